"""Requests that are wrong: what a process with a defect, or somebody who read the run long ago, would send.

Now and then a script's request is sent once more, with one thing wrong, just before it is carried out as it is. The
script must refuse it and change nothing. A process that asks about a run that was deleted a moment ago is one of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.store.keys import Keys
from simulation.server import Command, Server
from simulation.values import stream_id

Fail = Callable[[str, str], None]
OTHER = b"0" * 32
"""A digest, or an id, of nothing."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A request, and the only answer that it may get."""

    answer: bytes
    args: Sequence[bytes]
    without: tuple[str, ...] = field(default=())
    """Keys that are not there at this moment."""
    earlier: tuple[bytes, ...] = field(default=())
    """Refusals that may come first, because the right request would get one of them, too."""


SHARES = {
    "VOID": 0.6,
    "RECOVER": 0.6,
    "ATTEMPT": 0.3,
    "ASK": 0.1,
    "COMMIT": 0.05,
    "LEASE": 0.02,
    "DONE": 0.3,
    "DROP": 0.03,
    "PUSH": 0.03,
    "REPORT": 0.02,
    "BEGIN": 0.1,
    "CALL": 0.1,
    "END": 0.1,
    "FORGET": 0.5,
    "PUSH of open rollouts": 0.3,
}
"""Script -> share of its requests that get a wrong one before them."""


class Defects:
    """Sends wrong requests before right ones.

    Args:
        server: where they go.
        run: its name.
        seed: draws which.
        fail: takes what was not refused.
    """

    def __init__(self, server: Server, run: str, seed: int, fail: Fail) -> None:
        self._server, self._keys, self._fail = server, Keys(run), fail
        self._dice = random.Random(f"defects {seed}")

    def before(self, name: str, command: Command) -> None:
        """`command` runs the script `name` next."""
        count = int(command[2])
        keys, args = list(command[3 : 3 + count]), list(command[3 + count :])
        is_opened = name == "PUSH" and args[11] != b"0"
        share = SHARES.get("PUSH of open rollouts" if is_opened else name, 0.0)
        if self._dice.random() >= share or self._server.is_full or self._server.refusal:
            return
        wrong = list(getattr(self, f"_{name.lower()}")(args))
        if not wrong:
            return
        chosen = self._dice.choice(wrong)
        data, hidden = self._server.data, {}
        for key in [getattr(self._keys, name).encode() for name in chosen.without]:
            if key in data:
                hidden[key] = data.pop(key)
        on_event, changed = self._server.on_event, []

        def looked(commands: Sequence[Command], replies: list[Any]) -> None:
            changed.extend(self._server.changes)
            if not hidden:
                on_event(commands, replies)

        self._server.on_event = looked
        try:
            reply = self._server.execute([[*command[:3], *keys, *chosen.args]])[0]
        finally:
            self._server.on_event = on_event
        status = reply[0] if isinstance(reply, list) and reply else repr(reply).encode()
        if (changed and status != b"DUP") or status not in (chosen.answer, b"FENCED", *chosen.earlier):
            self._fail(
                "defect",
                f"{name} that should be {chosen.answer.decode()} answered {status.decode()}, changed {changed[:3]}",
            )
        data.update(hidden)

    def number(self, key: str, name: bytes) -> int:
        """A field of a hash of the run."""
        return int((self._server.data.get(key.encode()) or {}).get(name, 0) or 0)

    def _is_pending(self, entry_id: bytes) -> bool:
        pool = self._server.data.get(self._keys.pool.encode())
        return pool is not None and stream_id(entry_id) in pool.entries

    # -- the scripts -----------------------------------------------------------------------------------------------
    def _ask(self, args: list[bytes]) -> Iterator[Wrong]:
        yield Wrong(b"GONE", args, ("meta",))

    def _attempt(self, args: list[bytes]) -> Iterator[Wrong]:
        """A request of another process: the same uuid again is not refused."""
        meta = self._keys.meta
        step, retired, rest = self.number(meta, b"step"), self.number(meta, b"retired"), args[6:]
        yield Wrong(b"GONE", [OTHER, *args[1:]], ("meta",))
        if meta.encode() not in self._server.data:
            return
        yield Wrong(b"AHEAD", [OTHER, args[1], b"%d" % (step + 3), b"", OTHER, b"", *rest])
        if step > 0 and self._server.data[meta.encode()].get(b"digest"):  # a forced rewind may not know it
            yield Wrong(b"DIGEST", [OTHER, args[1], b"%d" % step, b"", OTHER, b"", *rest])
        if retired > 0:
            yield Wrong(b"RETIRED", [OTHER, args[1], b"%d" % (retired - 1), b"", b"", b"", *rest])
        yield Wrong(b"AHEAD", [OTHER, args[1], b"%d" % (step + 3), b"1", OTHER, b"claim", *rest])

    def _report(self, args: list[bytes]) -> Iterator[Wrong]:
        """Without a claim: what it hands back would be kept."""
        trainer = self._server.data.get(self._keys.trainer.encode()) or {}
        step, trained = self.number(self._keys.meta, b"step"), int(trainer.get(b"trained", 0))
        bare, early = [*args[:5], b"", args[6], b"0", args[8]], (b"EPOCH",)
        yield Wrong(b"EPOCH", [args[0], b"1", *bare[2:]])
        yield Wrong(b"FENCED", [b"1", *bare[1:]])
        yield Wrong(b"AHEAD", [*bare[:2], b"%d" % (step + 1), *bare[3:]], earlier=early)
        if trained and trainer.get(b"digest"):
            yield Wrong(b"DIGEST", [*bare[:2], b"%d" % trained, OTHER, *bare[4:]], earlier=early)
        if step > trained:
            yield Wrong(b"DIGEST", [*bare[:2], b"%d" % (trained + 1), OTHER, *bare[4:]], earlier=early)
            yield Wrong(b"MISSING", [*bare[:2], b"%d" % (trained + 1), *bare[3:]], ("steps",), early)

    def _commit(self, args: list[bytes]) -> Iterator[Wrong]:
        step, entries, groups = int(args[2]), args[13], args[14]
        yield Wrong(b"ORDER", [*args[:2], b"%d" % (step + 2), *args[3:]])
        yield Wrong(b"ORDER", [args[0], b"1", *args[2:]])
        meta = self._server.data.get(self._keys.meta.encode()) or {}
        if (meta.get(b"epoch"), meta.get(b"step"), meta.get(b"digest")) != (args[1], b"%d" % (step - 1), args[3]):
            return  # a repetition, or too late
        yield Wrong(b"ORDER", [*args[:3], OTHER, *args[4:]])
        entry, _, others = entries.partition(b"\n")
        yield Wrong(b"TWICE", [*args[:13], entry + b"\n" + entries, *args[14:]])
        entry_id, group, rollouts, rest = entry.split(b" ", 3)
        if group == b"" and self._is_pending(entry_id):
            more = b"%b  %d %b\n%b" % (entry_id, int(rollouts) + 1, rest, others)
            yield Wrong(b"UNEQUAL", [*args[:13], more, *args[14:]])
        group, env, uses, rest = groups.split(b" ", 3)
        yield Wrong(b"GONE", [*args[:14], b"%b %b %d %b" % (group, env, int(uses) + 1, rest), *args[15:]])

    def _done(self, args: list[bytes]) -> Iterator[Wrong]:
        """Requests by what was read of the run long ago."""
        if args[0] == b"done":
            yield Wrong(b"GONE", [args[0], b"1", args[2]])

    def _drop(self, args: list[bytes]) -> Iterator[Wrong]:
        yield Wrong(b"GONE", [b"", *args[1:]], ("meta",))

    def _lease(self, args: list[bytes]) -> Iterator[Wrong]:
        """The run has ended after a step that is not its last."""
        if args[0] not in (b"acquire", b"release") and self.number(self._keys.meta, b"step"):
            yield Wrong(b"OPEN", [b"end", args[1], b"%d" % (self.number(self._keys.meta, b"step") + 1)])

    def _push(self, args: list[bytes]) -> Iterator[Wrong]:
        if args[11] != b"0":
            other = [*args[:4], b"nobody.0", *args[5:]]
            yield Wrong(b"OPEN", other, earlier=(b"DUP", b"GONE"))
        if args[9] and self._is_pending(args[9]):
            more = [*args[:7], b"%d" % (int(args[7]) + 1), *args[8:]]
            yield Wrong(b"UNEQUAL", more, earlier=(b"DUP", b"GAP", b"GONE", b"MISSING"))

    def _begin(self, args: list[bytes]) -> Iterator[Wrong]:
        """Of a ticket that is not out; of one whose group was begun; about a run that was deleted."""
        yield Wrong(b"TAKEN", [OTHER, args[1], args[2], b"99999999", *args[4:]], earlier=(b"GONE",))
        yield Wrong(b"GONE", args, ("meta",))

    def _call(self, args: list[bytes]) -> Iterator[Wrong]:
        """With another capability, of a run that was deleted, from a call that is not there, of another line."""
        gone = (b"UNKNOWN", b"ENDED", b"GONE")
        yield Wrong(b"UNKNOWN", [*args[:2], OTHER, *args[3:]], earlier=(b"GONE",))
        yield Wrong(b"GONE", args, ("meta",))
        if args[0] == b"record":
            fresh = [*args[:7], b"of nobody", b"0", *args[9:16], b"of no call", *args[17:]]
            gone = (*gone, b"FROZEN")
            early = (*gone, b"FULL", b"LINE")
            yield Wrong(b"MISSING", [*fresh[:9], b"9999", *fresh[10:]], earlier=early)
            yield Wrong(b"LINE", [*fresh[:6], b"1", *fresh[7:]], earlier=gone)
            yield Wrong(b"FULL", [*fresh[:14], b"0", *fresh[15:]], earlier=early)
            yield Wrong(b"FULL", [*fresh[:15], b"0", *fresh[16:]], earlier=early)

    def _end(self, args: list[bytes]) -> Iterator[Wrong]:
        """With another capability, of a run that was deleted, and as abandoned before its deadline."""
        opened = self._server.data.get(self._keys.open.encode())
        if opened is not None and opened.scores.get(args[1], 0) > self._server.now_ms():
            yield Wrong(b"OPEN", [b"expire", *args[1:7], b"99999999"], earlier=(b"GONE",))
        if args[0] == b"end":
            yield Wrong(b"UNKNOWN", [*args[:7], OTHER], earlier=(b"GONE",))
        yield Wrong(b"GONE", args, ("meta",))

    def _forget(self, args: list[bytes]) -> Iterator[Wrong]:
        """By who does not lead; of what was pushed a moment ago."""
        yield Wrong(b"FENCED", [b"1", *args[1:]])
        yield Wrong(b"OK", [args[0], b"999999999999", *args[2:]])

    def _recover(self, args: list[bytes]) -> Iterator[Wrong]:
        yield Wrong(b"NONE", [*args[:2], OTHER, *args[3:]])
        yield Wrong(b"FENCED", [OTHER, *args[1:]])
        at = 12 + 3 * int(args[11])
        if int(args[at]) and self._is_pending(args[at + 1]):
            more = [*args[: at + 2], b"%d" % (int(args[at + 2]) + 1), *args[at + 3 :]]
            yield Wrong(b"UNEQUAL", more, earlier=(b"NONE",))

    def _void(self, args: list[bytes]) -> Iterator[Wrong]:
        """Without --force while the trainer is at work, to a step that is not there, to one that is gone."""
        meta = self._keys.meta
        step, retired = self.number(meta, b"step"), self.number(meta, b"retired")
        is_current = args[7] == b"%d" % self.number(meta, b"epoch")
        if is_current and retired > 0:  # few runs are so far
            # No silence is too short: where the clock was set back the trainer was seen in the future.
            yield Wrong(b"RETIRED", [b"%d" % (retired - 1), args[1], b"", b"-600000", *args[4:]])
            return
        yield Wrong(b"GONE", args, ("meta",))
        if meta.encode() not in self._server.data:
            return
        yield Wrong(b"CHANGED", [*args[:7], b"1"])
        if not is_current:
            return
        if self._keys.trainer.encode() in self._server.data:
            yield Wrong(b"ALIVE", [*args[:2], b"", b"9000000000000", *args[4:]])
        yield Wrong(b"BEYOND", [b"%d" % (step + 1), args[1], b"1", *args[3:]])
