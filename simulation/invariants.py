"""The invariants of docs/explain/protocol.md, checked on the server's data after every event, from what it changed.

Nothing of `verify` is used: this keeps accounts of its own. An event is one command, one script or one MULTI; the first
violation ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import ENV_NAME, GroupInfo
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_plan import Normalizers, version_trained
from rlbuffer.store.keys import Keys
from rlbuffer.store.moves.pool import reused_groups
from rlbuffer.store.moves.step_format import decode_header, decode_part, step_digest
from rlbuffer.wire import payload
from simulation.accounts import Live, Pending
from simulation.fences import Fences
from simulation.network import Network
from simulation.rewinds import Rewinds
from simulation.server import Command, Server
from simulation.values import Stream, StreamId, stream_id

UNITS = ("rollouts", "tokens")
FATES = ("pushed", "packed", "trained", "dropped")


@cache
def ledger_place(field: bytes) -> tuple[str, str, str]:
    """Env, fate and unit of a field of the ledger; every reason of a drop is one fate. What is beside it is no fate."""
    env, *fate, unit = field.decode().split(":") if b":" in field else ("", field.decode(), "")
    return env, fate[0], unit


def counted(value: bytes) -> int:
    """An amount, as a drop counts it."""
    return int(value) if value.isdigit() and len(value) <= 15 else 0


def _incarnation(payload: bytes) -> str:
    """Incarnation of the producer that pushed it."""
    return payload.decode().rpartition(":")[2].rpartition(".")[0]


class Invariants(Fences, Rewinds):
    """Conditions that must always hold."""

    def __init__(self, server: Server, network: Network, run: str) -> None:
        self.server = server
        self.network = network
        self.config = network.plan.config
        self.keys = Keys(run)
        self.violation = ""
        self.events = 0
        self.incarnations: dict[str, int] = {}
        """Producer -> the epoch that its writer works in."""
        self.damaged: set[tuple[bytes, bytes]] = set()
        """Payload key and field, of what chance has changed. A server that loses a reset has them back."""
        self._names: dict[bytes, str] = {}
        self._before: Any = None
        keys = self.keys
        self._handlers = {
            getattr(keys, name).encode(): getattr(self, f"_{name}_changed")
            for name in ("pool", "steps", "ledger", "trainer", "meta", "policy", "lease", "garbage", "ends")
        }
        self._prefix = keys.payload_prefix.encode()
        self.on_moment: Callable[[str], None] = lambda what: None
        """Hears of a recovery, and of steps that retire early."""
        self.forget()
        server.before_event = self._note
        server.on_event = self._check

    def forget(self) -> None:
        """The run is begun anew: nothing is known of it."""
        self.pool: dict[StreamId, Pending] = {}
        self.strange: dict[StreamId, dict[bytes, bytes]] = {}
        """What somebody else than a client has put there."""
        self.pushed: dict[bytes, Pending] = {}
        """Payload key -> the entry, of everything that was ever pending."""
        self.parts: dict[str, list[Pending]] = {}
        """Group -> the same entries."""
        self.scored: set[StreamId] = set()
        """Entries whose place a scored push has taken."""
        self.steps: dict[int, Live] = {}
        self.digests: dict[int, str] = {}
        self.trained_content: dict[tuple[int, int, int], str] = {}
        self._used: dict[str, tuple[int, int]] = {}
        """rollout id -> step, when."""
        self._uses: dict[str, int] = {}
        """rollout id -> steps that trained it."""
        self._closed: dict[str, tuple[int, str]] = {}
        """group -> when it was closed (server ms), by what."""
        self._amounts: dict[tuple[str, str], list[int]] = {}
        """(env, fate) -> rollouts, tokens, as they should be."""
        self._highest: dict[str, int] = {}
        self._holder = self._leader = (b"", 0)
        self._said: set[str] = set()
        """Envs of which somebody has said that nothing more comes, not even a part; the leader may know it yet when it
        was taken back."""
        self._normalizers: dict[str, Normalizers] = {}
        """Digest of a step -> what its losses are divided by."""
        self._continued: dict[int, int] = {}
        self.sampled: dict[tuple[str, str], tuple[int, str]] = {}
        """(incarnation, group) -> the version that its rollouts are of, and the digest of the step that made it."""
        self.was_rolled_back = False
        self.lost_digests: set[str] = set()
        """Steps that the server has lost, and that somebody may be training yet."""
        self.forgotten: dict[str, int] = {}
        """Rollout -> the step that trained it before the server lost it: it must not train again."""

    def fail(self, invariant: str, message: str) -> None:
        """Keeps the first violation."""
        if not self.violation:
            self.violation = f"{invariant}: {message}"

    # -- events ----------------------------------------------------------------------------------------------------
    def _note(self, commands: Sequence[Command]) -> None:
        if len(commands) == 1 and self._script(commands[0]) == "TICKET":
            tickets = self.server.find(commands[0][3])
            self._before = dict(tickets.scores) if tickets else {}

    def _check(self, commands: Sequence[Command], replies: list[Any]) -> None:
        self.events += 1
        if self.violation or (not self.server.changes and all(command[0] != b"EVALSHA" for command in commands)):
            return
        self._envs: set[str] = set()
        self._suspects: set[bytes] = set()
        self._left: dict[bytes, Pending] = {}
        self._new_steps: dict[int, None] = {}
        first, reply = commands[0], replies[0]
        is_done = first[0] == b"EVALSHA" and isinstance(reply, list) and reply[:1] == [b"OK"]
        name = self._script(first) if is_done else ""
        if name == "RECOVER":
            self._recovered(first[3 + int(first[2]) :], int(reply[1]))
            self.on_moment("a recovery")
        elif name == "VOID":
            self._taken_back(first[3 + int(first[2]) :])
        if name == "" and first[0] == b"EVALSHA" and isinstance(reply, list) and reply[:1] == [b"MOVED"]:
            self._renumbered()
        # What leaves a stream first: what takes its place in the same script must find it gone.
        for kind, key, detail in sorted(self.server.changes, key=lambda change: change[0] != "xdel"):
            handler = self._handlers.get(key)
            if handler is not None:
                handler(kind, detail)
            elif key.startswith(self._prefix):
                self._suspects.add(key)
        if name == "VOID":
            self._check_taken_back(first[3 + int(first[2]) :])
        for step in self._new_steps:
            self._check_step(step)
        for command, reply in zip(commands, replies, strict=True):
            if command[0] == b"EVALSHA":
                self._check_script(self._script(command), command, reply)
        if self._suspects:
            self._check_payloads()
        if self._envs:
            self._check_ledger()

    def _script(self, command: Command) -> str:
        sha = command[1]
        if sha not in self._names:
            script = self.server.scripts.get(sha)
            if script is None:
                return ""
            name = re.search(r"^-- ([A-Z]+)", script[0], re.MULTILINE)
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
            if self.network.sender.startswith("operator without"):
                self.strange[entry_id] = fields
                return
            group, suffix = fields[b"group"].decode(), fields[b"key"].decode()
            payload = self.keys.payload(group, suffix).encode()
            entry = Pending(
                payload,
                group,
                fields[b"env"].decode(),
                (int(fields[b"rollouts"]), int(fields[b"tokens"])),
                fields[b"metadata"],
                int(fields.get(b"pushed", entry_id[0])),
                entry_id,
            )
            if any(known.endswith(suffix.encode()) for known in (payload,) if known in self.pushed):
                self.fail("I1", f"push {suffix} of group {group} became pending twice")
            if self.server.find(payload) is None:
                self.fail("I11", f"push {suffix} of group {group} became pending without its payload")
            epoch, incarnation = self._field(self.keys.meta, b"epoch"), suffix.rpartition(".")[0]
            if self.incarnations.get(incarnation, epoch) != epoch:
                self.fail("I4", f"push {suffix} of epoch {self.incarnations[incarnation]} became pending in {epoch}")
            self.pool[entry_id] = self.pushed[payload] = entry
            self.parts.setdefault(group, []).append(entry)
            if b"replaces" in fields:
                self._check_replaced(entry, stream_id(fields[b"replaces"]))
            else:
                self._move(entry.env, "pushed", entry.amounts)
            self._move(entry.env, "pending", entry.amounts)
        else:
            gone, strange = self.pool.pop(entry_id, None), self.strange.pop(entry_id, None)
            if strange is not None:
                # Nobody has counted it as pushed; its drop counts what it says.
                rollouts, tokens = (counted(strange.get(unit.encode(), b"")) for unit in UNITS)
                env = strange.get(b"env", b"").decode()
                self._move(env if ENV_NAME.match(env) else "?", "pending", (-rollouts, -tokens))
            elif gone is not None:
                self._left[gone.payload] = gone
                self._move(gone.env, "pending", (-gone.amounts[0], -gone.amounts[1]))
                self._suspects.add(gone.payload)

    def _renumbered(self) -> None:
        """RENUMBER: what was pending is, in the same order; an entry with another id came now, as far as that says."""
        stream = self.server.data.get(self.keys.pool.encode(), Stream())
        before = sorted([*self.pool, *self.strange])
        if len(before) != len(stream.ids):
            self.fail("I10", f"of {len(before)} pending entries {len(stream.ids)} stay where ids are made anew")
            return
        names = dict(zip(before, stream.ids, strict=True))
        self.strange = {names[old]: fields for old, fields in self.strange.items()}
        self.pool = {names[old]: entry for old, entry in self.pool.items()}
        for entry_id, entry in self.pool.items():
            raw = stream.entries[entry_id]
            fields = dict(zip(raw[::2], raw[1::2], strict=True))
            if (fields[b"group"].decode(), fields[b"metadata"]) != (entry.group, entry.metadata):
                self.fail("I10", f"{entry_id} holds another push than before the ids were made anew")
            entry.entry_id, entry.pushed_ms = entry_id, int(fields.get(b"pushed", entry_id[0]))
        self.server.changes = [change for change in self.server.changes if change[1] != self.keys.pool.encode()]

    def _check_replaced(self, entry: Pending, old_id: StreamId) -> None:
        """A scored push takes the place of one that was pending until this moment, and of no other."""
        old = next((gone for gone in self._left.values() if gone.entry_id == old_id), None)
        if old is None:
            self.fail("I10", f"a scored push of group {entry.group} replaces {old_id}, which was not pending")
        elif (old.group, old.env, old.amounts, old.ids()) != (entry.group, entry.env, entry.amounts, entry.ids()):
            self.fail("I10", f"a scored push of group {entry.group} is not what it replaces ({old_id})")
        elif old.pushed_ms != entry.pushed_ms:
            self.fail("I6", f"group {entry.group} grew {entry.pushed_ms - old.pushed_ms} ms younger by being scored")
        if old is not None and (of := self.sampled.get((_incarnation(old.payload), old.group))):
            self.sampled[_incarnation(entry.payload), entry.group] = of
        self.scored.add(old_id)

    def expect_scored(self, group: str, entry_id: str) -> None:
        """A scorer was told that its push took this entry's place."""
        if not self.was_rolled_back and stream_id(entry_id.encode()) not in self.scored:
            self.fail("I10", f"a scored push of group {group} was acknowledged, but {entry_id} was not replaced")

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
        early = min(trained, self._field(self.keys.trainer, b"at"), self._field(self.keys.meta, b"early"))
        if step > max(min(trained, kept), early):
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
        if kind == "hash" and field == b"line" and self._field(self.keys.meta, b"line"):
            self._new_line(self._field(self.keys.meta, b"line"))
        if kind == "hash" and field in (b"step", b"retired", b"epoch"):
            self._grows(f"meta {field.decode()}", self._field(self.keys.meta, field))
        elif field == b"early":
            self.on_moment("steps retired early")

    def _policy_changed(self, kind: str, adapter: bytes) -> None:
        record = (self.server.data.get(self.keys.policy.encode()) or {}).get(adapter) if kind == "hash" else None
        if record is not None:
            epoch, version, _ = record.split(b" ", 2)
            self._grows(f"policy version of {adapter.decode()!r} in epoch {epoch.decode()}", int(version))
        elif self.was_rolled_back:  # a version of steps that the server has lost is taken back
            here = f"in epoch {self._field(self.keys.meta, b'epoch')}"
            for name in [name for name in self._highest if name.startswith("policy version") and name.endswith(here)]:
                if kind == "gone" or f" {adapter.decode()!r} " in name:
                    del self._highest[name]

    def _lease_changed(self, kind: str, field: bytes) -> None:
        if kind != "hash":
            return
        token = self._field(self.keys.lease, b"token")
        self._grows("lease token", token)
        owner = self.server.data[self.keys.lease.encode()].get(b"owner", b"")
        if owner != self._holder[0] and token <= self._holder[1]:
            self.fail("I8", f"two leaders share the token {token}")
        self._holder = owner, token

    def _ends_changed(self, kind: str, env: bytes) -> None:
        if (self.server.data.get(self.keys.ends.encode()) or {}).get(env, b"").startswith(b"="):
            self._said.add(env.decode())

    def _garbage_changed(self, kind: str, member: bytes) -> None:
        if kind == "zset":
            self._suspects.add(member)

    def _move(self, env: str, fate: str, amounts: tuple[int, int]) -> None:
        self._envs.add(env)
        sums = self._amounts.setdefault((env, fate), [0, 0])
        sums[0] += amounts[0]
        sums[1] += amounts[1]

    # -- I10, I11 --------------------------------------------------------------------------------------------------
    def _check_ledger(self) -> None:
        there: dict[tuple[str, str, str], int] = {}
        for field, value in (self.server.data.get(self.keys.ledger.encode()) or {}).items():
            place = ledger_place(field)
            there[place] = there.get(place, 0) + int(value)
        for env in self._envs:
            for unit, name in enumerate(UNITS):
                for fate in ("pushed", "packed", "trained"):
                    amount, expected = there.get((env, fate, name), 0), self._amounts.get((env, fate), (0, 0))[unit]
                    if amount != expected:
                        self.fail("I10", f"{env}: {amount} {name} {fate} in the ledger, {expected} by what happened")
                pending = self._amounts.get((env, "pending"), (0, 0))[unit]
                pushed, packed, trained, dropped = (there.get((env, fate, name), 0) for fate in FATES)
                left = pushed - packed - trained - dropped
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
                is_owned = bool(users) or key in pending or (garbage is not None and key in garbage.scores)
                if not is_owned:
                    self.fail("I11", f"{key.decode()} belongs to nothing and stays for ever")
            elif users or key in pending:
                self.fail("I2", f"{key.decode()} of {f'step {users}' if users else 'the pool'} has a time to live")

    # -- I1 to I6 --------------------------------------------------------------------------------------------------
    def _check_step(self, step: int) -> None:
        stream = self.server.data[self.keys.steps.encode()]
        ids = stream.between((step, 0), (step, 2**64 - 1))
        raw = stream.entries[ids[0]]
        fields = dict(zip(raw[::2], raw[1::2], strict=True))
        part_bytes = [stream.entries[i][1] for i in ids[1:]]
        try:
            header, limits = decode_header(fields[b"header"], digest=fields[b"digest"].decode(), committed_ms=0)
            parts = [decode_part(data, self.keys.payload_prefix) for data in part_bytes]
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
                self.fail("I1", f"rollout {rollout} of step {step} was in step {self._used[rollout][0]}")
            self._uses[rollout] = again + 1
            self._used[rollout] = step, now
            if key not in self._left and not again:
                self.fail("I1", f"step {step} trains {key.decode()}, which was not pending")
            field = str(member.index).encode()
            stored = (self.server.find(key) or {}).get(field, b"")
            if len(stored) != member.info.size and (key, field) not in self.damaged:
                self.fail("I2", f"step {step}: rollout {rollout} has {len(stored)} of {member.info.size} bytes")
            version, made_by = self.sampled.get((_incarnation(key), member.group_id), (-1, ""))
            if (
                not member.adapter
                and version == member.info.max_version
                and self.digests.get(version, made_by) not in (made_by, "")
            ):
                self.fail("I5", f"step {step}: rollout {rollout} is of a version {version} that was given up")
            trains = version_trained(header.adapters, member.adapter, step)
            age, limit = trains - member.info.min_version, self.config.max_age
            if not 0 <= age <= limit or limits.get(member.env) != limit:
                self.fail("I5", f"step {step}: rollout {rollout} has age {age}, max_age is {limit}")
        payloads = frozenset(member.payload_key.encode() for member in members)
        places = {m.info.rollout_id: (m.payload_key.encode(), str(m.index).encode()) for m in members}
        self.steps[step] = Live(payloads, amounts, places, len(parts))
        self._suspects |= payloads
        for env, sums in amounts.items():
            self._move(env, "packed", (sums[0], sums[1]))
        if set(header.group_ids) != set(groups) or len(header.group_ids) != len(groups):
            self.fail("I6", f"step {step} names groups {header.group_ids}, its parts hold {sorted(groups)}")
        for group, rollouts in groups.items():
            if group not in header.uses:
                self._check_group(step, group, rollouts, now)
        garbage = self.server.data.get(self.keys.garbage.encode())
        kept = self._kept()
        for key in payloads - kept:
            if garbage is None or garbage.scores.get(key, -1) < step:
                self.fail("I11", f"step {step}: {key.decode()} may be swept before the step is retired")

    def is_damaged(self, step: int) -> bool:
        """True when chance has changed a payload of a live step."""
        return step in self.steps and not self.damaged.isdisjoint(self.steps[step].places.values())

    def check_damage(self, rank: int, step: Step) -> None:
        """I2: what a rank misses is what is damaged, and the losses are divided by the same counts all the same."""
        live = self.steps.get(step.number)
        if live is None or self.digests.get(step.number) != step.digest:
            return
        missed = {rollout for rollout in step.damaged if live.places.get(rollout) not in self.damaged}
        if missed:
            self.fail("I2", f"rank {rank} misses rollouts {sorted(missed)} of step {step.number}")
        expected = self._normalizers.setdefault(step.digest, step.normalizers)
        if step.normalizers != expected or expected.rollouts != len(live.places):
            self.fail("I2", f"rank {rank} divides step {step.number} by {step.normalizers}, others by {expected}")

    def _check_use(self, step: int, rollout: str, again: int) -> None:
        """A rollout that was trained before: exactly as often as the step says, and not too often."""
        if self._uses.get(rollout) != again or again >= self.config.max_uses:
            self.fail("I1", f"rollout {rollout} of step {step} was used {self._uses.get(rollout)} times, not {again}")
        elif self._used[rollout] == (step, self.server.now_ms()):
            self.fail("I1", f"rollout {rollout} is twice in step {step}")

    def _kept(self) -> set[bytes]:
        """Payloads of groups that may be used again."""
        fields = self.server.data.get(self.keys.reuse.encode()) or {}
        groups = reused_groups(self.keys, fields)
        return {entry.payload_key.encode() for group in groups for entry in group.entries}

    def _check_group(self, step: int, group: str, members: list[Any], now: int) -> None:
        closed = self._closed.get(group)
        if closed:
            self.fail("I6", f"step {step} trains group {group}, which {closed[1]} closed {now - closed[0]} ms before")
        self._close(group, f"step {step}")
        tombstones = self.server.data.get(self.keys.closed.encode())
        if tombstones is None or group.encode() not in tombstones.scores:
            self.fail("I6", f"group {group} of step {step} has no tombstone")
        sources = [self._left[key] for key in {m.payload_key.encode() for m in members} if key in self._left]
        if not sources:
            return
        info: GroupInfo = payload.decode_info(sources[0].metadata)
        if any(payload.decode_info(source.metadata).needs for source in sources):
            self.fail("I6", f"step {step} trains group {group}, which needs a scorer yet")
        waited = now - min(source.pushed_ms for source in sources)
        if len({m.info.rollout_id for m in members}) != len(members) or len(members) > info.planned_size:
            self.fail("I6", f"step {step}: group {group} has {len(members)} rollouts, some twice or too many")
        is_early = waited < 1000 * self.config.group_timeout_seconds - 1 and info.env not in self._said
        if len(members) < info.planned_size and (len(members) < self.config.min_group_size or is_early):
            self.fail("I6", f"step {step}: group {group} has {len(members)} of {info.planned_size} after {waited} ms")

    def _close(self, group: str, by: str) -> None:
        self._closed[group] = self.server.now_ms(), by
