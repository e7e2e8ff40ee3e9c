"""Never silently stuck: while nobody has a step and none comes, the leader says why; it is true, and not old.

The reason is read where people read it, in the leader's heartbeat (:class:`rlbuffer.records.waiting.Waiting`);
:meth:`Reasons._possible` says from the server's data, and from the accounts kept here, which kinds may be true, and
:meth:`Reasons._holds` whether the cause that it gives for an env is one. Nothing is judged until the leader has been
undisturbed for some turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.records.waiting import Cause, Wait, Waiting
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.viewer import heartbeat_of
from rlbuffer.wire import payload
from simulation.accounts import Pending
from simulation.host import World
from simulation.network import LATEST_SECONDS
from simulation.plan import CONSTANTS
from simulation.scheduler import Process

LOOK_SECONDS = 0.1
TURNS_SECONDS = 0.6
"""Seconds within which an undisturbed leader says what has become true: some turns of it."""
SLOW_SECONDS = 10.0
"""The same, for each share of its round trips that is slow."""
PLANS = 4
"""Plans and looks at payloads, each of up to two leases, that a turn may take where they are slow."""
OLD_SECONDS = CONSTANTS["rlbuffer.daemon.reporter", "TELEMETRY_SECONDS"]
"""Seconds after which the leader says the same again."""
SILENT_SECONDS = 10.0
"""Seconds after which a trainer counts as gone."""
PLENTY = 2
"""Steps' worth of groups that could train now: with so much a step is due, whatever goes into it."""


class Reasons:
    """Looks at what the leader says, ten times a second, and changes nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turns = TURNS_SECONDS + SLOW_SECONDS * world.plan.slow
        self._turns += PLANS * 2 * world.plan.lease_seconds * bool(world.plan.planning)
        self._surroundings: object = None
        self._position: object = None
        self._calm = self._still = 0.0
        """Since when the leader leads undisturbed; since when, besides, the run is where it is."""
        self._word = 0
        """When the trainer had spoken last by then, by the server's clock."""
        self._true: dict[Wait, float] = {}
        """Kind -> when it was last true."""
        self._leader: Process | None = None
        self._faults = 0
        self._late_until = 0.0
        self._said: tuple[str, ...] | None = None
        """The reason that stands there, without its numbers."""
        self._since = 0.0
        """Since when."""

    def disturbed(self, process: Process, fault: str) -> None:
        """Something happened to a round trip of `process`. A heartbeat that comes late stands until the next."""
        if process.name.startswith("batcher"):
            self._faults += 1
            if fault in ("late", "twice"):
                self._late_until = self._world.scheduler.now + LATEST_SECONDS + OLD_SECONDS

    def heard(self, process: Process, line: Mapping[str, Any]) -> None:
        """A batcher has said it of itself."""
        if line["event"] in ("ready", "read again"):
            self._leader, self._faults = process, self._faults + 1
        elif line.get("state") == "lost" and self._leader is process:
            self._leader = None

    def look(self) -> None:
        """Judges the reason that stands there now."""
        world = self._world
        if world.is_over:
            return
        world.scheduler.after(LOOK_SECONDS, self.look)
        now = world.scheduler.now
        meta, lease, trainer = (self._hash(name) for name in ("meta", "lease", "trainer"))
        surroundings = self._leads(lease, meta)
        if surroundings is None or surroundings != self._surroundings:
            self._surroundings, self._position, self._calm = surroundings, None, max(now, self._late_until)
            self._word = number(trainer, b"seen")
            self._true.clear()
        position = [meta.get(name) for name in (b"step", b"retired")], trainer.get(b"trained"), trainer.get(b"number")
        if surroundings is None or position != self._position:
            self._position, self._still = position, now
        if surroundings is None:
            return
        self._true |= dict.fromkeys(self._possible(meta, trainer, lease), now)
        self._judge(meta, trainer, now)

    def _judge(self, meta: Mapping[bytes, bytes], trainer: Mapping[bytes, bytes], now: float) -> None:
        fail = self._world.invariants.fail
        at, beat = heartbeat_of(self._beats("batcher").get(b"leader", b"")) or (0, {})
        waiting, step = Waiting.of(beat.get("waiting")), number(meta, b"step")
        said = None if waiting is None else waiting.key
        if said != self._said:
            self._said, self._since = said, now
        if now - max(self._calm, self._since) <= self._turns:
            return
        if waiting is None:
            if step <= number(trainer, b"trained") and now - self._still > self._turns:
                fail("waiting", f"step {step + 1} does not come, nobody has it, and the leader says nothing")
            return
        age = self._world.server.now_ms() / 1000 - at / 1000
        if now - self._calm > OLD_SECONDS + self._turns < age:
            fail("waiting", f"the leader has said for {age:.1f} s: {waiting}")
        if now - max(self._true.get(waiting.kind, 0.0), self._calm) > self._turns:
            fail("waiting", f"step {step + 1} does not come, and the reason ({waiting.kind}) is none: {waiting}")
        if not self._holds(waiting):
            fail("waiting", f"what it says of {waiting.env or 'all envs'} ({waiting.cause}) is not true: {waiting}")

    def _holds(self, waiting: Waiting) -> bool:
        """The cause that it gives for an env is one, by the server's data."""
        match waiting.cause:
            case Cause.DROPPED:
                name = f"{waiting.env}:dropped:{waiting.dropped.partition(':')[0]}:rollouts"
                return number(self._hash("ledger"), name.encode()) > 0
            case Cause.DONE:
                return bool(self._hash("ends"))
            case Cause.SCORER:
                pool = self._world.invariants.pool.values()
                return any(payload.decode_info(entry.metadata).needs for entry in pool)
            case Cause.GENERATING | Cause.LOADING | Cause.WAITING | Cause.TROUBLE:
                return bool(self._beats("worker"))
        return True

    def _leads(self, lease: Mapping[bytes, bytes], meta: Mapping[bytes, bytes]) -> object:
        """All that may disturb a leader while it leads; None while none leads, or nobody gets through."""
        world, server, network = self._world, self._world.server, self._world.network
        now = world.scheduler.now
        batchers = [task.process for task in world.scheduler.tasks if task.process.name.startswith("batcher")]
        is_cut = any(max(process.stopped_until, network.cut_until.get(process, 0.0)) > now for process in batchers)
        runs_on = 0 <= number(lease, b"until") - server.now_ms() <= number(lease, b"ttl")
        is_open = b"schema" in meta and b"ended" not in meta and not meta.get(b"error")
        away = server.is_full or server.refusal or network.down_until > now
        leads = runs_on and is_open and self._leader is not None and not self._leader.is_dead
        if away or is_cut or not leads or self._hash("trainer").get(b"claim"):
            return None
        return (
            *(lease.get(b"token"), meta.get(b"epoch"), meta.get(b"config_digest"), meta.get(b"wanted_digest")),
            *(network.generation, network.primary, world.clock_ahead, self._faults, {id(p) for p in batchers}),
        )

    def _possible(
        self, meta: Mapping[bytes, bytes], trainer: Mapping[bytes, bytes], lease: Mapping[bytes, bytes]
    ) -> list[Wait]:
        """Kinds of reason that may be true now."""
        world, config = self._world, self._world.plan.config
        now_ms, step, seen = world.server.now_ms(), number(meta, b"step"), number(trainer, b"seen")
        if not number(trainer, b"number"):
            return [Wait.NO_TRAINER]
        calm_ms = now_ms - 1000 * (world.scheduler.now - self._calm)
        took_over = calm_ms + 1000 * self._turns
        kinds = [Wait.STEP_IN_HAND] if trainer.get(b"hand") else []
        is_before = seen < took_over or seen == self._word or seen > now_ms  # the latter two: the clock was set back
        if is_before and now_ms < took_over + 1000 * ATTEMPT_SECONDS:
            kinds.append(Wait.TAKEOVER)
        if not seen or abs(now_ms - seen) > 1000 * SILENT_SECONDS:  # as above: its age is not known
            kinds.append(Wait.TRAINER_GONE)
        trained = number(trainer, b"trained")
        if config.is_stream:
            taken, _, digest = trainer.get(b"hand", b"").partition(b" ")
            trained = max(trained, min(step, int(taken))) if digest else trained
        hand, _, digest = trainer.get(b"hand", b"").partition(b" ")
        if digest and trained < int(hand) <= step:  # a new leader waits for a step taken before the server was away
            kinds.append(Wait.TRAINER_BUSY)
        if step > trained + config.lookahead:
            return [*kinds, Wait.NOT_TAKEN if config.is_stream else Wait.TRAINER_BUSY]
        versions = [int(record.split(b" ", 2)[1]) for record in self._hash("policy").values()]
        oldest = max(0, (max(versions, default=0) if config.is_stream else step) - config.max_age)
        if not versions or min(versions) < oldest or world.plan.adapters:
            kinds.append(Wait.VERSION)
        if config.slow == "wait" and self._is_under_way(step):
            kinds.append(Wait.SLOW)
        if not self._has_plenty(oldest, number(trainer, b"world_size")):
            kinds += [Wait.FILLING, Wait.NOTHING_TO_LEARN]
            if self._hash("ends"):
                kinds.append(Wait.LAST_STEP)
            if number(meta, b"draining"):
                kinds.append(Wait.DRAINING)
        return kinds

    def _is_under_way(self, step: int) -> bool:
        """True when something that the step behind `step` is the last one for is out, or not whole."""
        world, keys = self._world, self._world.invariants.keys
        last = step - world.plan.config.max_age
        if world.plan.adapters or any(entry.oldest() == last for entry in world.invariants.pool.values()):
            return True
        taken = (world.server.data.get(keys.taken(env).encode()) or {} for env in ("a", "b"))
        return any(int(value.partition(b" ")[0]) == last for tickets in taken for value in tickets.values())

    def _has_plenty(self, oldest: int, world_size: int) -> bool:
        """True when what could train now fills a step more than once."""
        world, config = self._world, self._world.plan.config
        if world.plan.adapters or world.plan.strangers or world.plan.damages:
            return False  # which of it could train is the batcher's to say
        groups: dict[str, list[Pending]] = {}
        for entry in world.invariants.pool.values():
            groups.setdefault(entry.group, []).append(entry)
        closed = world.server.data.get(world.invariants.keys.closed.encode())
        totals = [0, 0, 0]
        for group, entries in groups.items():
            if closed is not None and group.encode() in closed.scores:
                continue
            infos = [payload.decode_info(entry.metadata) for entry in entries]
            ids = {rollout.rollout_id for info in infos for rollout in info.rollouts}
            is_young = all(rollout.min_version >= oldest for info in infos for rollout in info.rollouts)
            is_bare = any(info.needs or info.totals.is_flat for info in infos)
            if is_young and not is_bare and len(ids) >= infos[0].planned_size:
                its = {r.rollout_id: r.length for info in infos for r in info.rollouts if not r.failure}
                totals = [totals[0] + 1, totals[1] + len(its), totals[2] + sum(its.values())]
        rows = world_size * config.micro_batches_per_rank * config.rows_per_micro_batch
        wanted = (config.step_groups, config.step_rollouts, rows * config.row_tokens)
        place = next(place for place, size in enumerate(wanted) if size)
        return totals[place] >= PLENTY * (wanted[place] or 0)

    def _beats(self, kind: str) -> Mapping[bytes, bytes]:
        key = self._world.invariants.keys.heartbeats(kind)
        return self._world.server.data.get(key.encode()) or {}

    def _hash(self, name: str) -> Mapping[bytes, bytes]:
        keys = self._world.invariants.keys
        return self._world.server.data.get(getattr(keys, name).encode()) or {}


def number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    """A field's value; 0 where there is none."""
    return int(fields.get(name) or 0)
