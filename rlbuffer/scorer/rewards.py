"""Rewards that take their time: a judge, a test run, a reward model on another host. A function of the user's own."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.batcher.group import REWARD
from rlbuffer.config.imports import defined_at, load, place_of
from rlbuffer.config.settings import ScoreSettings
from rlbuffer.errors import InvalidRollout, RewardFailed
from rlbuffer.process.threads import in_thread
from rlbuffer.records.checks import shown
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.worker.failures import exited

TIMEOUT_SECONDS = 600.0
"""Longest that the function may take for one rollout."""
NAMED = "rewards."
"""First part of the need of a group whose rollouts lack the named reward NAME: ``rewards.NAME``."""

Function = Callable[[Rollout, Group], Any]


class RewardFunction:
    """Asks the user's function about rollouts, several at once.

    Args:
        function: ``(rollout, group) -> float | {name: float}``, plain or async. In a mapping the key ``reward`` is the
            reward, else the sum of all is; the others are named rewards.
        concurrent: rollouts asked about at once.
        timeout_seconds: for one rollout.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> def judge(rollout, group):
        ...     return {"reward": 0.5, "length": rollout.length / 10}
        >>> async def scored():
        ...     function = RewardFunction(judge, concurrent=4, timeout_seconds=10.0)
        ...     group = make_group(rewards=[None], lengths=[8])
        ...     return await function.add(group, frozenset({"reward", "rewards.length"}))
        >>> [(rollout.reward, dict(rollout.rewards)) for rollout in asyncio.run(scored())]
        [(0.5, {'length': 0.8})]
    """

    def __init__(self, function: Function, *, concurrent: int, timeout_seconds: float) -> None:
        self._function = function
        self._place = defined_at(function)  # once: of a class all of its file is parsed for it
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(concurrent)
        call = getattr(type(function), "__call__", None)  # noqa: B004 - asked whether it is async, not whether it is
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def add(self, group: Group, needs: frozenset[str]) -> list[Rollout]:
        """The group's rollouts with what they lacked: a reward that is there stays, and what failed gets none.

        Raises:
            RewardFailed: of the first rollout that could not be scored; the others are not waited for.
        """
        tasks = [asyncio.ensure_future(self._added(rollout, group, needs)) for rollout in group.rollouts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _added(self, rollout: Rollout, group: Group, needs: frozenset[str]) -> Rollout:
        names = {need.removeprefix(NAMED) for need in needs if need.startswith(NAMED)} - rollout.rewards.keys()
        is_scored = REWARD not in needs or rollout.reward is not None
        if rollout.failure or (is_scored and not names):
            return rollout
        reward, named = await self._asked(rollout, group)
        missing = sorted(names - named.keys())
        if missing:
            raise self._failed(rollout, f"the function gave no reward named {', '.join(missing)}")
        kept = rollout.reward if is_scored else reward
        try:
            return replace(rollout, reward=kept, rewards={**named, **rollout.rewards})
        except InvalidRollout as error:
            raise self._failed(rollout, str(error)) from None

    async def _asked(self, rollout: Rollout, group: Group) -> tuple[float, dict[str, float]]:
        async with self._slots:
            limit = asyncio.timeout(self._timeout)
            try:
                async with limit:
                    if self._is_async:
                        answer = await self._function(rollout, group)
                    else:
                        answer = await in_thread(lambda: self._function(rollout, group))
            except (SystemExit, asyncio.CancelledError) as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():  # by the scorer
                    raise
                raise self._failed(rollout, str(exited(error)), place_of(error)) from error
            except Exception as error:  # the user's code: whatever it raises costs this group only
                if limit.expired():
                    raise self._failed(rollout, f"no reward within {self._timeout:g} s") from None
                raise self._failed(rollout, f"{type(error).__name__}: {error}", place_of(error)) from error
        try:
            named = {str(name): float(value) for name, value in answer.items()} if isinstance(answer, Mapping) else {}
            reward = named.pop(REWARD, sum(named.values())) if isinstance(answer, Mapping) else float(answer)
        except (TypeError, ValueError, OverflowError):
            raise self._failed(rollout, f"{shown(answer)} is no reward") from None
        if not all(map(math.isfinite, [reward, *named.values()])):
            raise self._failed(rollout, f"{answer!r} is not finite")
        return reward, named

    def _failed(self, rollout: Rollout, why: str, place: str = "") -> RewardFailed:
        """The error of a rollout that has no reward, with the place of what raised, else of the function."""
        return RewardFailed(f"rollout {rollout.rollout_id}: {why}{place or self._place}")


def make_rewards(name: str, options: ScoreSettings) -> RewardFunction:
    """The function that ``[score.NAME]`` names. Call it inside the event loop's thread.

    Raises:
        ConfigError: it cannot be imported or called.

    Example:
        >>> make_rewards("judge", ScoreSettings(reward="math:tau"))
        Traceback (most recent call last):
        rlbuffer.errors.ConfigError: score.judge.reward = 'math:tau' is not callable but float
    """
    function = load(f"score.{name}.reward", options.reward, "a rollout and its group")
    return RewardFunction(function, concurrent=options.concurrent, timeout_seconds=TIMEOUT_SECONDS)
