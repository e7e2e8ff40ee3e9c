"""The worker's messages: its events, and what its heartbeat says of troubles and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rlbuffer.errors import PromptTooLong
from rlbuffer.events.event import Trouble
from rlbuffer.events.worker import GroupGivenUp, GroupPushed, VersionLoaded, WorkerEvent, WorkerWaits
from rlbuffer.records.group import Group
from rlbuffer.records.waiting import Waiting
from rlbuffer.worker.heartbeat import Pulse

SAY_WAITING_SECONDS = 5.0
"""Waiting is normal; for this long it is worth a sentence."""


class Messages:
    """Says the same in events and in the heartbeat."""

    def __init__(self, pulse: Pulse, on_event: Callable[[WorkerEvent], None]) -> None:
        self._pulse = pulse
        self.tell = on_event
        self._waiting_since: float | None = None
        self._said_waiting = 0.0

    def loaded(self, version: int, seconds: float) -> None:
        """`version` serves now (-1: none); loading took so long."""
        self._pulse.version = version
        if version >= 0:
            self.tell(VersionLoaded(version=version, seconds=seconds))

    def pushed(self, group: Group, seconds: float) -> None:
        """A group is on the server, `seconds` after its prompt was there."""
        tokens = sum(rollout.length for rollout in group.rollouts)
        self._pulse.groups += 1
        self._pulse.rollouts += len(group.rollouts)
        self._pulse.tokens += tokens
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        self.tell(
            GroupPushed(
                group_id=group.group_id,
                version=self._pulse.version,
                rollouts=len(group.rollouts),
                tokens=tokens,
                reward=sum(rewards) / len(rewards) if rewards else 0.0,
                seconds=seconds,
                lowest=min(rewards, default=None),
                highest=max(rewards, default=None),
            )
        )

    def trouble(self, event: Trouble | GroupGivenUp) -> None:
        """Something is wrong, and the worker goes on."""
        self._pulse.error = event.error
        self.tell(event)

    def left_out(self, error: PromptTooLong) -> None:
        """A prompt is skipped: nothing can be sampled for it. Counted by kind; the first one is said."""
        sentence, kind = f"{error}; such prompts are skipped and counted", type(error).__name__
        if self._pulse.failures.note(kind, sentence):
            self.trouble(GroupGivenUp(error=sentence, kind=kind, traceback=""))

    def waits(self, waiting: Waiting) -> None:
        """Notes what is waited for, and says it once it has lasted."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting = now
        waiting = replace(waiting, seconds=round(now - self._waiting_since, 1))
        self._pulse.waiting = waiting
        if now - self._said_waiting >= SAY_WAITING_SECONDS:
            self._said_waiting = now
            self.tell(WorkerWaits(waiting=waiting))

    def works(self) -> None:
        """Nothing is waited for any more."""
        self._waiting_since = None
        self._pulse.waiting = None
