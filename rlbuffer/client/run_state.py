"""Reads a :class:`~rlbuffer.state.run_state.RunState`: in one round trip, whatever the size of the pool; in two where
workers take tickets, whose counts need the names of the envs first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlbuffer.config.fractions import budgets_at
from rlbuffer.errors import PayloadError
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.heartbeats import KINDS, LEADER, Process, batcher_waiting, is_starting, run_problems
from rlbuffer.state.metric import said_in
from rlbuffer.state.run_state import ACCOUNTS, Amount, EnvState, RunState, ServerState, env_said
from rlbuffer.state.step_record import StepRecord
from rlbuffer.store.keys import SCHEMA, Keys
from rlbuffer.store.ledger import parse_ledger
from rlbuffer.store.open_rollouts import OpenCounts, counts_of
from rlbuffer.store.records import EnvLedger, policy_of
from rlbuffer.store.session import number, ranged, text
from rlbuffer.store.viewer import Viewer, ends_of, heartbeat_of, parse_meta, place_in, record_of, seconds_of, standing

READ_EVALUATIONS = 200
"""Newest results that are read."""


def read_run_state(store: Viewer, *, history: int = 0) -> RunState:
    """Reads what is known of a run; changes nothing, and never reads the pool. `history`: newest records to read with
    it.

    Raises:
        RunGone: the run is not there. RunDamaged, SchemaMismatch: it is, and cannot be read.
    """

    def ask(pipe: Any, keys: Keys) -> None:
        pipe.time()
        for key in (keys.meta, keys.ledger, keys.trainer, keys.policy, keys.ends, keys.numbers, keys.open_counts):
            pipe.hgetall(key)
        for kind in KINDS:
            pipe.hgetall(keys.heartbeats(kind))
        pipe.hget(keys.lease, "until")
        pipe.zrange(keys.paused, 0, -1)
        pipe.xlen(keys.pool)
        pipe.xrevrange(keys.eval, count=READ_EVALUATIONS)
        pipe.xrevrange(keys.records, count=1)
        if history:
            pipe.xrevrange(keys.history, count=history)

    server, (time, *hashes) = store.replies(ask)
    meta_fields, ledger, trainer, policy, ends, numbers, opened = (fields or {} for fields in hashes[:7])
    behind_beats = 7 + len(KINDS)
    beats = dict(zip(KINDS, hashes[7:behind_beats], strict=True))
    until, paused, pending, evaluations, records, *past = hashes[behind_beats:]
    if number(meta_fields.get(b"schema")) != SCHEMA:
        store.meta()  # says what is wrong
    meta, at = parse_meta(meta_fields), seconds_of(time)
    unreadable: list[str] = []
    """Where, and why."""

    def records_of(key: str, reply: Any) -> Iterator[Mapping[str, Any]]:
        for entry_id, fields in ranged(reply or []):
            try:
                yield record_of(entry_id, fields)
            except PayloadError as error:
                unreadable.append(f"{key} {entry_id}: {error}")

    version: dict[str, int] = {}
    for adapter, value in policy.items():
        try:
            version[text(adapter)] = policy_of(text(adapter), value).version
        except PayloadError as error:
            unreadable.append(f"{store.keys.policy}: {error}")
    newest = tuple(records_of(store.keys.history, past[0])) if past else ()
    trained = next(map(StepRecord.read, records_of(store.keys.records, records)), None)
    processes, leader = _processes(beats, at)
    is_led = (number(until) or 0) > at * 1000
    first = next((p for p in processes if p.kind == "batcher" and p.name == LEADER), None)
    fatal = "" if is_led else meta.error
    waiting = batcher_waiting(first, is_led=is_led, error=fatal, is_starting=is_starting(processes))
    strange = Problem(kind=Trouble.UNREADABLE, count=len(unreadable), detail=unreadable[0]) if unreadable else None
    return RunState(
        run=store.run,
        at=at,
        server=ServerState(
            address=server["address"],
            name=server["name"],
            version=server["version"],
            memory=int(server["used_memory"]),
            memory_limit=int(server["maxmemory"]),
        ),
        epoch=meta.epoch,
        step=meta.step,
        trained_step=number(trainer.get(b"trained")) or 0,
        policy_version=version.pop("", -1),
        world_size=number(trainer.get(b"world_size")) or 0,
        error=meta.error,
        revision=meta.revision,
        is_revision_asked=bool(meta.wanted_digest),
        draining_since=meta.draining_ms / 1000 if meta.draining_ms else None,
        ended_step=None if pending else meta.ended,
        retired_early=meta.early,
        adapters=version,
        evaluations=tuple(
            sorted(standing(evaluations or [], *place_in(meta_fields)), key=lambda r: (r["env"], r["version"]))
        ),
        processes=processes,
        is_led=is_led,
        waiting=waiting,
        problems=(*run_problems(processes, waiting), *([strange] if strange else [])),
        history=newest,
        trained=trained,
        **said_in(RunState, leader),
        **_account(
            store,
            ledger,
            at=at,
            written=ends,
            taken=numbers,
            opened=opened,
            paused={text(env) for env in paused or ()},
            budgets=budgets_at(meta.config.get("budgets", {}), meta.step + 1),
            pools=leader.get("envs"),
        ),
    )


def _account(
    store: Viewer,
    fields: Mapping[bytes, bytes],
    *,
    at: float,
    written: Mapping[bytes, bytes],
    taken: Mapping[bytes, bytes],
    opened: Mapping[bytes, bytes],
    paused: Collection[str],
    budgets: Mapping[str, float],
    pools: Any,
) -> dict[str, Any]:
    ledger = parse_ledger(fields)
    given, numbers, _, over = ends_of(written, taken)
    out = _tickets(store, sorted(numbers), at)
    pools = pools if isinstance(pools, Mapping) else {}
    agents = counts_of(opened)
    names = {*ledger.envs, *budgets, *paused, *numbers, *agents, *(env for env in given if not env.startswith("["))}
    envs = tuple(
        EnvState(
            name=name,
            **_amounts(ledger.envs.get(name, EnvLedger())),
            tickets=out.get(name, 0),
            is_paused=name in paused,
            is_done=name in over and not out.get(name, 0),
            **_of_agents(agents.get(name)),
            **(env_said(pools.get(name)) | {"budget": budgets.get(name)}),
        )
        for name in sorted(names)
    )
    return {"damaged": ledger.damaged, "lost": ledger.lost, "envs": envs}


def _of_agents(counts: OpenCounts | None) -> dict[str, Any]:
    if counts is None:
        return {}
    return {
        "agent_rollouts": counts.begun,
        "open_rollouts": counts.open,
        "ended_rollouts": counts.ended,
        "agent_calls": counts.calls,
        "agent_tokens": counts.tokens,
    }


def _amounts(account: EnvLedger) -> dict[str, Any]:
    amounts = {name: Amount(*getattr(account, name)) for name in ACCOUNTS}
    return amounts | {"dropped": {reason: Amount(*pair) for reason, pair in account.dropped.items()}}


def _tickets(store: Viewer, envs: Sequence[str], at: float) -> dict[str, int]:
    def ask(pipe: Any, keys: Keys) -> None:
        for env in envs:
            pipe.zcount(keys.tickets(env), f"({int(at * 1000)}", "+inf")

    return dict(zip(envs, (n or 0 for n in store.replies(ask)[1]), strict=True)) if envs else {}


def _processes(
    kinds: Mapping[str, Mapping[bytes, bytes] | None], at: float
) -> tuple[tuple[Process, ...], Mapping[str, Any]]:
    """The processes, and the leader's heartbeat."""
    leader: Mapping[str, Any] = {}

    def found() -> Iterator[Process]:
        nonlocal leader
        for kind, beats in kinds.items():
            for name, value in sorted((beats or {}).items()):
                beat = heartbeat_of(value)
                if beat is not None:
                    yield Process.of(kind, text(name), beat[1], seconds_ago=abs(at - beat[0] / 1000))
                    if (kind, name) == ("batcher", LEADER.encode()):
                        leader = beat[1]

    return tuple(found()), leader
