"""A checkpoint is whole or absent, and a run that continues from one is the run that was never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parameters import load_parameters
from safetensors.torch import save_file

from rlbuffer.config.settings import RunSettings
from rlbuffer.config.trainer import OptimizerSettings
from rlbuffer.errors import CheckpointError
from rlbuffer.process.files import sha256_of
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.checkpoints import checkpoint
from rlbuffer.trainer.checkpoints.checkpoint import (
    Checkpoint,
    load,
    newest,
    path_of,
    restore,
    save,
)
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.model.attention import ATTENTION
from rlbuffer.trainer.model.packed_policy import PackedPolicy
from rlbuffer.trainer.update.update import make_optimizer
from rlbuffer.weights.model import TINY_QWEN3, model_from_config


def made(step: int, **fields: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "step": step,
        "reader": {"step": step, "epoch": 1, "digest": "ab"},
        "run": "r",
        "learning_rate": 1e-3,
    }
    return Checkpoint(**(values | fields))


def trained(config: Mapping[str, Any] = TINY_QWEN3, *, seed: int = 0) -> tuple[PackedPolicy, torch.optim.Optimizer]:
    """A policy after one update, and its optimizer."""
    torch.manual_seed(seed)
    policy = PackedPolicy(model_from_config(config), attention=ATTENTION)
    optimizer = make_optimizer(policy, OptimizerSettings())
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return policy, optimizer


@pytest.fixture(scope="module")
def policy() -> tuple[PackedPolicy, torch.optim.Optimizer]:
    return trained()


Trained = tuple[PackedPolicy, torch.optim.Optimizer]


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path, policy: Trained) -> None:
    assert save(tmp_path, made(7), *policy, keep=2) == [7]
    loaded = load(tmp_path, 7, run="r")
    assert (loaded.step, loaded.learning_rate) == (7, 1e-3)
    assert loaded.reader == {"step": 7, "epoch": 1, "digest": "ab"}
    other, optimizer = trained(seed=1)
    restore(path_of(tmp_path, 7), other, optimizer)
    for ours, theirs in zip(other.parameters(), policy[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert all(torch.equal(value, policy[1].state[theirs][name]) for name, value in optimizer.state[ours].items())


def test_tied_embeddings_are_written_once_and_tied_again(tmp_path: Path, policy: Trained) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, made(1), *policy, keep=2)
    written = load_parameters(tmp_path, 1)
    assert "model.model.embed_tokens.weight" in written
    assert "model.lm_head.weight" not in written
    other, optimizer = trained(seed=1)
    restore(path_of(folder, 1), other, optimizer)
    head, embeddings = other.model.get_output_embeddings(), other.model.get_input_embeddings()
    assert head.weight is embeddings.weight
    assert torch.equal(head.weight, policy[0].model.get_input_embeddings().weight)


def test_the_newest_whole_ones_are_kept_and_count(tmp_path: Path, policy: Trained) -> None:
    assert newest(tmp_path / "none") == (0, [])
    assert [save(tmp_path, made(step), *policy, keep=2) for step in (3, 6, 9)] == [[3], [3, 6], [6, 9]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-00000012" / "rank-0.safetensors").write_bytes(b"half")
    assert newest(tmp_path) == (9, [])
    assert save(tmp_path, made(4), *policy, keep=2) == [4], "later ones are of an attempt that was replaced"


def test_whoever_may_read_the_folder_may_read_all_of_a_checkpoint(tmp_path: Path, policy: Trained) -> None:
    """A team whose members start the run in turn has one group, and its umask."""
    before = os.umask(0o002)
    try:
        save(tmp_path, made(3), *policy, keep=1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in path_of(tmp_path, 3).iterdir()} == {0o664}


def test_what_a_killed_save_has_left_makes_room_for_the_next_one(
    tmp_path: Path, policy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk without room for both, no checkpoint could be written ever again."""
    left = tmp_path / ".tmp-0123456789abcdef"
    left.mkdir()
    (left / "rank-0.safetensors").write_bytes(b"half")

    def saved(*arguments: Any) -> None:
        assert not left.exists()
        save_file(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", saved)
    assert save(tmp_path, made(3), *policy, keep=1) == [3]


class Together(Ranks):
    """One of several ranks, each in a thread."""

    def __init__(self, rank: int, said: dict[int, str], meeting: threading.Barrier) -> None:
        super().__init__(rank, meeting.parties, torch.device("cpu"))
        self._said, self._meeting = said, meeting

    def gather_text(self, text: str, *, meanwhile: Any = None) -> list[str]:
        self._said[self.rank] = text
        self._meeting.wait(60)
        everybody = [self._said[rank] for rank in range(self.world_size)]
        self._meeting.wait(60)
        return everybody


def test_each_rank_verifies_its_share_and_all_agree(
    tmp_path: Path, policy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone would read hundreds of GB while the others wait for it, and give up."""
    for step in (1, 2):
        save(tmp_path, made(step), *policy, keep=2)
        folder = path_of(tmp_path, step)
        meta = json.loads((folder / "meta.json").read_text())
        for rank in (1, 2):
            (folder / f"rank-{rank}.safetensors").write_bytes((folder / "rank-0.safetensors").read_bytes())
            meta["files"][f"rank-{rank}.safetensors"] = meta["files"]["rank-0.safetensors"]
        (folder / "meta.json").write_text(json.dumps(meta))
    damaged = path_of(tmp_path, 2) / "rank-2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    read: Counter[str] = Counter()

    def counted(path: Path) -> str:
        read[path.name] += 1
        return sha256_of(path)

    monkeypatch.setattr(checkpoint, "sha256_of", counted)
    said: dict[int, str] = {}
    meeting = threading.Barrier(3)
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda rank: newest(tmp_path, Together(rank, said, meeting)), range(3))]
    assert {step for step, _ in found} == {1}
    assert all(str(damaged) in problems[0] for _, problems in found)
    assert read == {f"rank-{rank}.safetensors": 2 for rank in range(3)}


@pytest.mark.parametrize("other", ["nothing there", "another format"])
def test_what_one_rank_alone_does_not_see_ends_all_of_them(tmp_path: Path, policy: Trained, other: str) -> None:
    """Training would begin again, and its first save remove a checkpoint that is whole."""
    save(tmp_path / "0", made(3), *policy, keep=1)
    if other == "another format":
        shutil.copytree(tmp_path / "0", tmp_path / "1")
        meta = path_of(tmp_path / "1", 3) / "meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 1}))
    said: dict[int, str] = {}
    meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(newest, tmp_path / str(r), Together(r, said, meeting)) for r in range(2)]
    for rank in ranks:
        with pytest.raises(CheckpointError) as refused:
            rank.result()
        assert str(path_of(tmp_path / "1", 3)) in str(refused.value)


@pytest.mark.parametrize("change", [{"run": "other"}, {"format": 1}])
def test_a_checkpoint_of_another_run_or_format_is_refused(
    tmp_path: Path, policy: Trained, change: dict[str, Any]
) -> None:
    save(tmp_path, made(3), *policy, keep=1)
    meta = path_of(tmp_path, 3) / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    with pytest.raises(CheckpointError):
        load(tmp_path, 3, run="r")
    if "format" in change:  # else a new one would begin, and its first save remove this one
        with pytest.raises(CheckpointError):
            newest(tmp_path)


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}], ids=str)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, policy: Trained, change: dict[str, int]) -> None:
    save(tmp_path, made(3), *policy, keep=1)
    with pytest.raises(CheckpointError):
        restore(path_of(tmp_path, 3), *trained(dict(TINY_QWEN3) | change))


def test_random_states_continue_where_they_were(tmp_path: Path, policy: Trained) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    random.gauss(0, 1)
    np.random.normal()
    save(tmp_path, made(1), *policy, keep=1)

    def draw() -> list[float]:
        return [float(torch.rand(1)), np.random.normal(), np.random.random(), random.gauss(0, 1), random.random()]

    expected = draw()
    draw()
    restore(path_of(tmp_path, 1), *trained(seed=1))
    assert draw() == expected


def test_each_rank_goes_on_with_its_states_and_at_another_world_size_with_those_of_its_rank_modulo_the_old_one(
    tmp_path: Path, policy: Trained
) -> None:
    torch.manual_seed(0)
    save(tmp_path, made(1), *policy, keep=1)
    path, expected = path_of(tmp_path, 1), [float(torch.rand(1))]
    torch.manual_seed(1)
    save_file({}, path / "rank-1.safetensors", {"random": json.dumps(checkpoint.random_state())})
    expected.append(float(torch.rand(1)))
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"files": dict.fromkeys(("rank-0", "rank-1"))}))
    for rank, of in ((0, 0), (1, 1), (2, 0), (3, 1)):
        restore(path, *policy, rank=rank)
        assert float(torch.rand(1)) == expected[of]


def settings(output: Path, **trainer: Any) -> RunSettings:
    values = {
        "steps": 6,
        "checkpoint": {"every": 3},
        "output": output,
        "device": "cpu",
        "reports": {"check_ranks": True},
    }
    return RunSettings(
        home=output,
        batcher={"row_tokens": 128},
        model={"config": dict(TINY_QWEN3)},
        trainer=values | {"optimizer": {"warmup_updates": 4, "weight_decay": 0.01}} | trainer,
    )


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_has_made_its_steps_makes_no_more(tmp_path: Path) -> None:
    once = settings(tmp_path, steps=1)
    assert train(once, rank=0, world_size=1, source=FakeRun)
    assert train(once, rank=0, world_size=1, source=FakeRun)
    assert [r["step"] for r in records(tmp_path)] == [1]


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = settings(tmp_path)
    assert train(wanted, rank=0, world_size=1, source=FakeRun)
    expected = load_parameters(tmp_path, 6)
    damaged = path_of(tmp_path / "checkpoints", 6) / "rank-0.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert train(wanted, rank=0, world_size=1, source=FakeRun)
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert str(damaged) in said
    assert [r["resumed_from"] for r in records(tmp_path)][-3:] == [3, 3, 3]
    ours = load_parameters(tmp_path, 6)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_with_no_whole_checkpoint_left_training_begins_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = settings(tmp_path, steps=1)
    assert train(once, rank=0, world_size=1, source=FakeRun)
    damaged = path_of(tmp_path / "checkpoints", 1) / "rank-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert train(once, rank=0, world_size=1, source=FakeRun)
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"{damaged} has ")
    assert [(r["step"], r["resumed_from"]) for r in records(tmp_path)] == [(1, 0), (1, 0)]
