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

from rlbuffer.client.lessons import last_steps
from rlbuffer.records.waiting import Cause, Trouble, Wait
from rlbuffer.state.evaluations import counts_of, mean_of
from rlbuffer.state.heartbeats import GATEWAY
from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord, scalars
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import RECENT_STEPS, masked_words, waited_of
from rlbuffer.store.history import Committed, Dropped
from rlbuffer_cli import look
from rlbuffer_cli.run_tables import ENVS, PROCESSES, env_rows, process_rows
from rlbuffer_cli.table import Printed
from rlbuffer_cli.text import WIDE, moment

LEAST_WINDOW_SECONDS, MOST_WINDOW_SECONDS = 60.0, 300.0
"""Rates and drops are of so long, or of the run's whole life where that is shorter."""
STEPS_OF_A_WINDOW = 5
"""Steps, at the pace of the newest ones, that a rate should be of: a run of slow steps has a longer window."""
SHOWN_PROCESSES, SHOWN_PROBLEMS = 30, 3
"""Rows of processes in a view of the run; problems, a line each, in the head of another table."""
SLOW_SHARE, SLOW_PASS_SECONDS = 1.25, 0.01
"""A rank is slow when its passes take so many times as long as the middle rank's, and this much longer: less is chance.
Of an even number the faster one of the two in the middle counts: of two ranks the slow one is not the middle."""


def run_view(state: RunState, trained: Sequence[StepRecord] = ()) -> Group:
    """The whole run: what must be cured, what it waits for, how far it is, its envs, its processes.

    `trained`: the trainer's records, where they can be read here; the last ones count.
    """
    processes = process_rows(state)
    parts: list[RenderableType] = [
        run_title(state),
        *alerts(state),
        look.Facts(figures(state).values()),
        look.Facts([*states(state).values(), *account(state)]),
        *([look.Facts(agent_facts.values())] if (agent_facts := agents(state)) else []),
    ]
    if state.envs:
        parts += [Text(), Printed(ENVS, env_rows(state)), *_said_before(state)]
    else:
        parts.append(Text(ENVS.empty, "faint"))
    noted = list(notes(state, trained))
    parts += [Text(), *noted] if noted else []
    if processes:
        parts += [Text(), Printed(PROCESSES, processes[:SHOWN_PROCESSES])]
    if len(processes) > SHOWN_PROCESSES:
        parts.append(more_processes(len(processes) - SHOWN_PROCESSES))
    return Group(*parts)


def run_title(state: RunState) -> Text:
    """Which run this is, and on which server."""
    server = state.server
    release = " ".join(filter(None, [server.name, server.version]))
    return Text.assemble((f'run "{printable(state.run)}"', "accent"), (f" on {server.address} ({release})", "faint"))


def run_head(state: RunState, width: int) -> list[RenderableType]:
    """The run above another table, in lines of `width` columns: the first ones matter most."""
    parts: list[RenderableType] = [
        *alerts(state, most=SHOWN_PROBLEMS if width >= WIDE else 1),
        look.across(list(figures(state, is_brief=True).values()), width),
        look.across(list(states(state, is_brief=True).values()), width),
        *([look.across(list(agent_facts.values()), width)] if (agent_facts := agents(state)) else []),
    ]
    if state.envs:
        parts += [*([Text()] if width >= WIDE else []), Printed(ENVS, env_rows(state)), *_said_before(state)]
    noted = list(notes(state))
    return [*parts, Text(), *noted] if noted else parts


def more_processes(count: int) -> Text:
    """Stands under a table of processes that has no room for so many of them."""
    return Text(f"and {count:,} more: rlbuffer inspect processes", "faint")


def alerts(state: RunState, *, most: int | None = None) -> Iterator[Text]:
    """What somebody must cure, then what the run waits for; `most`: a line for each of so many problems."""
    server, waiting = state.server, state.waiting
    if not server.memory_limit and server.name != "memory":
        yield bad(f"server memory: no limit (maxmemory 0), {server.memory / 2**20:,.0f} MiB used: set one")
    if state.retired_early:
        yield bad(f"steps up to {state.retired_early} retired early, because the server's memory was short")
    if state.damaged or state.lost:
        yield bad(f"{plural(state.damaged, 'rollout')} damaged, {plural(state.lost, 'push', 'pushes')} lost")
    if state.error:
        yield bad(f"the batcher failed: {state.error}")
    # Of an env without a worker the sentence of what is waited for says the same.
    headline = None if waiting is None or waiting.cause != Cause.NO_WORKER else (Trouble.NO_WORKER, waiting.env)
    problems = [problem for problem in state.problems if problem.key != headline]
    for problem in problems[:most]:
        line = bad(str(problem))
        line.no_wrap, line.overflow = most is not None, "ellipsis"
        yield line
    if most is not None and problems:
        more = max(0, len(problems) - most)
        yield bad(f"{f'{more} more, and what' if more else 'What'} cures them: rlbuffer inspect problems")
    yield from _sentences(state)


def _sentences(state: RunState) -> Iterator[Text]:
    """What the run waits for, or does; then the ranks that wait for something that somebody must cure."""
    leader, waiting = state.leader, state.waiting
    if waiting is None:
        if state.is_led:
            yield Text.assemble(("● ", "trained"), (f"Step {state.step + 1} is being made.", "bold"))
    else:
        is_old = leader is not None and not leader.is_fresh and leader.waiting == waiting
        ago = f" (said {duration(leader.seconds_ago)} ago)" if leader is not None and is_old else ""
        sentence = f"{waiting}{ago}"
        part = look.meter(waiting.done, cells=16).append(" ") if waiting.done else ""
        whole = Text.assemble(("● ", "trained"), part, (printable(sentence), "bold"))
        yield whole if waiting.is_normal else bad(sentence)
    for rank in state.of_kind("rank"):
        if rank.is_fresh and rank.waiting is not None and not rank.waiting.is_normal:
            yield bad(f"{rank.title}: {rank.waiting}")


def bad(sentence: str) -> Text:
    """Something that somebody must cure."""
    return Text.assemble(("✕ ", "dropped"), (printable(sentence), "bold"))


def figures(state: RunState, *, is_brief: bool = False) -> dict[str, Text]:
    """The run in numbers, by name; `is_brief`: those of one line, without how they went."""
    server, pace = state.server, pace_of(state) if state.history else None
    limit = f" of {server.memory_limit / 2**20:,.0f}" if server.memory_limit else ""
    share = f" ({percent(server.memory_share)})" if server.memory_share is not None else ""
    versions = [p.version for p in state.of_kind("worker") if p.is_alive and p.version >= 0]
    behind = state.policy_version - min(versions) if versions and state.policy_version >= 0 else 0
    facts = {
        "step": str(state.step),
        "trained": None if is_brief else f"step {state.trained_step}",
        "policy": f"v{state.policy_version}" if state.policy_version >= 0 else "none announced",
        "ranks": None if is_brief else state.world_size or None,
        "reward": reward_fact(last_steps(state.history), is_brief=is_brief),
        "pushed": f"{amount(state.rollouts_per_second)}/s",
        "steps": None if is_brief else pace and f"{60 * pace.steps / pace.window_seconds:.1f}/min",
        "packed": None if is_brief else pace and f"{amount(pace.tokens / pace.window_seconds)} tok/s",
        "age": f"{pace.newest['age']:.1f} max {pace.newest['max_age']}" if pace and pace.newest else None,
        "memory": None if is_brief else f"{server.memory / 2**20:,.0f}{limit} MiB{share}",
        "workers behind": plural(behind, "version") if behind > 0 and not is_brief else None,
    }
    return look.pairs(facts)


def reward_fact(newest_first: Sequence[Mapping[str, Any]], *, is_brief: bool = False) -> Text | None:
    """The reward of the last step that is scored, and how it went until there; None where none is scored."""
    rewards = [step["reward"] for step in reversed(newest_first) if step["reward"] is not None]
    return Text.assemble((f"{rewards[-1]:.3f}", "bold"), _trend(rewards, is_brief=is_brief)) if rewards else None


def _trend(values: Sequence[float], *, is_brief: bool = False) -> Text:
    """How they went, and between which values; nothing of a single one."""
    if len(values) < 2:
        return Text()
    low, high = min(values), max(values)
    between = "" if is_brief else f" {low:.3f} to {high:.3f}"
    cells = 8 if is_brief else 16
    return Text.assemble(" ", (look.spark(values, low, high, cells=cells), "accent"), (between, "faint"))


def states(state: RunState, *, is_brief: bool = False) -> dict[str, Text]:
    """Where the run's rollouts are, by state: groups of those in the pool, as long as a batcher says how many. What one
    said last is soon not true any more: then rollouts are pending. `is_brief`: numbers alone."""
    total = state.total
    numbers = {"packed": total.packed.rollouts, "trained": total.trained.rollouts}
    numbers["dropped"] = sum(each.rollouts for each in total.dropped.values())
    groups = {
        name: [getattr(env, f"groups_{name}") for env in state.envs if getattr(env, f"groups_{name}") is not None]
        for name in ("forming", "ready")
    }
    is_said = state.leader is not None and state.leader.is_fresh
    counts = {name: sum(ages) for name, ages in groups.items() if ages and is_said}
    shown = {name: f"{count:,}" if is_brief else plural(count, "group") for name, count in counts.items()}
    shown = shown or {"pending": f"{total.pending.rollouts:,}"}
    shown |= {name: f"{number:,}" for name, number in numbers.items()}
    return {
        name: Text.assemble((look.state(name).plain, name), " ", (number, "bold")) for name, number in shown.items()
    }


def agents(state: RunState) -> dict[str, Text]:
    """What agents before a gateway do, in numbers; nothing of a run that has none. Times are those of a call."""
    if not state.has_agents:
        return {}
    gateways = [p for p in state.of_kind(GATEWAY) if p.is_alive]
    rate = sum(p.calls_per_second for p in gateways)

    def mean(name: str) -> float | None:
        """Over the calls of all gateways."""
        weighed = sum(getattr(p, name) * p.calls_per_second for p in gateways)
        return weighed / rate if rate else None

    engine, gateway = mean("call_engine_seconds"), mean("call_own_seconds")
    facts = {
        "open rollouts": f"{sum(env.open_rollouts or 0 for env in state.envs):,}",
        "calls": f"{amount(rate) if rate >= 10 else f'{rate:.1f}'}/s" if gateways else "no gateway",
        "calls open": f"{sum(p.open_calls for p in gateways):,}" if gateways else None,
        "waiting for a ticket": f"{sum(p.ticket_waits for p in gateways):,}" if gateways else None,
        "engine": None if engine is None else f"{engine:.2f} s",
        "gateway": None if gateway is None else f"{1000 * gateway:.1f} ms",
    }
    return look.pairs(facts)


def account(state: RunState) -> list[Text]:
    """Rollouts that were pushed, and those that no step has."""
    total = state.total
    facts = {"of pushed": f"{total.pushed.rollouts:,}", "pending": f"{total.pending.rollouts:,}"}
    return list(look.pairs(facts).values())


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
    if recent and (line := weights_line(state, recent[-1])):
        yield _note("weights", line)
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


def weights_line(state: RunState, record: StepRecord) -> str:
    """What the newest version's way took, which is announced behind the step after its own: written beside that, and
    fetched and loaded by the slowest worker that samples with it; "" before there is one."""
    stages = scalars(record.publish_seconds)
    if not stages:
        return ""
    beside = sum(seconds for stage, seconds in stages.items() if stage != "gather")
    parts = [f"{beside:.1f} s to write"]
    workers = [p for p in state.of_kind("worker") if p.is_alive and p.version == record.published and p.weights_seconds]
    if workers:
        slowest = max(workers, key=lambda worker: sum(worker.weights_seconds.values()))
        took, came = dict(slowest.weights_seconds), sum(slowest.weights_bytes.values())
        load = took.pop("load", 0.0)
        if took:
            parts.append(f"{sum(took.values()):.1f} s to fetch ({_mb(came)} MB of {_mb(slowest.weights_size)})")
        parts.append(f"{load:.1f} s to load")
    return f"version {record.published}: {', '.join(parts)}"


def _mb(size: int) -> str:
    """Bytes in MB: ``1.2``, ``269``."""
    return f"{size / 1e6:,.0f}" if size >= 10e6 else f"{size / 1e6:.1f}"


def _note(name: str, text: str) -> Text:
    return Text.assemble((f"{printable(name):<8} ", "faint"), printable(text))


def _waited(state: RunState, recent: Sequence[StepRecord]) -> str:
    """How long the trainer waited for data; while it waits, the share of the last steps is not what it does now."""
    is_troubled = bool(state.problems) or (state.waiting is not None and not state.waiting.is_normal)
    wait = waited_of(recent, is_troubled=is_troubled)
    waits = any(r.waiting is not None and r.waiting.kind is Wait.STEP for r in state.of_kind("rank") if r.is_fresh)
    if waits and state.step == state.trained_step:
        return f"waits for a step now; of the last steps it waited {percent(wait.share)} of the time for data"
    return wait.text


def _said_before(state: RunState) -> Iterator[Text]:
    leader = state.leader
    if leader is None:
        yield Text("-: known to a batcher, and none has said it yet", "faint")
    elif not leader.is_fresh:
        note = f"ready, forming and age are those of {duration(leader.seconds_ago)} ago, when a batcher was last seen"
        yield Text(note, "faint")


# -- the trainer -------------------------------------------------------------------------------------------------------
def step_line(record: StepRecord, planned: int) -> str:
    """A trained step as one line."""
    parts = [
        f"step {record.step}/{planned}",
        *(f"{name} {value:{form}}" for name, value, form in _learned(record) if value is not None),
        f"age {record.age:.1f} max {record.max_age}" if record.age is not None else "",
        masked_words(record),
        f"{amount(record.tokens)} tok",
        f"{amount(record.tokens_per_second or 0.0)} tok/s",
        f"wait {percent(record.wait or 0.0)}",
    ]
    return "  ".join(filter(None, parts))


def _learned(record: StepRecord) -> list[tuple[str, float | None, str]]:
    return [
        ("reward", record.reward, ".3f"),
        ("loss", record.loss, "+.4f"),
        ("kl", record.kl, ".4f"),
        ("entropy", record.entropy, ".3f"),
        ("grad", record.grad_norm, ".2f"),
    ]


def progress(records: Sequence[StepRecord], planned: int) -> Text:
    """How many of the planned steps are trained, and how long the others take at the pace of the last `records`."""
    step, recent = records[-1].step, records[-RECENT_STEPS:]
    if not planned:
        return Text(f"step {step}", "bold")
    left = sum(record.seconds.get("total", 0.0) for record in recent) / len(recent) * (planned - step)
    return Text.assemble(
        (f"step {step} of {planned} ", "bold"),
        look.meter(step / planned, cells=24),
        f" {percent(step / planned)}" + (f"   {duration(left)} left" if left > 0 else ""),
    )


def rank_line(ranks: Sequence[Mapping[str, float]]) -> str:
    """Each rank's own seconds: its passes, without what it waits for others. Those far above are `slow`."""
    busy = [rank.get("forward", 0.0) + rank.get("backward", 0.0) for rank in ranks]
    most, usual = max(busy) or 1.0, sorted(busy)[(len(busy) - 1) // 2]
    slow = [seconds > SLOW_SHARE * usual and seconds - usual > SLOW_PASS_SECONDS for seconds in busy]
    return "  ".join(
        f"{rank} {look.spark([seconds], 0.0, most)} {seconds:.2f} s{' slow' * is_slow}"
        for rank, (seconds, is_slow) in enumerate(zip(busy, slow, strict=True))
    )


# -- pace --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class RunPace:
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


def pace_of(state: RunState) -> RunPace:
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
    return RunPace(
        window_seconds=window,
        steps=len(recent),
        tokens=sum(record["tokens"] for record in recent),
        drops=drops,
        newest=steps[0] if steps else None,
    )
