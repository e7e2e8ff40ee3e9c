"""The leader's watch of the envs: those that an operator has paused, and those that have fallen silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.process.logs import fields
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.viewer import Viewer

_log = logging.getLogger(__name__)
PAUSED_SECONDS = 0.5
"""Seconds between the leader's looks at the paused envs."""


class EnvWatch:
    """Tells the batcher of pauses and the people of silences."""

    def __init__(self, store: Viewer, config: BatcherConfig, batcher: Batcher) -> None:
        self._store = store
        self._config = config
        self._batcher = batcher
        self._paused: frozenset[str] = frozenset()
        self._paused_at = float("-inf")
        self._dead: frozenset[str] = frozenset()

    def update_pauses(self) -> None:
        """Takes in which envs an operator has paused or resumed; looked up every half second."""
        now = time.monotonic()
        if now - self._paused_at < PAUSED_SECONDS:
            return
        paused = self._store.paused()
        for env in sorted(paused - self._paused):
            self._batcher.pause(env)
            _log.info("%s is paused: steps go on without it", env, extra=fields("env", env=env, state="paused"))
        for env in sorted(self._paused - paused):
            self._batcher.resume(env)
            _log.info("%s takes part again", env, extra=fields("env", env=env, state="resumed"))
        self._paused, self._paused_at = paused, now

    def report_silent(self, dead: Mapping[str, float], step: int) -> None:
        """Tells of envs that have fallen silent or are back.

        Args:
            dead: env -> seconds of silence.
            step: the one that waits.

        Raises:
            RlbufferError: an env is dead and the settings say that this stops the run.
        """
        for env in sorted(dead.keys() - self._dead):
            sentence = str(Waiting(kind=Wait.ENV_DEAD, env=env, step=step, seconds=dead[env]))
            own = fields("env", env=env, state="dead", seconds=dead[env])
            _log.warning("%s", sentence, extra=own)
            if self._config.on_dead_env == "stop":
                raise RlbufferError(f"step {step} cannot be made: {sentence} (batcher.on_dead_env = stop)")
        for env in sorted(self._dead - dead.keys()):
            if env not in self._paused:
                _log.info("%s is back", env, extra=fields("env", env=env, state="back"))
        self._dead = frozenset(dead)
