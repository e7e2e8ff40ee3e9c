"""What an operator does: wishes for the leader, drops, envs paused and done, a run taken back or deleted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rlbuffer.errors import (
    ConfigChanged,
    EpochChanged,
    NotFound,
    PayloadError,
    RlbufferError,
    StepRetired,
)
from rlbuffer.records.info import RolloutInfo, folded
from rlbuffer.records.states import SettingsState
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.history import RunRewound, StepsVoided
from rlbuffer.store.keys import RUNS
from rlbuffer.store.member import TicketStore
from rlbuffer.store.pool import HISTORY_ENTRIES, drop, pool_entries
from rlbuffer.store.records import Meta, PartRollout, PoolEntry, by_rollout, is_stream
from rlbuffer.store.session import text
from rlbuffer.wire import payload

ASKS = 100
"""Times that somebody else may have asked between a look and the request."""
LISTED = 5000
"""Groups that the record of a void step or a rewind names: about half a MiB."""


class OperatorStore(TicketStore):
    """A run for a person, with or without a leader.

    Nobody but the leader changes what steps are made of. An operator leaves a wish in `meta`; the leader looks at
    `asked` in each turn and reads everything again when it has grown.
    """

    # -- wishes ----------------------------------------------------------------------------------------------------

    def ask_config(self, config: Mapping[str, Any], digest: str, *, seen: Meta) -> SettingsState:
        """ASK: the leader shall take this config at its next step boundary; without one it waits for the next.

        `seen` is the run as the operator looked at it. -> ``asked``, or ``same`` when it is in force and nothing else
        is wanted. Raises ConfigChanged when somebody came in between, RunGone.
        """
        reply = self._ask("config", payload.dumps(dict(config)), digest, seen.revision, seen.wanted_digest)
        status = text(reply[0])
        if status == "CHANGED":
            raise ConfigChanged(
                f"the settings of run {self.run!r} changed in between: they are at revision {text(reply[1])}"
                f"{' and others are asked for' if text(reply[2]) else ''}, not at {seen.revision} as shown. Look again"
            )
        return SettingsState.SAME if status == "SAME" else SettingsState.ASKED

    def ask_drain(self) -> int:
        """ASK: no more tickets are given. -> server time, in milliseconds, since when. Raises RunGone."""
        return int(self._ask_as_seen("drain")[1])

    def ask_undrain(self) -> bool:
        """ASK: tickets are given again. -> False when nothing was drained. Raises RunGone."""
        return text(self._ask_as_seen("undrain")[0]) == "OK"

    def _ask_as_seen(self, action: str) -> list[Any]:
        """Asks as long as others ask at the same moment."""
        for _ in range(ASKS):
            epoch, asked = self.look(lambda client: client.hmget(self.keys.meta, ["epoch", "asked"]))
            reply = self._ask(action, text(epoch or b""), text(asked or b"0"))
            if text(reply[0]) != "CHANGED":
                return reply
        raise self.unexpected("ask", reply)

    def _ask(self, action: str, *args: Any) -> list[Any]:
        return self.move("ask", (self.keys.meta, self.keys.allowance), (action, *args))

    def drop_pending(self, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> int:
        """DROP by an operator, with or without a leader. -> pushes that left the pool. Raises RunGone.

        May be repeated. A leader forgets what it held; a step that it plans meanwhile is refused as gone.
        """
        return drop(self.move, self.keys, "", drops)

    def pause(self, env: str) -> bool:
        """The env takes part in no step until it is resumed. -> False when it was paused already."""

        def add(client: Any) -> Any:
            seconds, _ = client.time()
            return client.zadd(self.keys.paused, {env: int(seconds)}, nx=True)

        return bool(self.look(add))

    def resume(self, env: str) -> bool:
        """Returns False when it was not paused."""
        return bool(self.look(lambda client: client.zrem(self.keys.paused, env)))

    def forget_end(self, env: str) -> bool:
        """DONE resume: the env's end is what its workers say from now on. -> False when it had none."""
        return text(self._say_done("resume", env)[0]) == "OK"

    def expect(self, sections: Iterable[str]) -> None:
        """DONE expect: worker sections that are about to start; a run that had ended goes on until they have come."""
        self._say_done("expect", *sorted(sections))

    # -- a run taken back, and deleted -------------------------------------------------------------------------------

    def void_from(self, step: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID: `step` and what follows it leave the run, in a new epoch; their rollouts drop as ``void``.

        -> epoch, steps (how many are void), entries (0). Raises RlbufferError when a trainer is at work and `force`
        is not set; EpochChanged, NotFound, StepRetired, RunGone.
        """
        if step < 1:
            raise NotFound(f"steps start at 1, there is no step {step}")
        return self._void(step - 1, f"step {step}", with_pool=False, force=force)

    def rewind(self, to: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID of what follows step `to` and of everything that is pending; later policy versions are taken back.

        With `force` also to a step that was retired, for a trainer whose only checkpoint is older: its steps stay
        counted as trained. Otherwise as `void_from`.
        """
        if to < 0:
            raise NotFound(f"a run can be taken back to step 0 at most, not to {to}")
        return self._void(to, f"step {to}", with_pool=True, force=force)

    def leaving(self, keep: int, *, with_pool: bool) -> list[list[Any]]:
        """A list for people: id, env, rollouts, tokens, reward, oldest version and why, of each group that drops when
        the run is taken back to step `keep`, with its pool or without. The script keeps the account; this list shows
        what is there just before, as far as it can be read: a step that cannot be read is the first that somebody
        wants to take back."""
        out: dict[str, list[Any]] = {}

        def add(group_id: str, env: str, infos: Sequence[RolloutInfo], why: str) -> None:
            rewards = [info.reward for info in infos if info.reward is not None]
            reward = sum(rewards) / len(rewards) if rewards else None
            if reward is not None and not math.isfinite(reward):
                reward = None  # of a step from before there was a limit
            tokens, oldest = sum(info.length for info in infos), min((info.min_version for info in infos), default=0)
            out.setdefault(group_id, [group_id, env, len(infos), tokens, reward, oldest, why])

        for header in self.headers(first=keep + 1, problems=[]):
            try:
                parts = self.read_parts(header.step)
            except (PayloadError, NotFound, StepRetired):
                continue
            members: dict[str, list[PartRollout]] = {}
            for member in (member for part in parts for member in part.rollouts):
                members.setdefault(member.group_id, []).append(member)
            for group_id, group_members in members.items():
                # For a group that was trained before, only one use is void.
                if not header.uses.get(group_id):
                    infos = [folded([ref.info for ref in of_rollout]) for of_rollout in by_rollout(group_members)]
                    add(group_id, group_members[0].env, infos, f"step {header.step} was taken back")
        pool = self.stream(self.keys.pool, "0-0", count=LISTED, block_seconds=0.0) if with_pool else []
        for entry in pool_entries(self.keys, pool):
            infos = list(entry.info.rollouts) if entry.info is not None else []
            add(entry.group_id, entry.env, infos, f"pending when the run was taken back to step {keep}")
        return list(out.values())

    def _void(self, keep: int, what: str, *, with_pool: bool, force: bool) -> Mapping[str, Any]:
        keys = self.keys
        groups = self.leaving(keep, with_pool=with_pool)
        taken_back = RunRewound if with_pool else StepsVoided
        listed = taken_back(step=keep, groups=groups[:LISTED], unlisted=len(groups[LISTED:]))
        record = payload.dumps(listed.as_object())
        where = (keys.lease, keys.meta, keys.pool, keys.steps, keys.ledger, keys.closed, keys.garbage, keys.trainer)
        flags = (int(with_pool), int(force))
        age = round(1000 * ATTEMPT_SECONDS)
        meta = self.meta()
        # Not repeated: a person asks again. The call names this epoch, so it cannot be carried out twice.
        reply = self.move(
            "void",
            (*where, keys.history, keys.policy, keys.reuse, keys.unused),
            (keep, *flags, age, keys.payload_prefix, HISTORY_ENTRIES, record, meta.epoch, int(is_stream(meta))),
            repeat=False,
        )
        status = text(reply[0])
        if status == "OK":
            return {"epoch": int(reply[1]), "steps": int(reply[2]), "entries": int(reply[3])}
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
        """Removes everything that the server holds of the run, control keys first. -> keys removed."""
        keys = self.keys
        # Meta first: whoever still works for the run hears that it is gone, instead of making half of it again.
        removed = int(self.look(lambda client: client.unlink(keys.meta)))
        for pattern in (f"{keys.tag}:*", f"{keys.payload_prefix}*"):
            # One command per key: payload keys lie in different slots of a cluster.
            removed += sum(
                self.paged(self.look(partial(_names, pattern=pattern)), lambda pipe, name: pipe.unlink(name))
            )
        self.look(lambda client: client.zrem(RUNS, self.run))
        return removed


def _names(client: Any, pattern: str) -> list[bytes]:
    return list(client.scan_iter(match=pattern, count=1000))
