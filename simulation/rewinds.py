"""Changes of the accounts when a run goes back: acknowledged writes lost, steps recovered, steps made void."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from rlbuffer.wire import payload

_KNOWLEDGE = (
    "pool",
    "strange",
    "pushed",
    "parts",
    "scored",
    "steps",
    "unused",
    "digests",
    "_used",
    "_uses",
    "_left_out",
    "void",
    "_closed",
    "_amounts",
    "_highest",
    "_holder",
    "_leader",
    "_continued",
    "incarnations",
    "opened",
    "begun_by",
    "open_counts",
    "accounted",
)


def said_unused(lines: bytes) -> dict[int, tuple[int, int]]:
    """Step -> rollouts and tokens that were given and not trained, by what REPORT or RECOVER is told."""
    told = (line.split() for line in lines.decode().splitlines())
    return {int(step): (int(rollouts), int(tokens)) for step, _, rollouts, tokens, *_ in told}


def unused_ids(lines: bytes) -> set[str]:
    """The rollouts in these lines, whose ids are unique over all groups."""
    told = (line.split()[4] for line in lines.decode().splitlines())
    return {rollout_id for ids in told for rollout_id in payload.loads(bytes.fromhex(ids), limit=2**20)}


class Rewinds:
    """The invariants' accounts, taken back: a part of `Invariants`."""

    def snapshot(self) -> dict[str, Any]:
        """The state that is known now, to go with a snapshot of the server."""
        return {name: deepcopy(getattr(self, name)) for name in _KNOWLEDGE}

    def roll_back(self, saved: dict[str, Any], trained: int) -> None:
        """The server went back to the snapshot that this one goes with; its trainer is at step `trained`."""
        self.was_rolled_back = True
        lost = {step: digest for step, digest in self.digests.items() if saved["digests"].get(step) != digest}
        self.lost_digests |= set(lost.values())
        for rollout, (step, _) in self._used.items():
            if step in lost and step <= trained:
                self.forgotten[rollout] = step
        for place in [place for place in self.trained_content if place[0] in lost]:
            del self.trained_content[place]
        incarnations = self.incarnations
        for name, value in saved.items():
            setattr(self, name, deepcopy(value))
        self.still_heard()
        self.incarnations = incarnations | self.incarnations  # whoever began since then is not forgotten

    def restarted(self, step: int) -> None:
        """A trainer begins from a checkpoint of `step`: what was trained after it is not in its state."""
        self.forgotten = {rollout: at for rollout, at in self.forgotten.items() if at <= step}

    def _recovered(self, args: Sequence[bytes], epoch: int) -> None:
        """RECOVER: what it may move, by the accounts kept here."""
        if epoch <= self._highest.get("meta epoch", 0):
            self.fail("I4", f"the run was recovered in epoch {epoch}, in which steps were lost")
        step, fork, before = int(args[3]), int(args[6]), self._highest.get("trainer trained", 0)
        said = said_unused(args[10])
        for number, live in self.steps.items():
            self._suspects |= live.payloads
            for env, (rollouts, tokens) in live.amounts.items() if number > before else ():
                self._move(env, "packed", (-rollouts, -tokens))
                if not fork or number < fork:
                    left = said.get(number, (0, 0))
                    self._move(env, "trained", (rollouts - left[0], tokens - left[1]))
        if fork:
            self._make_void(fork)
        self.steps.clear()
        self.unused.clear()
        at = 12 + 3 * int(args[11])
        for group in args[12:at:3]:
            self._close(group.decode(), "the recovery")
        count, at, counted = int(args[at]), at + 1, unused_ids(args[10])
        # A push of a group that waits for another use has its rollouts counted with the step of the first one, and so
        # are those that it dropped, such as failed ones.
        counted |= {rollout for rollout, (used_in, _) in self._used.items() if used_in}
        counted |= {rollout for rollout, beside in self._left_out.items() if beside in counted}
        for _ in range(count):
            milliseconds, _, place = args[at].partition(b"-")
            entry = self.pool.get((int(milliseconds), int(place)))
            if entry is not None:
                own, trained = entry.ids() - counted, int(args[at + 1])
                if len(own) != trained:
                    self.fail("I10", f"{trained} rollouts of {entry.group} count as trained, and not {len(own)}")
                counted |= own
                self._move(entry.env, "trained", (trained, int(args[at + 2])))
            at += 4 + 3 * int(args[at + 3])
        self.digests = {n: digest for n, digest in self.digests.items() if n < step} | {step: args[4].decode()}
        self._highest |= {"trainer trained": step, "meta step": step, "meta retired": step, "trainer oldest_kept": 0}
        self.trained_content = {place: content for place, content in self.trained_content.items() if place[0] <= step}
        line = self.field(self.keys.meta, b"line") or self.field(self.keys.meta, b"since")
        self._continued[line] = epoch
        self.incarnations = {name: epoch if at >= line else at for name, at in self.incarnations.items()}

    def _make_void(self, first: int) -> None:
        """What a step from `first` on has trained last trains no more, also where an earlier step has trained it."""
        for rollout, (step, at) in self._used.items():
            if step >= first:
                self.void[rollout] = step
                self._used[rollout] = 0, at

    def _new_line(self, epoch: int) -> None:
        """A process of an epoch before this one goes on neither in it nor in any later one."""
        for adapter, value in (self.server.data.get(self.keys.policy.encode()) or {}).items():
            is_above = int(value.split(b" ", 2)[1]) > self.field(self.keys.meta, b"step")
            if is_above and not self.network.plan.stream:
                self.fail("I5", f"version {value[:40]!r} of {adapter!r} stays in the new line of epoch {epoch}")

    def joined(self, incarnation: str, epoch: int) -> None:
        """A producer begins in `epoch`. Its knowledge may be from before a recovery: then it goes on in the next
        one."""
        self.incarnations[incarnation] = max(
            (after for since, after in self._continued.items() if since <= epoch <= after), default=epoch
        )

    def _taken_back(self, args: Sequence[bytes]) -> None:
        """VOID: what it may move, before what it changed is looked at."""
        keep, trained = int(args[0]), self._highest.get("trainer trained", 0)
        digest = (self.server.data[self.keys.meta.encode()]).get(b"digest", b"").decode()
        if not digest and keep < self._highest.get("meta retired", 0) and keep in self.digests:
            self.digests[keep] = ""  # only a checkpoint knows it: the chain begins again
        elif digest != self.digests.get(keep, ""):
            self.fail("I3", f"the run goes on from step {keep} with digest {digest!r}")
        self._epoch_before_void = self._highest.get("meta epoch", 0)
        for number, live in self.steps.items():
            if number > keep:
                self._suspects |= live.payloads
                for env, (rollouts, tokens) in live.amounts.items():
                    left = self.unused.get(number, (0, 0)) if number <= trained else (0, 0)
                    fate = "trained" if number <= trained else "packed"
                    self._move(env, fate, (left[0] - rollouts, left[1] - tokens))
        self.lost_digests |= {digest for number, digest in self.digests.items() if number > keep}
        self._kept_steps = {number: live for number, live in self.steps.items() if number <= keep}
        self.steps.clear()
        self.digests = {number: digest for number, digest in self.digests.items() if number <= keep}
        self._highest["meta step"] = keep
        for name in ("trainer trained", "trainer oldest_kept", "meta retired"):
            self._highest[name] = min(self._highest.get(name, 0), keep)
        self.trained_content = {place: content for place, content in self.trained_content.items() if place[0] <= keep}
        self._make_void(keep + 1)
        self._leader = b"", 0

    def _check_taken_back(self, args: Sequence[bytes]) -> None:
        """VOID: what stays is as it was, what works on the rest is fenced, and nobody samples from what is void."""
        keep, stream = int(args[0]), self.server.data.get(self.keys.steps.encode())
        if set(self._new_steps) != set(self._kept_steps):
            self.fail("I4", f"steps {sorted(self._kept_steps)} were to stay, {sorted(self._new_steps)} did")
        for step, live in self._kept_steps.items():
            raw = stream.entries.get((step, 0), []) if stream is not None else []
            digest = dict(zip(raw[::2], raw[1::2], strict=True)).get(b"digest", b"").decode()
            parts = len(stream.between((step, 1), (step, 2**64 - 1))) if stream is not None else 0
            if digest != self.digests[step] or parts != live.parts:
                self.fail("I4", f"step {step} has digest {digest} and {parts} parts since step {keep + 1} is void")
        self.steps.update(self._kept_steps)
        self._new_steps.clear()
        if self.field(self.keys.meta, b"epoch") <= (epoch := self._epoch_before_void):
            self.fail("I4", f"steps after {keep} are void, the epoch is {epoch} still")
        if until := self.field(self.keys.lease, b"until"):
            self.fail("I8", f"steps after {keep} are void, the lease of their leader runs until {until}")
        for adapter, value in (self.server.data.get(self.keys.policy.encode()) or {}).items():
            if int(value.split(b" ", 2)[1]) > keep and not self.network.plan.stream:
                self.fail("I5", f"version {value[:40]!r} of {adapter!r} stays, the run goes on from step {keep}")
        if args[1] == b"1" and self.pool:
            self.fail("I10", f"the pool was to be dropped, {len(self.pool)} entries stay")
