"""The batcher daemon: the loop that leads a run.

One leader at a time, fenced by a lease::

    standing by -> leading -> (reconnect or lost lease: forget everything) -> standing by

While leading it reads each pool entry once, keeps the index in memory, drops, plans, pins and commits. Every decision
is made by the pure :class:`rlbuffer.batcher.Batcher`; this module only carries it out.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from rlbuffer import wire
from rlbuffer.batcher import Batcher
from rlbuffer.batches import Decision, Drop, StepPlan
from rlbuffer.client import Buffer
from rlbuffer.config import BatcherConfig
from rlbuffer.errors import (
    ConfigError,
    LeaseLost,
    RlbufferError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
    StepRetired,
)
from rlbuffer.policy.waiting import for_dead
from rlbuffer.step_columns import agree
from rlbuffer.store.base import Attempt, Meta, PoolEntry, Store
from rlbuffer.store.recovery import ATTEMPT_SECONDS

LEASE_SECONDS = 5.0
"""A leader that is silent for this long may be replaced."""
POLL_SECONDS = 0.02
"""Longest that a new push or a finished step waits to be noticed."""
TELEMETRY_SECONDS = 1.0
"""How often the waiting sentence and the heartbeat are written although nothing changed."""
PAUSED_SECONDS = 0.5
"""How often the leader looks which envs are paused."""
FULL = 0.97
"""Share of maxmemory from which pushes may be refused: the server's own buffers count, too, and come and go."""
TRAINER_SILENT_SECONDS = 10.0
"""A trainer reports every two seconds, also while it waits: after five of these missed it is called silent."""
PAGE = 1000
"""Pool entries per read."""
BACKOFF_SECONDS = 0.5
"""Pause before a new takeover after the server went away or the lease was lost."""
_TICKET = re.compile(r"(?P<env>.+)\.(?P<number>[0-9]{1,15})\Z")

Emit = Callable[[dict[str, Any]], None]


def config_digest(config: BatcherConfig) -> str:
    """SHA-256 of every setting that decides what a step contains."""
    return hashlib.sha256(wire.dumps(config.as_dict())).hexdigest()


class Daemon:
    """Serves one run until told to stop."""

    def __init__(
        self,
        buffer: Buffer,
        config: BatcherConfig,
        *,
        on_event: Emit | None = None,
        replace_config: bool = False,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._store: Store = buffer.store
        self._config = config
        self._emit: Emit = on_event or (lambda event: None)
        self._replace_config = replace_config
        self._lease_seconds = lease_seconds
        self._owner = uuid.uuid4().hex  # one per process start: a restarted leader is another leader
        self._forget()

    def _forget(self) -> None:
        self._token = 0
        self._losses = self._store.losses()
        self._batcher = Batcher(self._config)
        self._entries: dict[str, PoolEntry] = {}
        self._used: set[str] = set()
        """Entries of groups that were trained and may be again; they are in `_entries`, but not in the pool."""
        self._cursor = "0-0"
        self._meta: Meta | None = None
        self._renewed = 0.0
        self._since = 0.0
        self._told = ("", 0.0)
        self._memory = ("", 0.0)
        self._allowances: Mapping[str, int] = {}
        self._published = 0.0
        self._drops: dict[str, list[int]] = {}
        self._has_heard = False
        """The trainer has reported since this process leads, or is silent: the server's steps are its steps."""
        self._paused: frozenset[str] = frozenset()
        self._paused_at = float("-inf")
        self._dead: frozenset[str] = frozenset()

    def run(self, stop: threading.Event) -> None:
        """Leads until `stop` is set; stands by while another leads, and takes over when the server comes back.

        Raises:
            ConfigError: the run was started with other settings and `replace_config` is not set.
            RlbufferError: a fatal error; every waiting rank is told before it is raised.
        """
        while not stop.is_set():
            try:
                if self._acquire(stop):
                    self._take_over()
                    while not stop.is_set():
                        self._turn()
            except (ServerUnreachable, ServerRefused, LeaseLost, RunGone) as error:
                self._emit({"event": "leader", "state": "lost", "reason": str(error)})
                self._forget()
                stop.wait(BACKOFF_SECONDS * random.uniform(1, 2))
            except ConfigError:
                self._store.release_lease(self._owner)
                raise
            except Exception as error:
                self._fail(error)
                raise
        self._leave()

    # -- leading ---------------------------------------------------------------------------------------------------
    def _acquire(self, stop: threading.Event) -> bool:
        self._store.open_run()
        said = ""
        while not stop.is_set():
            lease = self._store.lease(self._owner, ttl_seconds=self._lease_seconds)
            if lease.held:
                self._token, self._renewed = lease.token, time.monotonic()
                self._losses = self._store.losses()
                return True
            if lease.owner != said:
                said = lease.owner
                self._emit({"event": "leader", "state": "standby", "owner": lease.owner})
            stop.wait(min(0.2, max(0.02, lease.remaining_seconds)))
        return False

    def _take_over(self) -> None:
        """Memory is forgotten: everything comes from the server."""
        digest = config_digest(self._config)
        meta = self._store.meta()
        if meta.config_digest not in ("", digest) and not self._replace_config:
            raise ConfigError(_differences(meta.config, self._config.as_dict(), self._store.run))
        if meta.config_digest != digest:
            self._store.set_config(self._token, self._config.as_dict(), digest)
        self._meta = self._store.meta()
        self._renew(at_once=True)
        if meta.error:
            # Not before: ranks that wait must not miss an error that comes again.
            self._store.set_error(self._token, "")
        self._entries, self._cursor = {}, "0-0"
        self._batcher = Batcher(self._config, state=self._store.load_state())
        self._batcher.close(self._store.closed_groups())
        self._since = self._store.now()
        self._restore()
        while self._ingest(block_seconds=0.0):
            self._renew()
        self._emit(
            {
                "event": "ready",
                "run": self._store.run,
                "step": self._meta.step,
                "epoch": self._meta.epoch,
                "pending": len(self._entries) - len(self._used),
                "server": dict(self._store.server()),
            }
        )

    def _restore(self) -> None:
        """Takes in the groups that may be used again; releases those that this config or version cannot use."""
        for group in self._store.reused():
            parts = [(entry.entry_id, entry.info) for entry in group.entries if entry.info is not None]
            self._entries |= {entry.entry_id: entry for entry in group.entries}
            self._used |= {entry.entry_id for entry in group.entries}
            if group.uses < self._config.max_uses and len(parts) == len(group.entries) > 0:
                pushed = group.entries[0].pushed_ms / 1000
                self._batcher.restore(parts, uses=group.uses, now=self._since, pushed=pushed)
            elif group.entries:
                env, entry_ids = group.entries[0].env, tuple(entry.entry_id for entry in group.entries)
                self._carry_out_drops([Drop(group.group_id, env, "void", 0, 0, entry_ids=entry_ids)])

    def _turn(self) -> None:
        self._ingest(block_seconds=POLL_SECONDS)
        self._renew()
        meta = self._known_meta()
        trainer = self._store.trainer()
        if trainer.claim:
            self._recover(trainer)
            return
        self._retire(meta, trainer)
        if trainer.number == 0:
            self._say("No trainer has joined yet: start one with `rlbuffer train`.")
            return
        if not self._has_heard and not self._hears(trainer):
            self._say(
                f"The batcher has just taken over at step {meta.step} and waits until the trainer has said what it has "
                f"trained, at most {ATTEMPT_SECONDS:g} s: the server may have lost steps."
            )
            return
        version = self._store.policy().version
        if version < 0:
            self._say("The trainer has not announced a policy version yet; it does when its model is loaded.")
            return
        self._batcher.set_published(version)
        self._obey()
        step = meta.step + 1
        if step > trainer.trained + 1 + self._config.lookahead:
            allowances = self._batcher.allowances(step, world_size=trainer.world_size, version=version)
            self._publish(allowances)
            self._say(self._trainer_sentence(meta, trainer))
            return
        started = time.perf_counter()
        decision = self._batcher.next(
            step, world_size=trainer.world_size, now=self._store.now(), rng=np.random.default_rng(step)
        )
        self._carry_out_drops(decision.drops)
        self._publish(decision.allowances)
        self._mourn(decision.dead, step)
        if decision.plan is None:
            self._say(self._if_full() + decision.waiting)
            return
        self._commit(decision, decision.plan, meta, started)

    def _hears(self, trainer: Attempt) -> bool:
        """Whether the trainer has reported since the takeover, or has been silent for so long that it counts as gone.

        Until then nothing is committed: after a loss of acknowledged writes the next step here may be one that the
        trainer has trained already, with other content.
        """
        self._has_heard = trainer.seen_ms >= 1000 * self._since or self._store.now() > self._since + ATTEMPT_SECONDS
        return self._has_heard

    def _recover(self, trainer: Attempt) -> None:
        """The trainer has steps that the server lost: the run goes on after them, and everything is read again."""
        found = self._store.recover(self._token, trainer, self._entries.values())
        if found is not None:
            self._store.retire(self._token, int(found["step"]))
            self._emit({"event": "recovery", **found})
        self._allowances = {}
        self._take_over()
        self._has_heard = True  # it has just said so

    def _obey(self) -> None:
        """Takes in which envs an operator has paused or resumed; looked up every half second."""
        now = time.monotonic()
        if now - self._paused_at < PAUSED_SECONDS:
            return
        paused = self._store.paused()
        for env in sorted(paused - self._paused):
            self._batcher.pause(env)
            self._emit({"event": "env", "env": env, "state": "paused"})
        for env in sorted(self._paused - paused):
            self._batcher.resume(env)
            self._emit({"event": "env", "env": env, "state": "resumed"})
        self._paused, self._paused_at = paused, now

    def _mourn(self, dead: Mapping[str, float], step: int) -> None:
        """Tells of envs that have fallen silent or are back; stops the run where that is what the settings say."""
        for env in sorted(dead.keys() - self._dead):
            sentence = for_dead(env, dead[env])
            self._emit({"event": "env", "env": env, "state": "dead", "seconds": dead[env], "sentence": sentence})
            if self._config.on_dead_env == "stop":
                raise RlbufferError(f"step {step} cannot be made: {sentence} (batcher.on_dead_env = stop)")
        for env in sorted(self._dead - dead.keys()):
            if env not in self._paused:
                self._emit({"event": "env", "env": env, "state": "back"})
        self._dead = frozenset(dead)

    def _trainer_sentence(self, meta: Meta, trainer: Attempt) -> str:
        silent = trainer.seen_seconds_ago or 0.0
        if silent < TRAINER_SILENT_SECONDS:
            return (
                f"Step {meta.step} is committed and waits for the trainer, which is at step {trainer.trained} "
                f"(lookahead {self._config.lookahead})."
            )
        # Tens of seconds: the sentence must not change at every look, or it would be told at every look.
        return (
            f"Step {meta.step} is committed, but the trainer has said nothing for over {silent // 10 * 10:.0f} s; it "
            f"was at step {trainer.trained}. It has ended, or hangs: start `rlbuffer train` again to go on."
        )

    def _renew(self, *, at_once: bool = False) -> None:
        if self._store.losses() != self._losses:
            # It may be back without its newest writes: a drop, a commit, pushes that were read already.
            raise LeaseLost(f"the server of run {self._store.run!r} was away: everything is read from it again")
        if not at_once and time.monotonic() - self._renewed < self._lease_seconds / 3:
            return
        lease = self._store.lease(self._owner, ttl_seconds=self._lease_seconds)
        if not lease.held or lease.token != self._token or not lease.renewed:
            raise LeaseLost(f"the lease of run {self._store.run!r} lapsed; {lease.owner} holds it now")
        self._renewed = time.monotonic()

    def _known_meta(self) -> Meta:
        if self._meta is None:
            raise RlbufferError("the daemon has no meta before it has taken over")
        return self._meta

    def _leave(self) -> None:
        if not self._token:
            return  # stood by: what is waited for is the leader's to say
        try:
            self._store.set_waiting("batcher", "The batcher was stopped: start `rlbuffer serve` again.")
            self._store.release_lease(self._owner)
        except RlbufferError as error:
            # Leaving without the server is fine: the lease runs out by itself.
            self._emit({"event": "leader", "state": "lost", "reason": str(error)})

    def _fail(self, error: Exception) -> None:
        """Tells every waiting rank at once, then lets the error out."""
        try:
            self._store.set_error(self._token, f"{type(error).__name__}: {error}")
            self._store.release_lease(self._owner)
        except RlbufferError as second:
            self._emit({"event": "leader", "state": "lost", "reason": str(second)})

    # -- pool ------------------------------------------------------------------------------------------------------
    def _ingest(self, *, block_seconds: float) -> int:
        entries = self._store.read_pool(self._cursor, count=PAGE, block_seconds=block_seconds)
        if not entries:
            return 0
        invalid: list[tuple[Drop, list[PoolEntry]]] = []
        tickets: dict[str, list[int]] = {}
        for entry in entries:
            self._cursor = entry.entry_id
            if entry.info is None:
                invalid.append((_invalid(entry, entry.error), [entry]))
                continue
            self._entries[entry.entry_id] = entry
            # Time in which no batcher ran does not count against a group that is not full yet.
            arrived = max(entry.pushed_ms / 1000, self._since)
            self._batcher.add(entry.info, entry_id=entry.entry_id, now=arrived, pushed=entry.pushed_ms / 1000)
            match = _TICKET.match(entry.group_id)
            if match and match["env"] == entry.env:
                tickets.setdefault(entry.env, []).append(int(match["number"]))
        if invalid:
            self._store.drop(self._token, invalid)
            self._count([drop for drop, _ in invalid])
        for env, numbers in tickets.items():
            self._store.close_tickets(env, numbers)
        return len(entries)

    def _carry_out_drops(self, drops: Iterable[Drop]) -> None:
        drops = tuple(drops)
        if not drops:
            return
        self._store.drop(self._token, [(d, [self._entries[e] for e in d.entry_ids]) for d in drops])
        self._batcher.dropped(drops)
        # What was trained before is only released: its place in the account stays.
        self._count([drop for drop in drops if not self._used.issuperset(drop.entry_ids)])
        for drop in drops:
            for entry_id in drop.entry_ids:
                self._entries.pop(entry_id, None)
                self._used.discard(entry_id)

    def _count(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            totals = self._drops.setdefault(drop.reason, [0, 0])
            totals[0] += drop.rollouts
            totals[1] += drop.tokens
            self._emit({"event": "drop", **asdict(drop)})

    def _publish(self, allowances: Mapping[str, int]) -> None:
        """Also when nothing changed: an older one that was delayed on its way may have replaced it."""
        now = time.monotonic()
        if allowances != self._allowances or now - self._published > TELEMETRY_SECONDS:
            self._store.set_allowances(self._token, allowances)
            self._allowances, self._published = dict(allowances), now

    def _retire(self, meta: Meta, trainer: Attempt) -> None:
        up_to = min(trainer.oldest_kept, trainer.trained, meta.step)
        if up_to > meta.retired:
            self._store.retire(self._token, up_to)
            self._meta = self._store.meta()

    # -- steps -----------------------------------------------------------------------------------------------------
    def _commit(self, decision: Decision, plan: StepPlan, meta: Meta, started: float) -> None:
        used = {use.entry_id: self._entries[use.entry_id] for use in plan.entries}
        reason = "a payload is missing or of another size than its metadata says"
        broken = dict.fromkeys(self._store.pin(plan.rollouts, used), reason)
        if not broken:
            _, broken = agree(plan, {key: entry.info for key, entry in used.items() if entry.info is not None})
        if broken:
            self._drop_broken(broken)
            return
        status, detail = self._store.commit(self._token, plan, used, meta=meta, state=decision.state)
        if status == "gone":
            for entry_id in detail:
                self._entries.pop(entry_id, None)
                self._used.discard(entry_id)
            self._batcher.refused(plan, detail)
            return
        self._batcher.committed(plan)
        for use in plan.entries:
            if use.is_kept:
                self._used.add(use.entry_id)
            else:
                self._entries.pop(use.entry_id, None)
                self._used.discard(use.entry_id)
            for reason, rollouts, tokens in use.dropped:
                totals = self._drops.setdefault(reason, [0, 0])
                totals[0] += rollouts
                totals[1] += tokens
        self._meta = self._store.meta()
        try:
            header = self._store.wait_step(plan.step, block_seconds=0.0)
        except StepRetired:
            raise LeaseLost(f"step {plan.step} was trained and retired meanwhile: another leads this run") from None
        self._say("")
        if header is not None:
            build_ms = round(1000 * (time.perf_counter() - started), 2)
            self._emit({"event": "step", **asdict(header), "build_ms": build_ms, "drops": self._drops})
        self._drops = {}

    def _drop_broken(self, broken: Mapping[str, str]) -> None:
        """Pushes that cannot be trained (their payloads are gone, or do not go with the others) drop as invalid."""
        for entry_id, reason in broken.items():
            entry = self._entries.pop(entry_id)
            self._batcher.remove(entry_id)
            drop = _invalid(entry, reason)
            self._store.drop(self._token, [(drop, [entry])])
            if entry_id not in self._used:
                self._count([drop])
            self._used.discard(entry_id)

    def _if_full(self) -> str:
        """A sentence when the server takes no pushes for want of memory; looked up about once a second."""
        now = time.monotonic()
        if now - self._memory[1] > TELEMETRY_SECONDS:
            facts = self._store.server()
            used, limit = int(facts["used_memory"]), int(facts["maxmemory"])
            full = (
                f"The server's memory is full ({used / 2**20:.1f} of {limit / 2**20:.1f} MiB): pushes wait until steps "
                "retire. Checkpoint more often (trainer.checkpoint_every), or raise its maxmemory. "
            )
            self._memory = (full if limit and used >= FULL * limit else "", now)
        return self._memory[0]

    def _say(self, sentence: str) -> None:
        """The waiting sentence, from one place: `inspect`, `train` and this process's own output carry the same."""
        before, at = self._told
        now = time.monotonic()
        if sentence != before and sentence:
            self._emit({"event": "waiting", "sentence": sentence})
        if sentence != before or now - at > TELEMETRY_SECONDS:
            self._told = (sentence, now)
            self._store.set_waiting("batcher", sentence)
            pending = len(self._entries) - len(self._used)
            self._store.heartbeat("batcher", "leader", {"step": self._known_meta().step, "pending": pending})


def _invalid(entry: PoolEntry, detail: str) -> Drop:
    return Drop(
        group_id=entry.group_id,
        env=entry.env,
        reason="invalid",
        rollouts=entry.rollouts,
        tokens=entry.tokens,
        entry_ids=(entry.entry_id,),
        detail=detail,
    )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], run: str) -> str:
    changed = [f"{k}: {old.get(k)!r} -> {new[k]!r}" for k in new if old.get(k) != new[k]]
    return (
        f"run {run!r} was started with other settings ({'; '.join(changed)}). "
        f"Use another run name, or `rlbuffer serve --replace-config` to go on with the new ones."
    )
