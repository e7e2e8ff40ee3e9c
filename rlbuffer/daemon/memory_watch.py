"""The server's memory, as the leader watches it: the forecast at the start, and what happens when it fills up.

The decisions are :mod:`rlbuffer.daemon.memory_rules`'s; here they are carried out and told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.memory_needs import Forecast, capacity_bytes, does_not_fit, mib, steps_at_once
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.memory_rules import (
    FULL_SHARE,
    Pressure,
    assumed_limit,
    checkpoint_asked,
    checkpoints_often,
    mean_step_bytes,
    no_limit,
    steps_retired_early,
    stored_bytes,
)
from rlbuffer.daemon.teller import TELEMETRY_SECONDS
from rlbuffer.errors import ConfigError
from rlbuffer.process.logs import fields
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.store.keys import EARLY_SHARE
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import Attempt, Meta

_log = logging.getLogger(__name__)
HURRY_SECONDS = 0.1
"""Seconds between looks at the server while its memory may become short; :data:`TELEMETRY_SECONDS` otherwise."""
LAG_SECONDS = 5.0
"""Longest that memory which the server has still to give back is waited for before it is looked at anyway."""
ALIVE_SECONDS = 10.0
"""A trainer that was heard within this time is at work. While none is, nothing retires early: the next one starts from
its checkpoint and needs the steps after it."""
MEASURED_STEPS = 64
"""Steps that the mean size of a step is taken over."""


class MemoryWatch:
    """Watches the server for one leadership.

    Args:
        store: the run.
        config: what steps are made of.
        world_size: ranks that the settings name; counts until a trainer has joined.
        checkpoint_every: steps between the trainer's checkpoints by the settings.
    """

    def __init__(self, store: LeaderStore, config: BatcherConfig, *, world_size: int, checkpoint_every: int) -> None:
        self._store = store
        self._config = config
        self._world_size = world_size
        self._checkpoint_every = checkpoint_every
        self._pressure = Pressure()
        self._is_assumed = False
        """The server has no maxmemory: the limit is a share of its machine's memory."""
        self._looked = float("-inf")
        self._freed = float("-inf")
        self._retired = 0
        """The last retired step."""
        self._marked = 0
        """The step whose header asks for a checkpoint because memory is short."""
        self._attempt = 0
        """The attempt whose world size was looked at."""
        self._sizes: dict[int, int] = {}
        """Step -> bytes that it takes on the server; the live ones."""
        self._planned: dict[int, int] = {}
        """Step -> world size that it was planned for."""

    # -- the forecast ----------------------------------------------------------------------------------------------
    def start(self, meta: Meta, *, sweeps: bool = True) -> dict[str, int]:
        """Takes in the live steps, sweeps what an earlier leader left, and looks whether the run can fit.

        A run that is at work already with these settings is not ended by a leader that starts again: it is warned of.

        Args:
            meta: of the run, before these settings are written to it.
            sweeps: False where an archive may not have all of it yet: the leader sweeps it later.

        -> what the event of the takeover says of it.

        Raises:
            ConfigError: the steps that must be there at once do not fit the server's memory.
        """
        self._retired = meta.retired
        for header in self._store.headers():
            self._note(header)
        forecast = self._forecast(self._world_size)
        if meta.step == 0 or meta.config != self._config.as_dict():
            self._refuse(forecast, self._world_size)
        if meta.retired and sweeps:
            self._store.retire(meta.retired)
        if forecast is None:
            return {}
        return {
            "step_bytes": forecast.step_bytes,
            "steps": forecast.steps,
            "limit": forecast.limit,
            "measured": forecast.measured,
            "kept_steps": forecast.kept_steps,
        }

    def check(self, meta: Meta | None) -> None:
        """Checks that these settings may take the place of others, or begin a run (None). Ask a watch of its own before
        they do.

        Raises:
            ConfigError: the steps that must be there at once do not fit the server's memory.
        """
        for header in self._store.headers() if meta is not None else ():
            self._note(header)
        self._refuse(self._forecast(self._world_size), self._world_size)

    def tell(self) -> None:
        """Warns of what the settings and the server's memory mean for each other."""
        limit = self._limit()
        if limit == 0:
            assumed = assumed_limit(0, int(self._store.server()["machine"]))
            _warn(no_limit(assumed), "unlimited", limit=assumed)
        forecast = self._forecast(self._world_size)
        if forecast is not None and not forecast.fits:
            sentence = does_not_fit(forecast, self._config, world_size=self._world_size)
            _warn(f"{sentence[:1].upper()}{sentence[1:]}.", "tight")
        elif forecast is not None and forecast.kept_steps < self._checkpoint_every:
            _warn(checkpoints_often(forecast, self._checkpoint_every), "often", steps=forecast.kept_steps)

    def joined(self, trainer: Attempt) -> None:
        """A trainer has joined: its world size decides.

        Raises:
            ConfigError: what a step of that many ranks takes does not fit; all ranks hear it.
        """
        if trainer.number == self._attempt or (trainer.seen_seconds_ago or 0.0) > ALIVE_SECONDS:
            return
        self._attempt = trainer.number
        self._world_size = trainer.world_size
        if self._planned and self._planned[max(self._planned)] == trainer.world_size:
            return  # such steps are being made already
        try:
            self._refuse(self._forecast(trainer.world_size), trainer.world_size)
        except ConfigError as error:
            self._store.set_error(f"{type(error).__name__}: {error}")
            raise

    def _limit(self) -> int | None:
        """``maxmemory``, 0 when there is none; None for the model of a server, which has no memory to speak of."""
        facts = self._store.server()
        return None if facts["name"] == "memory" else int(facts["maxmemory"])

    def _forecast(self, world_size: int) -> Forecast | None:
        limit = self._limit()
        newest = {step: (self._sizes[step], self._planned[step]) for step in sorted(self._sizes)[-MEASURED_STEPS:]}
        size = mean_step_bytes(self._config, newest, world_size)
        measured = len(newest) if size is not None else 0
        if size is None:
            size = capacity_bytes(self._config, world_size)
        if not limit or size is None:
            return None
        return Forecast(step_bytes=size, steps=steps_at_once(self._config), limit=limit, measured=measured)

    def _refuse(self, forecast: Forecast | None, world_size: int) -> None:
        if forecast is None or forecast.fits:
            return
        raise ConfigError(does_not_fit(forecast, self._config, world_size=world_size), setting="server.maxmemory")

    # -- while the run goes on -------------------------------------------------------------------------------------
    def relieve(self, trainer: Attempt, step: int, archive: Archiving) -> None:
        """Looks at the server when it is time; retires trained steps early when they must go, and `archive` lets them.
        `step`: the last committed one."""
        self._look()
        done = min(trainer.at, trainer.trained, step)
        if trainer.seen_seconds_ago is None or trainer.seen_seconds_ago > ALIVE_SECONDS:
            return
        up_to = self._pressure.retires_up_to(retired=self._retired, done=done, sizes=self._sizes)
        up_to = None if up_to is None else archive.may_retire(up_to, share=1.0)
        if up_to is None or up_to <= self._retired:
            return
        used, limit = self._pressure.used or 0, self._pressure.limit
        first = self._retired + 1
        self._store.retire(up_to, early={"used": used, "limit": limit})
        self.retired(up_to)
        if up_to > trainer.checkpoint:
            self._pressure.must_ask()
        text, newest = steps_retired_early(first, up_to, used, limit, checkpoint=trainer.checkpoint), trainer.checkpoint
        _warn(text, "retired early", first=first, last=up_to, used=used, limit=limit, checkpoint=newest)

    def retired(self, up_to: int) -> None:
        """Steps up to `up_to` are gone; their memory comes back a little later."""
        for step in [step for step in self._sizes if step <= up_to]:
            del self._sizes[step], self._planned[step]
        self._pressure.freed()
        self._retired = up_to
        self._freed = time.monotonic()

    def marked(self, meta: Meta, trainer: Attempt) -> Meta:
        """`meta` as the next header is made from it: with the wish for a checkpoint when memory is short."""
        done = min(trainer.at, trainer.trained, meta.step)
        step = meta.step + 1
        if not self._pressure.asks(
            step, retired=self._retired, done=done, sizes=self._sizes, checkpoint=trainer.checkpoint
        ):
            return meta
        self._marked = step
        return replace(meta, checkpoint_now=True)

    def committed(self, header: StepHeader) -> None:
        """A step is committed."""
        self._note(header)
        if header.checkpoint_now and header.step == self._marked:
            _warn(checkpoint_asked(header.step), "checkpoint", step=header.step)

    @property
    def share(self) -> float:
        """Used over the server's memory; 0.0 while it is not known."""
        return self._pressure.share

    def problems(self) -> tuple[Problem, ...]:
        """The server takes no pushes for want of memory; or it has no limit, and uses much of its machine's."""
        self._look()
        used, limit = self._pressure.used, self._pressure.limit
        if used is None or not limit or used < limit * (EARLY_SHARE if self._is_assumed else FULL_SHARE):
            return ()
        in_steps = f"{mib(sum(self._sizes.values()))} of it in this run's steps"
        if self._is_assumed:  # nothing is refused there
            full = f"maxmemory 0, and it uses {mib(used)} of a machine that has {mib(2 * limit)}, {in_steps}"
        else:
            full = f"{used / 2**20:.1f} of {mib(limit)}, {in_steps}: pushes wait until steps retire"
        return (Problem(kind=Trouble.MEMORY, detail=full),)

    def _note(self, header: StepHeader) -> None:
        self._sizes[header.step] = stored_bytes(payload_bytes=header.bytes, rollouts=header.rollouts)
        self._planned[header.step] = header.world_size
        if header.checkpoint_now:
            self._pressure.has_asked(header.step, retired=self._retired)

    def _look(self) -> None:
        now = time.monotonic()
        pause = HURRY_SECONDS if self._pressure.may_be_short else TELEMETRY_SECONDS
        if now - self._looked < pause:
            return
        self._looked = now
        facts: Mapping[str, Any] = self._store.server()
        # A thread of the server gives unlinked memory back; until then it only looks used.
        if int(facts.get("unfreed", 0)) and now - self._freed < LAG_SECONDS:
            return
        self._is_assumed = not int(facts["maxmemory"])
        limit = assumed_limit(int(facts["maxmemory"]), int(facts["machine"]))
        self._pressure.look(int(facts["used_memory"]), limit)


def _warn(text: str, state: str, **values: int) -> None:
    _log.warning("%s", text, extra=fields("memory", state=state, **values))
