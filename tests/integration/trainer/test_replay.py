"""Recorded steps that are trained again: the same bits, from the beginning and from a checkpoint; what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from recorded_runs import STEPS, record

import rlbuffer.replay
from rlbuffer.archive.library import Archive
from rlbuffer.archive.schema import steps_names
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ArchiveError, CheckpointError, ConfigError
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_digest import digest_step
from rlbuffer.replay import training
from rlbuffer.replay.recorded_run import recorded_run
from rlbuffer.replay.scoring import samplers, travelled, versions_in
from rlbuffer.state.step_record import StepRecord
from rlbuffer.trainer.checkpoints import checkpoint
from rlbuffer.trainer.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    return record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def folder(run: RunSettings) -> Path:
    assert run.archive.dir is not None
    return run.archive.dir


def trained(replay: training.Replay, output: Path, changes: Mapping[str, Any] | None = None) -> dict[int, StepRecord]:
    """As the command's ranks train it, in this process."""
    settings = replay.settings(changes or {}, output=output, world_size=1)
    if replay.checkpoint is not None:
        shutil.copytree(replay.checkpoint, output / "checkpoints" / replay.checkpoint.name)
    source = partial(recorded_run, str(replay.archive.folder), replay.last)
    assert train(settings, rank=0, world_size=1, source=source)
    return training.records_in(output)


@pytest.mark.parametrize(("first", "begin"), [(1, 0), (3, 2), (4, 2), (STEPS, 4)])
def test_recorded_steps_make_the_bits_of_the_run_again(
    run: RunSettings, folder: Path, tmp_path: Path, first: int, begin: int
) -> None:
    replay = training.planned(folder, first=first)
    assert (replay.attempt, replay.begin, replay.first, replay.last) == (1, begin, begin + 1, STEPS)
    made = trained(replay, tmp_path)
    assert [*made] == [*range(begin + 1, STEPS + 1)]
    compared = training.compared(training.trained_records(replay.archive), made)
    steps = STEPS - begin
    assert (compared.steps, compared.parameters, compared.batches, compared.figures) == (steps, steps, steps, steps)
    assert (compared.largest, compared.damaged) == (0.0, ())
    theirs, ours = (checkpoint.path_of(place / "checkpoints", STEPS) for place in (run.output_dir, tmp_path))
    difference = checkpoint.difference(theirs, ours)
    assert (difference.same, difference.largest) == (difference.tensors, 0.0)
    assert not (tmp_path / "weights").exists()  # nobody samples
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name == theirs.name] == [theirs.name]


def test_another_setting_makes_other_parameters_and_what_cannot_change_is_named(folder: Path, tmp_path: Path) -> None:
    replay = training.planned(folder, last=2)
    loss = {"trainer.loss.name": "cispo", "trainer.loss.options.max_ratio": 3.0}
    assert replay.settings(loss, output=tmp_path, world_size=1).trainer.loss.options.max_ratio == 3.0
    made = trained(replay, tmp_path, {"trainer.optimizer.learning_rate": 0.1})
    compared = training.compared(training.trained_records(replay.archive), made)
    assert (compared.steps, compared.parameters, compared.batches) == (2, 0, 2)
    for name, why in {
        "batcher.max_age": "what a step is made of is recorded",
        "trainer.output": "--output sets it",
        "trainer.checkpoint.every": "a replay writes one checkpoint",
        "worker.a.env": "a replay reads",
        "trainer.loss.nam": "is not a setting. Did you mean trainer.loss.name",
    }.items():
        with pytest.raises(ConfigError, match=why):
            replay.settings({name: 1}, output=tmp_path, world_size=1)
    with pytest.raises(ConfigError, match=r"--set trainer\.steps = 1 ends before step 2"):
        replay.settings({"trainer.steps": 1}, output=tmp_path, world_size=1)


def test_a_hole_a_missing_checkpoint_and_steps_that_are_not_there_are_named(
    run: RunSettings, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArchiveError, match="no steps 2 to 99: it has 1 to "):
        training.planned(folder, first=2, last=99)
    for first, last, to in ((3, 2, 2), (STEPS + 1, None, STEPS)):
        there = rf"no step lies from {first} to {to}: the archive has 1 to \d+, trained to {STEPS}"
        with pytest.raises(ArchiveError, match=there):
            training.planned(folder, first=first, last=last)
    with pytest.raises(CheckpointError, match=r"step 2 is trained behind the checkpoint of step 1, .* has none\. Keep"):
        training.planned(folder, first=2, checkpoints=tmp_path)
    holed = tmp_path / "holed"
    shutil.copytree(folder, holed)
    (name,) = steps_names(holed)
    table = pq.read_table(holed / name.file())
    numbers = table.column("step").to_pylist()
    pq.write_table(table.take([at for at, step in enumerate(numbers) if step not in (3, 4)]), holed / name.file())
    with pytest.raises(ArchiveError, match=r"has no steps 3 to 4: .* 1-2, 5-"):
        training.planned(holed)
    assert training.planned(holed, last=2).last == 2
    assert training.planned(holed, first=5).begin == 4
    assert [step.number for step in rlbuffer.replay.reader(holed, last=2).steps()] == [1, 2]
    with pytest.raises(ArchiveError, match="has no steps 3 to 4"):
        next(rlbuffer.replay.reader(holed).steps(2))
    without = tmp_path / "without"
    shutil.copytree(folder, without)
    for path in without.glob("history-*"):
        path.unlink()
    with pytest.raises(ArchiveError, match="does not say what its trainer trained with"):
        training.planned(without)


def test_a_checkpoint_of_other_steps_is_refused(run: RunSettings, folder: Path) -> None:
    reader = rlbuffer.replay.reader(folder)
    meta = json.loads((checkpoint.path_of(run.output_dir / "checkpoints", 2) / "meta.json").read_text())
    reader.load_state_dict(meta["reader"])
    assert next(reader.steps()).number == 3
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 was made behind another step 2"):
        rlbuffer.replay.reader(folder).load_state_dict({"step": 2, "epoch": 0, "digest": "0" * 64})


def test_a_loop_of_ones_own_gets_the_recorded_steps_at_any_world_size(folder: Path) -> None:
    """At the recorded number of ranks the very micro-batches; at another one the same tokens."""
    records = {record["step"]: record for record in Archive(folder).trained}
    digests = {step.step: step.digest for step in Archive(folder).steps}
    reader = rlbuffer.replay.reader(folder, last=STEPS)
    steps = list(reader.steps())
    assert reader.has_ended
    assert [step.digest for step in steps] == [digests[number] for number in range(1, STEPS + 1)]
    assert [[digest_step(step)] for step in steps] == [records[n]["batch_sha256"] for n in range(1, STEPS + 1)]
    assert [step.number for step in rlbuffer.replay.reader(folder, last=2).steps()] == [1, 2]
    ranks = [list(rlbuffer.replay.reader(folder, rank, 2, last=2).steps()) for rank in range(2)]
    for alone, *both in zip(steps, *ranks, strict=False):
        assert tokens_of(*both) == tokens_of(alone)


def tokens_of(*steps: Step) -> list[int]:
    """The trained tokens of the parts of a step, sorted."""
    return sorted(token for step in steps for batch in step for token in batch.input_ids[batch.loss_mask].tolist())


def test_versions_that_sampled_fit_what_they_sampled(run: RunSettings, folder: Path) -> None:
    """Made-up logprobs fit no version; those of a checkpoint's own policy fit that one alone."""
    replay = training.planned(folder)
    places = {"output": run.output_dir, "checkpoints": replay.checkpoints}
    members = list(replay.archive.rollouts(STEPS))
    fits, scored = travelled(replay.kept, replay.batcher, members=members, versions=[0, 2, STEPS], **places)
    assert {fit.version for fit in fits} == {0, 2, STEPS}
    assert sum(fit.tokens for fit in fits if fit.version == 2) == sum(each.tokens for each in scored)
    assert all(fit.rms > 0.1 for fit in fits)
    with pytest.raises(CheckpointError, match=r"version 93 is not kept in .*checkpoints, .*: there are 0, 1, 2"):
        travelled(replay.kept, replay.batcher, members=members, versions=[93], **places)


def test_checkpoints_of_another_folder_count(run: RunSettings, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    theirs = checkpoint.path_of(training.planned(folder).checkpoints, 2)
    shutil.copytree(theirs, tmp_path / "copy" / theirs.name)
    assert training.planned(folder, first=3, checkpoints=tmp_path / "copy").checkpoints == tmp_path / "copy"
    there = versions_in(tmp_path, tmp_path / "copy")
    assert there == {2: tmp_path / "copy" / theirs.name}
    members = list(Archive(folder).rollouts(STEPS))
    kept, gone = samplers(members, there)
    assert {*kept, *gone} == {int(m.row[name]) for m in members for name in ("min_version", "max_version")}
    assert {*kept} <= {0, 2}
    assert {0, 2}.isdisjoint(gone)


def test_the_first_jump_of_the_gradient_is_found() -> None:
    norms = [1.0, 1.2, 0.9, 1.1, 3.9, 8.0, 9.0]
    records = {n: replace(StepRecord(), step=n, grad_norm=norm) for n, norm in enumerate(norms, 1)}
    assert training.jumped_at(records) == (6, 8.0, 1.1)
    assert training.jumped_at({n: records[n] for n in range(1, 6)}) is None
    assert training.left_at({n: replace(records[n], kl=n / 25) for n in records}) == 3
