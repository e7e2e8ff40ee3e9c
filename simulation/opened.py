"""I14: open rollouts, against a plain model of what BEGIN, CALL, END, PUSH and FORGET may do.

The model answers each request by itself. The reply must be its answer, and the keys of the group must hold what it
holds.
Beside it stands what agents have heard: that must be in the rollout for as long as it is open, and in its push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.store.open_rollouts import OpenCall
from rlbuffer.wire import payload
from simulation.server import Command

FIRST_SAMPLE = 1_000
"""Token of the first sample: each sample of a seed has one of its own, and prompts have smaller ones."""
KEPT = (b"capability", b"epoch", b"begun", b"heard", b"calls", b"sequences", b"bytes", b"tokens", b"oldest", b"end")
"""Fields of an open rollout that stay when it is pushed."""
Reply = list[bytes]


@dataclass(slots=True)
class OpenedRollout:
    """An open rollout as it should be."""

    fields: dict[bytes, bytes]
    deadline: int
    dropped: list[int] = field(default_factory=list)
    """Samples that it lost for want of memory: a gateway that had read them before may still push them."""

    @property
    def state(self) -> bytes:
        return self.fields[b"state"]

    def call(self, number: bytes) -> bytes:
        return self.fields.get(b"c:" + number, b"")

    def samples(self) -> list[int]:
        """The samples of its calls."""
        numbers = range(1, 1 + int(self.fields[b"calls"]))
        return [sample for number in numbers for sample in samples_of(self.call(b"%d" % number), number)]

    def has(self, number: bytes, call_id: bytes) -> bool:
        """Its call with that number is the one with that id, or any where none is asked for."""
        return self.fields.get(b"i:" + call_id) == number if call_id else bool(self.call(number))


@dataclass(slots=True)
class OpenedGroup:
    """A group of them as it should be."""

    fields: dict[bytes, bytes]
    rollouts: list[OpenedRollout]
    waits_since: int = -1
    """-1 while it does not wait for its push."""
    pushed_at: int = -1
    """-1 before it is pushed."""


class Opened:
    """Checks of the scripts of open rollouts: a part of `Invariants`."""

    server: Any
    network: Any
    keys: Any
    fail: Callable[[str, str], None]
    field: Callable[[str, bytes], int]
    opened: dict[str, OpenedGroup]
    begun_by: dict[bytes, str]
    """Digest of a caller's key -> the group that it has begun."""
    open_counts: dict[bytes, int]
    accounted: dict[str, frozenset[int]]
    """Open rollout that was pushed -> the samples in its push."""
    heard: dict[tuple[str, int], int]
    """Open rollout and number of a call -> the sample that its agent has heard."""
    _tickets_before: dict[bytes, float]

    def forget_opened(self) -> None:
        """The run is begun again."""
        self.opened, self.begun_by, self.open_counts, self.accounted, self.heard = {}, {}, {}, {}, {}
        self._tickets_before = {}

    def note_opened(self, name: str, command: Command) -> None:
        """A script of open rollouts runs next."""
        if name in ("BEGIN", "CALL", "END"):
            key = command[3 + {"BEGIN": 5, "CALL": 3, "END": 6}[name]]
            tickets = self.server.find(key)
            self._tickets_before = dict(tickets.scores) if tickets else {}

    def check_opened(self, name: str, command: Command, reply: Any) -> None:
        """A script has run: is its reply the model's, and does the server hold what the model holds?"""
        keys, args = command[3 : 3 + int(command[2])], command[3 + int(command[2]) :]
        if not isinstance(reply, list):
            return
        if name == "PUSH":
            if args[11] != b"0":
                self._check_push(keys, args, reply)
            return
        if name not in ("BEGIN", "CALL", "END", "FORGET"):
            return
        expected = getattr(self, f"_model_{name.lower()}")(args)
        if expected is not None and list(map(bytes_of, reply)) != expected:
            self.fail("I14", f"{name} {args[:4]} answered {reply[:2]}, the model {expected[:2]}")
        for group in self._groups_of(name, args):
            self._compare(group)
        if name in ("BEGIN", "CALL", "END"):
            self._compare_tickets(name, keys, args, reply)
        self._compare_sets()

    # -- the model -------------------------------------------------------------------------------------------------
    def _now(self) -> int:
        return round(self.server.clock() * 1e6) // 1000

    def _line(self) -> tuple[int, int]:
        epoch, line, since = (self.field(self.keys.meta, name) for name in (b"epoch", b"line", b"since"))
        return epoch, line or since or epoch

    def _is_there(self) -> bool:
        return self.keys.meta.encode() in self.server.data

    def _model_begin(self, args: Sequence[bytes]) -> Reply:
        asked, group, env, number, idle, _, salt, about, *capabilities = args
        if not self._is_there():
            return [b"GONE"]
        if asked in self.begun_by:
            return [b"DUP", self.begun_by[asked].encode()]
        if number not in self._tickets_before or group.decode() in self.opened:
            return [b"TAKEN"]
        self._check_heard_of(group.decode())  # of a group of this name that was pushed, and forgotten since
        now, (epoch, _) = self._now(), self._line()
        clock, size = b"%d" % now, b"%d" % len(capabilities)
        its = {b"key": asked, b"env": env, b"number": number, b"size": size, b"left": size, b"epoch": b"%d" % epoch}
        its |= {b"salt": salt, b"about": about, b"begun": clock}
        zero = {b"calls": b"0", b"sequences": b"0", b"bytes": b"0", b"tokens": b"0"}
        rollouts = [
            OpenedRollout(
                {b"state": b"open", b"capability": capability, b"epoch": b"%d" % epoch, b"idle": idle}
                | {b"begun": clock, b"heard": clock, **zero},
                now + int(idle),
            )
            for capability in capabilities
        ]
        self.opened[group.decode()] = OpenedGroup(its, rollouts)
        self.begun_by[asked] = group.decode()
        self._count(env, b"begun", len(capabilities))
        return [b"OK", group]

    def _model_call(self, args: Sequence[bytes]) -> Reply:
        action, name, capability, env, _, _, *more = args
        rollout = self._rollout(name)
        if not self._is_there():
            return [b"GONE"]
        if rollout is None or rollout.fields[b"capability"] != capability:
            return [b"UNKNOWN"]
        its = rollout.fields
        if rollout.state != b"open":
            return [b"ENDED", its.get(b"end", b"")]
        answer = b""
        if action == b"record":
            line, request, seen, after, history, call, oldest, tokens, most_calls, most_bytes, *others = more
            call_id, after_id, most_sequences = others
            if b"i:" + call_id in its:
                return [b"SAME", its[b"i:" + call_id]]
            if b"frozen" in its:
                return [b"FROZEN"]
            newest = its.get(b"r:" + request)
            if newest is not None and newest != seen:
                return [b"DUP", newest, rollout.call(newest)]
            epoch, here = self._line()
            if int(line) != here or int(its[b"epoch"]) < here:
                return [b"LINE", b"%d" % epoch, b"%d" % here]
            calls, size = int(its[b"calls"]), int(its[b"bytes"])
            full = [b"FULL", its[b"calls"], its[b"bytes"], its[b"sequences"]]
            if calls >= int(most_calls) or size + len(call) > int(most_bytes):
                return full
            if after != b"0" and not rollout.has(after, after_id):
                return [b"MISSING", after]
            is_longer = after != b"0" and b"n:" + after not in its
            sequences = int(its[b"sequences"]) + (not is_longer)
            if sequences > int(most_sequences):
                return full
            answer = b"%d" % (calls + 1)
            its |= {b"calls": answer, b"c:" + answer: call, b"r:" + request: answer, b"h:" + history: answer}
            its |= {b"i:" + call_id: answer, b"sequences": b"%d" % sequences}
            if is_longer:
                its[b"n:" + after] = answer
            its |= {b"bytes": b"%d" % (size + len(call)), b"tokens": b"%d" % (int(its[b"tokens"]) + int(tokens))}
            its[b"oldest"] = b"%d" % min(int(oldest), int(its.get(b"oldest", oldest)))
            self._count(env, b"calls", 1)
            self._count(env, b"tokens", int(tokens))
        elif action == b"freeze":
            its[b"frozen"] = b"1"
        elif more[1] != b"0" and rollout.has(more[1], more[2]):
            its[b"a:" + more[0]] = b"%s %d %s" % (more[1], self._now(), more[3])
        its[b"heard"] = b"%d" % self._now()
        rollout.deadline = self._now() + int(its[b"idle"])
        return [b"OK", answer]

    def _model_end(self, args: Sequence[bytes]) -> Reply:
        action, name, end, group, env, _, _, word = args
        rollout = self._rollout(name)
        if not self._is_there():
            return [b"GONE"]
        if rollout is None or (action == b"end" and word not in (b"", rollout.fields[b"capability"])):
            return [b"UNKNOWN"]
        if action == b"drop":
            if rollout.state != b"ended":
                return [b"OPEN"]
            its = rollout.fields
            rollout.dropped += rollout.samples()
            rollout.fields = {name: its[name] for name in (b"state", b"idle", *KEPT) if name in its} | {
                b"dropped": word
            }
            self.heard = {place: sample for place, sample in self.heard.items() if place[0] != name.decode()}
            return [b"OK"]
        if rollout.state != b"open":
            stands = rollout.fields.get(b"end", b"")
            return [b"SAME"] if stands == end else [b"OTHER", stands]
        now = self._now()
        if action == b"expire" and rollout.deadline > now:
            if rollout.deadline > now + int(word):
                rollout.deadline = now + int(rollout.fields[b"idle"])
            return [b"OPEN"]
        rollout.fields |= {b"state": b"ended", b"end": end}
        self._count(env, b"ended", 1)
        whole = self.opened[group.decode()]
        left = sum(one.state == b"open" for one in whole.rollouts)
        whole.fields[b"left"] = b"%d" % left
        if not left:
            whole.waits_since = now
        return [b"OK"]

    def _model_forget(self, args: Sequence[bytes]) -> Reply | None:
        lease = self.server.data.get(self.keys.lease.encode()) or {}
        if lease.get(b"token") != args[0] or int(lease.get(b"until", 0)) < self._now():
            return None  # refused, with the name of whoever leads
        forgotten = 0
        for group in args[2::2]:
            whole = self.opened.get(group.decode())
            if whole is not None and whole.pushed_at >= 0 and self._now() - whole.pushed_at > int(args[1]):
                del self.opened[group.decode()]
                del self.begun_by[whole.fields[b"key"]]
                forgotten += 1
        return [b"OK", b"%d" % forgotten]

    def _check_push(self, keys: Sequence[bytes], args: Sequence[bytes], reply: Reply) -> None:
        """A push of open rollouts: of a group that waits, once; and all that its agents have heard is in it."""
        status, group, env = reply[0], args[4].decode(), args[3]
        if keys[2].decode() != self.keys.open_group(group):  # a wrong request: its group is none
            if status == b"OK":
                self.fail("I14", f"open rollouts {group} are pushed with the state of {keys[2].decode()}")
            return
        whole = self.opened.get(group)
        waits = whole is not None and whole.waits_since >= 0
        if status == b"DUP" and (whole is None or whole.fields.get(b"id") != reply[1]):
            self.fail("I14", f"the push of open rollouts {group} is a duplicate of {reply[1]}, the group is {whole}")
        if status == b"OPEN" and waits:
            self.fail("I14", f"the push of open rollouts {group} is refused, and the group waits for it")
        if status == b"OK" and (whole is None or not waits):
            self.fail("I14", f"open rollouts {group} are pushed, and did not wait for it")
        elif status == b"OK" and whole is not None:
            self._account(group, whole, self.keys.payload(group, args[5].decode()).encode())
            whole.waits_since, whole.pushed_at = -1, self._now()
            whole.fields |= {b"sequence": b"1", b"id": reply[1]}
            whole.fields.pop(b"about", None)
            for rollout in whole.rollouts:
                kept = {name: rollout.fields[name] for name in KEPT if name in rollout.fields}
                rollout.fields = {b"state": b"pushed", **kept}
            self._count(env, b"pushed", int(args[11]))
        if whole is not None:
            self._compare(group)
        self._compare_sets()

    def _rollout(self, name: bytes) -> OpenedRollout | None:
        group, _, index = name.decode().rpartition("/")
        whole = self.opened.get(group)
        return whole.rollouts[int(index)] if whole is not None and int(index) < len(whole.rollouts) else None

    def _count(self, env: bytes, what: bytes, more: int) -> None:
        name = env + b":" + what
        self.open_counts[name] = self.open_counts.get(name, 0) + more

    # -- what agents have heard --------------------------------------------------------------------------------------
    def hears(self, name: str, number: int, sample: int, *, may_be_lost: bool) -> None:
        """An agent hears the answer of a call. `may_be_lost`: the server has lost writes, or the run, since it was
        made."""
        rollout = self._rollout(name.encode())
        there = rollout is not None and samples_of(rollout.call(b"%d" % number), number) == [sample]
        if not there and not may_be_lost and sample not in self.accounted.get(name, ()):
            self.fail("I14", f"an agent hears call {number} of {name}, sample {sample}, which is not on the server")
        if there:
            self.heard[name, number] = sample

    def _account(self, group: str, whole: OpenedGroup, key: bytes) -> None:
        fields = self.server.find(key)
        if fields is None:
            return  # of a shard on which it expired
        failures = 0
        for index, rollout in enumerate(whole.rollouts):
            name = f"{group}/{index}"
            its = payload.decode_rollout(fields[b"%d" % index])
            pushed = [int(token) for token in its.tokens[its.loss_mask] if token >= FIRST_SAMPLE]
            recorded = rollout.samples()
            failures += its.failure is not None
            if sorted(pushed) not in (sorted(recorded), sorted(rollout.dropped)) or len(set(pushed)) != len(pushed):
                self.fail("I14", f"{name} is pushed with samples {pushed}, recorded were {recorded}")
            lost = {sample for (heard, _), sample in self.heard.items() if heard == name} - set(pushed)
            if lost:
                self.fail("I14", f"{name} is pushed without samples {sorted(lost)}, which its agent has heard")
            self.accounted[name] = self.accounted.get(name, frozenset()) | frozenset(pushed)
        if int(whole.fields[b"epoch"]) < self._line()[1] and failures < len(whole.rollouts):
            self.fail("I14", f"{group} was begun in another line of versions, and is pushed as more than failures")

    def check_heard(self) -> None:
        """In the end everything that was heard is in a rollout that is there, or in a push."""
        for (name, number), sample in self.heard.items():
            if not self._is_accounted(name, number, sample):
                self.fail("I14", f"call {number} of {name} was heard, and is neither in the rollout nor in a push")

    def _check_heard_of(self, group: str) -> None:
        for (name, number), sample in list(self.heard.items()):
            if name.rpartition("/")[0] == group:
                if sample not in self.accounted.get(name, ()):
                    self.fail("I14", f"{group} is begun again, and call {number} of {name}, which was heard, is lost")
                del self.heard[name, number]

    def still_heard(self) -> None:
        """The server has lost writes: what it lost nobody can account for."""
        self.heard = {place: sample for place, sample in self.heard.items() if self._is_accounted(*place, sample)}

    def _is_accounted(self, name: str, number: int, sample: int) -> bool:
        rollout = self._rollout(name.encode())
        is_there = rollout is not None and samples_of(rollout.call(b"%d" % number), number) == [sample]
        return is_there or sample in self.accounted.get(name, ())

    # -- what is on the server ---------------------------------------------------------------------------------------
    def _groups_of(self, name: str, args: Sequence[bytes]) -> list[str]:
        if name == "FORGET":
            return [group.decode() for group in args[2::2]]
        return [(args[1].rpartition(b"/")[0] if name == "CALL" else args[1 if name == "BEGIN" else 3]).decode()]

    def _compare(self, group: str) -> None:
        data, whole, keys = self.server.data, self.opened.get(group), self.keys
        there = data.get(keys.open_group(group).encode())
        if there != (None if whole is None else whole.fields):
            self.fail("I14", f"open_group {group} holds {there}, not {whole and whole.fields}")
        for index, rollout in enumerate(whole.rollouts if whole is not None else ()):
            its = data.get(keys.open_rollout(f"{group}/{index}").encode())
            if its != rollout.fields:
                odd = sorted((its or {}).items() ^ rollout.fields.items())
                self.fail("I14", f"open_rollout {group}/{index} differs from the model in {odd[:4]}")
        if whole is None and any(keys.open_rollout(f"{group}/{i}").encode() in data for i in range(4)):
            self.fail("I14", f"open rollouts of {group} are there, and the group is not")

    def _compare_sets(self) -> None:
        keys, groups = self.keys, self.opened.items()
        sets = {
            keys.open: {
                f"{group}/{i}".encode(): float(its.deadline)
                for group, whole in groups
                for i, its in enumerate(whole.rollouts)
                if its.state == b"open"
            },
            keys.open_ended: {g.encode(): float(whole.waits_since) for g, whole in groups if whole.waits_since >= 0},
            keys.open_pushed: {g.encode(): float(whole.pushed_at) for g, whole in groups if whole.pushed_at >= 0},
        }
        for key, expected in sets.items():
            there = self.server.data.get(key.encode())
            if (dict(there.scores) if there else {}) != expected:
                odd = sorted(set(there.scores.items() if there else ()) ^ set(expected.items()))
                self.fail("I14", f"{key} differs from the model in {odd[:4]}")
        named = self.server.data.get(keys.open_keys.encode()) or {}
        if named != {asked: group.encode() for asked, group in self.begun_by.items()}:
            self.fail("I14", f"{keys.open_keys} holds {len(named)} keys, {len(self.begun_by)} were begun")
        counts = self.server.data.get(keys.open_counts.encode()) or {}
        if counts != {name: b"%d" % count for name, count in self.open_counts.items()}:
            self.fail("I14", f"{keys.open_counts} holds {counts}, {self.open_counts} by what happened")

    def _compare_tickets(self, name: str, keys: Sequence[bytes], args: Sequence[bytes], reply: Reply) -> None:
        """The ticket stays out until after the deadline of its rollouts, and none comes back that was closed."""
        tickets = self.server.find(keys[{"BEGIN": 5, "CALL": 3, "END": 6}[name]])
        after, expected = dict(tickets.scores) if tickets else {}, dict(self._tickets_before)
        number = args[{"BEGIN": 3, "CALL": 4, "END": 5}[name]]
        if reply[0] == b"OK" and number in expected and args[0] != b"drop":
            idle = self.opened[self._groups_of(name, args)[0]].rollouts[0].fields[b"idle"]
            expected[number] = self._now() + int(idle) + int(args[{"BEGIN": 5, "CALL": 5, "END": 6}[name]])
        if after != expected:
            self.fail("I14", f"{name} leaves tickets {after}, not {expected}")


def bytes_of(part: Any) -> bytes:
    """A part of a reply, as the model has it."""
    return part if isinstance(part, bytes) else str(part).encode()


def samples_of(call: bytes, number: int) -> list[int]:
    """The samples in a call as it was recorded."""
    if not call:
        return []
    return [int(token) for token in OpenCall.decoded(call, number).tokens if token >= FIRST_SAMPLE]
