"""The invariants of docs/protocol.md, checked on the server's data after every event, from what the event changed.

Nothing of `verify` is used: this keeps accounts of its own. An event is one command, one script or one MULTI; the first
violation ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from rlbuffer import wire
from rlbuffer.errors import PayloadError
from rlbuffer.infos import GroupInfo
from rlbuffer.store.keys import Keys
from rlbuffer.store.pool import CLOSING_REASONS, reused_groups
from rlbuffer.store.step_format import decode_header, decode_part, step_digest
from simulation.accounts import Live, Pending
from simulation.network import Network
from simulation.server import Command, Server
from simulation.values import StreamId

UNITS = ("rollouts", "tokens")
_KNOWLEDGE = (
    "pool",
    "pushed",
    "steps",
    "digests",
    "outlived",
    "_used",
    "_uses",
    "_closed",
    "_amounts",
    "_highest",
    "_holder",
    "_leader",
)


class Invariants:
    """What must always hold."""

    def __init__(self, server: Server, network: Network, run: str) -> None:
        self.server = server
        self.network = network
        self.config = network.plan.config
        self.keys = Keys(run)
        self.violation = ""
        self.events = 0
        self.incarnations: dict[str, int] = {}
        """Producer -> the epoch that its writer works in."""
        self._names: dict[bytes, str] = {}
        self._before: Any = None
        keys = self.keys
        self._handlers = {
            getattr(keys, name).encode(): getattr(self, f"_{name}_changed")
            for name in ("pool", "steps", "ledger", "trainer", "meta", "policy", "lease", "garbage")
        }
        self._prefix = keys.payload_prefix.encode()
        self._tombstone_ms = round(1000 * max(network.plan.tombstone_seconds, 2 * self.config.group_timeout_seconds))
        self.forget()
        server.before_event = self._note
        server.on_event = self._check

    def forget(self) -> None:
        """The run is begun anew: nothing is known of it."""
        self.pool: dict[StreamId, Pending] = {}
        self.pushed: dict[bytes, Pending] = {}
        """Payload key -> the entry, of everything that was ever pending."""
        self.steps: dict[int, Live] = {}
        self.digests: dict[int, str] = {}
        self.trained_content: dict[tuple[int, int, int], str] = {}
        self._used: dict[str, tuple[int, int]] = {}
        """rollout id -> step, when."""
        self._uses: dict[str, int] = {}
        """rollout id -> steps that trained it."""
        self.outlived: set[str] = set()
        """Rollouts that were pushed and trained again after their tombstone had gone: allowed."""
        self._closed: dict[str, tuple[int, str]] = {}
        """group -> when it was closed (server ms), by what."""
        self._amounts: dict[tuple[str, str], list[int]] = {}
        """(env, fate) -> rollouts, tokens, as they should be."""
        self._highest: dict[str, int] = {}
        self._holder = self._leader = (b"", 0)
        self._rearmed: set[bytes] = set()
        self.lost_digests: set[str] = set()
        """Steps that the server has lost, and that somebody may be training yet."""
        self.forgotten: dict[str, int] = {}
        """Rollout -> the step that trained it before the server lost it: it must not train again."""

    def snapshot(self) -> dict[str, Any]:
        """What is known now, to go with a snapshot of the server."""
        return {name: deepcopy(getattr(self, name)) for name in _KNOWLEDGE}

    def roll_back(self, saved: dict[str, Any], trained: int) -> None:
        """The server went back to the snapshot that this one goes with; its trainer is at step `trained`."""
        lost = {step: digest for step, digest in self.digests.items() if saved["digests"].get(step) != digest}
        self.lost_digests |= set(lost.values())
        for rollout, (step, _) in self._used.items():
            if step in lost and step <= trained:
                self.forgotten[rollout] = step
        for place in [place for place in self.trained_content if place[0] in lost]:
            del self.trained_content[place]
        for name, value in saved.items():
            setattr(self, name, deepcopy(value))

    def restarted(self, step: int) -> None:
        """A trainer begins from a checkpoint of `step`: what was trained after it is not in its state."""
        self.forgotten = {rollout: at for rollout, at in self.forgotten.items() if at <= step}

    def fail(self, invariant: str, message: str) -> None:
        """Keeps the first violation."""
        if not self.violation:
            self.violation = f"{invariant}: {message}"

    # -- events ----------------------------------------------------------------------------------------------------
    def _note(self, commands: Sequence[Command]) -> None:
        if len(commands) == 1 and commands[0][0] == b"EVALSHA" and self._script(commands[0]) == "TICKET":
            tickets = self.server.find(commands[0][3])
            self._before = dict(tickets.scores) if tickets else {}

    def _check(self, commands: Sequence[Command], replies: list[Any]) -> None:
        self.events += 1
        if self.violation:
            return
        self._envs: set[str] = set()
        self._suspects: set[bytes] = set()
        self._left: dict[bytes, Pending] = {}
        self._new_steps: dict[int, None] = {}
        first, reply = commands[0], replies[0]
        if (
            first[0] == b"EVALSHA"
            and self._script(first) == "RECOVER"
            and isinstance(reply, list)
            and reply[0] == b"OK"
        ):
            self._recovered(first[3 + int(first[2]) :], int(reply[1]))
        for kind, key, detail in self.server.changes:
            handler = self._handlers.get(key)
            if handler is not None:
                handler(kind, detail)
            elif key.startswith(self._prefix):
                self._suspects.add(key)
                if self.network.is_repetition and commands[0][0] == b"HSET":
                    self._rearmed.add(key)
        for step in self._new_steps:
            self._check_step(step)
        for command, reply in zip(commands, replies, strict=True):
            if command[0] == b"EVALSHA" and not isinstance(reply, Exception):
                self._check_script(self._script(command), command, reply)
        if self._suspects:
            self._check_payloads()
        if self._envs:
            self._check_ledger()

    def _script(self, command: Command) -> str:
        sha = command[1]
        if sha not in self._names:
            found = self.server.scripts.get(sha)
            if found is None:
                return ""
            name = re.search(r"^-- ([A-Z]+)", found[0], re.MULTILINE)
            self._names[sha] = name[1] if name else ""
        return self._names[sha]

    def _grows(self, what: str, value: int, invariant: str = "I8") -> None:
        before = self._highest.get(what, value)
        if value < before:
            self.fail(invariant, f"{what} went back from {before} to {value}")
        self._highest[what] = max(before, value)

    def _field(self, key: str, name: bytes) -> int:
        return int((self.server.data.get(key.encode()) or {}).get(name, 0) or 0)

    # -- what changed ----------------------------------------------------------------------------------------------
    def _pool_changed(self, kind: str, entry_id: StreamId) -> None:
        if kind == "xadd":
            raw = self.server.data[self.keys.pool.encode()].entries[entry_id]
            fields = dict(zip(raw[::2], raw[1::2], strict=True))
            group, suffix = fields[b"group"].decode(), fields[b"key"].decode()
            payload = self.keys.payload(group, suffix).encode()
            entry = Pending(
                payload,
                group,
                fields[b"env"].decode(),
                (int(fields[b"rollouts"]), int(fields[b"tokens"])),
                fields[b"metadata"],
                entry_id[0],
            )
            if any(known.endswith(suffix.encode()) for known in (payload,) if known in self.pushed):
                self.fail("I1", f"push {suffix} of group {group} became pending twice")
            if payload not in self.server.data:
                self.fail("I11", f"push {suffix} of group {group} became pending without its payload")
            epoch, incarnation = self._field(self.keys.meta, b"epoch"), suffix.rpartition(".")[0]
            if self.incarnations.get(incarnation, epoch) != epoch:
                self.fail("I4", f"push {suffix} of epoch {self.incarnations[incarnation]} became pending in {epoch}")
            self.pool[entry_id] = self.pushed[payload] = entry
            self._move(entry.env, "pushed", entry.amounts)
        else:
            gone = self.pool.pop(entry_id, None)
            if gone is not None:
                self._left[gone.payload] = gone
                self._envs.add(gone.env)
                self._suspects.add(gone.payload)

    def _steps_changed(self, kind: str, entry_id: StreamId) -> None:
        if kind == "gone":
            if self.steps:
                self.fail("I4", f"the stream was deleted with steps {sorted(self.steps)}")
            return
        step = entry_id[0]
        if kind == "xadd":
            self._new_steps[step] = None
            return
        trained, kept = (self._field(self.keys.trainer, name) for name in (b"trained", b"oldest_kept"))
        if step > min(trained, kept):
            self.fail("I4", f"step {step} left the stream, {trained} are trained, the oldest checkpoint is {kept}")
        live = self.steps.pop(step, None)
        if live is not None:
            self._suspects |= live.payloads

    def _ledger_changed(self, kind: str, field: bytes) -> None:
        env, colon, _ = field.decode().partition(":")
        if colon:
            self._envs.add(env)

    def _trainer_changed(self, kind: str, field: bytes) -> None:
        if field in (b"number", b"trained", b"oldest_kept"):
            value = self._field(self.keys.trainer, field)
            before = self._highest.get(f"trainer {field.decode()}", 0)
            self._grows(f"trainer {field.decode()}", value)
            if field == b"trained":
                if value > self._field(self.keys.meta, b"step"):
                    self.fail("I8", f"step {value} is trained, the run has no such step")
                for step in range(before + 1, value + 1):
                    for env, amounts in self.steps[step].amounts.items() if step in self.steps else ():
                        self._move(env, "packed", (-amounts[0], -amounts[1]))
                        self._move(env, "trained", (amounts[0], amounts[1]))

    def _meta_changed(self, kind: str, field: bytes) -> None:
        if kind == "hash" and field in (b"step", b"retired", b"epoch"):
            self._grows(f"meta {field.decode()}", self._field(self.keys.meta, field))

    def _policy_changed(self, kind: str, adapter: bytes) -> None:
        if kind == "hash":
            epoch, version, _ = self.server.data[self.keys.policy.encode()][adapter].split(b" ", 2)
            self._grows(f"policy version in epoch {epoch.decode()}", int(version))

    def _lease_changed(self, kind: str, field: bytes) -> None:
        if kind != "hash":
            return
        token = self._field(self.keys.lease, b"token")
        self._grows("lease token", token)
        owner = self.server.data[self.keys.lease.encode()].get(b"owner", b"")
        if owner != self._holder[0] and token <= self._holder[1]:
            self.fail("I8", f"two leaders share the token {token}")
        self._holder = owner, token

    def _garbage_changed(self, kind: str, member: bytes) -> None:
        if kind == "zset":
            self._suspects.add(member)

    def _move(self, env: str, fate: str, amounts: tuple[int, int]) -> None:
        self._envs.add(env)
        sums = self._amounts.setdefault((env, fate), [0, 0])
        sums[0] += amounts[0]
        sums[1] += amounts[1]

    def _recovered(self, args: Sequence[bytes], epoch: int) -> None:
        """RECOVER: what it may move, by the accounts kept here."""
        step, fork, before = int(args[3]), int(args[6]), self._highest.get("trainer trained", 0)
        for number, live in self.steps.items():
            self._suspects |= live.payloads
            for env, (rollouts, tokens) in live.amounts.items() if number > before else ():
                self._move(env, "packed", (-rollouts, -tokens))
                if not fork or number < fork:
                    self._move(env, "trained", (rollouts, tokens))
        self.steps.clear()
        at = 12 + 2 * int(args[11])
        for group in args[12:at:2]:
            self._close(group.decode(), "the recovery")
        count, at = int(args[at]), at + 1
        for _ in range(count):
            milliseconds, _, place = args[at].partition(b"-")
            entry = self.pool.get((int(milliseconds), int(place)))
            if entry is not None:
                self._move(entry.env, "trained", (int(args[at + 1]), int(args[at + 2])))
            at += 4 + 3 * int(args[at + 3])
        self.digests = {n: digest for n, digest in self.digests.items() if n < step} | {step: args[4].decode()}
        self._highest |= {"trainer trained": step, "meta step": step, "meta retired": step, "trainer oldest_kept": 0}
        self.trained_content = {place: content for place, content in self.trained_content.items() if place[0] <= step}
        self.incarnations = dict.fromkeys(self.incarnations, epoch)

    # -- I10, I11 --------------------------------------------------------------------------------------------------
    def _check_ledger(self) -> None:
        ledger = self.server.data.get(self.keys.ledger.encode()) or {}
        for env in self._envs:
            for unit, name in enumerate(UNITS):
                end = f":{name}".encode()
                dropped = sum(
                    int(v) for k, v in ledger.items() if k.startswith(env.encode() + b":dropped:") and k.endswith(end)
                )
                there = {
                    fate: int(ledger.get(f"{env}:{fate}:{name}".encode(), 0))
                    for fate in ("pushed", "packed", "trained")
                }
                for fate, value in there.items():
                    wanted = self._amounts.get((env, fate), (0, 0))[unit]
                    if value != wanted:
                        self.fail("I10", f"{env}: {value} {name} {fate} in the ledger, {wanted} by what happened")
                pending = sum(e.amounts[unit] for e in self.pool.values() if e.env == env)
                left = there["pushed"] - there["packed"] - there["trained"] - dropped
                if left != pending:
                    self.fail("I10", f"{env}: the ledger leaves {left} {name} pending, the pool holds {pending}")

    def _check_payloads(self) -> None:
        garbage = self.server.data.get(self.keys.garbage.encode())
        pending = {entry.payload for entry in self.pool.values()} | (self._kept() if self._suspects else set())
        for key in self._suspects:
            users = [step for step, live in self.steps.items() if key in live.payloads]
            if self.server.find(key) is None:
                if users or key in pending:
                    self.fail("I11", f"{key.decode()} is gone, step {users or 'none'} or the pool names it")
            elif key not in self.server.expiry:
                if not users and key not in pending and not (garbage and key in garbage.scores):
                    self.fail("I11", f"{key.decode()} belongs to nothing and stays for ever")
            elif users and key not in self._rearmed:
                self.fail("I2", f"{key.decode()} of step {users} has a time to live")

    # -- I1 to I6 --------------------------------------------------------------------------------------------------
    def _check_step(self, step: int) -> None:
        stream = self.server.data[self.keys.steps.encode()]
        ids = stream.between((step, 0), (step, 2**64 - 1))
        raw = stream.entries[ids[0]]
        fields = dict(zip(raw[::2], raw[1::2], strict=True))
        part_bytes = [stream.entries[i][1] for i in ids[1:]]
        try:
            header, limits = decode_header(fields[b"header"], digest=fields[b"digest"].decode(), committed_ms=0)
            parts = [decode_part(data) for data in part_bytes]
        except (PayloadError, KeyError) as problem:
            self.fail("I4", f"step {step} cannot be read: {problem}")
            return
        last = max(self.digests, default=0)
        if step != last + 1 or self._field(self.keys.meta, b"step") != step:
            self.fail("I4", f"step {step} was committed after step {last}")
        previous = self.digests.get(last, "")
        if header.previous_digest != previous or step_digest(previous, fields[b"header"], part_bytes) != header.digest:
            self.fail("I3", f"the digest of step {step} does not chain on that of step {last}")
        self.digests[step] = header.digest
        now = self.server.now_ms()
        members = [member for part in parts for member in part.rollouts]
        groups: dict[str, list[Any]] = {}
        amounts: dict[str, list[int]] = {}
        for member in members:
            groups.setdefault(member.group_id, []).append(member)
            rollout, key = member.info.rollout_id, member.payload_key.encode()
            if rollout in self.forgotten:
                lost = self.forgotten[rollout]
                self.fail("I1", f"rollout {rollout} of step {step} was trained in step {lost}, which the server lost")
            again = header.uses.get(member.group_id, 0)
            if again:
                self._check_use(step, rollout, again)
            else:
                sums = amounts.setdefault(member.env, [0, 0])
                sums[0], sums[1] = sums[0] + 1, sums[1] + member.info.length
            if rollout in self._used and not again:
                before, at = self._used[rollout]
                if now - at < self._tombstone_ms / 2:
                    self.fail("I1", f"rollout {rollout} of step {step} was in step {before}")
                self.outlived.add(rollout)
            self._uses[rollout] = again + 1
            self._used[rollout] = step, now
            if key not in self._left and not again:
                self.fail("I1", f"step {step} trains {key.decode()}, which was not pending")
            stored = (self.server.find(key) or {}).get(str(member.index).encode(), b"")
            if len(stored) != member.info.size:
                self.fail("I2", f"step {step}: rollout {rollout} has {len(stored)} of {member.info.size} bytes")
            age, limit = step - 1 - member.info.min_version, self.config.max_age
            if not 0 <= age <= limit or limits.get(member.env) != limit:
                self.fail("I5", f"step {step}: rollout {rollout} has age {age}, max_age is {limit}")
        payloads = frozenset(member.payload_key.encode() for member in members)
        self.steps[step] = Live(payloads, amounts)
        self._suspects |= payloads
        for env, sums in amounts.items():
            self._move(env, "packed", (sums[0], sums[1]))
        if set(header.group_ids) != set(groups) or len(header.group_ids) != len(groups):
            self.fail("I6", f"step {step} names groups {header.group_ids}, its parts hold {sorted(groups)}")
        for group, held in groups.items():
            if group not in header.uses:
                self._check_group(step, group, held, now)
        garbage = self.server.data.get(self.keys.garbage.encode())
        kept = self._kept()
        for key in payloads - kept:
            if garbage is None or garbage.scores.get(key, -1) < step:
                self.fail("I11", f"step {step}: {key.decode()} may be swept before the step is retired")

    def _check_use(self, step: int, rollout: str, again: int) -> None:
        """A rollout that was trained before: exactly as often as the step says, and not too often."""
        if self._uses.get(rollout) != again or again >= self.config.max_uses:
            self.fail("I1", f"rollout {rollout} of step {step} was used {self._uses.get(rollout)} times, not {again}")
        elif self._used[rollout][0] == step:
            self.fail("I1", f"rollout {rollout} is twice in step {step}")

    def _kept(self) -> set[bytes]:
        """Payloads of groups that may be used again."""
        fields = self.server.data.get(self.keys.reuse.encode()) or {}
        groups = reused_groups(self.keys, fields)
        return {entry.payload_key.encode() for group in groups for entry in group.entries}

    def _check_group(self, step: int, group: str, held: list[Any], now: int) -> None:
        closed = self._closed.get(group)
        if closed and now - closed[0] < self._tombstone_ms / 2:
            self.fail("I6", f"step {step} trains group {group}, which {closed[1]} closed {now - closed[0]} ms before")
        self._close(group, f"step {step}")
        tombstones = self.server.data.get(self.keys.closed.encode())
        if tombstones is None or group.encode() not in tombstones.scores:
            self.fail("I6", f"group {group} of step {step} has no tombstone")
        sources = [self._left[key] for key in {m.payload_key.encode() for m in held} if key in self._left]
        if not sources:
            return
        info: GroupInfo = wire.decode_info(sources[0].metadata)
        waited = now - min(source.pushed_ms for source in sources)
        if len({m.info.rollout_id for m in held}) != len(held) or len(held) > info.planned_size:
            self.fail("I6", f"step {step}: group {group} has {len(held)} rollouts, some twice or too many")
        if len(held) < info.planned_size and (
            len(held) < self.config.min_group_size or waited < 1000 * self.config.group_timeout_seconds - 1
        ):
            self.fail("I6", f"step {step}: group {group} has {len(held)} of {info.planned_size} after {waited} ms")

    def _close(self, group: str, by: str) -> None:
        self._closed[group] = self.server.now_ms(), by

    # -- fences ----------------------------------------------------------------------------------------------------
    def _check_script(self, name: str, command: Command, reply: Any) -> None:
        keys, args = command[3 : 3 + int(command[2])], command[3 + int(command[2]) :]
        status = reply[0] if isinstance(reply, list) and reply else b""
        now = self.server.now_ms()
        if name in ("COMMIT", "DROP", "RETIRE") and status == b"OK":
            lease = self.server.data.get(self.keys.lease.encode()) or {}
            if lease.get(b"token") != args[0]:
                self.fail("I8", f"{name} passed with token {args[0].decode()}, the leader's is {lease.get(b'token')}")
            elif int(lease[b"until"]) < now:
                self.fail("I8", f"{name} passed {now - int(lease[b'until'])} ms after the lease had run out")
        if name in ("REPORT", "ANNOUNCE") and status in (b"OK", b"OLD"):
            number = self._field(self.keys.trainer, b"number")
            if int(args[0]) != number:
                self.fail("I8", f"{name} of attempt {args[0].decode()} passed, the attempt is {number}")
            if name == "REPORT" and int(args[1]) != self._field(self.keys.meta, b"epoch"):
                self.fail("I4", f"REPORT of epoch {args[1].decode()} passed")
        if name == "LEASE" and args[0] == b"acquire" and status in (b"ACQUIRED", b"RENEWED"):
            if self._leader[0] not in (b"", args[1]) and self._leader[1] > now and status == b"RENEWED":
                self.fail("I8", f"the lease of {self._leader[0].decode()} was renewed by another")
            if self._leader[0] != args[1] and self._leader[1] > now:
                self.fail("I8", f"the lease went from one to another {self._leader[1] - now} ms before it ran out")
        if name == "LEASE":
            lease = self.server.data.get(self.keys.lease.encode()) or {}
            self._leader = lease.get(b"owner", b""), int(lease.get(b"until", 0))
        if name == "DROP" and status == b"OK":
            self._check_drop(args)
        if name == "TICKET" and args[0] == b"take":
            self._check_take(args, reply, keys, now)

    def _check_drop(self, args: Sequence[bytes]) -> None:
        at, left = 5, {entry.group for entry in self._left.values()}
        tombstones = self.server.data.get(self.keys.closed.encode())
        for _ in range(int(args[4])):
            group, reason, closes = args[at].decode(), args[at + 2].decode(), args[at + 3] == b"1"
            at += 6 + int(args[at + 5])
            if closes != (reason in CLOSING_REASONS) and closes:
                self.fail("I6", f"a drop for {reason} closes group {group}")
            if closes and group in left:
                if reason != "void":  # dropped by hand: the leader does not know
                    self._close(group, f"its drop ({reason})")
                if tombstones is None or group.encode() not in tombstones.scores:
                    self.fail("I6", f"group {group} was dropped ({reason}) without a tombstone")

    def _check_take(self, args: Sequence[bytes], reply: Any, keys: Sequence[bytes], now: int) -> None:
        allowed = self.server.data.get(keys[1]) or {}
        limit = int(allowed.get(args[1], allowed.get(b"*", 0)))
        out = {number for number, expiry in self._before.items() if expiry > now}
        given = {b"%d" % number for number in reply}
        if given & out or len(given) != len(reply):
            self.fail("tickets", f"{sorted(given & out)} of {args[1].decode()} were given out while they were out")
        if given and len(out) + len(given) > limit:
            self.fail(
                "tickets", f"{len(out)} + {len(given)} tickets of {args[1].decode()} are out, allowed are {limit}"
            )
