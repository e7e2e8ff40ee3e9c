"""A run as rich objects: `top`, `inspect`, the head of its browser, and the live views show this one thing.

Rates and drops come from the newest records of the run's history, so a first look says as much as the hundredth; where
none were read they are left out. The trainer's own figures are added where its metrics can be read from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rlbuffer.client.lessons import last_steps, mean_reward
from rlbuffer.records.waiting import Wait
from rlbuffer.state.evaluations import counts_of, mean_of
from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import RECENT_STEPS, masked_words, waited_of
from rlbuffer.store.history import Committed, Dropped
from rlbuffer_cli import look
from rlbuffer_cli.run_tables import ENVS, PROCESSES, env_rows, process_rows
from rlbuffer_cli.table import Printed
from rlbuffer_cli.text import moment

LEAST_WINDOW_SECONDS, MOST_WINDOW_SECONDS = 60.0, 300.0
"""Rates and drops are of so long, or of the run's whole life where that is shorter."""
STEPS_OF_A_WINDOW = 5
"""Steps, at the pace of the newest ones, that a rate should be of: a run of slow steps has a longer window."""
SHOWN_PROCESSES, SHOWN_PROBLEMS = 30, 3
"""Rows of processes in a view of the run; problems, a line each, in the head of another table."""
SLOW_SHARE, SLOW_PASS_SECONDS = 1.25, 0.01
"""A rank is slow when its passes take so many times as long as the middle rank's, and this much longer: less is chance.
Of an even number the faster one of the two in the middle counts: of two ranks the slow one is not the middle."""


def run_view(state: RunState, trained: Sequence[StepRecord] = (), *, with_processes: bool = True) -> Group:
    """The whole run: what must be cured, what it waits for, how far it is, its envs, its processes.

    `trained`: the trainer's records, where they can be read here; the last ones count. Without processes it is the
    head of another table, and problems take a line each.
    """
    processes = process_rows(state) if with_processes else []
    parts: list[RenderableType] = [head(state, trained, is_brief=not with_processes)]
    if state.envs:
        parts += [Text(), Printed(ENVS, env_rows(state)), *_said_before(state)]
    else:
        parts.append(Text(ENVS.empty, "faint"))
    said = list(notes(state, trained))
    parts += [Text(), *said] if said else []
    if processes:
        parts += [Text(), Printed(PROCESSES, processes[:SHOWN_PROCESSES])]
    if len(processes) > SHOWN_PROCESSES:
        parts.append(Text(f"and {len(processes) - SHOWN_PROCESSES:,} more: rlbuffer inspect processes", "faint"))
    return Group(*parts)


def head(state: RunState, trained: Sequence[StepRecord] = (), *, is_brief: bool = False) -> Group:
    """Everything but the tables; `is_brief`: with a line for each of the first problems."""
    server = state.server
    title = Text.assemble(
        (f'run "{printable(state.run)}"', "accent"),
        (f" on {server.address} ({' '.join(filter(None, [server.name, server.version]))})", "faint"),
    )
    return Group(
        title,
        *alerts(state, is_brief=is_brief),
        look.Facts(figures(state, trained)),
        look.Facts(states(state)),
    )


def alerts(state: RunState, *, is_brief: bool = False) -> Iterator[Text]:
    """What somebody must cure, then what each process waits for; `is_brief`: a line for each of the first problems."""
    server = state.server
    if not server.memory_limit and server.name != "memory":
        yield bad(f"server memory: no limit (maxmemory 0), {server.memory / 2**20:,.0f} MiB used: set one")
    if state.retired_early:
        yield bad(f"steps up to {state.retired_early} retired early, because the server's memory was short")
    if state.damaged or state.lost:
        yield bad(f"{plural(state.damaged, 'rollout')} damaged, {plural(state.lost, 'push', 'pushes')} lost")
    if state.error:
        yield bad(f"the batcher failed: {state.error}")
    for problem in state.problems[: SHOWN_PROBLEMS if is_brief else None]:
        line = bad(str(problem))
        line.no_wrap, line.overflow = is_brief, "ellipsis"
        yield line
    if is_brief and state.problems:
        more = max(0, len(state.problems) - SHOWN_PROBLEMS)
        yield bad(f"{f'{more} more, and what' if more else 'What'} cures them: rlbuffer inspect problems")
    leader = state.leader
    waits = [("batcher", 0.0 if leader is None or leader.is_fresh else leader.seconds_ago, state.waiting)]
    waits += [(rank.title, 0.0, rank.waiting) for rank in state.of_kind("rank") if rank.is_fresh]
    for who, ago, waiting in waits:
        if waiting is not None:
            said = f"{who}{f' ({duration(ago)} ago)' if ago else ''}: {waiting}"
            part = look.meter(waiting.done, cells=16).append(" ") if waiting.done else ""
            yield Text.assemble(("● ", "trained"), part, printable(said)) if waiting.is_normal else bad(said)


def bad(sentence: str) -> Text:
    """Something that somebody must cure."""
    return Text.assemble(("✕ ", "dropped"), (printable(sentence), "bold"))


def figures(state: RunState, trained: Sequence[StepRecord] = ()) -> list[Text]:
    """The run in numbers."""
    server, pace = state.server, pace_of(state) if state.history else None
    reward = mean_reward(last_steps(state.history))
    rewards = [r["reward"] for r in last_steps(state.history)[::-1] if r.get("reward") is not None]
    shown = None if reward is None else Text.assemble((f"{reward:.3f}", "bold"), _trend(rewards))
    limit = f" of {server.memory_limit / 2**20:,.0f}" if server.memory_limit else ""
    share = f" ({percent(server.memory_share)})" if server.memory_share is not None else ""
    versions = [p.version for p in state.of_kind("worker") if p.is_alive and p.version >= 0]
    behind = state.policy_version - min(versions) if versions and state.policy_version >= 0 else 0
    return look.pairs(
        ("step", str(state.step)),
        ("trained", f"step {state.trained_step}"),
        ("policy", f"v{state.policy_version}" if state.policy_version >= 0 else "none announced"),
        ("ranks", state.world_size or None),
        ("reward", shown),
        ("pushed", f"{amount(state.rollouts_per_second)}/s"),
        ("steps", pace and f"{60 * pace.steps / pace.window_seconds:.1f}/min"),
        ("packed", pace and f"{amount(pace.tokens / pace.window_seconds)} tok/s"),
        ("age", f"{pace.newest['age']:.1f} max {pace.newest['max_age']}" if pace and pace.newest else None),
        ("memory", f"{server.memory / 2**20:,.0f}{limit} MiB{share}"),
        ("workers behind", plural(behind, "version") if behind > 0 else None),
    )


def _trend(values: Sequence[float]) -> Text:
    """How they went and between which values; nothing of a single one."""
    if len(values) < 2:
        return Text()
    low, high = min(values), max(values)
    return Text.assemble(" ", (look.spark(values, low, high), "accent"), (f" {low:.3f} to {high:.3f}", "faint"))


def states(state: RunState) -> list[Text]:
    """Where the run's rollouts are."""
    total = state.total
    groups = {
        name: [getattr(env, f"groups_{name}") for env in state.envs if getattr(env, f"groups_{name}") is not None]
        for name in ("forming", "ready")
    }
    numbers = {name: plural(sum(known), "group") for name, known in groups.items() if known}
    numbers |= {"packed": f"{total.packed.rollouts:,}", "trained": f"{total.trained.rollouts:,}"}
    numbers["dropped"] = f"{sum(each.rollouts for each in total.dropped.values()):,}"
    of_all = look.pairs(("of pushed", f"{total.pushed.rollouts:,}"), ("pending", f"{total.pending.rollouts:,}"))
    return [
        *(Text.assemble((look.state(name).plain, name), " ", (number, "bold")) for name, number in numbers.items()),
        *of_all,
    ]


def notes(state: RunState, trained: Sequence[StepRecord] = ()) -> Iterator[Text]:
    """Everything else that holds now."""
    if state.history:
        pace = pace_of(state)
        lately = ", ".join(f"{rollouts:,} {reason}" for reason, rollouts in pace.drops.most_common())
        lost, pushed = sum(each.rollouts for each in state.total.dropped.values()), state.total.pushed.rollouts
        share = f"; {percent(lost / pushed)} of all so far" if lost else ""
        yield _note("drops", f"{lately or 'none'} in the last {duration(pace.window_seconds)}{share}")
        yield _note("lag", f"batcher {plural(state.step - state.trained_step, 'step')} ahead of the trainer")
    recent = trained[-RECENT_STEPS:] or ([state.trained] if state.trained is not None else [])
    if recent and any(record.seconds for record in recent):
        yield _note("trainer", _waited(state, recent))
    if trained and len(trained[-1].ranks) > 1:
        yield _note("ranks", rank_line(trained[-1].ranks))
    reused = state.total.reused
    if reused.rollouts:
        yield _note(
            "reused", f"{plural(reused.rollouts, 'more use')} of trained rollouts, {amount(reused.tokens)} tokens"
        )
    if state.revision > 1 or state.is_revision_asked:
        asked = "; others are asked for and not taken yet" if state.is_revision_asked else ""
        yield _note("settings", f"revision {state.revision}{asked}")
    if state.ended_step is not None:
        yield _note("ended", f"after step {state.ended_step}")
    if state.draining_since is not None:
        yield _note("draining", f"since {moment(state.draining_since)}: no tickets are given")
    for adapter, version in sorted(state.adapters.items()):
        yield _note("adapter", f"{adapter} v{version}")
    yield from evaluations(state)


def evaluations(state: RunState) -> Iterator[Text]:
    """The newest result of each env that is evaluated, and how its results went."""
    for env in dict.fromkeys(result["env"] for result in state.evaluations):
        results = [result for result in state.evaluations if result["env"] == env]
        newest, values = results[-1], [float(result["reward/mean"]) for result in results]
        yield _note(
            f"eval {env}", f"{mean_of(newest)} at version {newest['version']} ({counts_of(newest)})"
        ).append_text(_trend(values))


def _note(name: str, text: str) -> Text:
    return Text.assemble((f"{printable(name):<8} ", "faint"), printable(text))


def _waited(state: RunState, recent: Sequence[StepRecord]) -> str:
    """How long the trainer waited for data; while it waits, the share of the last steps is not what it does now."""
    wait = waited_of(recent)
    waits = any(r.waiting is not None and r.waiting.kind is Wait.STEP for r in state.of_kind("rank") if r.is_fresh)
    if waits and state.step == state.trained_step:
        return f"waits for a step now; of the last steps it waited {percent(wait.share)} of the time for data"
    return wait.text


def _said_before(state: RunState) -> Iterator[Text]:
    leader = state.leader
    if leader is None:
        yield Text("-: known to a batcher, and none has said it yet", "faint")
    elif not leader.is_fresh:
        said = f"ready, forming and age are those of {duration(leader.seconds_ago)} ago, when a batcher was last seen"
        yield Text(said, "faint")


# -- the trainer -------------------------------------------------------------------------------------------------------
def step_line(record: StepRecord, planned: int) -> str:
    """A trained step as one line."""
    said = [
        f"step {record.step}/{planned}",
        *(f"{name} {value:{form}}" for name, value, form in _learned(record) if value is not None),
        f"age {record.age:.1f} max {record.max_age}" if record.age is not None else "",
        masked_words(record),
        f"{amount(record.tokens)} tok",
        f"{amount(record.tokens_per_second or 0.0)} tok/s",
        f"wait {percent(record.wait or 0.0)}",
    ]
    return "  ".join(filter(None, said))


def _learned(record: StepRecord) -> list[tuple[str, float | None, str]]:
    return [
        ("reward", record.reward, ".3f"),
        ("loss", record.loss, "+.4f"),
        ("kl", record.kl, ".4f"),
        ("entropy", record.entropy, ".3f"),
        ("grad", record.grad_norm, ".2f"),
    ]


def progress(records: Sequence[StepRecord], planned: int, elapsed: float) -> Text:
    """How many of the planned steps are trained, and how long the others take at the pace of these `records`."""
    step = records[-1].step
    left = elapsed / len(records) * (planned - step)
    return Text.assemble(
        (f"step {step} of {planned} ", "bold"),
        look.meter(step / planned, cells=24),
        f" {percent(step / planned)}   {duration(elapsed)}" + (f", {duration(left)} left" if left > 0 else ""),
    )


def rank_line(ranks: Sequence[Mapping[str, float]]) -> str:
    """Each rank's own seconds: its passes, without what it waits for others. Those far above are `slow`."""
    own = [rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in ranks]
    most, usual = max(own) or 1.0, sorted(own)[(len(own) - 1) // 2]
    slow = [seconds > SLOW_SHARE * usual and seconds - usual > SLOW_PASS_SECONDS for seconds in own]
    return "  ".join(
        f"{rank} {look.spark([seconds], 0.0, most)} {seconds:.2f} s{' slow' * is_slow}"
        for rank, (seconds, is_slow) in enumerate(zip(own, slow, strict=True))
    )


# -- pace --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a run goes, by the newest records of its history."""

    window_seconds: float
    """Time that the next three are of."""
    steps: int
    """Committed."""
    tokens: int
    """Tokens of those steps."""
    drops: Counter[str]
    """Reason -> rollouts."""
    newest: Mapping[str, Any] | None
    """Record of the newest step; None before the first."""


def pace_of(state: RunState) -> Pace:
    """Reads the history that came with the state."""
    steps = [record for record in state.history if record.get("event") == Committed.event]
    first = min((float(record["at"]) for record in state.history), default=state.at)
    gaps = [later["at"] - earlier["at"] for later, earlier in pairwise(steps[: STEPS_OF_A_WINDOW + 1])]
    pace = STEPS_OF_A_WINDOW * median(gaps) if gaps else 0.0
    window = min(max(LEAST_WINDOW_SECONDS, pace), MOST_WINDOW_SECONDS, max(1.0, state.at - first))
    recent = [record for record in steps if record["at"] >= state.at - window]
    drops: Counter[str] = Counter()
    for record in state.history:
        if record.get("event") == Dropped.event and record["at"] >= state.at - window:
            drops[record["reason"]] += record["rollouts"]
    return Pace(
        window_seconds=window,
        steps=len(recent),
        tokens=sum(record["tokens"] for record in recent),
        drops=drops,
        newest=steps[0] if steps else None,
    )
