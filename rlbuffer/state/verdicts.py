"""The causes of a run that learns wrongly, by name, from what the trainer measured in its last steps.

A sign is what one step shows; two steps in a row with the same sign make a verdict, so that chance alone makes none.
Each looks where no other cause shows:

- *age 0*: the very weights that train a token sampled it. What is off there is the sampler, and no staleness.
- *support*: the mean of the ratio is 1 for any two policies, unless one of them never draws what the other might.
- *temperature*: the difference of logprobs is a line over the logprob.
- *weights*: those that do not arrive leave age 0 as far off as older tokens, and further off from step to step, or much
  further than numbers are. At a learning rate that hardly moves anything that takes many steps to show.
- *numbers*: what remains is compared with what bfloat16 changes in this very model. A sampler in bfloat16 is no fault.
- *drawn otherwise*: surprise less entropy is 0 on average where tokens are drawn as their logprobs say. It is noisy, so
  it is added up over steps.

Pure: records in, problems out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.metric import is_number
from rlbuffer.state.step_record import DRIFT_NUMBERS, StepRecord

JUDGED_STEPS = 20
"""Newest records that a verdict looks at."""
LEAST_TOKENS = 200
"""Tokens of age 0 from which a step shows anything of the sampler."""
ROUNDED = 2.5
"""Times what bfloat16 changes in the model, up to which a sampler is rounded and no more. Two engines that both compute
in it differ by 1.1 to 1.6 times that, noise of ten times its rounding by 3.6 and more (docs/log.md)."""
LEAST_RMS = 1e-3
"""Nats of difference that no cause is looked for in."""
SURPRISED_ERRORS, SURPRISED_NATS = 5.0, 0.02
"""Standard errors of the mean surprise from which it is no chance, and the mean from which it matters."""
GROWN, TOO_FAR = 1.3, 10.0
"""Where weights do not arrive: how many times further off tokens of age 0 are than when that began, or than bfloat16
explains."""
MOVED_NATS, MOVED_ENTROPY = 2.0, 0.5
"""Nats by which one step's updates move logprobs, or the mean entropy, where the learning rate is far too high. A tiny
model that learns fast moves by 0.3, and by 0.7 in its first steps."""
STILL_ENTROPY = 0.01
"""Mean entropy in nats up to which a policy gives one answer."""
LEAST_ROLLOUTS = 16
"""Rollouts of an env from which equal rewards are no chance."""
MORE_TRUNCATED, MOST_TRUNCATED, EARLIER_STEPS = 0.25, 0.95, 6
"""Where truncation grows: how much more it is than the mean of the steps before, at least so many; besides, it is twice
that mean, or nearly all. An env whose rollouts all end at the limit from the first step on may be meant so."""

OF_LEARNING = frozenset({Trouble.COLLAPSED, Trouble.CONSTANT_REWARD})
"""Verdicts that say why nothing is learned."""
WRONG = frozenset(
    {
        Trouble.SAMPLER_NUMERICS,
        Trouble.STUCK_WEIGHTS,
        Trouble.OTHER_TEMPERATURE,
        Trouble.SUPPORT_MISSING,
        Trouble.RATE_TOO_HIGH,
    }
)
"""Verdicts of a run that trains wrongly; the other ones may be meant, as a nucleus whose logprobs are those of all
tokens."""
OF_WEIGHTS = frozenset({Trouble.STUCK_WEIGHTS, Trouble.SAMPLER_NUMERICS})
"""Verdicts that old weights may bring about: scoring by the kept versions tells (:mod:`rlbuffer.replay.proof`)."""
VERDICTS = WRONG | OF_LEARNING | {Trouble.OTHER_SAMPLING, Trouble.TRUNCATION}
Signs = Mapping[tuple[str, str], Problem]
"""By :attr:`~rlbuffer.records.waiting.Problem.key`."""


def verdicts(records: Sequence[StepRecord]) -> tuple[Problem, ...]:
    """What the newest two of these steps show alike, with the numbers of the newest.

    Args:
        records: of one run, ascending; a step that was trained again stands there as it was last.
    """
    if len(records) < 2 or records[-1].step != records[-2].step + 1:
        return ()
    now, before = signs(records), signs(records[:-1])
    return tuple(problem for key, problem in now.items() if key in before)


class Spell(NamedTuple):
    """Steps one after the other that a cause was named in."""

    problem: Problem
    """As the last of them has it."""
    first: int
    last: int


def spells(records: Sequence[StepRecord]) -> list[Spell]:
    """All that these steps name, in the order in which it begins. Args: as of :func:`verdicts`, of any number."""
    found: list[Spell] = []
    open_ones: dict[tuple[str, str], int] = {}
    for end in range(1, len(records) + 1):
        named = {problem.key: problem for problem in verdicts(records[max(0, end - JUDGED_STEPS - 1) : end])}
        step = records[end - 1].step
        for key, problem in named.items():
            if key in open_ones:
                found[open_ones[key]] = found[open_ones[key]]._replace(problem=problem, last=step)
            else:
                open_ones[key] = len(found)
                found.append(Spell(problem, step, step))
        open_ones = {key: at for key, at in open_ones.items() if key in named}
    return found


def readable(line: Mapping[str, Any]) -> StepRecord:
    """A record as verdicts can take it. Anybody may have written it: of its tables the numbers count, and the rows of
    `drift` that are whole."""
    record = StepRecord.read(line)
    drift = {
        age: row
        for age, row in record.drift.items()
        if isinstance(row, Mapping) and all(is_number(row.get(name)) for name in DRIFT_NUMBERS)
    }
    tables = ("support", "rewards", "reward_std", "truncated_by_env", "rollouts_by_env")
    numbers: dict[str, Any] = {
        name: {k: v for k, v in getattr(record, name).items() if is_number(v)} for name in tables
    }
    return replace(record, drift=drift, **numbers)


def newest_steps(newest_first: Iterable[Mapping[str, Any]]) -> list[StepRecord]:
    """What the trainer measured in its last steps, ascending; a step that was taken back, or is trained again, counts
    as it is now."""
    found: list[StepRecord] = []
    for line in newest_first:
        record = readable(line)
        if not found or record.step < found[-1].step:
            found.append(record)
    return found[: JUDGED_STEPS + 1][::-1]


def sampler_fact(record: StepRecord) -> str:
    """How far off the sampler is, of a step with tokens of age 0; "" of another.

    Example:
        >>> sampler_fact(StepRecord(step=7, drift={"0": {"rms": 0.0041}}, bfloat16_rms=0.0077))
        'step 7: tokens of age 0 are off by 0.0041 nats (rms); bfloat16 changes 0.0077 in this model'
    """
    row = record.drift.get("0")
    if row is None:
        return ""
    rounded = "" if record.bfloat16_rms is None else f"; bfloat16 changes {record.bfloat16_rms:.2g} in this model"
    return f"step {record.step}: tokens of age 0 are off by {row['rms']:.2g} nats (rms){rounded}"


def signs(records: Sequence[StepRecord]) -> Signs:
    """What the newest of these steps shows."""
    records = records[-JUDGED_STEPS:]
    found = [
        *_of_sampler(records),
        *_of_rate(records),
        *_of_entropy(records[-1]),
        *_of_rewards(records[-1]),
        *_of_lengths(records),
    ]
    return {problem.key: problem for problem in found}


# -- the sampler -------------------------------------------------------------------------------------------------------
def _of_sampler(records: Sequence[StepRecord]) -> list[Problem]:
    """At most one: each but the last would show as the ones behind it, too."""
    newest = records[-1]
    unrecorded = newest.support.get("unrecorded", 0.0)
    if unrecorded:
        text = f"{unrecorded:.1%} of the tokens of restricted sampling came without a record of what it left"
        return [Problem(kind=Trouble.SUPPORT_MISSING, step=newest.step, detail=text)]
    row = newest.drift.get("0")
    if row is None or row["tokens"] < LEAST_TOKENS:
        return []
    if _is_off(newest):
        for look in (_support, _temperature, _weights, _numbers):
            text = look(records)
            if text:
                return [Problem(kind=_KINDS[look], step=newest.step, detail=text)]
        return []
    text = _drawn_otherwise(records)
    return [Problem(kind=Trouble.OTHER_SAMPLING, step=newest.step, detail=text)] if text else []


def _is_off(record: StepRecord) -> bool:
    """Tokens of age 0 are further off than rounding explains."""
    row = record.drift.get("0")
    return row is not None and row["rms"] > rounding(record.bfloat16_rms)


def rounding(bfloat16_rms: float | None) -> float:
    """Nats (rms) up to which a sampler rounds and no more, by what bfloat16 changes in the model (None: not known)."""
    return max(LEAST_RMS, ROUNDED * (bfloat16_rms or 0.0))


def _support(records: Sequence[StepRecord]) -> str:
    row = records[-1].drift["0"]
    error = max(row["ratio_error"], 1e-9)
    below = (1.0 - row["ratio"]) / error
    if row["ratio"] > 0.995 or below < 6 or -row["mean"] < 0.25 * row["rms"]:
        return ""
    return f"the mean ratio at age 0 is {row['ratio']:.4f}, {below:.0f} standard errors below 1"


def _temperature(records: Sequence[StepRecord]) -> str:
    row = records[-1].drift["0"]
    if row["fit"] < 0.5 or abs(row["slope"]) < 8 * row["slope_error"]:
        return ""
    return (
        f"at age 0 the difference of logprobs is a line over the sampler's (slope {row['slope']:+.3f}, which explains "
        f"{row['fit']:.0%} of it): it samples at {1 + row['slope']:.2f} times the trainer's temperature"
    )


def _weights(records: Sequence[StepRecord]) -> str:
    newest = records[-1]
    rms, older = newest.drift["0"]["rms"], [row["rms"] for age, row in newest.drift.items() if age != "0"]
    if not older or rms < 0.5 * max(older):
        return ""
    since = len(records) - 1
    while since and _is_off(records[since - 1]):
        since -= 1
    first = records[since].drift["0"]["rms"]
    is_too_far = rms > TOO_FAR * (newest.bfloat16_rms or math.inf)
    if since < len(records) - 1 and rms < GROWN * first and not is_too_far:
        return ""
    grown = f", and {first:.3f} in step {records[since].step}" if since < len(records) - 1 else ""
    return f"tokens of age 0 are off by {rms:.3f} (rms, nats), older ones by {max(older):.3f}{grown}"


def _numbers(records: Sequence[StepRecord]) -> str:
    newest = records[-1]
    rms, reference = newest.drift["0"]["rms"], newest.bfloat16_rms
    if not reference:
        return ""  # no measure of what this model's rounding does
    return (
        f"tokens of age 0 are off by {rms:.4f} (rms, nats), {rms / reference:.1f} times what bfloat16 changes in this "
        f"model ({reference:.4f})"
    )


def _drawn_otherwise(records: Sequence[StepRecord]) -> str:
    """The newest steps, as many as show it best."""
    total = tokens = variance = 0.0
    for count, record in enumerate(reversed(records), start=1):
        row = record.drift.get("0")
        if row is None or _is_off(record):
            continue
        total += row["surprise"] * row["tokens"]
        variance += (row["surprise_error"] * row["tokens"]) ** 2
        tokens += row["tokens"]
        mean, error = total / tokens, math.sqrt(variance) / tokens
        if error and abs(mean) > max(SURPRISED_NATS, SURPRISED_ERRORS * error):
            side = "less" if mean < 0 else "more"
            where = f"over {count} steps" if count > 1 else f"in step {record.step} alone"
            return (
                f"{where} a token surprises by {abs(mean):.3f} nats {side} than the "
                f"entropy ({abs(mean) / error:.1f} standard errors, {tokens:,.0f} tokens of age 0)"
            )
    return ""


_KINDS: Mapping[Callable[[Sequence[StepRecord]], str], Trouble] = {
    _support: Trouble.SUPPORT_MISSING,
    _temperature: Trouble.OTHER_TEMPERATURE,
    _weights: Trouble.STUCK_WEIGHTS,
    _numbers: Trouble.SAMPLER_NUMERICS,
}


# -- what is learned ---------------------------------------------------------------------------------------------------
def _of_rate(records: Sequence[StepRecord]) -> list[Problem]:
    newest = records[-1]
    rate = "" if newest.learning_rate is None else f" at learning rate {newest.learning_rate:g}"
    row, at_0 = newest.drift.get("1"), newest.drift.get("0")
    text = ""
    if row and row["rms"] > MOVED_NATS and (at_0 is None or at_0["rms"] < 0.5 * row["rms"]):
        text = f"one step moves logprobs by {row['rms']:.2f} nats (rms of the tokens of age 1){rate}"
    elif len(records) > 1 and newest.entropy is not None and records[-2].entropy is not None:
        before = records[-2].entropy
        # Steps of other envs have other entropies: then tokens of age 1, which saw the same update, are not far off.
        has_moved = row is None or row["rms"] > MOVED_ENTROPY / 2
        is_trained = newest.drift and records[-2].drift  # damaged steps train nothing, and have no entropy
        if is_trained and has_moved and abs(newest.entropy - before) > MOVED_ENTROPY:
            text = f"one step moves the mean entropy from {before:.2f} to {newest.entropy:.2f} nats{rate}"
    return [Problem(kind=Trouble.RATE_TOO_HIGH, step=newest.step, detail=text)] if text else []


def _of_entropy(record: StepRecord) -> list[Problem]:
    if record.entropy is None or not record.drift or record.entropy > STILL_ENTROPY:
        return []
    reward = "" if record.reward is None else f", the mean reward {record.reward:.3f}"
    text = f"the mean entropy is {record.entropy:.4f} nats{reward}"
    return [Problem(kind=Trouble.COLLAPSED, step=record.step, detail=text)]


def _of_rewards(record: StepRecord) -> list[Problem]:
    """Envs all of whose rollouts have one reward; what rounding leaves of a spread is none."""
    return [
        Problem(
            kind=Trouble.CONSTANT_REWARD,
            env=env,
            step=record.step,
            detail=f"every rollout of {env} has reward {record.rewards[env]:.4g}",
        )
        for env, spread in record.reward_std.items()
        if spread is not None
        and record.rewards.get(env) is not None
        and record.rollouts_by_env.get(env, 0) >= LEAST_ROLLOUTS
        and spread <= 1e-9 * max(1.0, abs(record.rewards[env] or 0.0))
    ]


def _of_lengths(records: Sequence[StepRecord]) -> list[Problem]:
    newest, found = records[-1], []
    for env, share in newest.truncated_by_env.items():
        if share is None or newest.rollouts_by_env.get(env, 0) < LEAST_ROLLOUTS:
            continue
        earlier = [record.truncated_by_env[env] or 0.0 for record in records[:-2] if env in record.truncated_by_env]
        if len(earlier) < EARLIER_STEPS:
            continue
        usual = sum(earlier) / len(earlier)
        if share < usual + MORE_TRUNCATED or share < min(2 * usual, MOST_TRUNCATED):
            continue
        text = f"{share:.0%} of its rollouts end at the length limit, {usual:.0%} in the {len(earlier)} steps before"
        found.append(Problem(kind=Trouble.TRUNCATION, env=env, step=newest.step, detail=text))
    return found
