"""Answers that single scripts may give: nobody gets past a fence, drops close what they must, tickets are given out
once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from rlbuffer.batcher.admission import START_TICKETS
from rlbuffer.batcher.age import oldest_version
from rlbuffer.store.pool import CLOSING_REASONS
from simulation.rollouts import SMALLEST_TOKENS
from simulation.server import Command

GROWING_SCRIPTS = frozenset({"PUSH", "TICKET", "BEGIN"})
"""All that may be refused at the memory limit."""


class Fences:
    """Checks of a script's reply, after what it changed was taken into the accounts: a part of `Invariants`."""

    def _check_script(self, name: str, command: Command, reply: Any) -> None:
        if isinstance(reply, Exception):
            if isinstance(reply, OutOfMemoryError) and name not in GROWING_SCRIPTS:
                self.fail("I9", f"{name} was refused for memory: {reply}")
            return
        keys, args = command[3 : 3 + int(command[2])], command[3 + int(command[2]) :]
        status = reply[0] if isinstance(reply, list) and reply else b""
        now = self.server.now_ms()
        if name in ("COMMIT", "DROP", "RETIRE") and status == b"OK" and args[0]:  # a DROP without a token: an operator
            lease = self.server.data.get(self.keys.lease.encode()) or {}
            if lease.get(b"token") != args[0]:
                self.fail("I8", f"{name} passed with token {args[0].decode()}, the leader's is {lease.get(b'token')}")
            elif int(lease[b"until"]) < now:
                self.fail("I8", f"{name} passed {now - int(lease[b'until'])} ms after the lease had run out")
        if name in ("REPORT", "ANNOUNCE") and status in (b"OK", b"OLD"):
            number = self.field(self.keys.trainer, b"number")
            if int(args[0]) != number:
                self.fail("I8", f"{name} of attempt {args[0].decode()} passed, the attempt is {number}")
            if name == "REPORT" and int(args[1]) != self.field(self.keys.meta, b"epoch"):
                self.fail("I4", f"REPORT of epoch {args[1].decode()} passed")
        if name == "LEASE" and args[0] == b"acquire" and status in (b"ACQUIRED", b"RENEWED"):
            if self._leader[0] not in (b"", args[1]) and self._leader[1] > now and status == b"RENEWED":
                self.fail("I8", f"the lease of {self._leader[0].decode()} was renewed by another")
            # One that runs longer than it was given for is of a clock that has been set back since, on the disk too.
            if self._leader[0] != args[1] and now < self._leader[1] <= now + int(args[2]):
                self.fail("I8", f"the lease went from one to another {self._leader[1] - now} ms before it ran out")
        if name == "LEASE":
            lease = self.server.data.get(self.keys.lease.encode()) or {}
            until = int(lease.get(b"until", 0))
            # One that would run for longer than it was given is of a clock that was set back since: it has expired.
            self._leader = lease.get(b"owner", b""), until if until - now <= int(lease.get(b"ttl", 0)) else 0
        if name == "DROP" and status == b"OK":
            self._check_drop(args)
        if name == "TICKET" and args[0] == b"take":
            self._check_take(args, reply, keys, now)

    def clock_set_back(self) -> None:
        """A lease that would run for longer than it was given counts as expired from now on."""
        self._leader = b"", 0

    def _check_drop(self, args: Sequence[bytes]) -> None:
        at, left = 4, {b"%d-%d" % entry.entry_id for entry in self._left.values()}
        tombstones = self.server.data.get(self.keys.closed.encode())
        for _ in range(int(args[3])):
            group, reason, closes = args[at].decode(), args[at + 2].decode(), args[at + 3] == b"1"
            own = args[at + 6 : at + 6 + int(args[at + 5])]
            at += 6 + len(own)
            if closes and reason not in CLOSING_REASONS:
                self.fail("I6", f"a drop for {reason} closes group {group}")
            if left.isdisjoint(own):
                self._outlived.add(group)
            if closes and not left.isdisjoint(own):  # else what it names was replaced meanwhile, and the group goes on
                if reason not in ("void", "operator"):  # dropped by hand: the leader does not know
                    self._close(group, f"its drop ({reason})")
                if tombstones is None or group.encode() not in tombstones.scores:
                    self.fail("I6", f"group {group} was dropped ({reason}) without a tombstone")

    def _check_take(self, args: Sequence[bytes], reply: Any, keys: Sequence[bytes], now: int) -> None:
        ends, numbers = (self.server.data.get(key) or {} for key in (keys[3], keys[2]))
        end = ends.get(args[1], b"")
        if reply == [b"DONE"]:
            if self._before or int(numbers.get(args[1], 0)) < int(end.removeprefix(b"=")):
                self.fail("tickets", f"env {args[1].decode()} is done, but {sorted(self._before)} are out")
            return
        if end and any(number >= int(end.removeprefix(b"=")) for number in reply):
            self.fail("tickets", f"{reply} of {args[1].decode()} were given, which ends at {end.decode()}")
        allowed = self.server.data.get(keys[1]) or {}
        limit = int(allowed.get(args[1], allowed.get(b"*", 0)))
        out = {number for number, expiry in self._before.items() if expiry > now}
        given = {b"%d" % number for number in reply}
        self._check_taken(args[1].decode(), given, keys, now)
        if given & out or len(given) != len(reply):
            self.fail("tickets", f"{sorted(given & out)} of {args[1].decode()} were given out while they were out")
        if given and len(out) + len(given) > limit:
            self.fail(
                "tickets", f"{len(out)} + {len(given)} tickets of {args[1].decode()} are out, allowed are {limit}"
            )
        if given:
            # A ticket expires when no leader takes its group in for as long as it lives, and is given out again.
            again = {f"{args[1].decode()}.{number.decode()}" for number in given & self._before.keys()}
            self._expired |= again & {entry.group for entry in self.pool.values()}
            self._check_window(args[1].decode(), out | given)

    def _check_taken(self, env: str, given: set[bytes], keys: Sequence[bytes], now: int) -> None:
        """What stands beside the tickets is of those that were taken last, and of nothing else."""
        policy, taken = self.server.data.get(keys[5]) or {}, self.server.data.get(keys[6]) or {}
        version = policy[b""].split(b" ")[1] if b"" in policy else b"-1"
        known = {number: taken.get(number, b"none 0").split(b" ") for number in given}
        wrong = {n for n, (its, at) in known.items() if its != version or abs(int(at) - now) > 1}
        tickets = self.server.find(keys[0])
        left = set(taken) - set(tickets.scores if tickets else ())
        if wrong or left:
            self.fail("tickets", f"{env}: not of version {version.decode()}: {sorted(wrong)}; not out: {sorted(left)}")

    def _check_window(self, env: str, out: set[bytes]) -> None:
        """What is pending and can still train, plus the tickets that are out, is at most what the steps can hold in
        which it can train: more would be sampled for nothing, without end."""
        config = self.network.plan.config
        step = self.field(self.keys.meta, b"step") + 1
        counts_others = self.network.plan.adapters or self.network.plan.stream  # versions that are no steps of the run
        oldest = 0 if counts_others else oldest_version(step, config.max_age)
        groups = {name.decode() for name in out}
        for entry in self.pool.values():
            is_known = not any(entry.group in gone for gone in (self._closed, self._outlived, self._expired))
            if entry.env == env and is_known and entry.oldest() >= oldest:
                groups.add(entry.group.removeprefix(f"{env}."))
        rows = max(self.network.plan.world_sizes) * config.micro_batches_per_rank * config.rows_per_micro_batch
        tokens = rows * config.row_tokens // SMALLEST_TOKENS
        most = (1 + config.max_age) * max(START_TICKETS, config.step_groups or config.step_rollouts or tokens)
        # Of a stream's pace a few are assumed until it is known, and an env that is waited for gets one more.
        if len(groups) > most + self.network.plan.stream:
            self.fail("window", f"{len(groups)} groups of {env} are out or pending, at most {most} can train")
