"""What-if on the archive of a run: its decisions come out again byte for byte, and what cannot be known is refused."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import terminals
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.archive.library import Archive
from rlbuffer.archive.writer import ArchiveWriter
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon.config_changes import config_digest
from rlbuffer.errors import ArchiveError, ConfigError, EpochChanged
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.scorer.loop import run_scorer
from rlbuffer.testing import make_group
from rlbuffer.what_if import estimate, read, repeat
from rlbuffer.what_if.estimate import tasks_of
from rlbuffer.what_if.recorded import changed, completed
from rlbuffer_cli.main import main

STEPS = 8


@dataclass(frozen=True)
class Events:
    """What happens to a recorded run beside its steps."""

    takes_over: bool = False
    """Another leader takes over in the middle."""
    parts: int = 1
    """Pushes of each group; of more than two the last one of every third group is lost."""
    is_scored: bool = False
    """A scorer adds the rewards."""
    train_seconds: float = 0.0
    """Of a step, in which the leader may make no other."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that an operator changes in the middle."""
    is_taken_back: bool = False
    """The second half of the steps is taken back when the run is over, and made again."""


def record(folder: Path, *, steps: int = STEPS, events: Events = Events(), **batcher: Any) -> Path:
    """The archive of a run of two envs, one of which takes longer."""
    run = Run(f"memory://{uuid.uuid4().hex}", folder)
    score = {"one": {"reward": "scorer_stage:share_of_zeros"}} if events.is_scored else {}
    settings = RunSettings(redis_url=run.url, archive={"dir": str(folder / "archive")}, score=score)
    config = rlbuffer.BatcherConfig(**{"row_tokens": 256, "step_groups": 3, "max_age": 1, **batcher})
    served, stop = Served(run), threading.Event()
    buffer = Buffer(run.again(), settings=settings)

    def work(env: str, seconds: float) -> None:
        # Short: of a step that was taken back tickets stay out.
        writer = buffer.writer(f"{env}-worker", ticket_seconds=1.0)
        while not stop.is_set():
            for ticket in writer.take(env, timeout_seconds=0.05):
                version = max(0, buffer.policy.version)  # none is there until the trainer is back
                lengths = [8 + ticket.number % 5] * 4
                whole = make_group(size=4, lengths=lengths, version=version, seed=ticket.number).rollouts
                if events.is_scored:
                    whole = tuple(replace(rollout, reward=None) for rollout in whole)
                needs = ("reward",) if events.is_scored else ()
                for part in range(events.parts - (events.parts > 2 and ticket.number % 3 == 2)):
                    stop.wait(seconds / events.parts)
                    try:
                        writer.push(ticket, whole[part :: events.parts], planned_size=4, needs=needs)
                    except EpochChanged:  # steps were taken back
                        writer = buffer.writer(f"{env}-worker", ticket_seconds=1.0)
                        writer.push(ticket, whole[part :: events.parts], planned_size=4, needs=needs)

    def train(first: int, changes: Mapping[str, Any]) -> None:
        reader = run.closes(buffer.reader(timeout_seconds=100))  # late: workers must not hear that it is finished
        reader.start(first)
        reader.announce(PolicyVersion(version=first))
        for step in reader.steps(last=steps):
            reader.announce(PolicyVersion(version=step.number))
            threading.Event().wait(events.train_seconds)
            reader.trained(step)
            seconds = {"total": 0.02, "wait": 0.01}
            reader.add_record({"step": step.number, "epoch": step.epoch, "digest": step.digest, "seconds": seconds})
            if step.number == steps // 2 and events.takes_over:
                served.stop()
                served.serve(config, settings=settings)
            if step.number == steps // 2 and changes:
                other = replace(config, **changes)
                run.store.ask_config(other.as_dict(), config_digest(other), seen=run.store.meta())
        served.stop()

    threads = [threading.Thread(target=work, args=each) for each in (("a", 0.005), ("b", 0.03))]
    if events.is_scored:
        threads.append(threading.Thread(target=run_scorer, args=(buffer, "s", "one", settings), kwargs={"stop": stop}))
    try:
        served.serve(config, settings=settings)
        for thread in threads:
            thread.start()
        train(0, events.changes)
        if events.is_taken_back:
            run.store.rewind(steps // 2, force=True)
            served.serve(config, settings=settings)
            train(steps // 2, {})
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        served.close()
        run.close()
    return folder / "archive"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"events": Events(takes_over=True)},
        {"events": Events(parts=2)},
        {"events": Events(parts=4), "group_timeout_seconds": 0.5, "min_group_size": 2, "order": "oldest_first"},
        # What a leader that waits for the trainer lets go, and what rules that go by the clock do then.
        {
            "events": Events(train_seconds=0.1),
            "spillover": "borrow",
            "spill_after_seconds": 0.02,
            "budgets": {"a": 0.3, "b": 0.7},
        },
        # The last part of a group of b comes when its time is up, and often while the leader waits for the trainer.
        {"events": Events(parts=4, train_seconds=0.1), "group_timeout_seconds": 0.02, "min_group_size": 2},
        # A drop that a scorer's push overtakes is not in the history: so old that none is.
        {"events": Events(is_scored=True), "max_age": 8},
        {"events": Events(is_scored=True), "max_age": 8, "slow": "wait"},
        {"events": Events(changes={"max_age": 3, "order": "oldest_first", "step_groups": 5})},
        {"events": Events(changes={"max_age": 0})},
        {"spillover": "borrow", "spill_after_seconds": 0.02, "budgets": {"a": 0.3, "b": 0.7}},
        {
            "events": Events(changes={"spill_after_seconds": 0.04}),
            "spillover": "borrow",
            "spill_after_seconds": 0.02,
            "budgets": {"a": 0.3, "b": 0.7},
        },
        # Shares of envs without budgets go by all that is pending, which nobody keeps of steps that are taken back.
        {"events": Events(is_taken_back=True), "budgets": {"a": 0.5, "b": 0.5}},
        {"slow": "wait"},
        {"step_groups": 0, "row_tokens": 128, "micro_batches_per_rank": 2},
        {"order": "priority", "flat": 0.5, "budgets": {"a": 0.7, "b": 0.3}},
        {"max_uses": 2, "max_age": 3},
        {"max_uses": 2, "max_age": 3, "events": Events(takes_over=True)},
    ],
    ids=str,
)
def test_every_commit_and_drop_comes_out_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    recorded = read(Archive(record(tmp_path, **settings)))
    repeated = repeat(recorded)
    assert (repeated.equal, repeated.differs) == (len(recorded.commits), "")
    assert repeated.steps >= STEPS
    assert repeated.drops == repeated.equal_drops
    assert repeated.is_exact


def test_a_push_that_the_archive_lacks_is_found_at_the_step_that_took_it(tmp_path: Path) -> None:
    recorded = read(Archive(record(tmp_path)))
    taken = recorded.commits[3].header.group_ids[0]
    recorded.pushes[:] = [push for push in recorded.pushes if push.info.group_id != taken]
    repeated = repeat(recorded)
    assert repeated.equal == 3
    assert repeated.differs.startswith("step 4: ")
    assert not repeated.is_exact


def test_an_estimate_has_a_range_and_follows_the_settings(tmp_path: Path) -> None:
    recorded = read(Archive(record(tmp_path)))
    assert sorted(recorded.workers) == ["a", "b"]
    usual = estimate(recorded, recorded.config, {}, seeds=3)
    low, high = usual.spread("steps_per_hour")
    mean = usual.mean("steps_per_hour")
    assert 0 < low <= mean * (1 + 1e-9)
    assert mean <= high * (1 + 1e-9)
    larger = estimate(recorded, changed(recorded.config, {"batcher.step_groups": 6}), {}, seeds=1)
    # Twice the groups a step; how many steps an hour that makes is up to what limits the machine.
    usual_step, larger_step = (e.mean("trained_tokens_per_hour") / e.mean("steps_per_hour") for e in (usual, larger))
    assert larger_step > 1.5 * usual_step
    again = estimate(recorded, recorded.config, {}, seeds=3)
    assert usual == again


def test_a_task_that_was_under_way_when_the_record_ended_takes_longer_than_that(tmp_path: Path) -> None:
    folder = record(tmp_path)
    recorded = read(Archive(folder))
    times = sorted(push.seconds for push in recorded.timed if push.info.env == "b" and push.seconds is not None)
    writer = ArchiveWriter(folder, recorded.archive.run)
    for seconds in (times[-2], times[-1] + 5.0):
        writer.add_tickets([{"env": "b", "number": 9999, "version": 3, "seconds": seconds}])
        taken, info = tasks_of(recorded)("b", 9999, 3)
        assert taken >= seconds
        assert taken in (*times, seconds)
        assert (info.group_id, info.rollouts[0].min_version) == ("b.9999", 3)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("trainer.loss.name", "replay"),
        ("worker.a.sampler", "sampler"),
        ("gateway.engines", "engines"),
        ("batcher.flat", "rewards"),
        ("batcher.maxage", r"is not a setting of \[batcher\].* Did you mean batcher.max_age\?"),
        ("max_age", r"is not a setting of \[batcher\].* Did you mean batcher.max_age\?"),
    ],
)
def test_what_cannot_be_known_is_refused_by_name(setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        changed(rlbuffer.BatcherConfig(64), {setting: 4})
    assert str(caught.value).startswith(setting)


def test_waiting_for_slow_groups_brings_its_order_along() -> None:
    config = changed(rlbuffer.BatcherConfig(64), {"batcher.slow": "wait", "batcher.budgets.a": 0.5})
    assert (config.order, config.slow, config.budgets) == ("oldest_first", "wait", {"a": 0.5})


def test_an_archive_whose_decisions_are_not_whole_is_refused(tmp_path: Path) -> None:
    archive = Archive(record(tmp_path))
    archive.__dict__["lacks"] = ("the pool entry of each push",)
    with pytest.raises(ArchiveError, match="lacks the pool entry"):
        read(archive)
    archive = Archive(tmp_path / "archive")
    archive.__dict__["has_lost_steps"] = True
    with pytest.raises(ArchiveError, match="the server had lost steps"):
        read(archive)


def test_an_archive_without_a_step_or_the_trainers_seconds_is_refused(tmp_path: Path) -> None:
    folder = record(tmp_path)
    archive = Archive(folder)
    archive.__dict__["steps"] = archive.__dict__["all_steps"] = archive.steps[:3] + archive.steps[4:]
    with pytest.raises(ArchiveError, match="step 4 was not archived"):
        read(archive)
    archive = Archive(folder)
    archive.__dict__["trained"] = tuple({**record, "seconds": {}} for record in archive.trained)
    with pytest.raises(ArchiveError, match=r"how long a step trains.*add_record"):
        read(archive)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batcher.min_group_size": 8}, r"step 1 is never made.* small"),
        ({"batcher.budgets.nope": 0.5}, r"step \d is never made.*it waits: nope"),
        ({"batcher.max_age_seconds": 0.001}, r"step 1 is never made.* stale"),
    ],
    ids=str,
)
def test_settings_that_make_no_step_end_with_a_reason(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    recorded = read(Archive(record(tmp_path)))
    with pytest.raises(ConfigError, match=why):
        estimate(recorded, changed(recorded.config, changes), changes, seeds=1)


def test_a_setting_inside_of_one_that_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_age is no table"):
        changed(rlbuffer.BatcherConfig(64), {"batcher.max_age.foo": 1})


def test_an_order_that_comes_with_waiting_is_named() -> None:
    config, waits = rlbuffer.BatcherConfig(64), {"batcher.slow": "wait"}
    assert completed(config, waits) == {**waits, "batcher.order": "oldest_first"}
    assert completed(changed(config, waits), waits) == waits
    assert completed(config, {"batcher.slow": "drop"}) == {"batcher.slow": "drop"}


def test_a_name_twice_or_a_folder_that_is_not_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "/nope", "--set", "batcher.max_age=1", "--set", "batcher.max_age=2"]) == 2
    assert "--set batcher.max_age stands there twice" in capsys.readouterr().err
    assert main(["what-if", "/nope", "-o", "/nope/x.png"]) == 1
    assert "there is no folder /nope" in capsys.readouterr().err


def test_a_what_if_says_how_far_it_is_where_no_terminal_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(record(tmp_path))
    steps = len(Archive(folder).steps)  # the leader may have made another one before it was stopped
    monkeypatch.setattr("rlbuffer_cli.progress.LINE_SECONDS", 0.0)
    capsys.readouterr()
    assert main(["what-if", folder, "--set", "batcher.max_age=3", "--seeds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith(f"step 1 of {steps} made again (")
    assert [line for line in lines if line.startswith(f"max_age 3: seed 2 of 2, step {steps} of {steps}, ")]
    assert len(out.splitlines()) == 3


def test_a_what_if_draws_how_far_it_is_on_a_terminal(tmp_path: Path) -> None:
    folder = str(record(tmp_path))
    steps = len(Archive(folder).steps)
    drawn = terminals.typed(["what-if", folder, "--seeds", "1"], tmp_path, until=b"Made again", keys=b"")
    assert f"model of it: seed 1 of 1, step {steps} of {steps}, ".encode() in terminals.ANSI.sub(b"", drawn)


def test_the_command_sweeps_values_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = str(record(tmp_path)), tmp_path / "ages.png"
    sets = ["--set", "batcher.max_age=1,3", "--set", "batcher.order=oldest_first"]
    capsys.readouterr()
    assert main(["what-if", folder, *sets, "--seeds", "2", "--json", "-o", str(picture)]) == 0
    head, usual, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (head["schema"], head["equal"]) == ("rlbuffer.what-if/1", head["steps"])
    assert (usual["changes"], usual["seeds"]) == ({}, 2)
    assert [each["changes"]["batcher.max_age"] for each in others] == [1, 3]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["what-if", folder, "--set", "batcher.max_age=3", "--seeds", "1"]) == 0
    told = capsys.readouterr().out
    assert f"Made again: {head['steps']} of {head['steps']} commits" in told
    assert "max_age 3" in told
    assert main(["what-if", folder, "--set", "max_age"]) == 2
    assert main(["what-if", folder, "--set", "trainer.loss.name=clip"]) == 3
