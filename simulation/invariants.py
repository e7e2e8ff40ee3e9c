"""The invariants of docs/explain/protocol.md, checked on the server's data after every event, from what it changed.

Nothing of `verify` is used: this keeps accounts of its own. An event is one command, one script or one MULTI; the first
violation ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rlbuffer.records.info import ENV_NAME
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.store.keys import Keys
from simulation.accounts import FATES, UNITS, Live, Pending, counted, incarnation_of, ledger_place
from simulation.committed_steps import CommittedSteps
from simulation.fences import Fences
from simulation.network import Network
from simulation.opened import Opened
from simulation.rewinds import Rewinds, said_unused
from simulation.server import Command, Server
from simulation.values import StreamId, stream_id


class Invariants(CommittedSteps, Fences, Rewinds, Opened):
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
        """Tickets of the env before a script: number -> expiry."""
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
        """The run is begun again: nothing is known of it."""
        self.forget_opened()
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
        self.unused: dict[int, tuple[int, int]] = {}
        """Step of a stream -> rollouts and tokens of it that were given and not trained."""
        self.digests: dict[int, str] = {}
        self.trained_content: dict[tuple[int, int, int], str] = {}
        self._used: dict[str, tuple[int, int]] = {}
        """rollout id -> step, when."""
        self._uses: dict[str, int] = {}
        """rollout id -> steps that trained it."""
        self._left_out: dict[str, str] = {}
        """Rollout that was dropped with the first use of its group -> one that was trained."""
        self.void: dict[str, int] = {}
        """Rollout -> the step of it that was made void: no step may train it again."""
        self._closed: dict[str, tuple[int, str]] = {}
        """group -> when it was closed (server ms), by what."""
        self._outlived: set[str] = set()
        """Groups of which the leader dropped what had been replaced meanwhile: it has not read yet that they go on."""
        self._expired: set[str] = set()
        """Groups whose tickets were given out again."""
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
        if len(commands) == 1 and self.script_of(commands[0]) == "TICKET":
            tickets = self.server.find(commands[0][3])
            self._before = dict(tickets.scores) if tickets else {}
        for command in commands:
            if command[0] == b"EVALSHA":
                self.note_opened(self.script_of(command), command)

    def _check(self, commands: Sequence[Command], replies: list[Any]) -> None:
        self.events += 1
        if self.violation or (not self.server.changes and all(command[0] != b"EVALSHA" for command in commands)):
            return
        self._envs: set[str] = set()
        self._suspects: set[bytes] = set()
        self._left: dict[bytes, Pending] = {}
        """Pushes that left the pool in this event, by payload key."""
        self._new_steps: dict[int, None] = {}
        first, reply = commands[0], replies[0]
        is_done = first[0] == b"EVALSHA" and isinstance(reply, list) and reply[:1] == [b"OK"]
        name = self.script_of(first) if is_done else ""
        self._said_unused = said_unused(first[3 + int(first[2]) + 11]) if name == "REPORT" else {}
        if name == "RECOVER":
            self._recovered(first[3 + int(first[2]) :], int(reply[1]))
            self.on_moment("a recovery")
        elif name == "VOID":
            self._taken_back(first[3 + int(first[2]) :])
        # Removals from a stream come first: an entry that takes the place in the same script must find it gone.
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
                self._check_script(self.script_of(command), command, reply)
                self.check_opened(self.script_of(command), command, reply)
        if self._suspects:
            self._check_payloads()
        if self._envs:
            self._check_ledger()

    def script_of(self, command: Command) -> str:
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

    def field(self, key: str, name: bytes) -> int:
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
                self.network.scheduler.now,
            )
            if any(known.endswith(suffix.encode()) for known in (payload,) if known in self.pushed):
                self.fail("I1", f"push {suffix} of group {group} became pending twice")
            if self.server.find(payload) is None and not self.may_expire(payload):
                self.fail("I11", f"push {suffix} of group {group} became pending without its payload")
            epoch, incarnation = self.field(self.keys.meta, b"epoch"), suffix.rpartition(".")[0]
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
                env = env if ENV_NAME.match(env) else "?"
                self._move(env, "pending", (-rollouts, -tokens))
            elif gone is not None:
                self._left[gone.payload] = gone
                self._move(gone.env, "pending", (-gone.amounts[0], -gone.amounts[1]))
                self._suspects.add(gone.payload)

    def _check_replaced(self, entry: Pending, old_id: StreamId) -> None:
        """A scored push takes the place of one that was pending until this moment, and of no other."""
        old = next((gone for gone in self._left.values() if gone.entry_id == old_id), None)
        if old is None:
            self.fail("I10", f"a scored push of group {entry.group} replaces {old_id}, which was not pending")
        elif (old.group, old.env, old.amounts, old.ids()) != (entry.group, entry.env, entry.amounts, entry.ids()):
            self.fail("I10", f"a scored push of group {entry.group} is not what it replaces ({old_id})")
        elif old.pushed_ms != entry.pushed_ms:
            self.fail("I6", f"group {entry.group} grew {entry.pushed_ms - old.pushed_ms} ms younger by being scored")
        if old is not None:
            entry.came = old.came
        if old is not None and (of := self.sampled.get((incarnation_of(old.payload), old.group))):
            self.sampled[incarnation_of(entry.payload), entry.group] = of
        self.scored.add(old_id)

    def expect_scored(self, group: str, entry_id: str) -> None:
        """A scorer has heard that its push took this entry's place."""
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
        trained, kept = (self.field(self.keys.trainer, name) for name in (b"trained", b"oldest_kept"))
        early = min(trained, self.field(self.keys.trainer, b"at"), self.field(self.keys.meta, b"early"))
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
            value = self.field(self.keys.trainer, field)
            before = self._highest.get(f"trainer {field.decode()}", 0)
            self._grows(f"trainer {field.decode()}", value)
            if field == b"trained":
                if value > self.field(self.keys.meta, b"step"):
                    self.fail("I8", f"step {value} is trained, the run has no such step")
                for step in range(before + 1, value + 1):
                    for env, amounts in self.steps[step].amounts.items() if step in self.steps else ():
                        rollouts, tokens = self.unused[step] = self._said_unused.get(step, (0, 0))
                        self._move(env, "packed", (-amounts[0], -amounts[1]))
                        self._move(env, "trained", (amounts[0] - rollouts, amounts[1] - tokens))

    def _meta_changed(self, kind: str, field: bytes) -> None:
        if kind == "hash" and field == b"line" and self.field(self.keys.meta, b"line"):
            self._new_line(self.field(self.keys.meta, b"line"))
        if kind == "hash" and field in (b"step", b"retired", b"epoch"):
            self._grows(f"meta {field.decode()}", self.field(self.keys.meta, field))
        elif field == b"early":
            self.on_moment("steps retired early")

    def _policy_changed(self, kind: str, adapter: bytes) -> None:
        record = (self.server.data.get(self.keys.policy.encode()) or {}).get(adapter) if kind == "hash" else None
        if record is not None:
            epoch, version, _ = record.split(b" ", 2)
            self._grows(f"policy version of {adapter.decode()!r} in epoch {epoch.decode()}", int(version))
        elif self.was_rolled_back:  # a version of steps that the server has lost is taken back
            here = f"in epoch {self.field(self.keys.meta, b'epoch')}"
            for name in [name for name in self._highest if name.startswith("policy version") and name.endswith(here)]:
                if kind == "gone" or f" {adapter.decode()!r} " in name:
                    del self._highest[name]

    def _lease_changed(self, kind: str, field: bytes) -> None:
        if kind != "hash":
            return
        token = self.field(self.keys.lease, b"token")
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

    def may_expire(self, key: bytes) -> bool:
        """True for a payload on another shard, where no script makes it permanent, that expired before its writer or a
        leader had come to do so: it is not there, or was stored again. No step may need it."""
        return self.network.plan.spread and key in self.server.expired

    def _check_payloads(self) -> None:
        garbage = self.server.data.get(self.keys.garbage.encode())
        there = {key for key in self._suspects if self.server.find(key) is not None}
        pending = {entry.payload for entry in self.pool.values() if not self.may_expire(entry.payload)} | self._kept()
        for key in self._suspects:
            users = [step for step, live in self.steps.items() if key in live.payloads]
            if key not in there:
                if users or key in pending:
                    self.fail("I11", f"{key.decode()} is gone, step {users or 'none'} or the pool names it")
            elif key not in self.server.expiry:
                is_owned = bool(users) or key in pending or (garbage is not None and key in garbage.scores)
                is_undone = self.network.plan.spread and self.was_rolled_back  # what named it lay on another shard
                if not is_owned and not is_undone:
                    self.fail("I11", f"{key.decode()} belongs to nothing and stays for ever")
            elif users or key in pending:
                self.fail("I2", f"{key.decode()} of {f'step {users}' if users else 'the pool'} has a time to live")
