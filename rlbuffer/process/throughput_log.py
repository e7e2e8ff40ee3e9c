"""Groups that a process has made, summed up: a line every few seconds instead of one for each."""

from __future__ import annotations

import logging
import time

from rlbuffer.state.text import amount, plural

EVERY_SECONDS = 10.0


class ThroughputLog:
    """Says how many groups, rollouts and tokens there were since it last said so.

    Args:
        log: where it says it.
        verb: what was done to them.
    """

    def __init__(self, log: logging.Logger, verb: str) -> None:
        self._log, self._verb = log, verb
        self._since = time.monotonic()
        self._groups = self._rollouts = self._tokens = 0
        self._reward: float | None = None
        self._more = ""
        self._has_said = False

    def add(self, rollouts: int, tokens: int, *, reward: float | None = None, more: str = "") -> None:
        """One more group: the sum of its rewards, and what stands behind the numbers of the last one."""
        self._groups, self._rollouts, self._tokens = self._groups + 1, self._rollouts + rollouts, self._tokens + tokens
        if reward is not None:
            self._reward = (self._reward or 0.0) + reward
        self._more = more
        if not self._has_said or time.monotonic() - self._since >= EVERY_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Logs what was not logged yet."""
        if self._groups:
            rate = self._rollouts / max(time.monotonic() - self._since, 1e-3)
            counts = plural(self._groups, "group"), plural(self._rollouts, "rollout"), f"{amount(self._tokens)} tokens"
            parts = [
                f"{self._verb} {', '.join(counts)}",
                "" if self._reward is None else f"reward {self._reward / self._rollouts:.2f}",
                self._more,
                f"{amount(rate)} rollouts/s" if self._has_said else "",
            ]
            self._log.info("%s", "  ".join(part for part in parts if part))
        self._since, self._has_said, self._reward = time.monotonic(), True, None
        self._groups = self._rollouts = self._tokens = 0
