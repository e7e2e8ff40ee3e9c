"""The leader knows what teaches: by the columns that groups bring, and by its trainer's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from daemon_runs import Served, start_trainer
from looks import lines_of
from store_runs import Run

import rlbuffer
from rlbuffer.checks.server import judged, stands_still
from rlbuffer.client.lessons import LEAST_STEPS
from rlbuffer.client.reader import Reader
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Trouble
from rlbuffer.state.step_record import DRIFT_NUMBERS
from rlbuffer.state.verdicts import newest_steps
from rlbuffer.testing import make_group
from rlbuffer_cli.drift import DRIFT
from rlbuffer_cli.run_tables import READ_RECORDS
from rlbuffer_cli.table import Printed
from rlbuffer_cli.view import run_view
from rlbuffer_cli.whole_run import WholeRun

pytest_plugins = ("store_fixtures",)

OWN: Mapping[str, Any] = {"name": "teacher:loss", "columns": ("teacher_logprobs",)}


def push(run: Run, group_id: str, columns: tuple[str, ...], size: int = 3, best: float = 0.0) -> None:
    """A group whose rollouts earn 0, but for the first, which earns `best`."""
    group = make_group(env="a", group_id=group_id, size=size, rewards=[best] + [0.0] * (size - 1))
    rollouts = tuple(
        replace(r, columns={name: np.where(r.loss_mask, -0.5, 0).astype(np.float32) for name in columns})
        for r in group.rollouts
    )
    run.sequence += 1
    run.store.push(
        replace(group, rollouts=rollouts), producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch
    )


@pytest.mark.parametrize(
    ("columns", "loss", "trains"),
    [
        ((), {}, False),
        (("advantages",), {}, True),
        (("teacher_logprobs",), OWN, True),
    ],
)
def test_at_the_end_of_the_data_what_teaches_trains_and_what_does_not_is_named(
    served: Served, columns: tuple[str, ...], loss: Mapping[str, Any], trains: bool
) -> None:
    run = served.run
    start_trainer(run)
    served.serve(rlbuffer.BatcherConfig(64, step_groups=9, max_age=8), settings=RunSettings(trainer={"loss": loss}))
    for n in range(2):
        push(run, f"a.{n}", columns)
    run.store.say_done("a", epoch=run.meta.epoch)
    if trains:
        step = served.wait_for(lambda: served.said("step"))[0]
        assert (step["closed_by"], step["rollouts"], step["flat"]) == ("end", 6, 0)
    else:
        ended = served.wait_for(lambda: served.said("ended"))[0]
        assert (ended["step"], ended["drops"]["flat"][0]) == (0, 6)
    assert run.store.verify().ok


def test_a_step_of_groups_of_one_says_that_it_teaches_nothing(served: Served) -> None:
    run = served.run
    start_trainer(run)
    served.serve(rlbuffer.BatcherConfig(64, step_groups=2, max_age=8))
    for n in range(2):
        push(run, f"a.{n}", (), size=1)
    step = served.wait_for(lambda: served.said("step"))[0]
    assert (step["flat"], len(step["group_ids"])) == (2, 2)


ALONE = "each group of env a is one rollout, and {} = {!r} compares the rollouts of a group"


@pytest.mark.parametrize(
    ("size", "columns", "loss", "settings", "said"),
    [
        (1, (), {}, {}, ALONE.format("batcher.advantage", "rloo")),
        (1, (), {}, {"envs": {"a": {"advantage": "grpo"}}}, ALONE.format("batcher.envs.a.advantage", "grpo")),
        (1, (), {}, {"advantage": "reinforce"}, ""),
        (1, (), {}, {"advantage": "grpo", "envs": {"a": {"advantage": "reinforce"}}}, ""),
        (1, ("advantages",), {}, {}, ""),
        (1, ("teacher_logprobs",), OWN, {}, ""),
        (2, (), {}, {}, ""),
    ],
)
def test_a_loop_of_ones_own_hears_at_its_first_step_that_groups_of_one_teach_nothing(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    size: int,
    columns: tuple[str, ...],
    loss: Mapping[str, Any],
    settings: Mapping[str, Any],
    said: str,
) -> None:
    run = served.run
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    config = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, lookahead=0, **settings)
    served.serve(config, settings=RunSettings(trainer={"loss": loss}))
    for n in range(4):
        push(run, f"a.{n}", columns, size=size, best=1.0)
    for _, step in zip(range(2), reader.steps(), strict=False):
        assert step.groups == 2
    told = [record.message for record in caplog.records if record.name == "rlbuffer.client.reader"]
    assert [said in message for message in told] == ([True] if said else [])
    assert not told or told[0].startswith("step 1: ")


def seen(run: Run, kind: Trouble = Trouble.NO_LESSON) -> tuple[str, list[str]]:
    """The problem of this kind that `top` shows, and what `doctor` finds of it."""
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        state = read_run_state(buffer.store, history=READ_RECORDS)
    problem = next((p for p in state.problems if p.kind is kind), None)
    lesson = "" if problem is None else str(problem)
    assert lesson in "\n".join(lines_of(run_view(state)))
    judgement = judged(newest_steps(run.store.history(of="records")))
    texts = [finding.text for finding in (*stands_still(run.store, opened=0.0), *judgement)]
    return lesson, [text for text in texts if text == lesson]


@pytest.mark.parametrize(
    ("best", "measured", "number"),
    [
        (0.0, {}, f"100% of the groups of the last {LEAST_STEPS} steps are flat"),
        (1.0, {"grad_norm": 0.0, "entropy": 0.041}, "0.041"),
        (1.0, {"grad_norm": 0.5, "entropy": 0.002}, "0.002"),
        (
            1.0,
            {"grad_norm": 0.0, "masked_fraction": 1.0, "masked_by": {"clip": 0.1, "icepop": 1.0}},
            f"{LEAST_STEPS} steps trained nothing, the newest because of icepop",
        ),
    ],
    ids=["flat", "no gradient", "no entropy", "masked"],
)
def test_a_run_that_learns_nothing_is_said_to_in_the_sentence_in_top_and_by_doctor(
    served: Served, best: float, measured: Mapping[str, float], number: str
) -> None:
    run = served.run
    start_trainer(run)
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=99, lookahead=99))

    def step(number: int) -> None:
        """The trainer's record of a step is there before the next one is committed."""
        run.store.add_record({"step": number, "digest": "", **measured})
        push(run, f"a.{number}", (), best=best)
        served.wait_for(lambda: len(served.said("step")) == number)

    for at in range(1, LEAST_STEPS):
        step(at)
    assert seen(run)[0] == ""
    step(LEAST_STEPS)
    lesson, found = served.wait_for(lambda: (its := seen(run))[0] and its)
    assert found == [lesson]
    assert number in lesson


def test_a_run_that_learns_is_not_said_to_learn_nothing(served: Served) -> None:
    run = served.run
    start_trainer(run)
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=99, lookahead=99))
    for number in range(1, LEAST_STEPS + 1):
        run.store.add_record({"step": number, "grad_norm": float(number == 1), "entropy": 0.04, "digest": ""})
        push(run, f"a.{number}", (), best=1.0)
        served.wait_for(lambda number=number: len(served.said("step")) == number)
    assert seen(run)[0] == ""


OFF = dict.fromkeys(DRIFT_NUMBERS, 0.0) | {"tokens": 900.0, "ratio": 1.0, "ratio_error": 0.01, "surprise_error": 1.0}


def test_a_cause_that_two_steps_name_is_said_in_top_and_by_doctor_and_shown_by_age(served: Served) -> None:
    run = served.run
    start_trainer(run)
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=99, lookahead=99))
    for number, rms in ((1, 0.001), (2, 0.04), (3, 0.04)):
        assert seen(run, Trouble.SAMPLER_NUMERICS)[0] == ""
        drift = {"0": OFF | {"rms": rms}}
        run.store.add_record({"step": number, "digest": "", "bfloat16_rms": 0.01, "drift": drift})
        push(run, f"a.{number}", (), best=1.0)
        served.wait_for(lambda number=number: len(served.said("step")) == number)
    problem, found = served.wait_for(lambda: (both := seen(run, Trouble.SAMPLER_NUMERICS))[0] and both)
    assert found == [problem]
    assert "0.0400 (rms, nats), 4.0 times what bfloat16 changes" in problem
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        whole = WholeRun(buffer, None)
        rows = DRIFT.listed(whole, "", 2)
        assert [(row.record.step, row.number("rms")) for row in rows] == [(3, 0.04), (2, 0.04)]
        assert [row.record.step for row in DRIFT.listed(whole, "step:2", 9)] == [2]
        text = "\n".join(lines_of(Printed(DRIFT, DRIFT.listed(whole, "", 9))))
        assert "0.0010" in text
        assert "0.0400" in text
        assert problem in "\n".join(str(line) for line in DRIFT.above(whole, DRIFT.listed(whole, "", 9), 100))
