"""Moves that take a run back: RECOVER after a loss of acknowledged writes, VOID by an operator.

A server that comes back without its newest writes (power cut, failover) may be behind the trainer. The trainer hands
back a *claim*, the last steps that it has trained; the leader lets the run go on after them, in a new epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rlbuffer.errors import EpochChanged, NotFound, PayloadError, RlbufferError, RunGone, StepRetired
from rlbuffer.events.event import as_object
from rlbuffer.events.history import Recovered, RunRewound, StepsVoided
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.states import Reason
from rlbuffer.store.keys import RUNS
from rlbuffer.store.moves.pool import HISTORY_ENTRIES, pool_entries
from rlbuffer.store.moves.run import RunViews
from rlbuffer.store.moves.steps import StepMoves
from rlbuffer.store.records import Attempt, Claim, PartRollout, PoolEntry, TrainedStep
from rlbuffer.store.session import text
from rlbuffer.wire import payload

ATTEMPT_SECONDS = 6.0
"""A trainer that is silent for this long counts as gone: it says something every second, and I12 allows 10 s."""
LISTED = 5000
"""Groups that the record of a void step or a rewind names: about half a MiB."""
MAX_CLAIM_BYTES = 16 * 2**20
"""Largest claim that is decoded: eight steps of tens of thousands of groups."""


def encode_claim(claim: Claim) -> bytes:
    """A claim as it is handed back."""
    return payload.dumps(asdict(claim) | {"steps": [pack_step(step) for step in claim.steps]})


def decode_claim(data: bytes) -> Claim:
    """A claim as the leader reads it. Raises PayloadError."""
    record = payload.loads(data, limit=MAX_CLAIM_BYTES)
    try:
        steps = tuple(unpack_step(step) for step in record["steps"])
        return Claim(step=int(record["step"]), epoch=int(record["epoch"]), digest=str(record["digest"]), steps=steps)
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError(f"claim of a trainer: unexpected content ({type(error).__name__}: {error})") from None


def pack_step(step: TrainedStep) -> dict[str, Any]:
    """A remembered step as plain values, for a claim or a checkpoint."""
    envs = {env: list(pair) for env, pair in step.envs.items()}
    return {"step": step.step, "digest": step.digest, "group_ids": list(step.group_ids), "envs": envs}


def unpack_step(record: Mapping[str, Any]) -> TrainedStep:
    """The inverse of :func:`pack_step`. Raises KeyError, TypeError, ValueError."""
    return TrainedStep(
        step=int(record["step"]),
        digest=str(record["digest"]),
        group_ids=tuple(str(group_id) for group_id in record["group_ids"]),
        envs={str(env): (int(rollouts), int(tokens)) for env, (rollouts, tokens) in record["envs"].items()},
    )


class RecoveryMoves(StepMoves, RunViews):
    """RECOVER and VOID."""

    def recover(self, token: int, trainer: Attempt, entries: Iterable[PoolEntry]) -> Mapping[str, Any] | None:
        claim = decode_claim(trainer.claim)
        meta = self.meta()
        last = meta.step
        # A trainer from before a recovery: what follows its step is void.
        fork = claim.step + 1 if claim.step < meta.retired else self._fork(claim, last)
        common = fork - 1 if fork else last
        groups = list(dict.fromkeys(g for step in claim.steps if step.step > common for g in step.group_ids))
        trained_groups = set(groups)
        pending: dict[str, list[PoolEntry]] = {}
        for entry in entries:
            if entry.group_id in trained_groups:
                pending.setdefault(entry.group_id, []).append(entry)
        uses = [use for members in pending.values() for use in _as_trained(members)]
        record = Recovered(
            step=claim.step,
            forgotten=claim.step - common,
            void=last - common,
            groups=len(groups),
            entries=len(uses),
        )
        keys = self.keys
        args: list[Any] = [token, trainer.number, trainer.claim, claim.step, claim.digest, claim.epoch, fork]
        args += [keys.payload_prefix, HISTORY_ENTRIES, payload.dumps(as_object(record))]
        args.append(len(groups))
        for group_id in groups:
            args += [group_id, pending[group_id][0].env if group_id in pending else ""]
        args.append(len(uses))
        for use in uses:
            args += use
        where = (keys.lease, keys.meta, keys.pool, keys.steps, keys.ledger, keys.closed, keys.garbage, keys.trainer)
        reply = self.move("recover", (*where, keys.history, keys.reuse), args)
        status = text(reply[0])
        if status == "OK":
            return {"epoch": int(reply[1]), **asdict(record)}
        if status == "NONE":
            return None
        if status == "FENCED":
            raise self.lost(reply[1])
        if status == "UNEQUAL":
            raise RlbufferError(
                f"pool entry {text(reply[1])} holds {text(reply[2])} rollouts and {text(reply[3])} tokens, which is "
                "not what was read before"
            )
        raise self.unexpected("recover", reply)

    def _fork(self, claim: Claim, last: int) -> int:
        """First step that is here with other content than the trainer's; 0 when there is none."""
        here = {header.step: header.digest for header in self.headers(first=claim.steps[0].step if claim.steps else 1)}
        theirs = {step.step: step.digest for step in claim.steps} | {claim.step: claim.digest}
        others = [step for step, digest in theirs.items() if step <= last and here.get(step, digest) != digest]
        # A last step whose header is gone is known by the run's own digest.
        if not others and claim.step <= last:
            others = [claim.step]
        return min(others, default=0)

    # -- operator --------------------------------------------------------------------------------------------------
    def void_from(self, step: int, *, force: bool = False) -> Mapping[str, Any]:
        if step < 1:
            raise NotFound(f"steps start at 1, there is no step {step}")
        return self._void(step - 1, f"step {step}", with_pool=False, force=force)

    def rewind(self, to: int, *, force: bool = False) -> Mapping[str, Any]:
        if to < 0:
            raise NotFound(f"a run can be taken back to step 0 at most, not to {to}")
        return self._void(to, f"step {to}", with_pool=True, force=force)

    def _leaving(self, keep: int, *, with_pool: bool) -> list[list[Any]]:
        """A list for people: id, env, rollouts, tokens, reward, oldest version and why, of each group that leaves. The
        script keeps the account; this list shows what is there just before, as far as it can be read: a step that
        cannot be read is the first that somebody wants to take back."""
        out: dict[str, list[Any]] = {}

        def add(group_id: str, env: str, infos: Sequence[RolloutInfo], why: str) -> None:
            rewards = [info.reward for info in infos if info.reward is not None]
            reward = sum(rewards) / len(rewards) if rewards else None
            if reward is not None and not math.isfinite(reward):
                reward = None  # of a step from before there was a limit
            tokens, oldest = sum(info.length for info in infos), min((info.min_version for info in infos), default=0)
            out.setdefault(group_id, [group_id, env, len(infos), tokens, reward, oldest, why])

        retired, last = self._bounds()
        for step in range(max(keep, retired) + 1, last + 1):
            try:
                header = self.wait_step(step, block_seconds=0.0)
                parts = self.read_parts(step)
            except (PayloadError, NotFound, StepRetired):
                continue
            members: dict[str, list[PartRollout]] = {}
            for member in (member for part in parts for member in part.rollouts):
                members.setdefault(member.group_id, []).append(member)
            for group_id, group_members in members.items():
                # For a group that was trained before, only one use is void.
                if header is not None and not header.uses.get(group_id):
                    infos = [member.info for member in group_members]
                    add(group_id, group_members[0].env, infos, f"step {step} was taken back")
        pool = self.stream(self.keys.pool, "0-0", count=LISTED, block_seconds=0.0) if with_pool else []
        for entry in pool_entries(self.keys, pool):
            infos = list(entry.info.rollouts) if entry.info is not None else []
            add(entry.group_id, entry.env, infos, f"pending when the run was taken back to step {keep}")
        return list(out.values())

    def _void(self, keep: int, what: str, *, with_pool: bool, force: bool) -> Mapping[str, Any]:
        keys = self.keys
        groups = self._leaving(keep, with_pool=with_pool)
        taken_back = RunRewound if with_pool else StepsVoided
        listed = taken_back(step=keep, groups=groups[:LISTED], unlisted=len(groups[LISTED:]))
        record = payload.dumps(as_object(listed))
        where = (keys.lease, keys.meta, keys.pool, keys.steps, keys.ledger, keys.closed, keys.garbage, keys.trainer)
        flags = (int(with_pool), int(force))
        age = round(1000 * ATTEMPT_SECONDS)
        epoch = self.meta().epoch
        # Not repeated: a person asks again. The call names this epoch, so it cannot be carried out twice.
        reply = self.move(
            "void",
            (*where, keys.history, keys.policy),
            (keep, *flags, age, keys.payload_prefix, HISTORY_ENTRIES, record, epoch),
            repeat=False,
        )
        status = text(reply[0])
        if status == "OK":
            return {"epoch": int(reply[1]), "steps": int(reply[2]), "entries": int(reply[3])}
        if status == "GONE":
            raise RunGone(f"run {self.run!r} is not on the server ({keys.meta})")
        if status == "CHANGED":
            raise EpochChanged(
                f"run {self.run!r} began epoch {text(reply[1])} at this moment, by somebody else or by this request "
                "after its answer was lost: look at it (`rlbuffer inspect`), and ask again if it is still needed",
                epoch=int(reply[1]),
            )
        if status == "ALIVE":
            raise RlbufferError(
                f"the trainer of run {self.run!r} was seen {int(reply[1]) / 1000:.1f} s ago: stop it first, or use "
                "--force, which ends it"
            )
        if status == "BEYOND":
            raise NotFound(f"run {self.run!r} has no {what}: the last committed one is {text(reply[1])}.")
        if status == "RETIRED":
            further = f", or from this one with `rlbuffer runs rewind {keep} --force`" if with_pool else ""
            raise StepRetired(
                f"steps up to {text(reply[1])} of run {self.run!r} were retired: "
                f"it can go on from step {text(reply[1])} or a later one{further}"
            )
        raise self.unexpected("void", reply)

    def delete_run(self) -> int:
        keys = self.keys
        # Meta first: whoever still works for the run hears that it is gone, instead of making half of it again.
        removed = int(self.look(lambda client: client.unlink(keys.meta)))
        for pattern in (f"{keys.tag}:*", f"{keys.payload_prefix}*"):
            for page in _pages(self.look(partial(_names, pattern=pattern))):
                removed += self.look(partial(_unlinked, names=page))
        self.look(lambda client: client.zrem(RUNS, self.run))
        return removed


def _as_trained(entries: Iterable[PoolEntry]) -> Iterator[list[Any]]:
    """The pending pushes of a group that was trained: each rollout counts once, a repeated one is a duplicate."""
    seen: set[str] = set()
    for entry in entries:
        repeated: list[int] = []
        for info in entry.info.rollouts if entry.info else ():
            if info.rollout_id in seen:
                repeated.append(info.length)
            seen.add(info.rollout_id)
        amounts = [entry.rollouts - len(repeated), entry.tokens - sum(repeated)]
        dropped = [Reason.DUPLICATE, len(repeated), sum(repeated)] if repeated else []
        yield [entry.entry_id, *amounts, int(bool(repeated)), *dropped]


def _names(client: Any, pattern: str) -> list[bytes]:
    return list(client.scan_iter(match=pattern, count=1000))


def _unlinked(client: Any, names: list[bytes]) -> int:
    # One command per key: payload keys lie in different slots of a cluster.
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.unlink(name)
        return sum(pipe.execute())


def _pages(names: list[bytes], size: int = 500) -> Iterator[list[bytes]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
