"""A run in text: what `top`, `inspect`, its browser and its pages, and the live views show of one record.

Rates and drops come from the newest records of the run's history, so a first look says as much as the hundredth; where
none were read they are left out. The trainer's own figures are added where its metrics can be read from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlbuffer.client.lessons import last_steps, mean_reward
from rlbuffer.records.waiting import Wait
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import Waited, waited_of
from rlbuffer.store.history import Dropped
from rlbuffer_cli.run_tables import READ_RECORDS
from rlbuffer_cli.text import bar, sparkline, utc
from rlbuffer_cli.view import Pace, pace_of

if TYPE_CHECKING:
    from rlbuffer.state.heartbeats import Process
    from rlbuffer.state.run_state import EnvState, RunState

MOST_AGES = 10
"""Blocks of an age histogram."""
SHOWN_PROMPTS = 5
SHOWN_MEMORY = 0.5
"""Share of its limit from which the server's memory is said."""
NOT_SAID = "-"
"""Stands for what no leader has said yet."""
ENV_HEADER = ("env", "ready", "forming", "age", "share of tokens", "packed", "trained", "dropped")
ENV_NUMBERS = frozenset({"ready", "forming", "packed", "trained"})
ENV_OPTIONAL = ("forming", "packed", "age", "trained")
"""Columns that a narrow terminal does without, the first ones first."""
ENV_LEGEND = (
    "ready, forming, age (policy versions): groups   packed, trained, dropped: rollouts\n"
    "share of tokens: of all that the run has packed and trained so far; │ is the target"
)
PROCESS_HEADER = ("who", "heard", "version", "rate", "env", "dropped", "last failure")
PROCESS_NUMBERS = frozenset({"heard", "version", "rate"})
PROCESS_OPTIONAL = ("env", "rate", "dropped")


# -- in lines ----------------------------------------------------------------------------------------------------------
def run_lines(state: RunState) -> list[str]:
    """Everything but the tables."""
    return [*first_lines(state), *act_lines(state), *fact_lines(state), *pace_lines(state)]


def first_lines(state: RunState) -> list[str]:
    """What the run is, and how far."""
    total, server = state.total, state.server
    dropped = sum(each.rollouts for each in total.dropped.values())
    version = f"policy v{state.policy_version}" if state.policy_version >= 0 else "no policy announced"
    return [
        f'run "{state.run}" on {server.address} ({" ".join(filter(None, [server.name, server.version]))})',
        f"  {version} · step {state.step} committed, {state.trained_step} trained · {plural(state.world_size, 'rank')}",
        (
            f"  rollouts: {total.pushed.rollouts:,} pushed = {total.pending.rollouts:,} pending + "
            f"{total.packed.rollouts:,} packed + {total.trained.rollouts:,} trained + {dropped:,} dropped   "
            f"({amount(total.pushed.tokens)} tokens)"
        ),
    ]


def act_lines(state: RunState) -> Iterator[str]:
    """What somebody must act on, and what each process waits for; after ``!`` where somebody must act."""
    server = state.server
    if not server.memory_limit and server.name != "memory":
        yield f"  ! server memory: no limit (maxmemory 0), {server.memory / 2**20:,.0f} MiB used: set one"
    if state.retired_early:
        yield f"  ! steps up to {state.retired_early} retired early, because the server's memory was short"
    if state.damaged or state.lost:
        yield f"  ! {plural(state.damaged, 'rollout')} damaged, {plural(state.lost, 'push', 'pushes')} lost"
    if state.error:
        yield f"  ! the batcher failed: {printable(state.error)}"
    yield from (f"  ! {printable(str(problem))}" for problem in state.problems)
    leader = state.leader
    waits = [("batcher", 0.0 if leader is None or leader.is_fresh else leader.seconds_ago, state.waiting)]
    waits += [(rank.title, 0.0, rank.waiting) for rank in state.of_kind("rank") if rank.is_fresh]
    for who, ago, waiting in waits:
        if waiting is not None:
            said = f" ({duration(ago)} ago)" if ago else ""
            yield f"  {'' if waiting.is_normal else '! '}{who}{said}: {printable(str(waiting))}"


def fact_lines(state: RunState) -> Iterator[str]:
    """Everything else that holds now."""
    reused, server = state.total.reused, state.server
    if reused.rollouts:
        yield f"  {plural(reused.rollouts, 'more use')} of trained rollouts ({amount(reused.tokens)} tokens)"
    share = server.memory_share
    if share is not None and share >= SHOWN_MEMORY:
        used, limit = server.memory / 2**20, server.memory_limit / 2**20
        yield f"  server memory: {used:,.0f} of {limit:,.0f} MiB ({percent(share)})"
    if state.revision > 1 or state.is_revision_asked:
        asked = "; others are asked for and not taken yet" if state.is_revision_asked else ""
        yield f"  settings: revision {state.revision}{asked}"
    if paused := [env.name for env in state.envs if env.is_paused]:
        yield f"  paused: {', '.join(paused)}"
    done = [env.name for env in state.envs if env.is_done]
    if done or state.ended_step is not None:
        ended = "" if state.ended_step is None else f"; the run has ended after step {state.ended_step}"
        yield f"  done: {', '.join(done)}{ended}"
    if state.draining_since is not None:
        yield f"  draining since {utc(state.draining_since)}: no tickets are given"
    for adapter, version in sorted(state.adapters.items()):
        yield f"  adapter {printable(adapter)} v{version}"
    for env in dict.fromkeys(result["env"] for result in state.evaluations):
        results = [result for result in state.evaluations if result["env"] == env]
        yield f"  {_evaluated(printable(env), results)}"


def _evaluated(env: str, results: Sequence[Mapping[str, Any]]) -> str:
    """The newest version of an env, and how the mean reward went over the versions before."""
    newest = results[-1]
    history = f"   {sparkline([float(r['reward/mean']) for r in results])}" if len(results) > 1 else ""
    return (
        f"eval/{env}/reward/mean {newest['reward/mean']:.3f} +- {newest['reward/error']:.3f} at version "
        f"{newest['version']} ({plural(newest['rollouts'], 'rollout')}){history}"
    )


# -- pace --------------------------------------------------------------------------------------------------------------
def pace_lines(state: RunState) -> Iterator[str]:
    """Both sides' rates, lag, reward, the trainer's waiting, and drops; without a history the trainer's alone."""
    if state.history:
        pace, server = pace_of(state), state.server
        yield (
            f"  rates    {amount(state.rollouts_per_second)} rollouts/s by the workers' heartbeats · "
            f"{60 * pace.steps / pace.window_seconds:.1f} steps/min · "
            f"{amount(pace.tokens / pace.window_seconds)} tok/s committed in the last {duration(pace.window_seconds)}"
        )
        yield f"  lag      {_lag(state, pace)}"
        if (reward := mean_reward(last_steps(state.history))) is not None:
            yield f"  reward   {reward:.3f} in the last steps"
    recent = [state.trained] if state.trained is not None else []
    if recent and any(record.seconds for record in recent):
        yield f"  trainer  {_trainer(state, waited_of(recent))}"
    if state.history:
        total, pushed = sum(each.rollouts for each in state.total.dropped.values()), state.total.pushed.rollouts
        share = f" ({percent(total / pushed)} of all pushed)" if pushed else ""
        lately = ", ".join(f"{rollouts:,} {reason}" for reason, rollouts in pace.drops.most_common())
        yield (
            f"  drops    {lately or 'none'} in the last {duration(pace.window_seconds)} · {plural(total, 'rollout')} "
            f"in all{share}"
        )
        limit = f" of {server.memory_limit / 2**20:,.0f}" if server.memory_limit else ""
        known = f" ({percent(server.memory_share)})" if server.memory_share is not None else ""
        yield f"  memory   {server.memory / 2**20:,.0f}{limit} MiB{known}"


def _trainer(state: RunState, wait: Waited) -> str:
    """Says how long it waited for data; while it waits, the share of the last steps is not what it does now."""
    waits = any(r.waiting is not None and r.waiting.kind is Wait.STEP for r in state.of_kind("rank") if r.is_fresh)
    if waits and state.step == state.trained_step:
        return f"waits for a step now; of the last steps it waited {percent(wait.share)} of the time for data"
    return wait.text


def _lag(state: RunState, pace: Pace) -> str:
    parts = [f"batcher {plural(state.step - state.trained_step, 'step')} ahead of the trainer"]
    versions = [p.version for p in state.of_kind("worker") if p.is_alive and p.version >= 0]
    if versions and state.policy_version >= 0:
        oldest, newest = min(versions), max(versions)
        shown = f"v{oldest}" if oldest == newest else f"v{oldest}-v{newest}"
        parts.append(f"workers sample {shown} of v{state.policy_version}")
    if pace.newest is not None:
        parts.append(f"age {pace.newest['age']:.1f} max {pace.newest['max_age']}")
    return " · ".join(parts)


# -- tables ------------------------------------------------------------------------------------------------------------
def env_row(state: RunState, env: EnvState) -> list[str]:
    """Cells under :data:`ENV_HEADER`."""
    dropped = " ".join(f"{each.rollouts:,} {reason}" for reason, each in sorted(env.dropped.items()))
    target = f" (target {percent(env.budget)})" if env.budget is not None else ""
    share = state.share(env)
    return [
        env.name,
        NOT_SAID if env.groups_ready is None else str(env.groups_ready),
        NOT_SAID if env.groups_forming is None else str(env.groups_forming),
        age_histogram({int(age): groups for age, groups in env.ages.items()}),
        f"{bar(share, width=12, mark=env.budget)} {percent(share)}{target}",
        f"{env.packed.rollouts:,}",
        f"{env.trained.rollouts:,}",
        dropped or "0",
    ]


def env_legend(state: RunState) -> Iterator[str]:
    """What the columns mean, and how old the leader's are."""
    yield from ENV_LEGEND.splitlines()
    leader = state.leader
    if leader is None:
        yield f"{NOT_SAID}  known to a batcher, and none has said it yet"
    elif not leader.is_fresh:
        yield f"ready, forming and age are those of {duration(leader.seconds_ago)} ago, when a batcher was heard last"


def age_histogram(ages: Mapping[int, int]) -> str:
    """Groups per age from 0 to the oldest: a block each, then the range; ages that nothing has are dots.

    Example:
        >>> age_histogram({0: 4, 2: 8})
        '▅·█ 0-2'
    """
    if not ages:
        return ""
    most, youngest, oldest = max(ages.values()), min(ages), max(ages)
    first = 0 if oldest < MOST_AGES else oldest - MOST_AGES + 1
    blocks = "".join(sparkline([ages[a] / most]) if ages.get(a) else "·" for a in range(first, oldest + 1))
    return f"{blocks} {youngest}" + (f"-{oldest}" if oldest > youngest else "")


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Rollouts of one worker that were dropped lately."""

    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> rollouts."""
    prompts: Counter[str] = field(default_factory=Counter)
    """Prompt id -> its stale rollouts."""
    envs: dict[str, None] = field(default_factory=dict)


def _dropped_of(state: RunState) -> dict[str, _Dropped]:
    """``worker NAME`` -> what was dropped of it; also of those that send no heartbeat."""
    out: dict[str, _Dropped] = {}
    for record in state.history:
        if record.get("event") == Dropped.event and record.get("worker"):
            dropped = out.setdefault(f"worker {record['worker']}", _Dropped())
            count = record.get("rollouts")
            rollouts = count if isinstance(count, int) else 0  # anybody may have written it
            dropped.reasons[str(record.get("reason"))] += rollouts
            dropped.envs[str(record.get("env"))] = None
            if record.get("reason") == "stale" and record.get("prompt_id"):
                dropped.prompts[str(record["prompt_id"])] += rollouts
    return out


def process_rows(state: RunState) -> dict[str, list[str]]:
    """``worker NAME``, ``rank N`` ... -> cells under :data:`PROCESS_HEADER`; a mark for whoever was silent for long."""
    dropped = _dropped_of(state)
    rows = {}
    for process in state.processes:
        who, rate = process.title, process.rollouts_per_second
        rows[who] = [
            who,
            f"{duration(process.seconds_ago)} ago{' !' * (not process.is_fresh)}",
            _version(state, process),
            f"{amount(rate)} rollouts/s" if rate and process.is_fresh else "",
            process.env,
            _counted(dropped[who].reasons) if who in dropped else "",
            " ".join(problem.detail for problem in process.problems),
        ]
    for who, lost in dropped.items():
        if who not in rows:
            rows[who] = [who, "no heartbeat", "", "", ", ".join(lost.envs), _counted(lost.reasons), ""]
    return rows


def _version(state: RunState, process: Process) -> str:
    if process.kind == "rank":
        return f"step {process.step}"
    if process.version < 0:
        return ""
    behind = state.policy_version - process.version
    return f"v{process.version}" + (f", {behind} behind" if behind > 0 else "")


def process_lines(state: RunState, who: str) -> list[str]:
    """All that is known of one: what failed, with its traceback, and which of its prompts went stale."""
    process = next((process for process in state.processes if process.title == who), None)
    lines = []
    if process is not None:
        own = [replace(p, env=p.env or process.env, worker=process.name) for p in process.problems]
        lines += [f"  ! {printable(str(problem))}" for problem in own]
        lines += [f"  waits: {printable(str(process.waiting))}"] if process.waiting is not None else []
        lines += [f"    {printable(line)}" for line in process.traceback.splitlines()]
    if (dropped := _dropped_of(state).get(who)) is not None:
        lines.append(f"  dropped rollouts in the last {READ_RECORDS:,} records: {_counted(dropped.reasons)}")
        most = dropped.prompts.most_common(SHOWN_PROMPTS)
        prompts = [f"{printable(name)} ({plural(count, 'rollout')})" for name, count in most]
        more = f" and {len(dropped.prompts) - SHOWN_PROMPTS} more" if len(dropped.prompts) > SHOWN_PROMPTS else ""
        lines += [f"  stale prompts: {', '.join(prompts)}{more}"] if prompts else []
    return lines


def _counted(reasons: Mapping[str, int]) -> str:
    return " ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
