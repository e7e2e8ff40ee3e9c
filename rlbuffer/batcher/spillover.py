"""The time that a step waits for an env: the timers of `spillover` and of dead envs. No clock: `now` is given.

An env is **short** while it is owed more than its mean group and has nothing ready; after `spill_after_seconds` of that
`borrow` lets the others fill its place until it has something again, `partial` closes the step as it is. An env is
**dead** when a step has waited for it for `env_dead_after_seconds` and the env sent nothing, not even a part of a
group. An env may be silent for ever while no step needs it, or while only the trainer holds it up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rlbuffer.config.batcher import BatcherConfig


class Patience:
    """Since when the open step has waited for each env, and which envs are dead."""

    __slots__ = ("_awaited", "_config", "_dead", "_heard", "_short")

    def __init__(self, config: BatcherConfig) -> None:
        self._config = config
        self._short: dict[str, float] = {}
        """env -> since when it has been short."""
        self._awaited: dict[str, float] = {}
        """env -> since when a step has needed it."""
        self._heard: dict[str, float] = {}
        self._dead: dict[str, float] = {}
        """env -> since when it is silent."""

    def heard(self, env: str, now: float) -> None:
        """Something of `env` came."""
        self._heard[env] = now
        self._dead.pop(env, None)

    def silence(self, now: float) -> dict[str, float]:
        """env -> seconds since something of it came."""
        return {env: max(0.0, now - at) for env, at in self._heard.items()}

    def forget(self, env: str) -> None:
        """`env` is paused: nothing is expected of it."""
        for timers in (self._short, self._awaited, self._dead):
            timers.pop(env, None)

    def looked(self, now: float, *, short: Iterable[str], awaited: Iterable[str]) -> None:
        """Notes the result of the last trial: the envs that are short, and those that the open step needs."""
        self._short = {env: self._short.get(env, now) for env in short}
        self._awaited = {env: self._awaited.get(env, now) for env in awaited}

    def committed(self, *, is_full: bool = True) -> None:
        """A step went out: the next one counts its waiting from now, but who borrows goes on.

        One that went out because it had waited for long enough lacked what it had waited for, and so did one in which
        others filled the place of an env that was short: silence goes on.
        """
        if is_full:
            self._awaited = {env: since for env, since in self._awaited.items() if env in self._short}
        if self._config.spillover != "borrow":
            self._short = {}

    def judge(self, now: float, budgeted: Collection[str]) -> None:
        """Finds the envs that are dead by now.

        An env without a budget holds no step up by itself: it is dead only when all that the step needs are silent.
        """
        limit = self._config.env_dead_after_seconds
        since = {env: max(first, self._heard.get(env, first)) for env, first in self._awaited.items()}
        silent = {env: first for env, first in since.items() if now - first >= limit}
        if len(silent) < len(since):
            silent = {env: first for env, first in silent.items() if env in budgeted}
        self._dead = {**silent, **self._dead}

    def dead(self, now: float) -> dict[str, float]:
        """Dead env -> seconds of silence."""
        return {env: now - first for env, first in sorted(self._dead.items())}

    def excused(self, now: float) -> set[str]:
        """Envs that a step does not wait for though they are short."""
        excused = set(self._dead) if self._config.on_dead_env == "borrow" else set()
        if self._config.spillover == "borrow":
            excused.update(env for env in self._short if self._is_over(env, now))
        return excused

    def overdue(self, now: float) -> set[str]:
        """Envs that have been short for so long that `partial` closes the step without them."""
        return {e for e in self._short if self._is_over(e, now)} if self._config.spillover == "partial" else set()

    def may_close(self, now: float, short: Iterable[str]) -> bool:
        """True when `partial` closes the step that waits for these envs."""
        return not self.overdue(now).isdisjoint(short)

    def _is_over(self, env: str, now: float) -> bool:
        return env in self._short and now - self._short[env] >= self._config.spill_after_seconds
