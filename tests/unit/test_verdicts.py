"""Causes by name, from records made by hand: two steps in a row, numbers just beyond and just within each bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlbuffer.checks.server import judged
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.verdicts import JUDGED_STEPS, newest_steps, spells, verdicts

REFERENCE = 0.01
ROW = {
    "tokens": 1000.0,
    "ratio": 1.0,
    "ratio_error": 1e-4,
    "far": 0.0,
    "mean": 0.0,
    "rms": 1e-6,
    "kl": 0.0,
    "slope": 0.0,
    "slope_error": 1e-3,
    "fit": 0.0,
    "surprise": 0.0,
    "surprise_error": 0.04,
    "entropy": 1.0,
    "clipped": 0.0,
    "corrected": 0.0,
}
OLDER = {"1": {"rms": 0.12}, "2": {"rms": 0.25}}
CLEAN = StepRecord(
    entropy=1.0,
    reward=0.4,
    rewards={"a": 0.4},
    reward_std={"a": 0.3},
    truncated_by_env={"a": 0.3},
    rollouts=64,
    rollouts_by_env={"a": 64},
    loss_tokens=3000,
    learning_rate=1e-3,
    bfloat16_rms=REFERENCE,
)


def record(step: int, *, ages: Mapping[str, Mapping[str, float]] = OLDER, **row: Any) -> StepRecord:
    """A step with such tokens of age 0; fields of the record go by their names."""
    own = {name: row.pop(name) for name in list(row) if name not in ROW or name in ("entropy", "clip")}
    table = {"0": ROW | row, **{age: {**ROW, **values} for age, values in ages.items()}}
    return replace(CLEAN, step=step, **({"drift": table} | own))


def run_of(*rows: Mapping[str, Any], clean: int = 8) -> list[StepRecord]:
    """Clean steps, then these."""
    return [record(n + 1) for n in range(clean)] + [record(clean + n + 1, **row) for n, row in enumerate(rows)]


def kinds(records: list[StepRecord]) -> list[Trouble]:
    return [problem.kind for problem in verdicts(records)]


CASES: dict[str, tuple[Trouble, tuple[Mapping[str, Any], Mapping[str, Any]], tuple[Mapping[str, Any], ...], str]] = {
    "numerics": (
        Trouble.SAMPLER_NUMERICS,
        ({"rms": 0.04}, {"rms": 0.036}),
        ({"rms": 0.024}, {"rms": 0.024}),
        "0.0360 (rms, nats), 3.6 times what bfloat16 changes in this model (0.0100)",
    ),
    "weights": (
        Trouble.STUCK_WEIGHTS,
        ({"rms": 0.13}, {"rms": 0.24}),
        ({"rms": 0.024}, {"rms": 0.024}),
        "off by 0.240 (rms, nats), older ones by 0.250, and 0.130 in step 9",
    ),
    "temperature": (
        Trouble.OTHER_TEMPERATURE,
        ({"rms": 0.1, "slope": -0.09, "fit": 0.9},) * 2,
        ({"rms": 0.02, "slope": -0.09, "fit": 0.9},) * 2,
        "0.91 times the trainer's temperature",
    ),
    "support": (
        Trouble.SUPPORT_MISSING,
        ({"rms": 0.09, "mean": -0.09, "ratio": 0.913, "ratio_error": 7e-4},) * 2,
        ({"rms": 0.02, "mean": -0.02, "ratio": 0.98, "ratio_error": 1e-4},) * 2,
        "0.9130, 124 standard errors below 1",
    ),
    "unrecorded": (
        Trouble.SUPPORT_MISSING,
        ({"support": {"exact": 0.9, "unrecorded": 0.1}},) * 2,
        ({"support": {"exact": 1.0, "unrecorded": 0.0}},) * 2,
        "10.0% of the tokens",
    ),
    "otherwise": (
        Trouble.OTHER_SAMPLING,
        ({"surprise": -0.25},) * 2,
        ({"surprise": -0.1},) * 2,
        "in step 10 alone a token surprises by 0.250 nats less than the entropy",
    ),
    "rate": (
        Trouble.RATE_TOO_HIGH,
        ({"ages": {"1": {"rms": 4.7}}},) * 2,
        ({"ages": {"1": {"rms": 1.9}}},) * 2,
        "moves logprobs by 4.70 nats",
    ),
    "synchronous rate": (
        Trouble.RATE_TOO_HIGH,
        ({"ages": {}, "entropy": 1.7}, {"ages": {}, "entropy": 1.1}),
        ({"ages": {}, "entropy": 1.4}, {"ages": {}, "entropy": 1.0}),
        "from 1.70 to 1.10 nats at learning rate 0.001",
    ),
    "collapsed": (Trouble.COLLAPSED, ({"entropy": 0.009},) * 2, ({"entropy": 0.6}, {"entropy": 0.3}), "0.0090 nats"),
    "constant": (
        Trouble.CONSTANT_REWARD,
        ({"reward_std": {"a": 0.0}, "rewards": {"a": 0.5}},) * 2,
        ({"reward_std": {"a": 1e-6}},) * 2,
        "every rollout of a has reward 0.5",
    ),
    "truncated": (
        Trouble.TRUNCATION,
        ({"truncated_by_env": {"a": 0.96}},) * 2,
        ({"truncated_by_env": {"a": 0.5}},) * 2,
        "96% of its rollouts",
    ),
    "grows": (
        Trouble.TRUNCATION,
        ({"truncated_by_env": {"a": 0.7}},) * 2,
        ({"truncated_by_env": {"a": 0.59}},) * 2,
        "70% of its rollouts end at the length limit, 30%",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_steps_beyond_a_bound_are_a_cause_with_its_numbers_and_what_to_look_at(case: str) -> None:
    kind, beyond, within, number = CASES[case]
    (problem,) = (p for p in verdicts(run_of(*beyond)) if p.kind is kind)
    assert number in str(problem)
    assert "by steps 9 and 10" in str(problem)
    assert "Look: `rlbuffer " in str(problem)
    *_, look = problem.in_words("/data/my run/").partition(" Look: `rlbuffer ")
    # Needs no server: what it reads is the archive.
    assert re.fullmatch(r"(plot \S+|export --archive) '/data/my run/'( --where '.*' -o groups.html)?`\.", look), look
    assert kind not in kinds(run_of(beyond[0])) + kinds(run_of(beyond[0], {}, beyond[1], clean=7))
    assert kinds(run_of(*within)) == []


def test_what_is_as_far_off_at_every_age_is_old_weights_where_numbers_are_never_so_far_off() -> None:
    near = {"1": {"rms": 0.1}}
    assert kinds(run_of(*[{"rms": 0.09, "ages": near}] * 4)) == [Trouble.SAMPLER_NUMERICS]
    assert kinds(run_of(*[{"rms": 0.11, "ages": near}] * 4)) == [Trouble.STUCK_WEIGHTS]
    assert kinds(run_of(*[{"rms": 0.11, "ages": {"1": {"rms": 0.3}}}] * 4)) == [Trouble.SAMPLER_NUMERICS]


def test_a_sampler_in_bfloat16_is_a_fact() -> None:
    records = run_of(*[{"rms": 0.016}] * 3)
    (finding,) = judged(records)
    assert finding.level == "ok"
    assert "off by 0.016 nats (rms); bfloat16 changes 0.01 in" in finding.text


def test_a_model_whose_rounding_is_not_known_is_not_called_rounded_wrongly() -> None:
    assert kinds([replace(r, bfloat16_rms=None) for r in run_of(*[{"rms": 0.04}] * 3)]) == []


def test_few_tokens_show_nothing_and_what_is_off_by_a_little_shows_when_it_is_added_up() -> None:
    assert kinds(run_of(*[{"rms": 0.04, "tokens": 199}] * 2)) == []
    assert kinds(run_of(*[{"surprise": -0.1}] * 4)) == []
    assert kinds(run_of(*[{"surprise": -0.1}] * 6)) == [Trouble.OTHER_SAMPLING]


def test_steps_with_one_between_them_that_is_not_known_are_not_in_a_row() -> None:
    records = run_of({"rms": 0.04}, {"rms": 0.04})
    assert kinds(records) == [Trouble.SAMPLER_NUMERICS]
    assert kinds([*records[:-1], replace(records[-1], step=99)]) == []


def test_steps_that_were_taken_back_count_as_they_are_now() -> None:
    lines = [{"step": step, "entropy": entropy} for step, entropy in ((3, 0.3), (2, 0.2), (3, 9.0), (2, 9.0), (1, 0.1))]
    assert [(r.step, r.entropy) for r in newest_steps(lines)] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert len(newest_steps({"step": n} for n in range(99, 0, -1))) == JUDGED_STEPS + 1


def test_an_env_whose_rollouts_all_end_at_the_limit_from_the_first_step_on_is_meant_so() -> None:
    assert not spells([record(n + 1, truncated_by_env={"a": 0.98}) for n in range(30)])


def test_steps_of_other_envs_and_steps_that_trained_nothing_are_no_moves_of_the_policy() -> None:
    mixed = [record(n + 1, entropy=0.3 if n % 2 else 1.2, ages={"1": {"rms": 0.05}}) for n in range(20)]
    assert not spells(mixed)
    damaged = [replace(record(n + 1), entropy=0.0, drift={}) if n in (8, 9) else record(n + 1) for n in range(20)]
    assert not spells(damaged)


def test_few_rollouts_of_an_env_show_nothing_of_its_rewards_and_lengths() -> None:
    few = {"reward_std": {"a": 0.3, "b": 0.0}, "rewards": {"a": 0.4, "b": 0.0}, "rollouts_by_env": {"a": 60, "b": 4}}
    assert not spells(run_of(*[few | {"truncated_by_env": {"a": 0.3, "b": 1.0}}] * 4))


def test_doctor_calls_what_trains_wrongly_a_failure_and_what_may_be_meant_a_warning() -> None:
    (wrong,) = judged(run_of(*[{"rms": 0.04}] * 2))
    (meant,) = judged(run_of(*[{"truncated_by_env": {"a": 1.0}}] * 2))
    assert (wrong.level, meant.level) == ("failure", "warning")
    assert wrong.text == str(Problem.of(verdicts(run_of(*[{"rms": 0.04}] * 2))[0].record()))


def test_spells_of_a_whole_run_begin_and_end_where_a_cause_is_named() -> None:
    off: dict[str, Any] = {"rms": 0.04}
    records = [record(n + 1, **(off if n in (4, 5, 6, 20, 21) else {})) for n in range(30)]
    kind = Trouble.SAMPLER_NUMERICS
    assert [(s.problem.kind, s.first, s.last) for s in spells(records)] == [(kind, 6, 7), (kind, 22, 22)]


@pytest.mark.parametrize("value", [{"0": {"rms": 1.0}, "a": "x"}, {"0": {"rms": None}}, {"a": {"b": {}}}, {"a": None}])
def test_what_somebody_else_wrote_names_nothing(value: Any) -> None:
    line = record(1).as_object() | dict.fromkeys(
        ("support", "rewards", "reward_std", "truncated_by_env", "drift"), value
    )
    assert verdicts(newest_steps([line | {"step": 2}, line])) == ()
