"""The server's memory, as the leader watches it: what happens when it fills up.

The decisions are :mod:`rlbuffer.daemon.memory_rules`'s; here they are carried out and told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.config.memory_needs import ASK_SHARE, FULL_SHARE, mib
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.memory_rules import Pressure, stored_bytes
from rlbuffer.daemon.reporter import TELEMETRY_SECONDS
from rlbuffer.process.logs import fields
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import Attempt, Meta

_log = logging.getLogger(__name__)
HURRY_SECONDS = 0.1
"""Seconds between looks at the server while its memory may become short; :data:`TELEMETRY_SECONDS` otherwise."""
LAG_SECONDS = 5.0
"""Longest that memory which the server has still to give back is waited for before it is looked at anyway."""
ALIVE_SECONDS = 10.0
"""A trainer that was seen within this time is at work. While none is, nothing retires early: the next one starts from
its checkpoint and needs the steps after it."""


class MemoryWatch:
    """Watches the server for one leadership."""

    def __init__(self, store: LeaderStore) -> None:
        self._store = store
        self._pressure = Pressure()
        self._looked = float("-inf")
        self._freed = float("-inf")
        self._marked = 0
        """The step whose header asks for a checkpoint because memory is short."""

    def start(self, meta: Meta) -> None:
        """Takes in the live steps."""
        self._pressure.retire(meta.retired)
        for header in self._store.headers():
            self._note(header)

    # -- while the run goes on -------------------------------------------------------------------------------------
    def is_short(self) -> bool:
        """Looks at the server when it is time. -> True while something has to go."""
        self._measure()
        return self._pressure.is_short

    def relieve(self, trainer: Attempt, step: int, archive: Archiving) -> bool:
        """Retires trained steps early when they must go, and `archive` lets them. `step`: the last committed one.
        -> whether it did."""
        if trainer.seen_seconds_ago is None or trainer.seen_seconds_ago > ALIVE_SECONDS:
            return False
        pressure = self._pressure
        up_to = pressure.retires_up_to(min(trainer.at, trainer.trained, step))
        up_to = None if up_to is None else archive.may_retire(up_to, share=1.0)
        if up_to is None or up_to <= pressure.retired:
            return False
        used, limit, first, checkpoint = pressure.used or 0, pressure.limit, pressure.retired + 1, trainer.checkpoint
        self._store.retire(up_to, early={"used": used, "limit": limit})
        self.retired(up_to)
        pressure.must_ask |= up_to > checkpoint
        held = (
            f"the trainer's newest checkpoint, of step {checkpoint}, holds them."
            if up_to <= checkpoint
            else f"no checkpoint holds them. A trainer that starts again needs one of step {up_to} or later; the next "
            "step asks for it."
        )
        _warn(
            f"The server's memory was {100 * used / limit:.0f} % full ({used / 2**20:.1f} of {mib(limit)}): steps "
            f"{first} to {up_to} retired early; {held}",
            "retired early",
            first=first,
            last=up_to,
            used=used,
            limit=limit,
            checkpoint=checkpoint,
        )
        return True

    def retired(self, up_to: int) -> None:
        """Steps up to `up_to` are gone; their memory comes back a little later."""
        self._pressure.retire(up_to)
        self._freed = time.monotonic()

    def freed(self) -> None:
        """Something else is gone."""
        self._pressure.freed()
        self._freed = time.monotonic()

    def marked(self, meta: Meta, trainer: Attempt) -> Meta:
        """`meta` as the next header is made from it: with the wish for a checkpoint when memory is short."""
        done = min(trainer.at, trainer.trained, meta.step)
        if not self._pressure.asks(done=done, checkpoint=trainer.checkpoint):
            return meta
        self._marked = meta.step + 1
        return replace(meta, checkpoint_now=True)

    def committed(self, header: StepHeader) -> None:
        """A step is committed."""
        self._note(header)
        if header.checkpoint_now and header.step == self._marked:
            share = f"above {100 * ASK_SHARE:.0f} %"
            text = f"The server's memory is {share}: step {header.step} asks the trainer for a checkpoint."
            _warn(text, "checkpoint", step=header.step)

    @property
    def share(self) -> float:
        """Used over the server's memory; 0.0 while it is not known."""
        return self._pressure.share

    def problems(self) -> tuple[Problem, ...]:
        """The server takes no pushes for want of memory."""
        self._measure()
        used, limit = self._pressure.used, self._pressure.limit
        if used is None or not limit or used < limit * FULL_SHARE:
            return ()
        in_steps = f"{mib(sum(self._pressure.sizes.values()))} of it in this run's steps"
        full = f"{used / 2**20:.1f} of {mib(limit)}, {in_steps}: pushes wait until steps retire"
        return (Problem(kind=Trouble.MEMORY, detail=full),)

    def _note(self, header: StepHeader) -> None:
        size = stored_bytes(payload_bytes=header.bytes, sequences=header.sequences)
        self._pressure.committed(header.step, size, asks=header.checkpoint_now)

    def _measure(self) -> None:
        now = time.monotonic()
        pause = HURRY_SECONDS if self._pressure.may_be_short else TELEMETRY_SECONDS
        if now - self._looked < pause:
            return
        self._looked = now
        facts: Mapping[str, Any] = self._store.server()
        # A thread of the server gives unlinked memory back; until then it only looks used.
        if int(facts.get("unfreed", 0)) and now - self._freed < LAG_SECONDS:
            return
        self._pressure.observe(int(facts["used_memory"]), int(facts["maxmemory"]))


def _warn(text: str, state: str, **values: int) -> None:
    _log.warning("%s", text, extra=fields("memory", state=state, **values))
