"""Whether a group teaches anything: the one place that says so.

A group that does not is flat. The setting `flat`, the order by priority, `fill_timeout_seconds`, the last step of a
run, the worker's skipping of prompts and the figures ask here. The first of these that applies decides:

1. No token of the group is trained: it teaches nothing.
2. ``batcher.flat_by`` names a number that all its rollouts have: it teaches where that differs.
3. It brings a column ``advantages``, or the trainer's loss needs no advantage
   (:func:`rlbuffer.config.losses.needs_advantage`): it teaches, whatever its rewards are.
4. Else it teaches where a trained token has an advantage, by its env's estimator.

Rewards closer together than 1e-6 of the largest count as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from rlbuffer.batcher.advantages import OF_DIFFERENCES, Loaded
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.batcher.step_plan import advantages_of, all_train, trained_tokens
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ConfigError
from rlbuffer.records.checks import MAX_NUMBER
from rlbuffer.records.info import are_flat
from rlbuffer.state.text import plural

OWN = "advantages"
"""Column that wins over the estimator."""
UNTRAINED = "no token of it is trained"
MOST = MAX_NUMBER**2
"""Lesson of a group that teaches whatever its rewards are: no variance of rewards is larger."""
_NOISE_OF_EQUALS, _NOISE = 1e-8, 1e-12
"""Advantages up to this much of the largest reward are rounding: where rewards are equal, and where they differ."""


class Rewarded(Protocol):
    """A rollout, or its info."""

    @property
    def reward(self) -> float | None: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...


class Teaching:
    """Judges groups.

    Args:
        config: the settings `flat_by`, `advantage`, `truncated`.
        needs_advantage: the trainer's loss has no gradient where the advantage is 0, as far as is known.
        estimators: by name; without them only :meth:`anyway` and :meth:`judged` may be asked.
    """

    def __init__(
        self, config: BatcherConfig, *, needs_advantage: bool = True, estimators: Mapping[str, Loaded] | None = None
    ) -> None:
        self.estimators = estimators or {}
        self._config, self._needs_advantage = config, needs_advantage

    @property
    def is_trainers(self) -> bool:
        """True of a stream: its trainer judges for itself what a group teaches, and is given all but what settings keep
        back."""
        return self._config.is_stream

    def of(self, group: PooledGroup) -> bool:
        """True when a ready group teaches anything."""
        return not self.flatness(group)

    def flatness(self, group: PooledGroup) -> str:
        """The reason why a ready group teaches nothing; "" when it teaches. Judged once a group."""
        if group.flatness is None:
            group.flatness = self._judge(group)
        return group.flatness

    def trains(self, group: PooledGroup) -> bool:
        """True when a token of a ready group is trained."""
        return self.flatness(group) != UNTRAINED

    def lesson(self, group: PooledGroup) -> float:
        """How much a ready group teaches, as far as can be told without its payload: the variance over n of what it is
        judged by; -1 for one that teaches nothing, :data:`MOST` for one that teaches whatever its rewards are."""
        if not self.of(group):
            return -1.0
        if self.anyway(group.infos, _columns(group)):
            return MOST
        return float(np.var(self.judged(group.infos)))

    def anyway(self, rollouts: Sequence[Rewarded], columns: Iterable[str]) -> bool:
        """True when these rollouts, with further columns of these names, teach whatever their rewards are."""
        return self._named(rollouts) is None and (not self._needs_advantage or OWN in columns)

    def judged(self, rollouts: Sequence[Rewarded]) -> list[float]:
        """The numbers that rollouts are judged by: what `flat_by` names, else the rewards that are there."""
        named = self._named(rollouts)
        return [r.reward for r in rollouts if r.reward is not None] if named is None else named

    def _named(self, rollouts: Sequence[Rewarded]) -> list[float] | None:
        name = self._config.flat_by
        if not name or not rollouts:
            return None
        values = [r.rewards.get(name, r.reward if name == "reward" else None) for r in rollouts]
        return [value for value in values if value is not None] if None not in values else None

    def _judge(self, group: PooledGroup) -> str:
        # [rollouts] True where one trains a token; numpy takes longer than a whole group of a few rollouts.
        are_trained = None if all_train(group, self._config) else trained_tokens([group], self._config) > 0
        if are_trained is not None and not are_trained.any():
            return UNTRAINED
        by = self._config.flat_by
        named = self._named(group.infos) if by else None
        if named is not None:
            return _alike(by, named) if are_flat(named) else ""
        if self.anyway((), _columns(group)):
            return ""
        equal, name = group.is_flat, self._config.for_env(group.env).advantage
        if name not in OF_DIFFERENCES or not (equal or are_trained is None or are_trained.all()):
            try:
                advantages, untrainable = advantages_of([group], self._config, self.estimators)
            except ConfigError:  # whoever makes a step of it meets that again, and says so
                return ""
            largest = float(np.abs(group.rewards).max(initial=0.0))
            noise = _NOISE_OF_EQUALS * largest if equal else _NOISE * min(1.0, largest)
            if untrainable or (np.abs(advantages if are_trained is None else advantages[are_trained]) > noise).any():
                return ""
        elif not equal:
            return ""
        return _alike("reward", group.rewards) if equal else "no rollout of it has an advantage"


def _columns(group: PooledGroup) -> set[str]:
    return {name for part in group.parts.values() for name, _, _ in part.info.columns}


def _alike(name: str, values: Sequence[float]) -> str:
    who = f"all {plural(len(values), 'rollout')} have" if len(values) > 1 else "its only rollout has"
    return f"{who} {name} {sum(values) / len(values):g}"
