"""I1 to I6: what a committed step may hold, checked against what was pending and what was trained before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.store.pool import reused_groups
from rlbuffer.store.records import PartRollout
from rlbuffer.store.step_format import decode_header, decode_part, step_digest
from rlbuffer.wire import payload
from simulation.accounts import Live, Pending, incarnation_of


class CommittedSteps:
    """Checks of the steps that an event has added, and of what ranks get of them: a part of `Invariants`."""

    # -- a step that was just committed ------------------------------------------------------------------------------
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
        self._check_chain(step, header, fields[b"header"], part_bytes)
        now = self.server.now_ms()
        groups: dict[str, list[PartRollout]] = {}
        amounts: dict[str, list[int]] = {}
        members = [member for part in parts for member in part.rollouts]
        for member in members:
            groups.setdefault(member.group_id, []).append(member)
            again = header.uses.get(member.group_id, 0)
            if not again:
                sums = amounts.setdefault(member.env, [0, 0])
                sums[0], sums[1] = sums[0] + (member.sequence == 0), sums[1] + member.info.length
            if member.sequence == 0:
                self._check_once(step, member, again, now)
            self._check_stored(step, member)
            self._check_age(step, member, header, limits.get(member.env))
        payloads = frozenset(member.payload_key.encode() for member in members)
        places: dict[str, set[tuple[bytes, bytes]]] = {}
        for member in members:
            its = places.setdefault(member.info.rollout_id, set())
            its.add((member.payload_key.encode(), str(member.index).encode()))
        fresh = Counter(its[0].env for group, its in groups.items() if group not in header.uses)
        self.steps[step] = Live(payloads, amounts, places, len(parts), dict(fresh))
        self._suspects |= payloads
        for env, sums in amounts.items():
            self._move(env, "packed", (sums[0], sums[1]))
            self._check_groups(env)
        if set(header.group_ids) != set(groups) or len(header.group_ids) != len(groups):
            self.fail("I6", f"step {step} names groups {header.group_ids}, its parts hold {sorted(groups)}")
        for group, rollouts in groups.items():
            if group not in header.uses:
                self._check_group(step, group, rollouts, now)
        self._check_garbage(step, payloads)

    def _check_chain(self, step: int, header: StepHeader, header_bytes: bytes, part_bytes: Sequence[bytes]) -> None:
        """It follows the newest step, and its digest covers it and what it follows."""
        last = max(self.digests, default=0)
        if step != last + 1 or self.field(self.keys.meta, b"step") != step:
            self.fail("I4", f"step {step} was committed after step {last}")
        previous = self.digests.get(last, "")
        if header.previous_digest != previous or step_digest(previous, header_bytes, part_bytes) != header.digest:
            self.fail("I3", f"the digest of step {step} does not chain on that of step {last}")
        self.digests[step] = header.digest

    def _check_groups(self, env: str) -> None:
        """The ledger counts as packed the groups of the steps that are not trained."""
        trained = self.field(self.keys.trainer, b"trained")
        expected = sum(live.groups.get(env, 0) for step, live in self.steps.items() if step > trained)
        packed = self.field(self.keys.ledger, f"{env}:packed:groups".encode())
        if packed != expected:
            self.fail("I10", f"{env}: {packed} groups packed in the ledger, {expected} by what happened")

    def _check_once(self, step: int, member: PartRollout, again: int, now: int) -> None:
        """A rollout was pending, and trains once; or `again`, as often as the step says."""
        rollout = member.info.rollout_id
        if rollout in self.forgotten:
            lost = self.forgotten[rollout]
            self.fail("I1", f"rollout {rollout} of step {step} was trained in step {lost}, which the server lost")
        if rollout in self.void:
            self.fail("I1", f"rollout {rollout} of step {step} was in step {self.void[rollout]}, which was made void")
        if again:
            self._check_use(step, rollout, again)
        if rollout in self._used and not again:
            self.fail("I1", f"rollout {rollout} of step {step} was in step {self._used[rollout][0]}")
        self._uses[rollout] = again + 1
        self._used[rollout] = step, now
        if member.payload_key.encode() not in self._left and not again:
            self.fail("I1", f"step {step} trains {member.payload_key}, which was not pending")

    def _check_stored(self, step: int, member: PartRollout) -> None:
        """Its payload is there, whole."""
        key, field = member.payload_key.encode(), str(member.index).encode()
        stored = (self.server.find(key) or {}).get(field, b"")
        if len(stored) != member.info.size and (key, field) not in self.damaged:
            rollout, size = member.info.rollout_id, member.info.size
            self.fail("I2", f"step {step}: rollout {rollout} has {len(stored)} of {size} bytes")

    def _check_age(self, step: int, member: PartRollout, header: StepHeader, limit_then: int | None) -> None:
        """It is of versions that led to this step, and young enough."""
        rollout = member.info.rollout_id
        source = incarnation_of(member.payload_key.encode()), member.group_id
        version, made_by = self.sampled.get(source, (-1, ""))
        if (
            not member.adapter
            and version == member.info.max_version
            and self.digests.get(version, made_by) not in (made_by, "")
        ):
            self.fail("I5", f"step {step}: rollout {rollout} is of a version {version} that was given up")
        trains = version_trained(header.adapters, member.adapter, step)
        age, limit = trains - member.info.min_version, self.config.max_age
        if not 0 <= age <= limit or limit_then != limit:
            self.fail("I5", f"step {step}: rollout {rollout} has age {age}, max_age is {limit}")

    def _check_garbage(self, step: int, payloads: frozenset[bytes]) -> None:
        """Nothing that it needs is swept before it is retired."""
        garbage = self.server.data.get(self.keys.garbage.encode())
        for key in payloads - self._kept():
            if garbage is None or garbage.scores.get(key, -1) < step:
                self.fail("I11", f"step {step}: {key.decode()} may be swept before the step is retired")

    def is_damaged(self, step: int) -> bool:
        """True when chance has changed a payload of a live step."""
        return step in self.steps and any(not its.isdisjoint(self.damaged) for its in self.steps[step].places.values())

    def check_damage(self, rank: int, step: Step) -> None:
        """I2: what a rank misses is what is damaged, and the losses are divided by the same counts all the same."""
        live = self.steps.get(step.number)
        if live is None or self.digests.get(step.number) != step.digest:
            return
        missed = {rollout for rollout in step.damaged if self.damaged.isdisjoint(live.places.get(rollout, ()))}
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

    def _check_group(self, step: int, group: str, members: list[PartRollout], now: int) -> None:
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
        waited = round(1000 * (self.network.scheduler.now - min(source.came for source in sources)))
        rollouts = Counter(m.info.rollout_id for m in members)
        others = {rollout for source in sources for rollout in source.ids()} - rollouts.keys()
        self._left_out |= dict.fromkeys(others, members[0].info.rollout_id)
        if any(rollouts[m.info.rollout_id] != m.sequences for m in members):
            self.fail("I6", f"step {step}: group {group} has a rollout twice, or not all of its sequences")
        if len(rollouts) > info.planned_size:
            self.fail("I6", f"step {step}: group {group} has {len(rollouts)} rollouts of {info.planned_size}")
        missing = info.planned_size - len(rollouts)
        if trained := failed_of(sources) & rollouts.keys():
            self.fail("I6", f"step {step} trains {sorted(trained)}, which failed")
        is_early = waited < 1000 * self.config.group_timeout_seconds - 1 and info.env not in self._said
        if missing and (
            len(rollouts) < self.config.min_group_size
            or (is_early and len(failed_of(self.parts.get(group, ()))) < missing)
        ):
            self.fail("I6", f"step {step}: group {group} has {len(rollouts)} of {info.planned_size} after {waited} ms")

    def _close(self, group: str, by: str) -> None:
        self._closed[group] = self.server.now_ms(), by


def failed_of(pushes: Iterable[Pending]) -> set[str]:
    """The rollouts of these that are failed attempts."""
    infos = [payload.decode_info(push.metadata) for push in pushes]
    return {rollout.rollout_id for info in infos for rollout in info.rollouts if rollout.failure}
