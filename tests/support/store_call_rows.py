"""A row for every call of the roles: what must be there before it, and the call itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from every_role import EveryRole
from store_runs import Run, plan_of

from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.open_rollouts import End, OpenCall
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.records import Claim, NotTrained, TrainedStep
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.session import Session
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.testing import make_group

Call = Callable[[EveryRole, Run], Any]
LOST = "sent without reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call."""

    call: Call
    prepare: Callable[[Run], Any] = lambda run: None
    repeats: bool = True
    """It is repeated inside, so that its caller never hears of a broken connection; else the caller decides."""
    second: Mapping[str, Any] = field(default_factory=dict)
    """moment -> the answer when it was the last request that broke then, where a repetition hears something else."""
    counts_twice: bool = False
    """A lost reply may have its effect twice, which is said where the call is defined."""


def _pool(run: Run) -> None:
    run.push("a.0", answer="7")
    run.push("b.1")
    run.lead()


def _steps(run: Run) -> None:
    for i in range(3):
        run.step(f"a.{i}")
    run.push("a.3")


def _trained(run: Run) -> None:
    _steps(run)
    run.train(2, oldest_kept=1)
    run.client.hset(run.store.keys.trainer, "seen", 1)  # long ago


def _attempted(run: Run) -> None:
    _steps(run)
    run.store.attempt(uuid="trainer", world_size=2, resume_step=0)


def _claimed(run: Run) -> None:
    """The trainer is two steps ahead of the server."""
    run.step("a.0")
    run.push("a.1", version=1)
    steps = tuple(TrainedStep(step=n, digest="f" * 64, group_ids=(f"a.{n - 1}",), envs={"a": (2, 51)}) for n in (2, 3))
    claim = Claim(step=3, epoch=run.meta.epoch, digest="f" * 64, steps=steps)
    run.store.attempt(uuid="trainer", world_size=2, resume_step=3, claim=claim)


def _reusable(run: Run) -> None:
    _pool(run)
    keys = run.store.keys
    for entry in run.client.xrange(keys.pool):
        fields = entry[1]
        record = [fields[b"env"], fields[b"key"], fields[b"rollouts"], fields[b"tokens"], fields[b"metadata"]]
        run.client.hset(
            keys.reuse,
            mapping={fields[b"group"]: b"1 1", fields[b"group"] + b" " + entry[0]: b" ".join(record)},
        )


def _beat(store: EveryRole, run: Run) -> None:
    kinds = {
        GatewayStore: "gateway",
        ScorerStore: "scorer",
        TrainerStore: "rank",
        LeaderStore: "batcher",
        OperatorStore: "batcher",
    }
    store.heartbeat(kinds.get(type(store), "worker"), "w", {"groups": 1})


def _ask(store: EveryRole, run: Run) -> Any:
    asked = store.ask("a", 1, worker="w", beat={"version": 0}, ttl_seconds=60, size=None, section="")
    return len(asked.numbers), asked.policy, asked.is_draining


def _push(store: EveryRole, run: Run) -> Any:
    group = make_group(env="a", size=2, group_id="a.7")
    status, _ = store.push(group, producer="w", incarnation="v", sequence=1, epoch=run.meta.epoch)
    return status if status == "stored" else "stored before"


def _push_many(store: EveryRole, run: Run) -> Any:
    pushes = [(make_group(env="a", size=2, group_id=f"a.{n}"), "") for n in (7, 8, 9)]
    outcomes, error = store.push_many(pushes, producer="w", incarnation="v", sequence=1, epoch=run.meta.epoch)
    if error is not None:
        raise error
    return [status if status == "stored" else "stored before" for status, _ in outcomes]


def _commit(store: EveryRole, run: Run) -> Any:
    entries = {entry.entry_id: entry for entry in run.pool()}
    plan = plan_of(list(entries.values()), 1)
    return store.commit(plan, entries, meta=run.meta, columns={}, state={"deficits": {"a": 1.5}})[1].digest


def _led(store: Any) -> Any:
    """The store, with the lease that the run's leader has."""
    assert store.lease("leader", ttl_seconds=30).held
    return store


def _drops(run: Run) -> list[Any]:
    entries = [entry for entry in run.pool() if entry.env == "a"]
    return [
        (Drop("a.0", "a", "stale", entry.rollouts, entry.tokens, entry_ids=(entry.entry_id,)), [entry])
        for entry in entries
    ]


def _drop(store: EveryRole, run: Run) -> None:
    store.drop(_drops(run))


def _attempt(run: Run) -> int:
    return run.store.trainer().number


def _report(store: EveryRole, run: Run) -> Any:
    left = {"a.1/0": NotTrained(tokens=4, min_version=0, reward=1.0)}
    unused = TrainedStep(step=2, digest="", group_ids=("a.1",), envs={"a": (2, 16)}, unused=left)
    epoch = run.meta.epoch
    return store.report(_attempt(run), epoch=epoch, trained=2, digest="", oldest_kept=1, unused=[unused])


def _pin(store: EveryRole, run: Run) -> Any:
    entries = {entry.entry_id: entry for entry in run.pool()}
    return store.pin(plan_of(list(entries.values()), 1).rollouts, entries)


def _parts(run: Run) -> list[Any]:
    return [member for part in run.store.read_parts(1) for member in part.rollouts]


def _fields(store: EveryRole, run: Run) -> Any:
    wanted: dict[str, dict[str, int]] = {}
    for ref in _parts(run):
        wanted.setdefault(ref.payload_key, {})[str(ref.index)] = ref.info.size
    return {f"{key} {field}": value for (key, field), value in store.read_fields(wanted).items()}


def _tickets(run: Run) -> None:
    _pool(run)
    run.store.set_allowances({"a": 4})
    run.store.take_tickets("a", 2, ttl_seconds=60)


def _ended(run: Run) -> None:
    run.lead()
    run.store.say_done("a", epoch=run.meta.epoch)
    assert run.store.set_ended(0, run.store.sources().written)


def _whole(run: Run) -> None:
    """A server that needs its file rewritten after a start has done it: the sentence is "" from then on."""
    deadline = time.monotonic() + 30
    while run.store.until_whole():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _claims(run: Run) -> list[str]:
    ids = [entry.entry_id for entry in run.pool()]
    run.store.claim_scoring(ids, owner="s", ttl_seconds=60)
    return ids


def _stray(run: Run) -> list[str]:
    """A payload that no push has announced."""
    run.lead()
    key = f"{run.store.keys.payload_prefix}{{stray}}"
    run.client.hset(key, "0", b"x")
    run.client.expire(key, 3600)
    return [key]


def _are_payloads(keys: list[str], run: Run) -> bool:
    """How many stand on a page depends on the other keys of the server."""
    return set(keys) <= set(run.payload_keys())


def _strays(run: Run) -> list[str]:
    return [f"{run.store.keys.payload_prefix}{{stray}}"]


# -- open rollouts
KEY = "a key"


def _opened(run: Run) -> None:
    """Two open rollouts, the first with a call."""
    run.lead()
    run.store.set_allowances({"a": 4})
    (number,) = run.store.take_tickets("a", 1, ttl_seconds=60)
    run.store.begin(KEY, Ticket(env="a", number=number, group_id=f"a.{number}"), size=2, about={"prompt": "7"})
    _recorded(run.store, run, "r")


def _ticketed(run: Run) -> None:
    run.lead()
    run.store.set_allowances({"a": 4})
    run.store.take_tickets("a", 1, ttl_seconds=60)


def _lapsed(run: Run) -> None:
    _opened(run)
    run.client.zadd(run.store.keys.open, {"a.0/0": 1})


def _loading(run: Run) -> None:
    run.store.claim_loading("g", ttl_seconds=60.0)


def _waiting(run: Run) -> None:
    _opened(run)
    for i, capability in enumerate(_capabilities(run)):
        run.store.end(capability, End(reward=float(i)))


def _pushed(run: Run) -> None:
    _waiting(run)
    _push_opened(run.store, run)
    run.client.zadd(run.store.keys.open_pushed, {"a.0": 1})


def _capabilities(run: Run) -> tuple[str, ...]:
    begun = run.store.begun(KEY)
    return begun.capabilities if begun else ()


def _recorded(store: Any, run: Run, request: str) -> Any:
    capability = _capabilities(run)[0]
    tokens = np.array([5], np.int32)
    call = OpenCall(id=f"{ord(request):016x}", prompt=tokens, tokens=tokens, logprobs=np.zeros(1, np.float32))
    line = run.store.look_up(capability).line
    answer = store.record(capability, call, request=request, seen=0, history="h", line=line)
    return answer.number, answer.call.tokens.tolist()


def _begun(store: EveryRole, run: Run) -> Any:
    begun = store.begin(KEY, Ticket(env="a", number=0, group_id="a.0"), size=2, about={})
    return begun.group_id, begun.size


def _push_opened(store: Any, run: Run) -> Any:
    waiting = run.store.waiting() or store.opened_before
    store.opened_before = waiting
    status, _ = store.push_rollouts(waiting[0], make_group(env="a", size=2, group_id="a.0"))
    return status if status == "stored" else "stored before"


def _visited(run: Run) -> None:
    run.store.note_visits("a", "p", "s")


ROWS: dict[str, Row] = {
    # -- life
    "close": Row(call=lambda store, run: store.close()),
    "server": Row(call=lambda store, run: store.server()["name"]),
    "server_id": Row(call=lambda store, run: store.server_id() == run.store.server_id()),
    "until_whole": Row(call=lambda store, run: store.until_whole(), prepare=_whole),
    "errors": Row(call=lambda store, run: store.errors() == store.errors()),
    "losses": Row(call=lambda store, run: store.losses() - store.losses()),
    "now": Row(call=lambda store, run: store.now() > run.store.now() - 60),
    "meta": Row(call=lambda store, run: store.meta(), prepare=_steps),
    "open_run": Row(call=lambda store, run: store.open_run()),
    "has_ended": Row(call=lambda store, run: store.has_ended(), prepare=_ended),
    "runs": Row(call=lambda store, run: run.store.run in store.runs()),
    # -- worker
    "push": Row(call=_push, repeats=False, second={LOST: "stored before"}),
    "push_many": Row(call=_push_many, repeats=False, second={LOST: ["stored before"] * 3}),
    "leave_out": Row(
        call=lambda store, run: store.leave_out(producer="w", incarnation="v", sequence=1, epoch=run.meta.epoch),
        repeats=False,
    ),
    "take_tickets": Row(
        call=lambda store, run: len(store.take_tickets("a", 1, ttl_seconds=60)), prepare=_tickets, counts_twice=True
    ),
    "ask": Row(call=_ask, prepare=_tickets, counts_twice=True),
    "say_done": Row(call=lambda store, run: store.say_done("a", epoch=run.meta.epoch), prepare=_tickets),
    "renew_tickets": Row(call=lambda store, run: store.renew_tickets("a", [0, 1], ttl_seconds=60), prepare=_tickets),
    "release_tickets": Row(call=lambda store, run: store.release_tickets("a", [0]), prepare=_tickets),
    "visits": Row(call=lambda store, run: store.visits("a", ["p", "q"]), prepare=_visited),
    "prompts_before": Row(
        call=lambda store, run: store.prompts_before("a", "then"),
        prepare=lambda run: run.store.note_prompts("a", "before"),
    ),
    "note_prompts": Row(call=lambda store, run: store.note_prompts("a", "now")),
    "note_visits": Row(call=lambda store, run: store.note_visits("a", "p", "sm"), prepare=_visited),
    # -- gateway
    "begun": Row(call=lambda store, run: store.begun(KEY).size, prepare=_opened),
    "begin": Row(call=_begun, prepare=_ticketed),
    "may_sample": Row(call=lambda store, run: store.may_sample()),
    "look_up": Row(
        call=lambda store, run: store.look_up(_capabilities(run)[0], request="r", histories=["x", "h"]).history_call,
        prepare=_opened,
    ),
    "read_calls": Row(call=lambda store, run: len(store.read_calls("a.0/0")), prepare=_opened),
    "record": Row(call=lambda store, run: _recorded(store, run, "s"), prepare=_opened),
    "freeze": Row(call=lambda store, run: store.freeze(_capabilities(run)[0]), prepare=_opened),
    "heard": Row(call=lambda store, run: store.heard(_capabilities(run)[0], "r", 1), prepare=_opened),
    "touch": Row(call=lambda store, run: store.touch(_capabilities(run)[0]), prepare=_opened),
    "end": Row(
        call=lambda store, run: store.end(_capabilities(run)[0], End(reward=1.0)),
        prepare=_opened,
        second={LOST: "same"},
    ),
    "fail": Row(call=lambda store, run: store.fail("a.0/0", Failure("stale")), prepare=_opened, second={LOST: False}),
    "end_abandoned": Row(call=lambda store, run: store.end_abandoned(), prepare=_lapsed, second={LOST: []}),
    "can_make_room": Row(call=lambda store, run: store.can_make_room(), prepare=_steps),
    "drop_calls": Row(call=lambda store, run: store.drop_calls(run.store.waiting()[0], "full"), prepare=_waiting),
    "waiting": Row(call=lambda store, run: [waiting.size for waiting in store.waiting()], prepare=_waiting),
    "push_rollouts": Row(call=_push_opened, prepare=_waiting, repeats=False, second={LOST: "stored before"}),
    "forget_open_rollouts": Row(
        call=lambda store, run: _led(store).forget_open_rollouts(), prepare=_pushed, second={LOST: 0}
    ),
    "claim_loading": Row(call=lambda store, run: store.claim_loading("g", ttl_seconds=60.0)),
    "release_loading": Row(
        call=lambda store, run: store.release_loading("g"),
        prepare=_loading,
    ),
    # -- scorer
    "claim_scoring": Row(
        call=lambda store, run: len(
            store.claim_scoring([e.entry_id for e in run.pool()], owner="s", ttl_seconds=60)[0]
        ),
        prepare=_pool,
    ),
    "renew_scoring": Row(
        call=lambda store, run: store.renew_scoring(_claims(run), owner="s", ttl_seconds=60), prepare=_pool
    ),
    "release_scoring": Row(call=lambda store, run: store.release_scoring(_claims(run), owner="s"), prepare=_pool),
    # -- batcher
    "lease": Row(call=lambda store, run: store.lease("leader", ttl_seconds=30).held),
    "load_scripts": Row(call=lambda store, run: store.load_scripts()),
    "renew": Row(call=lambda store, run: _led(store).renew(ttl_seconds=30).held, prepare=_pool),
    "release_lease": Row(call=lambda store, run: _led(store).release_lease(), prepare=_pool),
    "set_config": Row(call=lambda store, run: store.set_config({"max_age": 2}, "d"), prepare=_pool),
    "set_error": Row(call=lambda store, run: store.set_error("a plain reason"), prepare=_pool),
    "taken_tickets": Row(call=lambda store, run: store.taken_tickets(), prepare=_tickets),
    "read_pool": Row(call=lambda store, run: store.read_pool(), prepare=_pool),
    "take_look": Row(call=lambda store, run: store.take_look().entries, prepare=_pool),
    "paused": Row(call=lambda store, run: store.paused(), prepare=lambda run: run.store.pause("b")),
    "sources": Row(call=lambda store, run: store.sources(), prepare=_ended),
    "set_finished": Row(call=lambda store, run: store.set_finished("7 3"), prepare=lambda run: run.lead()),
    "set_ended": Row(call=lambda store, run: store.set_ended(0), prepare=lambda run: run.lead()),
    "reused": Row(call=lambda store, run: store.reused(), prepare=_reusable),
    "set_allowances": Row(call=lambda store, run: store.set_allowances({"a": 3}), prepare=_tickets),
    "tickets_out": Row(call=lambda store, run: store.tickets_out(), prepare=_tickets),
    "close_tickets": Row(call=lambda store, run: store.close_tickets("a", [0]), prepare=_tickets),
    "drop": Row(call=_drop, prepare=_pool),
    "pin": Row(call=_pin, prepare=_pool),
    "commit": Row(call=_commit, prepare=_pool),
    "payload_page": Row(
        call=lambda store, run: _are_payloads(store.payload_page(store.FIRST_PAGE)[1], run), prepare=_stray
    ),
    "not_garbage": Row(call=lambda store, run: len(store.not_garbage(run.payload_keys())), prepare=_pool),
    "shorten_lives": Row(call=lambda store, run: store.shorten_lives(_strays(run), 60_000), prepare=_stray),
    "expired": Row(call=lambda store, run: store.expired(_strays(run)), prepare=_stray),
    "load_state": Row(call=lambda store, run: store.load_state(), prepare=_steps),
    "closed_groups": Row(call=lambda store, run: store.closed_groups(), prepare=_steps),
    "retire": Row(call=lambda store, run: len(run.payload_keys()) and store.retire(1) <= 1, prepare=_trained),
    "recover": Row(
        call=lambda store, run: store.recover(run.store.trainer(), run.pool()) is not None,
        prepare=_claimed,
        second={LOST: False},
    ),
    # -- operator
    "forget_end": Row(call=lambda store, run: store.forget_end("a"), prepare=_ended, second={LOST: False}),
    "expect": Row(call=lambda store, run: store.expect(["x", "y"]), prepare=_ended),
    "leaving": Row(call=lambda store, run: store.leaving(1, with_pool=True), prepare=_steps),
    "void_from": Row(
        call=lambda store, run: store.void_from(2)["steps"],
        prepare=_trained,
        repeats=False,
        second={LOST: 0},
        counts_twice=True,
    ),
    "rewind": Row(call=lambda store, run: store.rewind(2)["epoch"], prepare=_trained, repeats=False, counts_twice=True),
    "delete_run": Row(call=lambda store, run: store.delete_run() >= 0, prepare=_steps),
    "pause": Row(call=lambda store, run: store.pause("a") in (True, False)),
    "resume": Row(call=lambda store, run: store.resume("a") in (True, False), prepare=lambda run: run.store.pause("a")),
    "ask_config": Row(
        call=lambda store, run: store.ask_config({"max_age": 2}, "d", seen=run.store.meta()) in ("asked", "same"),
        prepare=_pool,
    ),
    "ask_drain": Row(call=lambda store, run: store.ask_drain() >= 0, prepare=_pool),
    "ask_undrain": Row(
        call=lambda store, run: store.ask_undrain() in (True, False), prepare=lambda run: run.store.ask_drain()
    ),
    # A repetition finds nothing to drop, but tells the leader once more to look (`asked`).
    "drop_pending": Row(call=lambda store, run: store.drop_pending(_drops(run)) >= 0, prepare=_pool, counts_twice=True),
    "is_led": Row(call=lambda store, run: store.is_led(), prepare=_pool),
    "refuse_config": Row(call=lambda store, run: store.refuse_config("d", "why"), prepare=_pool),
    # -- trainer
    "attempt": Row(call=lambda store, run: store.attempt(uuid="u", world_size=2, resume_step=0), prepare=_steps),
    "trainer": Row(call=lambda store, run: store.trainer(), prepare=_attempted),
    "rank_0": Row(call=lambda store, run: store.rank_0(), prepare=_attempted),
    "report": Row(call=_report, prepare=_attempted),
    "announce": Row(
        call=lambda store, run: store.announce(_attempt(run), PolicyVersion(version=2)) in (True, False),
        prepare=_attempted,
    ),
    "policy": Row(
        call=lambda store, run: store.policy(),
        prepare=lambda run: (
            _attempted(run),
            run.store.announce(_attempt(run), PolicyVersion(version=3, location="/3")),
        ),
    ),
    "wait_step": Row(call=lambda store, run: store.wait_step(2, block_seconds=0), prepare=_steps),
    "read_parts": Row(call=lambda store, run: store.read_parts(2), prepare=_steps),
    "left_out": Row(
        call=lambda store, run: store.left_out(run.store.wait_step(1, block_seconds=0), _parts(run)), prepare=_steps
    ),
    "read_payloads": Row(call=lambda store, run: store.read_payloads(_parts(run)), prepare=_steps),
    "read_fields": Row(call=_fields, prepare=_steps),
    "read_group_payloads": Row(
        call=lambda store, run: store.read_group_payloads([entry.payload_key for entry in run.pool()]), prepare=_pool
    ),
    "unused": Row(call=lambda store, run: store.unused() == {}, prepare=_attempted),
    "count_damaged": Row(call=lambda store, run: store.count_damaged(1, ["a.0/0"]), prepare=_steps),
    "count_lost": Row(call=lambda store, run: store.count_lost(2), prepare=_pool, counts_twice=True),
    # -- evaluation
    "claim_evaluation": Row(call=lambda store, run: store.claim_evaluation("a", 3, owner="w", ttl_seconds=60)),
    "release_evaluation": Row(
        call=lambda store, run: store.release_evaluation("a", 3, owner="w"),
        prepare=lambda run: run.store.claim_evaluation("a", 3, owner="w", ttl_seconds=60),
    ),
    "add_evaluation": Row(
        call=lambda store, run: store.add_evaluation("a", 3, {"reward": 0.5}),
        prepare=lambda run: run.store.claim_evaluation("a", 3, owner="w", ttl_seconds=60),
        counts_twice=True,
    ),
    # -- seeing
    "heartbeat": Row(call=_beat),
    "heartbeats": Row(
        call=lambda store, run: list(store.heartbeats("rank")),
        prepare=lambda run: run.store.heartbeat("rank", "0", {}),
    ),
    "replies": Row(
        call=lambda store, run: store.replies(lambda pipe, keys: pipe.hget(keys.meta, "step"))[1], prepare=_steps
    ),
    "add_record": Row(
        call=lambda store, run: store.add_record({"step": 1, "digest": "d", "loss": 0.5}), counts_twice=True
    ),
    "ledger": Row(call=lambda store, run: store.ledger(), prepare=_trained),
    "headers": Row(call=lambda store, run: list(store.headers()), prepare=_steps),
    "history": Row(call=lambda store, run: [r["event"] for r in store.history()], prepare=_steps),
    "read_step_bytes": Row(  # its bytes name the epoch, which is another one in every run
        call=lambda store, run: [r.group_id for part in store.read_step_bytes(2).decoded for r in part.rollouts],
        prepare=_steps,
    ),
    "read_history": Row(
        call=lambda store, run: [r["event"] for _, r in store.read_history("0-0").records], prepare=_steps
    ),
    "dropped_payloads": Row(
        call=lambda store, run: len(store.dropped_payloads(["a.0"])["a.0"]),
        prepare=lambda run: (_pool(run), run.store.drop(_drops(run))),
    ),
    "read_push_payload": Row(
        call=lambda store, run: sorted(store.read_push_payload(run.payload_keys()[0])), prepare=_pool
    ),
    "verify": Row(call=lambda store, run: store.verify().findings, prepare=_trained),
}


def calls_of(role: type[Session]) -> set[str]:
    """The public calls of a role, without those of the base of all."""
    classes = [made for made in role.__mro__ if made not in (Session, object)]
    return {name for made in classes for name, call in vars(made).items() if name[0] != "_" and callable(call)}
