"""A step's record, computed by hand: ratios, waiting, FLOPs, scalars for other tools; and who is missing."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb

import rlbuffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.packing.pack import pack
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.step_record import StepRecord, scalars
from rlbuffer.state.trained import waited
from rlbuffer.trainer.reports.debug_samples import checked
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.sinks import finite, sinks_of
from rlbuffer.trainer.update.ratios import Ratios, ratios_of


def test_ratios_of_ranks_are_those_of_all_their_tokens() -> None:
    torch.manual_seed(0)
    drifts = torch.randn(5000).double() * 0.1
    parts = [Ratios(), Ratios(), Ratios()]
    parts[0].add(drifts[:1000].float().double())
    parts[1].add(drifts[1000:])
    parts[2].add(drifts[:0])  # a rank of dummies
    told = ratios_of([part.counts() for part in parts])
    assert told["mean"] == pytest.approx(float(drifts.exp().mean()), rel=1e-6)
    assert told["max"] == pytest.approx(math.exp(drifts.max()), rel=1e-6)
    assert told["min"] == pytest.approx(math.exp(drifts.min()), rel=1e-6)
    exact = float(drifts.abs().quantile(0.99))
    assert exact <= math.log(told["p99"]) * (1 + 1e-9) <= exact * 10 ** (1 / 16) * (1 + 1e-6)


@pytest.mark.parametrize(("drift", "p99"), [(0.0, 1.0), (1.0, math.e), (-50.0, math.exp(50.0)), (800.0, math.exp(700))])
def test_ratios_at_the_ends_of_the_scale(drift: float, p99: float) -> None:
    ratios = Ratios()
    ratios.add(torch.tensor([drift]))
    assert ratios_of([ratios.counts()])["p99"] == pytest.approx(p99, rel=1e-6)
    assert ratios_of([Ratios().counts()]) == {}


def test_waiting_for_data_is_said_with_its_share_and_the_slow_side() -> None:
    slow = waited([0.43] * 20, [1.0] * 20)
    assert slow.text == "the trainer waited 43% of the last 20 steps for data: workers are slower than the trainer"
    assert slow.is_long
    assert not waited([0.1], [1.0]).is_long
    assert waited([], []).share == 0.0


def test_flops_are_six_per_parameter_and_token_and_attention_by_the_square() -> None:
    config = SimpleNamespace(num_attention_heads=4, hidden_size=64, head_dim=32, num_hidden_layers=2)
    config.get_text_config = lambda: config
    embedding = SimpleNamespace(weight=torch.zeros(10, 64))
    tied = SimpleNamespace(
        config=config, get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: embedding
    )
    untied = SimpleNamespace(
        config=config,
        get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: SimpleNamespace(weight=torch.zeros(10, 64)),
    )
    cpu = torch.device("cpu")
    assert Utilization(tied, 5000, cpu, passes=1).flops(100, 2000) == 6 * 5000 * 100 + 6 * 2 * 128 * 2000
    assert Utilization(untied, 5000, cpu, passes=1).flops(100, 0) == 6 * (5000 - 640) * 100
    assert Utilization(tied, 5000, cpu, passes=1).share(100, 2000, 1.0) is None


WAITS = {"buckets": {"1.0": 2, "5.0": 2, "+Inf": 3}, "sum": 9.0, "count": 3}
"""A histogram, as the leader's figures have it."""


def test_other_tools_get_the_numbers_by_their_path() -> None:
    record = {"step": 3, "rewards": {"math": 0.5, "code": None}, "ratio": {"p99": 1.2}, "digest": "ab", "list": [1]}
    record |= {"buffer": {"step": 2, "wait": {"math": WAITS}}}
    assert scalars(record) == {"step": 3.0, "rewards/math": 0.5, "ratio/p99": 1.2, "buffer/step": 2.0}


def test_what_is_not_finite_is_null_at_any_depth() -> None:
    assert finite({"ratio": {"max": math.inf}, "list": [math.nan, 1.0], "text": "nan", "n": 1}) == {
        "ratio": {"max": None},
        "list": [None, 1.0],
        "text": "nan",
        "n": 1,
    }


@pytest.mark.parametrize(
    ("module", "values"),
    [("torch.utils.tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "p"})],
)
def test_a_package_that_is_missing_is_said_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, values: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    told = RunSettings(trainer=TrainerSettings(output=tmp_path, reports=values))
    with pytest.raises(ConfigError, match=r"pip install '\.\[") as caught:
        sinks_of(told)
    assert caught.value.setting == f"trainer.reports.{next(iter(values))}"


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = RunSettings(trainer=TrainerSettings(output=tmp_path, reports={"tensorboard": True}))
    with sinks_of(told)["TensorBoard"]() as write:
        for step in (1, 2):
            write(record(step))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rewards/math")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["histograms"] == []


def record(step: int) -> StepRecord:
    return StepRecord(step=step, time=1e9 + step, rewards={"math": 0.25 * step}, buffer={"wait": WAITS}, examples=[{}])


def test_wandb_gets_every_number_and_the_settings_without_the_servers_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real package, with a run that is never uploaded."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = RunSettings(
        run="learns",
        redis_url="redis://:secret@host",
        batcher=rlbuffer.BatcherConfig(1024, budgets={"math": 0.7, "code": 0.3}),
        trainer=TrainerSettings(output=tmp_path, reports={"wandb_project": "p"}),
    )
    with sinks_of(told)["W&B"]() as write:
        for step in (1, 2):
            write(record(step))
        run: Any = wandb.run
        assert run.name == "learns"
        config = run.config.as_dict()
        assert config["batcher"]["budgets"] == {"math": 0.7, "code": 0.3}
        assert "secret" not in str(config)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-learns.wandb")
    deadline = time.monotonic() + 60
    last = scalars(record(2).as_object())
    assert last["rewards/math"] == 0.5
    while (rows := history_of(path))[-1:] != [last]:  # written beside us
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)
    assert rows[:-1] == [scalars(record(1).as_object())]
    wandb.teardown()  # its service is a process of its own


def test_wandb_draws_every_step_of_each_life_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A life goes on after a restart, also where steps are trained again; a run begun anew has a curve of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = RunSettings(run="again", trainer=TrainerSettings(output=tmp_path, reports={"wandb_project": "p"}))
    ids = []
    for created, steps in ((1, (1, 2, 3, 2, 3)), (1, ()), (2, (1,))):
        with sinks_of(told, created=created)["W&B"]() as write:
            ids.append(str(wandb.run.id))  # type: ignore[union-attr]
            for step in steps:
                write(record(step))
    assert ids[0] == ids[1] != ids[2]
    path = next(p for p in tmp_path.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb") if history_of(p))
    assert [row["step"] for row in history_of(path)] == [1, 2, 3, 2, 3]
    axes = {
        record.metric.glob_name: record.metric.step_metric for record in records_of(path) if record.metric.glob_name
    }
    assert axes == {"*": "step"}
    wandb.teardown()  # its service is a process of its own


def history_of(path: Path) -> list[dict[str, Any]]:
    """W&B's rows, without its own fields."""
    found = []
    for record in records_of(path):
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if row:
            found.append({name: json.loads(value) for name, value in row.items() if not name.startswith("_")})
    return found


def records_of(path: Path) -> Iterator[Any]:
    """What is in W&B's own file: a LevelDB log behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def made(**changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "prompt_ids": [5, 6],
        "token_ids": [7, 8],
        "logprobs": [-0.5, -1.0],
        "reward": 1.0,
        "policy_version": 3,
    }
    return Rollout.from_completion(**(values | changes))


def test_a_rollout_is_shown_with_its_checks() -> None:
    batch = pack([made()], [0.25], row_tokens=8)
    (text,) = checked(batch, torch.tensor([-0.5, -1.08]), step=4)
    head, *checks = text.splitlines()
    assert "reward 1, advantage +0.25, 4 tokens, 2 of them prompt, policy versions 3 to 3, trained in step 4" in head
    assert [check[:5] for check in checks] == ["  ok "] * 7
    assert "differ by 0.0400 nats a token" in checks[-1]
