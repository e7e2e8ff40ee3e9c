"""The pool: a run at a glance, one line per env, and a table of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlbuffer.records.states import State
from rlbuffer.records.waiting import Problem, Waiting
from rlbuffer.state.heartbeats import FRESH_SECONDS, batcher_waiting, run_problems, waiting_of
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.render.adapters import AdapterSummary, adapter_line, summarize_adapters
from rlbuffer_cli.render.evaluations import evaluation_lines, summarize_evaluations
from rlbuffer_cli.render.text import bar, show_table, sparkline, utc
from rlbuffer_cli.render.workers import beat_line, problem_lines

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.pool_look import PoolLook
    from rlbuffer.client.views import GroupView
    from rlbuffer.store.records import EnvLedger, Ledger
    from rlbuffer.store.viewer import Viewer

MAX_AGES = 10
"""Blocks of an age histogram."""
ENV_HEADER = ("env", "ready", "forming", "age", "share of tokens", "packed", "trained", "dropped")
ENV_NUMBERS = frozenset({"ready", "forming", "packed", "trained"})
ENV_LEGEND = (
    "ready, forming, age (policy versions): groups   packed, trained, dropped: rollouts\n"
    "share of tokens: of all that the run has packed and trained so far; │ is the target"
)
GROUP_ORDER = "first those in the pool, then those in steps, then dropped ones, the newest of each first"
NOT_KEPT = "-"
"""Stands for what a dropped group had and its record has not."""
NOT_KEPT_LEGEND = "-  not kept of a dropped group"
GROUP_HEADER = ("id", "env", "rollouts", "reward", "spread", "age", "tokens", "state", "waited", "worker", "prompt")
GROUP_NUMBERS = frozenset({"rollouts", "reward", "age", "tokens", "waited"})
GROUP_OPTIONAL = ("prompt", "worker", "env", "waited", "rollouts", "tokens", "spread")
"""Columns that a narrow terminal does without, the first ones first."""
SHOWN_PROMPT = 24
"""Characters of a prompt's id in a row."""
SORTS: Mapping[str, Callable[[GroupView], Any]] = MappingProxyType(
    {
        "newest first": lambda view: 0,
        "id": lambda view: view.group_id,
        "env": lambda view: view.env,
        "reward": lambda view: (view.reward is not None, view.reward or 0.0),
        "age": lambda view: view.age if view.age is not None else -1,
        "tokens": lambda view: view.tokens,
        "state": lambda view: (view.state, view.reason),
        "waited": lambda view: view.waited_seconds if view.waited_seconds is not None else -1.0,
        "worker": lambda view: view.worker,
    }
)
"""Orders of groups, the worst reward and the smallest number first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSummary:
    """One env as a line."""

    env: str
    ready: int
    """Groups."""
    forming: int
    """Groups."""
    ages: Mapping[int, int]
    """Age in policy versions -> pending groups."""
    account: EnvLedger
    budget: float | None
    """Fraction of a step's tokens; None when the env has no budget of its own."""
    share: float
    """Fraction of all packed and trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The header."""

    run: str
    server: Mapping[str, Any]
    policy_version: int
    step: int
    trained: int
    world_size: int
    ledger: Ledger
    waiting: Mapping[str, Waiting]
    """``batcher``, ``rank 0``, ... -> what it waits for."""
    problems: tuple[Problem, ...]
    """What somebody must cure, as the processes say it."""
    seen: Mapping[str, float]
    """``batcher``, ``rank 0``, ... -> seconds since its last heartbeat."""
    workers: Mapping[str, Mapping[str, Any]]
    """Name -> its last heartbeat, with ``seconds_ago``."""
    scorers: Mapping[str, Mapping[str, Any]]
    """Name -> the scorer's last heartbeat, likewise."""
    error: str
    revision: int
    """Revision of the batcher's settings."""
    has_wanted: bool
    """Other settings are asked for and not taken yet."""
    draining_ms: int
    """Server time since when no tickets are given; 0 while they are."""
    paused: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    """Envs of which nothing more comes."""
    ended: int | None = None
    """The step after which the run has ended; None while it goes on."""
    early: int = 0
    """Last step that retired early, because the server's memory was short; 0: none did."""
    early_seconds_ago: float = 0.0
    envs: tuple[EnvSummary, ...] = field(default=())
    adapters: tuple[AdapterSummary, ...] = field(default=())
    evaluations: tuple[Mapping[str, Any], ...] = field(default=())


def summarize(buffer: Buffer, pool: PoolLook | None = None) -> RunSummary:
    """Reads everything that the header shows; changes nothing. `pool`: of who looks again and again."""
    from rlbuffer.client.pool_look import PoolLook
    from rlbuffer.config.fractions import budgets_at

    store = buffer.store
    meta, trainer, ledger = store.meta(), store.trainer(), store.ledger()
    pending = list((pool or PoolLook(store)).groups())
    budgets = budgets_at(meta.config.get("budgets", {}), meta.step + 1)
    consumed = {env: a.packed[1] + a.trained[1] for env, a in ledger.envs.items()}
    total = sum(consumed.values()) or 1
    envs = []
    for env in sorted({*ledger.envs, *budgets}):
        mine = [g for g in pending if g.env == env]
        ages = Counter(g.age for g in mine)
        envs.append(
            EnvSummary(
                env=env,
                ready=sum(g.state == State.READY for g in mine),
                forming=sum(g.state == State.FORMING for g in mine),
                ages=dict(sorted(ages.items())),
                account=ledger.envs.get(env) or _empty(),
                budget=budgets.get(env),
                share=consumed.get(env, 0) / total,
            )
        )
    leader = store.heartbeats("batcher").get("leader")
    workers, scorers = store.heartbeats("worker"), store.heartbeats("scorer")
    waiting = _waiting(store, leader, meta.error)
    return RunSummary(
        run=buffer.run,
        server=store.server(),
        policy_version=store.policy().version,
        step=meta.step,
        trained=trainer.trained,
        world_size=trainer.world_size,
        ledger=ledger,
        waiting=waiting,
        problems=run_problems(leader=leader, workers=workers, scorers=scorers, waiting=waiting.get("batcher")),
        seen=last_seen(store),
        workers=workers,
        scorers=scorers,
        error=meta.error,
        revision=meta.revision,
        has_wanted=bool(meta.wanted_digest),
        draining_ms=meta.draining_ms,
        paused=tuple(sorted(store.paused())),
        done=tuple(sorted(store.sources().done)),
        ended=meta.ended if store.has_ended() else None,
        early=meta.early,
        early_seconds_ago=max(0.0, store.now() - meta.early_ms / 1000) if meta.early else 0.0,
        envs=tuple(envs),
        adapters=summarize_adapters(store),
        evaluations=summarize_evaluations(store),
    )


def _waiting(store: Viewer, leader: Mapping[str, Any] | None, error: str) -> dict[str, Waiting]:
    batcher = batcher_waiting(leader, is_led=store.is_led(), error=error)
    ranks = {
        f"rank {name}": waiting
        for name, beat in store.heartbeats("rank").items()
        if beat["seconds_ago"] <= FRESH_SECONDS and (waiting := waiting_of(beat)) is not None
    }
    return ({} if batcher is None else {"batcher": batcher}) | ranks


def last_seen(store: Viewer) -> dict[str, float]:
    """``batcher``, ``worker NAME``, ``scorer NAME``, ``rank N`` -> seconds since the last heartbeat, on the server."""
    leader = store.heartbeats("batcher").get("leader")
    seen = {"batcher": leader["seconds_ago"]} if leader else {}
    for kind in ("worker", "scorer", "rank"):
        seen |= {f"{kind} {name}": beat["seconds_ago"] for name, beat in store.heartbeats(kind).items()}
    return seen


def _empty() -> EnvLedger:
    from rlbuffer.store.records import EnvLedger

    return EnvLedger()


# -- JSON --------------------------------------------------------------------------------------------------------------
def group_record(view: GroupView) -> dict[str, Any]:
    """``rlbuffer.group/1``: numbers raw, ids whole, UTC times."""
    return {"schema": "rlbuffer.group/1", **asdict(view), "created": utc(view.created)}


def summary_records(summary: RunSummary) -> Iterator[dict[str, Any]]:
    """``rlbuffer.run/1``, then a line per env (``rlbuffer.env/1``), adapter (``rlbuffer.adapter/1``), worker
    (``rlbuffer.worker/1``), scorer (``rlbuffer.scorer/1``) and evaluation (``rlbuffer.evaluation/1``)."""
    yield {
        "schema": "rlbuffer.run/1",
        "run": summary.run,
        "server": dict(summary.server),
        "policy_version": summary.policy_version,
        "step": summary.step,
        "trained": summary.trained,
        "world_size": summary.world_size,
        "ledger": asdict(summary.ledger.total()),
        "damaged": summary.ledger.damaged,
        "lost": summary.ledger.lost,
        "waiting": {who: waiting.record() | {"sentence": str(waiting)} for who, waiting in summary.waiting.items()},
        "problems": [problem.record() | {"sentence": str(problem)} for problem in summary.problems],
        "seconds_ago": dict(summary.seen),
        "error": summary.error,
        "revision": summary.revision,
        "revision_wanted": summary.has_wanted,
        "draining_since": utc(summary.draining_ms / 1000) if summary.draining_ms else None,
        "paused": list(summary.paused),
        "done": list(summary.done),
        "ended": summary.ended,
        "memory": memory_record(summary),
    }
    for env in summary.envs:
        yield {"schema": "rlbuffer.env/1", **asdict(env)}
    for adapter in summary.adapters:
        yield {"schema": "rlbuffer.adapter/1", **asdict(adapter)}
    for name, beat in summary.workers.items():
        yield {"schema": "rlbuffer.worker/1", "worker": name, **beat}
    for name, beat in summary.scorers.items():
        yield {"schema": "rlbuffer.scorer/1", "scorer": name, **beat}
    for result in summary.evaluations:
        yield {"schema": "rlbuffer.evaluation/1", **result, "at": utc(result["at"])}


def memory_record(summary: RunSummary) -> dict[str, Any]:
    """The server's memory: bytes used and allowed, percent (None without a limit), the last early retirement."""
    used, limit = int(summary.server["used_memory"]), int(summary.server["maxmemory"])
    early = {"step": summary.early, "seconds_ago": summary.early_seconds_ago} if summary.early else None
    percentage = round(100 * used / limit, 1) if limit else None
    return {"used": used, "limit": limit, "percent": percentage, "retired_early": early}


# -- tables ------------------------------------------------------------------------------------------------------------
def show_run(summary: RunSummary) -> None:
    """Prints header and envs."""
    for line in header_lines(summary):
        say(line, indent="    ")
    echo("")
    if summary.envs:
        show_table(
            ENV_HEADER,
            [env_row(env) for env in summary.envs],
            right=ENV_NUMBERS,
            optional=["forming", "packed", "age", "trained"],
        )
        say(ENV_LEGEND, indent="")


def show(summary: RunSummary, groups: Sequence[GroupView], *, where: str, limit: int) -> None:
    """Prints header, envs and groups."""
    show_run(summary)
    if summary.envs:
        echo("")
    if not groups:
        envs = ", ".join(env.env for env in summary.envs)
        echo(f"no group matches {where!r}   (envs: {envs})" if where else "no groups yet")
        return
    rows = [group_row(view) for view in groups]
    show_table(GROUP_HEADER, rows, right=GROUP_NUMBERS, optional=GROUP_OPTIONAL)
    if any(NOT_KEPT in row for row in rows):
        say(NOT_KEPT_LEGEND)
    if len(groups) == limit:
        say(f"the first {limit} ({GROUP_ORDER}): --limit shows more, --where chooses", err=True)
    say(f"one group: rlbuffer inspect {groups[0].group_id}", err=True)


def header_lines(summary: RunSummary) -> list[str]:
    """The run in a few lines."""
    return [*first_lines(summary), *warning_lines(summary), *fact_lines(summary), *waiting_lines(summary)]


def first_lines(summary: RunSummary) -> list[str]:
    """What the run is, and how far."""
    account = summary.ledger.total()
    dropped = sum(d[0] for d in account.dropped.values())
    server = summary.server
    version = f"policy v{summary.policy_version}" if summary.policy_version >= 0 else "no policy announced"
    return [
        f'run "{summary.run}" on {server["address"]} ({" ".join(filter(None, [server["name"], server["version"]]))})',
        (
            f"  {version} · step {summary.step} committed, {summary.trained} trained · "
            f"{plural(summary.world_size, 'rank')}"
        ),
        (
            f"  rollouts: {account.pushed[0]:,} pushed = {account.pending[0]:,} pending + {account.packed[0]:,} packed "
            f"+ {account.trained[0]:,} trained + {dropped:,} dropped   ({amount(account.pushed[1])} tokens)"
        ),
    ]


def warning_lines(summary: RunSummary) -> list[str]:
    """What somebody must act on."""
    record, lines = memory_record(summary), []
    if not record["limit"] and summary.server["name"] != "memory":
        lines.append(f"  ! server memory: no limit (maxmemory 0), {record['used'] / 2**20:,.0f} MiB used: set one")
    if summary.early:
        lines.append(
            f"  ! steps up to {summary.early} retired early {duration(summary.early_seconds_ago)} ago, because the "
            "server's memory was short"
        )
    if summary.ledger.damaged or summary.ledger.lost:
        lost = plural(summary.ledger.lost, "push", "pushes")
        lines.append(f"  ! {plural(summary.ledger.damaged, 'rollout')} damaged, {lost} lost")
    if summary.error:
        lines.append(f"  ! the batcher failed: {printable(summary.error)}")
    return lines + problem_lines(summary.problems)


def fact_lines(summary: RunSummary) -> list[str]:
    """Everything else of the run's state."""
    account, lines = summary.ledger.total(), []
    if account.reused[0]:
        uses = plural(account.reused[0], "more use")
        lines.append(f"  {uses} of trained rollouts ({amount(account.reused[1])} tokens)")
    record = memory_record(summary)
    if record["percent"] is not None and record["percent"] >= 50:
        used, limit = record["used"] / 2**20, record["limit"] / 2**20
        lines.append(f"  server memory: {used:,.0f} of {limit:,.0f} MiB ({record['percent']:.0f} %)")
    if summary.revision > 1 or summary.has_wanted:
        asked = "; others are asked for and not taken yet" if summary.has_wanted else ""
        lines.append(f"  settings: revision {summary.revision}{asked}")
    if summary.paused:
        lines.append(f"  paused: {', '.join(summary.paused)}")
    if summary.done:
        ended = "" if summary.ended is None else f"; the run has ended after step {summary.ended}"
        lines.append(f"  done: {', '.join(summary.done)}{ended}")
    if summary.draining_ms:
        lines.append(f"  draining since {utc(summary.draining_ms / 1000)}: no tickets are given")
    lines += [f"  adapter {adapter_line(one)}" for one in summary.adapters]
    lines += [f"  {line}" for line in evaluation_lines(summary.evaluations)]
    if summary.workers:
        lines.append("  workers: " + " · ".join(beat_line(name, beat) for name, beat in summary.workers.items()))
    if summary.scorers:
        lines.append("  scorers: " + " · ".join(beat_line(name, beat) for name, beat in summary.scorers.items()))
    return lines


def waiting_lines(summary: RunSummary) -> list[str]:
    """What each process waits for; after ``!`` where somebody must act."""
    lines = []
    for who, waiting in sorted(summary.waiting.items()):
        ago = summary.seen.get(who, 0.0)
        said = f" ({duration(ago)} ago)" if ago > FRESH_SECONDS else ""
        mark = "" if waiting.is_normal else "! "
        lines.append(f"  {mark}{who}{said}: {printable(str(waiting))}")
    return lines


def env_row(env: EnvSummary) -> list[str]:
    """Cells under :data:`ENV_HEADER`."""
    dropped = " ".join(f"{d[0]:,} {reason}" for reason, d in sorted(env.account.dropped.items()))
    target = f" (target {percent(env.budget)})" if env.budget is not None else ""
    return [
        env.env,
        str(env.ready),
        str(env.forming),
        age_histogram(env.ages),
        f"{bar(env.share, width=12, mark=env.budget)} {percent(env.share)}{target}",
        f"{env.account.packed[0]:,}",
        f"{env.account.trained[0]:,}",
        dropped or "0",
    ]


def age_histogram(ages: Mapping[int, int]) -> str:
    """Groups per age from 0 to the oldest: a block each, then the range; ages that nothing has are dots.

    Example:
        >>> age_histogram({0: 4, 2: 8})
        '▅·█ 0-2'
    """
    if not ages:
        return ""
    most, youngest, oldest = max(ages.values()), min(ages), max(ages)
    first = 0 if oldest < MAX_AGES else oldest - MAX_AGES + 1
    blocks = "".join(sparkline([ages[a] / most]) if ages.get(a) else "·" for a in range(first, oldest + 1))
    return f"{blocks} {youngest}" + (f"-{oldest}" if oldest > youngest else "")


def group_row(view: GroupView) -> list[str]:
    """Cells under :data:`GROUP_HEADER`."""
    low, high = min(view.rewards, default=0.0), max(view.rewards, default=1.0)
    state = f"{view.state} {view.reason}" if view.reason else view.state
    unknown = NOT_KEPT if view.state == State.DROPPED else ""
    return [
        view.group_id,
        view.env,
        f"{view.rollouts}/{view.planned_size}" if view.planned_size else str(view.rollouts),
        unknown if view.reward is None else f"{view.reward:.3f}",
        sparkline(view.rewards, low=min(low, 0.0), high=max(high, 1.0)) or unknown,
        unknown if view.age is None else str(view.age),
        amount(view.tokens),
        f"{state} in {view.step}{f' (use {view.uses})' * (view.uses > 1)}" if view.step else state,
        duration(view.waited_seconds) or unknown,
        view.worker,
        view.prompt_id[:SHOWN_PROMPT],
    ]
