"""The batcher of a run whose steps may wait for slow groups: none that it waited for is lost to others.

A group that was waited for is in the step, or it came to nothing (its ticket lapsed, it was given back, or dropped for
another reason), or `slow_wait_seconds` were over, or its place was taken by what could not wait either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlbuffer.batcher.age import last_version
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.records.step_plan import Decision, StepPlan

Fail = Callable[[str, str], None]


class Watched(Batcher):
    """Remembers what it waited for, and compares it with the step that it makes then."""

    fail: Fail
    """Hears of a group that was lost."""
    _watched = 0
    """The step that may wait."""
    _waited: set[tuple[str, str]]
    """(env, group) that it has waited for."""
    _since = float("inf")
    """When it could be made for the first time."""

    def next(self, step: int, **asked: Any) -> Decision:
        decision = super().next(step, **asked)
        if self._watched != step:
            self._watched, self._waited, self._since = step, set[tuple[str, str]](), float("inf")
        if decision.plan is not None or self.waited_for:
            self._since = min(self._since, self._pool.now)
        if decision.plan is not None:
            self._check(step, decision.plan)
        self._waited |= {(env, name) for env, names in self.waited_for.items() for name in names}
        return decision

    def _check(self, step: int, plan: StepPlan) -> None:
        if self._pool.now - self._since >= self._config.slow_wait_seconds:
            return
        for env, name in sorted(self._waited):
            if self._situation.sampled(env) != [""]:  # an adapter came since: which tickets are for it is not known
                continue
            if name in plan.group_ids or env in self._situation.paused or not self._is_last(env, name, step):
                continue
            order = len(name), name
            for push in plan.rollouts.pushes:
                group_id = push.info.group_id
                is_behind = push.info.env == env and (len(group_id), group_id) > order
                if is_behind or not self._is_last(push.info.env, group_id, step):
                    self.fail("slow", f"step {step} waited for {name}, and takes {group_id} in its place")
                    return

    def _is_last(self, env: str, name: str, step: int) -> bool:
        """True for a group that can train at this step and at no later one, and is here or under way."""
        group = self._pool._groups.get(name)
        number = name.rpartition(".")[2]
        if group is not None:
            version, adapter = group.min_version, group.adapter
        elif number.isdigit() and not self._pool.is_known(name):
            version, adapter = self._situation.under_way.get(env, {}).get(int(number), -1), ""
        else:
            return False
        return version == last_version(self._situation.steps(step)(adapter), self._config.for_env(env).max_age)
