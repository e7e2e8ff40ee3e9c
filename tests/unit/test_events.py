"""Events as the objects that ``--display json``, metrics.jsonl and the run's history hold, and as lines for people."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rlbuffer.events import batcher, history, scorer, trainer, worker
from rlbuffer.events.batcher_narrator import ServeNarrator, step_line
from rlbuffer.events.event import Event, RunChanged, Trouble, as_object
from rlbuffer.events.scorer_narrator import ScoreNarrator
from rlbuffer.events.trainer_narrator import line_of
from rlbuffer.packing.pack import pack
from rlbuffer.records import waiting
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Problem, Wait, Waiting
from rlbuffer.state.step_record import StepRecord
from rlbuffer.testing import make_group

BATCH = pack(make_group(size=2).rollouts, row_tokens=64)
HEADER = Step(
    number=7,
    epoch=1,
    digest="d",
    world_size=1,
    normalizers=BATCH.normalizers,
    rollouts=2,
    groups=1,
    micro_batches=(BATCH,),
).header
MEMORY: dict[str, Any] = {"first": 1, "last": 2, "used": 3, "limit": 4, "checkpoint": 0, "sentence": "s"}
TRAINED = StepRecord(
    step=4,
    reward=0.5,
    rewards={"a": 0.5, "b": None},
    loss=0.25,
    entropy=1.0,
    kl=0.0,
    clip_fraction=0.0,
    grad_norm=2.0,
    age=0.5,
    tokens=100,
    wait=0.25,
    seconds={"total": 2.0},
)

SERVER = Waiting(kind=Wait.SERVER, detail="s")
ARCHIVE = Problem(kind=waiting.Trouble.ARCHIVE, detail="s")
OBJECTS: list[tuple[Event, str]] = [
    (Trouble(error="e"), '{"event": "trouble", "error": "e"}'),
    (RunChanged(error="e"), '{"event": "restart", "error": "e"}'),
    (worker.SamplerChecked(version=1, difference=0.5), '{"event": "checked", "version": 1, "difference": 0.5}'),
    (worker.VersionLoaded(version=1, seconds=0.5), '{"event": "version", "version": 1, "seconds": 0.5}'),
    (
        worker.GroupPushed(group_id="a", version=1, rollouts=2, tokens=3, reward=0.5, seconds=2.0),
        '{"event": "group", "group_id": "a", "version": 1, "rollouts": 2, "tokens": 3, "reward": 0.5, "seconds": 2.0}',
    ),
    (
        worker.GroupGivenUp(error="e", kind="KeyError", traceback=""),
        '{"event": "trouble", "error": "e", "kind": "KeyError", "traceback": ""}',
    ),
    (worker.WorkerWaits(waiting=SERVER), '{"event": "waiting", "kind": "server", "detail": "s", "sentence": "s"}'),
    (
        worker.VersionEvaluated(env="held_out", version=4, result={"reward/mean": 0.5, "seconds": 2.0}),
        '{"event": "evaluation", "env": "held_out", "version": 4, "reward/mean": 0.5, "seconds": 2.0}',
    ),
    (worker.EnvFinished(env="a", sentence="s"), '{"event": "done", "env": "a", "sentence": "s"}'),
    (
        worker.WorkerStopped(groups=1, rollouts=2, failed_groups=3),
        '{"event": "stopped", "groups": 1, "rollouts": 2, "failed_groups": 3}',
    ),
    (scorer.ScorerReady(gives=("ref_logprobs",)), '{"event": "ready", "gives": ["ref_logprobs"]}'),
    (
        scorer.GroupScored(group_id="a.1", env="a", rollouts=2, tokens=3, seconds=0.5),
        '{"event": "scored", "group_id": "a.1", "env": "a", "rollouts": 2, "tokens": 3, "seconds": 0.5}',
    ),
    (scorer.ScoredLate(group_id="a.1"), '{"event": "late", "group_id": "a.1"}'),
    (
        scorer.ScorerStopped(groups=1, rollouts=2, late=3, failed_groups=4),
        '{"event": "stopped", "groups": 1, "rollouts": 2, "late": 3, "failed_groups": 4}',
    ),
    (
        batcher.LeaderReady(run="r", step=1, epoch=2, pending=3, server={"name": "valkey"}, forecast={}),
        (
            '{"event": "ready", "run": "r", "step": 1, "epoch": 2, "pending": 3, "server": {"name": "valkey"}, '
            '"forecast": {}}'
        ),
    ),
    (
        batcher.ReadAgain(run="r", step=1, epoch=2, pending=3, server={}, forecast={"steps": 4}),
        (
            '{"event": "read again", "run": "r", "step": 1, "epoch": 2, "pending": 3, "server": {}, '
            '"forecast": {"steps": 4}}'
        ),
    ),
    (batcher.StandingBy(owner="o"), '{"event": "leader", "state": "standby", "owner": "o"}'),
    (batcher.RunBeginsAgain(run="r", sentence="s"), '{"event": "begins again", "run": "r", "sentence": "s"}'),
    (batcher.LeadLost(reason="r"), '{"event": "leader", "state": "lost", "reason": "r"}'),
    (
        batcher.RunRecovered(epoch=2, step=1, forgotten=3, void=4, groups=5, entries=6),
        '{"event": "recovery", "epoch": 2, "step": 1, "forgotten": 3, "void": 4, "groups": 5, "entries": 6}',
    ),
    (batcher.RunEnded(step=3, sentence="s"), '{"event": "ended", "step": 3, "sentence": "s", "drops": {}}'),
    (
        batcher.StepWaits(waiting=SERVER),
        '{"event": "waiting", "kind": "server", "detail": "s", "sentence": "s"}',
    ),
    (
        batcher.CureNeeded(problem=ARCHIVE),
        f'{{"event": "trouble", "kind": "archive", "detail": "s", "sentence": {json.dumps(str(ARCHIVE))}}}',
    ),
    (
        batcher.GroupDropped(drop=Drop("a.1", "a", Reason.STALE, 2, 30, ("5-0",), "age 3", 4, 0.5)),
        (
            '{"event": "drop", "group_id": "a.1", "env": "a", "reason": "stale", "rollouts": 2, "tokens": 30, '
            '"entry_ids": ["5-0"], "detail": "age 3", "min_version": 4, "reward": 0.5}'
        ),
    ),
    (
        batcher.PayloadsDamaged(step=1, rollouts=2, sentence="s"),
        '{"event": "damaged", "step": 1, "rollouts": 2, "sentence": "s"}',
    ),
    (batcher.SettingsAsked(state="same"), '{"event": "config", "state": "same"}'),
    (
        batcher.SettingsTaken(revision=2, step=3, changes=("a: 1 -> 2",)),
        '{"event": "config", "state": "taken", "revision": 2, "step": 3, "changes": ["a: 1 -> 2"]}',
    ),
    (batcher.SettingsRefused(reason="r"), '{"event": "config", "state": "refused", "reason": "r"}'),
    (batcher.EnvPaused(env="a"), '{"event": "env", "env": "a", "state": "paused"}'),
    (batcher.EnvResumed(env="a"), '{"event": "env", "env": "a", "state": "resumed"}'),
    (
        batcher.EnvSilent(env="a", seconds=9.5, sentence="s"),
        '{"event": "env", "env": "a", "state": "dead", "seconds": 9.5, "sentence": "s"}',
    ),
    (batcher.EnvBack(env="a"), '{"event": "env", "env": "a", "state": "back"}'),
    (
        batcher.MemoryUnlimited(limit=5, sentence="s"),
        '{"event": "memory", "state": "unlimited", "limit": 5, "sentence": "s"}',
    ),
    (batcher.MemoryTight(sentence="s"), '{"event": "memory", "state": "tight", "sentence": "s"}'),
    (
        batcher.CheckpointsNeeded(steps=5, sentence="s"),
        '{"event": "memory", "state": "often", "steps": 5, "sentence": "s"}',
    ),
    (
        batcher.StepsRetiredEarly(**MEMORY),
        (
            '{"event": "memory", "state": "retired early", "first": 1, "last": 2, "used": 3, "limit": 4, '
            '"checkpoint": 0, "sentence": "s"}'
        ),
    ),
    (
        batcher.CheckpointAsked(step=5, sentence="s"),
        '{"event": "memory", "state": "checkpoint", "step": 5, "sentence": "s"}',
    ),
    (batcher.ArchiveStuck(sentence="s"), '{"event": "archive", "state": "stuck", "sentence": "s"}'),
    (
        batcher.ArchiveWritten(step=5, steps=2, records=3),
        '{"event": "archive", "state": "written", "step": 5, "steps": 2, "records": 3}',
    ),
    (
        trainer.TrainingStarted(
            step=0, steps=5, world_size=2, device="cpu", attention="sdpa", parameters=12, output="o"
        ),
        (
            '{"event": "start", "step": 0, "steps": 5, "world_size": 2, "device": "cpu", "attention": "sdpa", '
            '"parameters": 12, "output": "o"}'
        ),
    ),
    (trainer.TrainerWarning(message="m"), '{"event": "warning", "message": "m"}'),
    (trainer.WaitingNoticed(message="m"), '{"event": "notice", "message": "m"}'),
    (trainer.CheckpointWritten(step=1, path="p"), '{"event": "checkpoint", "step": 1, "path": "p"}'),
    (
        trainer.TrainingEnded(step=1, finished=True, reason=""),
        '{"event": "end", "step": 1, "finished": true, "reason": ""}',
    ),
    (
        history.Dropped(
            group_id="a.1", env="a", reason=Reason.STALE, rollouts=2, tokens=30, detail="d", min_version=4, reward=None
        ),
        (
            '{"event": "drop", "group_id": "a.1", "env": "a", "reason": "stale", "rollouts": 2, "tokens": 30, '
            '"detail": "d", "min_version": 4, "reward": null}'
        ),
    ),
    (
        history.Committed(
            groups=1,
            closed_by=ClosedBy.FILL,
            step=2,
            rollouts=3,
            tokens=4,
            reward=None,
            age=0.5,
            max_age=1,
            fill=0.9,
            envs={},
        ),
        (
            '{"event": "step", "groups": 1, "closed_by": "fill", "step": 2, "rollouts": 3, "tokens": 4, '
            '"reward": null, "age": 0.5, "max_age": 1, "fill": 0.9, "envs": {}}'
        ),
    ),
    (
        history.Recovered(step=1, forgotten=2, void=3, groups=4, entries=5),
        '{"event": "recovery", "step": 1, "forgotten": 2, "void": 3, "groups": 4, "entries": 5}',
    ),
    (
        history.StepsVoided(step=1, groups=[["a.1", "a"]], unlisted=0),
        '{"event": "void", "step": 1, "groups": [["a.1", "a"]], "unlisted": 0}',
    ),
    (
        history.RunRewound(step=1, groups=[], unlisted=2),
        '{"event": "rewind", "step": 1, "groups": [], "unlisted": 2}',
    ),
    (
        history.RetiredEarly(step=1, memory={"used": 2, "limit": 3}),
        '{"event": "retired early", "step": 1, "used": 2, "limit": 3}',
    ),
]


@pytest.mark.parametrize(("event", "line"), OBJECTS, ids=lambda value: type(value).__name__)
def test_an_event_is_this_line_of_json(event: Event, line: str) -> None:
    assert json.dumps(as_object(event)) == line


def test_a_committed_step_is_its_header_and_what_was_dropped_since_the_last() -> None:
    event = batcher.StepCommitted(header=HEADER, build_ms=1.5, drops={"stale": [2, 30]})
    keys = list(as_object(event))
    assert keys[:4] == ["event", "step", "epoch", "digest"]
    assert keys[-3:] == ["build_ms", "drops", "flat"]
    assert step_line(event).startswith("step 7  ")
    assert step_line(event).endswith("  dropped 2: 2 stale (30 tok)  2 ms")


def test_a_step_that_teaches_nothing_or_not_all_says_so() -> None:
    groups = ("a.0", "a.1")

    def line(flat: int, rollouts: int) -> str:
        header = dataclasses.replace(HEADER, group_ids=groups, rollouts=rollouts)
        return step_line(batcher.StepCommitted(header=header, build_ms=1.5, drops={}, flat=flat))

    assert "teach" not in line(0, 8)
    assert "1 of 2 groups teach nothing" in line(1, 8)
    assert "! it teaches nothing: no rollout" in line(2, 8)
    assert "! it teaches nothing: each group is one rollout" in line(2, 2)


def test_a_trained_step_is_told_in_a_line() -> None:
    assert line_of(TRAINED).startswith("step 4  reward 0.500 (a 0.500)  loss +0.2500")


def test_serve_tells_each_event_in_a_line() -> None:
    said: list[str] = []
    tell = ServeNarrator(said.append)
    for event, _ in OBJECTS:
        if isinstance(event, batcher.BatcherEvent) and not isinstance(event, batcher.StepWaits):
            tell(event)
    tell.close()
    assert said == [
        "standing by: another batcher leads this run (o); takes over when it stops",
        "! s",
        "! lost the lead: r. Trying again.",
        (
            "! the server had lost 3 steps that the trainer has trained: the run goes on after step 1 in epoch 2; "
            "5 groups will not be trained again"
        ),
        "s",
        f"! {ARCHIVE}",
        "! s",
        "settings: nothing is new",
        "settings: revision 2 from step 3 on: a: 1 -> 2",
        "! settings: the old ones go on: r",
        "a is paused: steps go on without it",
        "a takes part again",
        "! s",
        "a is back",
        *["! s"] * 6,
        "the archive is written again: 2 steps, up to step 5",
    ]


def test_score_tells_troubles_at_once_and_scored_groups_together() -> None:
    said: list[str] = []
    tell = ScoreNarrator(said.append)
    for event, _ in OBJECTS:
        if isinstance(event, scorer.ScorerEvent):
            tell(event)
    assert said == [
        "! e",
        "! e",
        "gives ref_logprobs",
        "scored 1 group, 2 rollouts, 3 tokens",
        "stopped after 1 group, 2 rollouts, 3 late, 4 not scored",
    ]


def test_train_tells_its_start_its_checkpoints_and_its_end() -> None:
    start = trainer.TrainingStarted(
        step=0, steps=5, world_size=2, device="cpu", attention="segments", parameters=1200, output="out"
    )
    assert line_of(start) == "training 1,200 parameters on 2 ranks (cpu, segments), from step 0 to 5; output in out"
    assert line_of(trainer.CheckpointWritten(step=1, path="p")) == "checkpoint of step 1 in p"
    assert line_of(trainer.TrainingEnded(step=5, finished=True, reason="The end.")) == "finished at step 5: the end."
    assert line_of(trainer.TrainerWarning(message="m")) == "m"
