"""The amount that each env is owed: deficit round robin over envs.

Every env has a share of what a step trains, in tokens, rollouts or groups. Whenever a group of size w is selected, each
env is credited its share of w and the env that gave the group is charged w; who is owed most in proportion to its share
gives the next one, whole (:mod:`rlbuffer.batcher.selection`). Deficits carry over from step to step, so that shares
hold in the long run within one group even when a single step is too small to hold them.

Source: Shreedhar and Varghese 1995, Efficient fair queuing using deficit round robin, with a continuous quantum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.fractions import budgets_at, fraction_at
from rlbuffer.errors import RlbufferError

ROUNDING = 1e-9
"""Share of a group below which a deficit is nothing."""
CHARGED_AT_ONCE = 256
"""Groups of one cumulative sum: two numbers a group and env."""
MEAN_WINDOW = 64
"""Trained groups over which an env's mean group is remembered: long enough to be steady, short enough to follow."""


@dataclass(slots=True)
class EnvAccount:
    """The account of an env from step to step; moves only when a step is committed."""

    deficit: float = 0.0
    """Amount that the env is owed, in the budget's unit; negative when it gave more than its share."""
    groups: int = 0
    """Trained groups that the means were made of, at most MEAN_WINDOW."""
    tokens: float = 0.0
    """Mean tokens of a trained group."""
    rollouts: float = 0.0
    """Mean rollouts of a trained group."""
    largest: float = 0.0
    """Largest group ever trained, in the budget's unit."""
    variance: float = 0.0
    """Variance of the tokens of a trained group."""

    def learn(self, tokens: int, rollouts: int, size: int) -> None:
        """Takes one trained group into the running means."""
        off = tokens - self.tokens
        self.tokens += off / (self.groups + 1)
        # Source: Welford 1962, a method for calculating corrected sums of squares.
        self.variance += (off * (tokens - self.tokens) - self.variance) / (self.groups + 1)
        self.rollouts += (rollouts - self.rollouts) / (self.groups + 1)
        self.groups = min(self.groups + 1, MEAN_WINDOW - 1)
        self.largest = max(self.largest, size)

    def clamp(self, share: float, largest: float) -> None:
        """Bounds the deficit by the env's `share` of one step, beyond the `largest` group of any env.

        An env that had nothing for long must not flood the next steps. But a deficit of up to one group is how shares
        smaller than a group are kept at all, so that much is never forgotten.
        """
        limit = share + largest
        self.deficit = min(max(self.deficit, -limit), limit)


def size_of(unit: str, *, tokens: int, rollouts: int) -> int:
    """The size of a group in the budget's unit."""
    return tokens if unit == "tokens" else rollouts if unit == "rollouts" else 1


def has_budget(config: BatcherConfig, env: str) -> bool:
    """True when a share is promised to this env by name: then a step waits for it when it is short."""
    return env in config.budgets or env == config.remainder


def is_off(config: BatcherConfig, env: str, step: int) -> bool:
    """True when the schedule gives this env nothing at `step`: then nothing is expected of it."""
    return env != config.remainder and env in config.budgets and fraction_at(config.budgets[env], step) == 0


def is_open(config: BatcherConfig, step: int) -> bool:
    """True when envs that nobody named may have a share of `step`."""
    return config.remainder in ("proportional", "equal") and _rest(budgets_at(config.budgets, step)) > 1e-9


def _rest(budgets: Mapping[str, float]) -> float:
    return max(0.0, 1.0 - sum(budgets.values()))


def known_envs(config: BatcherConfig, seen: Iterable[str]) -> list[str]:
    """Envs that have a budget or have sent a group, sorted."""
    named = set(config.budgets)
    if config.remainder not in ("proportional", "equal"):
        named.add(config.remainder)
    return sorted(named.union(seen))


def shares(
    config: BatcherConfig,
    envs: Iterable[str],
    ready: Mapping[str, float] | None,
    *,
    step: int = 1,
    paused: Collection[str] = (),
) -> dict[str, float]:
    """env -> fraction of `step`, summing to 1 when any env can have one.

    Args:
        config: budgets and who gets what they leave over.
        envs: the known envs.
        step: scheduled budgets are looked up here.
        paused: envs that take no part; what was theirs goes to the others in proportion.
        ready: env -> what it has ready in the budget's unit; `proportional` splits the rest by it. None: before
            anything is sampled, `proportional` means equal: an env without data must be given leave to make some.

    A share that no env without a budget can take goes to the envs with one, in proportion: a step cannot be left
    unfilled.

    Example:
        >>> from rlbuffer.config.batcher import BatcherConfig
        >>> shares(BatcherConfig(8192, budgets={"math": 0.5}, remainder="equal"), ["math", "code", "chat"], None)
        {'chat': 0.25, 'code': 0.25, 'math': 0.5}
    """
    budgets = budgets_at(config.budgets, step)
    out = {e: f for e, f in (dict.fromkeys(envs, 0.0) | budgets).items() if e not in paused}
    rest = _rest(budgets)
    if rest > 1e-9:
        others = [e for e in out if e not in budgets]
        if config.remainder == "equal" or (config.remainder == "proportional" and ready is None):
            for env in others:
                out[env] += rest / len(others)
        elif config.remainder == "proportional" and ready is not None:
            total = sum(ready.get(e, 0.0) for e in others)
            for env in others:
                out[env] += rest * ready.get(env, 0.0) / total if total else 0.0
        elif config.remainder not in paused:
            out[config.remainder] = out.get(config.remainder, 0.0) + rest
    total = sum(out.values())
    return {e: out[e] / total if total else 0.0 for e in sorted(out)}


class Deficits:
    """What each env is owed while groups are selected one by one, and whose turn it is.

    All envs are looked at for every group, so they are arrays: a thousand cost little more than ten. Each env's sums
    are those that it would have by itself, in the same order, to the last bit.

    Args:
        owed: env -> what it is owed before; 0 where it is not named.
        shares: env -> share, summing to 1.
    """

    __slots__ = ("_gains", "_least", "_limits", "_owed", "_places", "_shares", "_sizes", "_watches", "envs")

    def __init__(self, owed: Mapping[str, float], shares: Mapping[str, float]) -> None:
        self.envs = sorted(shares, key=lambda env: (-shares[env], env))
        """Of equals the first one has its turn: the larger share, then by name."""
        self._places = {env: place for place, env in enumerate(self.envs)}
        self._shares = np.array([shares[env] for env in self.envs], np.float64)
        self._owed = np.array([owed.get(env, 0.0) for env in self.envs], np.float64)
        nothing = np.full(len(self.envs), np.inf)
        self._sizes, self._gains, self._least = nothing, nothing.copy(), nothing.copy()
        """Of the group that an env gives next; what it is credited for it, and what is nothing beside it."""
        self._limits = nothing.copy()
        self._watches = False

    def offer(self, env: str, size: float | None) -> None:
        """The env's next group is of this size; None: it has none."""
        place, size = self._places[env], math.inf if size is None else size
        self._sizes[place], self._least[place] = size, ROUNDING * size
        self._gains[place] = size if size == math.inf else self._shares[place] * size

    def turn(self) -> str | None:
        """The env that gives the next group, of those that have one: whose deficit would reach it soonest."""
        if not self.envs:
            return None
        deadlines = (self._sizes - self._owed) / self._shares
        # An env that is ahead of its share by more than its next group waits, unless nobody else has anything.
        waits = self._owed + self._gains <= self._least
        place = int(np.where(waits, math.inf, deadlines).argmin())
        if waits[place]:
            place = int(deadlines.argmin())
        return self.envs[place] if self._sizes[place] < math.inf else None

    def charge(self, env: str, size: float) -> None:
        """One group is selected: everyone is credited, `env` pays."""
        self._owed += self._shares * size
        self._owed[self._places[env]] -= size

    def charge_all(self, groups: Sequence[tuple[str, float]]) -> None:
        """The same for many (env, size), in order and to the last bit: a cumulative sum adds row after row."""
        for first in range(0, len(groups), CHARGED_AT_ONCE):
            chunk = groups[first : first + CHARGED_AT_ONCE]
            sizes = np.array([size for _, size in chunk], np.float64)
            payers = [self._places[env] for env, _ in chunk]
            # What is owed, then two rows a group: what everyone is credited, and what its env pays.
            moves = np.zeros((1 + 2 * len(chunk), len(self.envs)))
            moves[0] = self._owed
            moves[1::2] = self._shares * sizes[:, None]
            moves[np.arange(2, len(moves), 2), payers] = -sizes
            self._owed = moves.cumsum(axis=0)[-1]

    def watch(self, env: str, limit: float) -> None:
        """The env is short once it is owed more than `limit`."""
        self._limits[self._places[env]], self._watches = limit, True

    def short(self) -> list[str]:
        """The watched envs that are short, the neediest first."""
        if not self._watches:
            return []
        places = np.flatnonzero(self._owed > self._limits)
        return sorted((self.envs[place] for place in places), key=lambda env: (-self[env], env))

    def places(self, envs: Iterable[str]) -> NDArray[np.intp]:
        """Where these envs stand in `owed`."""
        return np.array([self._places[env] for env in envs], np.intp)

    def owed(self, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """What these are owed."""
        return self._owed[places]

    def __getitem__(self, env: str) -> float:
        return float(self._owed[self._places[env]])

    def all(self) -> dict[str, float]:
        """Env -> what it is owed now."""
        return dict(zip(self.envs, self._owed.tolist(), strict=True))


def settle(
    accounts: Mapping[str, EnvAccount],
    groups: Iterable[tuple[str, int, int]],
    fractions: Mapping[str, float],
    unit: str,
) -> dict[str, EnvAccount]:
    """New accounts, as they are once a step of these groups is committed; `accounts` stay as they were.

    Args:
        groups: (env, tokens, rollouts) of each group, in the order in which they were selected.
        fractions: env -> share, summing to 1; holds every env of `groups`.
        unit: tokens | rollouts | groups.
    """
    out = {env: replace(account) for env, account in accounts.items()}
    for env in fractions:
        out.setdefault(env, EnvAccount())
    deficits = Deficits({env: out[env].deficit for env in fractions}, fractions)
    total, charges = 0, list[tuple[str, float]]()
    for env, tokens, rollouts in groups:
        size = size_of(unit, tokens=tokens, rollouts=rollouts)
        total += size
        charges.append((env, size))
        out[env].learn(tokens, rollouts, size)
    deficits.charge_all(charges)
    largest = max(account.largest for account in out.values())
    for env, deficit in deficits.all().items():
        out[env].deficit = deficit
        out[env].clamp(fractions[env] * total, largest)
    return out


def dump(accounts: Mapping[str, EnvAccount]) -> dict[str, Any]:
    """The accounts as msgpack types."""
    return {
        "schema": 1,
        "envs": {
            env: [a.deficit, a.groups, a.tokens, a.rollouts, a.largest, a.variance]
            for env, a in sorted(accounts.items())
        },
    }


def load(state: Mapping[str, Any] | None) -> dict[str, EnvAccount]:
    """The inverse of :func:`dump`; None is a new run.

    Raises:
        RlbufferError: the state is not one that this version wrote.
    """
    if state is None:
        return {}
    if state.get("schema") != 1 or not isinstance(state.get("envs"), Mapping):
        raise RlbufferError(f"the batcher's saved state has schema {state.get('schema')!r}, this version reads 1")
    return {env: EnvAccount(*values) for env, values in state["envs"].items()}
