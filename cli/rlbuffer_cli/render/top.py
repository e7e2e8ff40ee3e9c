"""Both sides of a run at a glance, as `rlbuffer top` shows them: who waits for whom, how fast, how old, what is lost.

A look needs nothing but what stands on the server: rates come from its history and from heartbeats, so the first look
says as much as the hundredth. The trainer's own figures are added where its metrics can be read from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from rlbuffer.records.waiting import Wait
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import RECENT_STEPS, Waited, waited_of
from rlbuffer_cli.render.pool import (
    ENV_HEADER,
    ENV_NUMBERS,
    RunSummary,
    env_row,
    first_lines,
    memory_record,
    summarize,
    summary_records,
    waiting_lines,
    warning_lines,
)
from rlbuffer_cli.render.ranks import rank_line
from rlbuffer_cli.render.text import aligned, broken, cut, utc
from rlbuffer_cli.render.workers import BEAT_HEADER, BEAT_NUMBERS, beat_row

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.pool_look import PoolLook
    from rlbuffer.state.step_record import StepRecord

LEAST_WINDOW_SECONDS, MOST_WINDOW_SECONDS = 60.0, 300.0
"""Rates and drops are of so long, or of the run's whole life where that is shorter."""
STEPS_OF_A_WINDOW = 5
"""Steps, at the pace of the newest ones, that a rate should be of: a run of slow steps has a longer window."""
READ_RECORDS = 1000
"""Records of the history that are read; a run that makes more of them has a shorter window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look at a run."""

    summary: RunSummary
    at: float
    """The server's clock, Unix seconds."""
    ranks: Mapping[str, Mapping[str, Any]]
    """Rank -> its last heartbeat, with ``seconds_ago``."""
    window_seconds: float
    """Time that the next three are of."""
    steps: int
    """Committed."""
    tokens: int
    """Tokens of those steps."""
    drops: Mapping[str, tuple[int, int]]
    """Reason -> rollouts, tokens."""
    ages: tuple[float, int] | None
    """Mean and largest age in policy versions in the newest step; None before the first."""
    reward: float | None
    """Mean of the last steps; None where nothing is scored."""
    trained: Sequence[StepRecord]
    """The trainer's records of the last steps, where its metrics can be read here."""

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts that workers push, by their own count."""
        rates = (beat.get("rollouts_per_second") for beat in self.fresh_workers)
        return sum(rate for rate in rates if isinstance(rate, float))

    @property
    def fresh_workers(self) -> list[Mapping[str, Any]]:
        """Heartbeats of the workers that live."""
        return [beat for beat in self.summary.workers.values() if beat["seconds_ago"] <= FRESH_SECONDS]

    @property
    def sampled_versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that a living worker samples with; None when none does."""
        versions = [v for beat in self.fresh_workers if isinstance(v := beat.get("version"), int) and v >= 0]
        return (min(versions), max(versions)) if versions else None

    @property
    def wait(self) -> Waited | None:
        """The share of its time that the trainer waited for data; None where that is not known here."""
        return waited_of(self.trained) if self.trained else None


def look(buffer: Buffer, trained: Sequence[StepRecord], pool: PoolLook) -> Sight:
    """Looks at a run. `trained`: the trainer's step records, as far as they can be read here; the last ones count."""
    from rlbuffer.client.lessons import last_steps, mean_reward
    from rlbuffer.store.history import Committed, Dropped

    store = buffer.store
    now, history = store.now(), store.history(READ_RECORDS)
    first = min((float(record["at"]) for record in history), default=now)
    steps = [record for record in history if record.get("event") == Committed.event]
    window = min(window_of([record["at"] for record in steps]), max(1.0, now - first))
    recent = [record for record in steps if record["at"] >= now - window]
    drops: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in history:
        if record.get("event") == Dropped.event and record["at"] >= now - window:
            rollouts, tokens = drops[record["reason"]]
            drops[record["reason"]] = rollouts + record["rollouts"], tokens + record["tokens"]
    return Sight(
        summary=summarize(buffer, pool),
        at=now,
        ranks=store.heartbeats("rank"),
        window_seconds=window,
        steps=len(recent),
        tokens=sum(record["tokens"] for record in recent),
        drops=dict(sorted(drops.items(), key=lambda item: -item[1][0])),
        ages=(steps[0]["age"], steps[0]["max_age"]) if steps else None,
        reward=mean_reward(last_steps(history)),
        trained=trained[-RECENT_STEPS:],
    )


def window_of(committed: Sequence[float]) -> float:
    """Seconds that rates are of: short, so that they follow a change, and long enough for a few steps at their pace.

    `committed`: when each step was committed, in seconds, the newest first. How long ago the newest one was changes
    nothing: a run that stops is soon at 0.

    Example:
        >>> window_of([100.0, 98.0, 96.0]), window_of([100.0, 70.0, 40.0]), window_of([])
        (60.0, 150.0, 60.0)
    """
    gaps = [later - earlier for later, earlier in pairwise(committed[: STEPS_OF_A_WINDOW + 1])]
    seconds = STEPS_OF_A_WINDOW * median(gaps) if gaps else 0.0
    return min(max(LEAST_WINDOW_SECONDS, seconds), MOST_WINDOW_SECONDS)


# -- JSON --------------------------------------------------------------------------------------------------------------
def sight_records(sight: Sight) -> Iterator[dict[str, Any]]:
    """``rlbuffer.top/1``, then what `inspect --json --totals` gives, then a line per rank (``rlbuffer.rank/1``)."""
    summary, versions = sight.summary, sight.sampled_versions
    yield {
        "schema": "rlbuffer.top/1",
        "run": summary.run,
        "at": utc(sight.at),
        "window_seconds": sight.window_seconds,
        "steps_per_second": sight.steps / sight.window_seconds,
        "tokens_per_second": sight.tokens / sight.window_seconds,
        "rollouts_per_second": sight.rollouts_per_second,
        "steps_ahead": summary.step - summary.trained,
        "sampled_versions": None if versions is None else list(versions),
        "age": sight.ages[0] if sight.ages else None,
        "max_age": sight.ages[1] if sight.ages else None,
        "reward": sight.reward,
        "drops": {reason: list(counts) for reason, counts in sight.drops.items()},
        "trainer_wait": sight.wait.share if sight.wait else None,
    }
    yield from summary_records(summary)
    for rank, beat in sight.ranks.items():
        yield {"schema": "rlbuffer.rank/1", "rank": rank, **beat}


# -- lines -------------------------------------------------------------------------------------------------------------
def sight_lines(sight: Sight, width: int | None) -> list[str]:
    """The view as lines of at most `width` columns: prose is broken, tables lose their least columns, then are cut."""
    summary = sight.summary
    lines = [
        *first_lines(summary)[:2],
        *warning_lines(summary),
        *(waiting_lines(summary) or ["  nobody waits"]),
        f"  rates    {_rates(sight)}",
        f"  lag      {_lag(sight)}",
        *([f"  reward   {sight.reward:.3f} in the last steps"] if sight.reward is not None else []),
        *([f"  trainer  {_trainer(sight, sight.wait)}"] if sight.wait else []),
        f"  drops    {_drops(sight)}",
        f"  memory   {_memory(summary)}",
    ]
    lines = [row for line in lines for row in broken(printable(line), width, indent="    ")] + [""]
    if summary.envs:
        rows = [env_row(env) for env in summary.envs]
        lines += _table(ENV_HEADER, rows, right=ENV_NUMBERS, optional=("forming", "packed", "age"), width=width)
        lines.append("")
    beats = [*_beats("worker", summary.workers), *_beats("scorer", summary.scorers), *_beats("rank", sight.ranks)]
    if beats:
        lines += _table(BEAT_HEADER, beats, right=BEAT_NUMBERS, optional=("env", "last failure"), width=width)
    ranks = sight.trained[-1].ranks if sight.trained else ()
    return lines + ([rank_line(ranks)] if len(ranks) > 1 else [])


def _trainer(sight: Sight, wait: Waited) -> str:
    """Says how long it waited for data; while it waits, the share of the last steps is not what it does now."""
    summary = sight.summary
    waits = any(waiting.kind is Wait.STEP for waiting in summary.waiting.values())
    if waits and summary.step == summary.trained:
        return f"waits for a step now; of the last steps it waited {percent(wait.share)} of the time for data"
    return wait.text


def _rates(sight: Sight) -> str:
    per_minute = 60 * sight.steps / sight.window_seconds
    return (
        f"{amount(sight.rollouts_per_second)} rollouts/s by the workers' heartbeats · {per_minute:.1f} steps/min · "
        f"{amount(sight.tokens / sight.window_seconds)} tok/s committed in the last "
        f"{duration(sight.window_seconds)}"
    )


def _lag(sight: Sight) -> str:
    summary, versions = sight.summary, sight.sampled_versions
    ahead = summary.step - summary.trained
    parts = [f"batcher {plural(ahead, 'step')} ahead of the trainer"]
    if versions is not None and summary.policy_version >= 0:
        oldest, newest = versions
        shown = f"v{oldest}" if oldest == newest else f"v{oldest}-v{newest}"
        parts.append(f"workers sample {shown} of v{summary.policy_version}")
    if sight.ages is not None:
        parts.append(f"age {sight.ages[0]:.1f} max {sight.ages[1]}")
    return " · ".join(parts)


def _drops(sight: Sight) -> str:
    account = sight.summary.ledger.total()
    total = sum(rollouts for rollouts, _ in account.dropped.values())
    share = f" ({percent(total / account.pushed[0])} of all pushed)" if account.pushed[0] else ""
    recent = ", ".join(f"{rollouts:,} {reason}" for reason, (rollouts, _) in sight.drops.items())
    return f"{recent or 'none'} in the last {duration(sight.window_seconds)} · {plural(total, 'rollout')} in all{share}"


def _memory(summary: RunSummary) -> str:
    record = memory_record(summary)
    used = f"{record['used'] / 2**20:,.0f}"
    return (
        f"{used} of {record['limit'] / 2**20:,.0f} MiB ({record['percent']:.0f} %)"
        if record["limit"]
        else f"{used} MiB"
    )


def _beats(kind: str, beats: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    for name, beat in beats.items():
        row = beat_row(f"{kind} {name}", beat)
        step = beat.get("step")
        if kind == "rank" and isinstance(step, int):
            row[BEAT_HEADER.index("version")] = f"step {step}"
        yield row


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str],
    optional: Sequence[str],
    width: int | None,
) -> list[str]:
    lines = ["  ".join(row).rstrip() for row in aligned(header, rows, right=right, optional=optional, width=width)]
    return lines if width is None else [cut(line, width) for line in lines]
