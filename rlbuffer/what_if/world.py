"""Workers, leader and trainer of a recorded run on one virtual clock, with other settings of the batcher.

Task n of an env takes as long, and is as long, as recorded; one beyond the record is like one of the env's, drawn. A
worker takes a ticket when fewer are out than allowed, and its ticket is out until the leader has read the group and
said what is allowed then. The trainer takes its recorded seconds; the version of a step is there when it is trained.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np

from rlbuffer.batcher.admission import ANY_ENV
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.batcher.turn import take_turn
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ConfigError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.step_plan import Drop, StepPlan
from rlbuffer.state.text import duration, plural
from rlbuffer.what_if.outcome import Fate, Outcome, oldest_of, outcome_of

Tasks = Callable[[str, int, int], tuple[float, GroupInfo]]
"""(env, number, version) -> seconds, and the group."""
ASK_SECONDS = 0.06
"""Mean time from one ask for a ticket to the next."""
LEAST_PATIENCE = 3600.0
"""Seconds. A run that gets no further for so long, or `PATIENCE` times a step and the longest task, makes no step."""
PATIENCE, LEAST_GROUPS = 100, 10_000
"""Nor does one that gets no further for so many steps' worth of groups: where tasks are short an hour has more of them
than anybody waits for."""
TOLD_GROUPS = 50
"""From one word of progress to the next."""


class World:
    """One run.

    Args:
        config: the settings.
        tasks: what a ticket becomes.
        workers: the env of each.
        train_seconds: of a step.
        turn_seconds: from a push, or a trained step, to the leader's decision.
        world_size: ranks.
        steps: how many to train.
        step_groups: that came for a step of the record, about.
        seed: draws when workers ask.
        needs_advantage: as the recorded trainer's loss.
    """

    def __init__(
        self,
        config: BatcherConfig,
        tasks: Tasks,
        workers: list[str],
        *,
        train_seconds: float,
        turn_seconds: float,
        world_size: int,
        steps: int,
        step_groups: int,
        seed: int,
        needs_advantage: bool,
    ) -> None:
        self._config, self._tasks, self._steps, self._world_size = config, tasks, steps, world_size
        self._train_seconds, self._turn_seconds, self._step_groups = train_seconds, turn_seconds, step_groups
        self._batcher = Batcher(config, needs_advantage=needs_advantage)
        self._rng, self._order = np.random.default_rng(seed), count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._now = 0.0
        self._committed = self._trained = 0
        self._out: dict[str, dict[int, int]] = {env: {} for env in dict.fromkeys(workers)}
        """env -> number of a ticket that is out -> its version."""
        self._given: Counter[str] = Counter()
        self._allowances: Mapping[str, int] = {}
        self._unread: list[tuple[str, int]] = []
        self._queue: list[StepPlan] = []
        self._is_training = self._is_ticking = False
        self._idle_since = self._waited = 0.0
        self._longest_task = self._moved = 0.0
        """When it last got further: a step was made or trained, or more groups were pending than since that."""
        self._most_pending = self._groups_then = 0
        self._waiting = ""
        self._infos: dict[str, GroupInfo] = {}
        self._fates: dict[str, Fate] = {}
        self._later(0.0, self._turn)
        for index, env in enumerate(workers):
            self._later(0.001 * (index + 1), self._ask, env)

    def run(self, progress: Callable[[int, int], None] = lambda steps, groups: None) -> Outcome:
        """Runs until the steps are trained. `progress` gets the steps that are, and the groups so far: with each
        step, and while one takes many groups.

        Raises:
            ConfigError: with these settings one never is.
        """
        told = (0, 0)
        while self._trained < self._steps:
            tries = len(self._infos) - self._groups_then
            most = max(LEAST_GROUPS, PATIENCE * self._step_groups)
            if not self._events or self._now - self._moved > self._patience or tries > most:
                raise ConfigError(self._never())
            self._now, _, what, args = heapq.heappop(self._events)
            what(*args)
            place = self._trained, len(self._infos) // TOLD_GROUPS
            if place != told:
                told = place
                progress(self._trained, len(self._infos))
        return outcome_of([*self._fates.values()], steps=self._trained, seconds=self._now, waited=self._waited)

    @property
    def _pending(self) -> int:
        return len(self._infos) - len(self._fates)

    @property
    def _patience(self) -> float:
        by_clock = self._config.slow_wait_seconds + (self._config.fill_timeout_seconds or 0.0)
        return max(LEAST_PATIENCE, PATIENCE * (self._train_seconds + self._longest_task), 2 * by_clock)

    def _never(self) -> str:
        """Which step is never made, and what is known of the reason."""
        reasons = Counter(fate.reason for fate in self._fates.values() if fate.age is None)
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        why = [
            f"of {plural(len(self._infos), 'group')} it dropped {dropped}" if reasons else "",
            f"in the end it waits: {self._waiting}" if self._waiting else "",
        ]
        after = duration(self._now - self._moved)
        cause = "; ".join(filter(None, why)) or "no group came"
        return f"with these settings step {self._trained + 1} is never made, so it seems after {after}: {cause}"

    def _move(self) -> None:
        self._moved, self._groups_then, self._most_pending = self._now, len(self._infos), self._pending

    def _later(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), what, args))

    # -- workers ------------------------------------------------------------------------------------------------------
    def _ask(self, env: str) -> None:
        out = self._out[env]
        if len(out) >= self._allowances.get(env, self._allowances.get(ANY_ENV, 0)):
            self._later(ASK_SECONDS * self._rng.uniform(0.5, 1.5), self._ask, env)
            return
        number = self._given[env]
        self._given[env] += 1
        out[number] = self._trained
        seconds, info = self._tasks(env, number, self._trained)
        self._longest_task = max(self._longest_task, seconds)
        self._later(seconds, self._push, env, number, info)

    def _push(self, env: str, number: int, info: GroupInfo) -> None:
        self._infos[info.group_id] = info
        self._batcher.add(info, entry_id=f"{next(self._order)}-0", now=self._now, pushed=self._now)
        self._unread.append((env, number))
        self._later(self._turn_seconds, self._turn)
        self._later(0.0, self._ask, env)

    # -- leader -------------------------------------------------------------------------------------------------------
    def _turn(self) -> None:
        for env, number in self._unread:
            self._out[env].pop(number, None)
        self._unread.clear()
        step = self._committed + 1
        turn = take_turn(
            self._batcher,
            step=step,
            published={"": self._trained},
            under_way=self._out if self._config.slow == "wait" else {},
            is_held=step > self._trained + 1 + self._config.lookahead,
            world_size=self._world_size,
            now=self._now,
        )
        self._drop(turn.drops)
        if self._pending > self._most_pending:  # a step of many groups takes its time
            self._move()
        self._allowances = dict(turn.allowances)
        if turn.decision is None:
            return
        self._waiting = turn.decision.waiting
        if turn.decision.plan is None:
            if not self._is_ticking:  # rules that go by the clock
                self._is_ticking = True
                self._later(0.5, self._tick)
            return
        self._commit(turn.decision.plan)
        self._later(self._turn_seconds, self._turn)

    def _tick(self) -> None:
        self._is_ticking = False
        self._turn()

    def _drop(self, drops: tuple[Drop, ...]) -> None:
        self._batcher.dropped(drops)
        for drop in drops:
            self._decide(drop.group_id, reason=str(drop.reason))

    def _commit(self, plan: StepPlan) -> None:
        self._batcher.committed(plan)
        self._committed = plan.step
        for group_id in plan.group_ids:
            self._decide(group_id, age=plan.step - 1 - oldest_of([self._infos[group_id]]))
        self._step_groups = max(self._step_groups, len(plan.group_ids))
        self._move()
        self._queue.append(plan)
        self._begin()

    def _decide(self, group_id: str, *, age: int | None = None, reason: str = "") -> None:
        info = self._infos[group_id]
        length = info.tokens / max(1, info.totals.rollouts)
        self._fates.setdefault(group_id, Fate(tokens=info.tokens, length=length, age=age, reason=reason))

    # -- trainer ------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self._queue and not self._is_training:
            plan = self._queue.pop(0)
            self._waited += self._now - self._idle_since
            self._is_training = True
            self._later(self._train_seconds, self._finish, plan.step)

    def _finish(self, step: int) -> None:
        self._trained, self._is_training, self._idle_since = step, False, self._now
        self._move()
        self._begin()
        self._later(self._turn_seconds, self._turn)
