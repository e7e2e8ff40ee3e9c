"""LoRA adapters trained side by side: their own steps and ages, and whose turn it is.

**Own steps.** All weights ("" as an adapter) make a version per step of the run: step s trains version s - 1. Any other
adapter gathers rollouts until it has its batch: its own step ends with the first step of the run at whose end at least
`batch_size` of its rollouts were trained since its last own step. That step's header says `ready_to_update`, the
trainer steps the adapter's optimizer once, and the version that this makes is the number of its own steps. The
rollouts of one step are never split, so an own step has at least `batch_size` of them and the count begins at 0 again.

An own step's age rule is that of the run's: version - `min_policy_version`, where version is the one that the adapter
has while this step trains. An announced version is proof of its steps: after a loss of writes the count goes on there.

**Turns.** Which env gives the next group is decided by the budgets alone. Inside an env adapters take turns by
start-time fair queuing, all with the same share: each has a tag, where its last group ended in the service of its env;
the smallest goes first, and tags count from the beginning of the group in service. An adapter without a group moves
nobody's tag; when it is back it begins where the others are, so that it neither waits nor is paid for its absence.
Tags lie between 0 and the env's largest group. So of two adapters that both always have a group ready, from the
beginning on neither is ever given more than one group beyond the other, in the budget's unit, whatever their sizes.
Source: Goyal, Vin and Cheng 1996, Start-time fair queueing, theorem 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from rlbuffer.batcher.age import oldest_version
from rlbuffer.batcher.budget import size_of
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_plan import AdapterProgress

Tags = MutableMapping[str, int]
"""adapter -> where its last group ended, in the budget's unit, from the beginning of the env's group in service."""


@dataclass(frozen=True, slots=True)
class AdapterAccount:
    """The account of an adapter; moves only when a step is committed."""

    samples: int = 0
    """Rollouts trained in this run."""
    tokens: int = 0
    step: int = 0
    """Own steps made; without meaning for "", whose steps are the run's."""
    gathered: int = 0
    """Rollouts since its last own step."""


@dataclass(frozen=True, slots=True)
class AdapterAccounts:
    """All adapters that were trained, and whose turn it is in each env."""

    accounts: Mapping[str, AdapterAccount] = field(default_factory=dict)
    tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """env -> adapter -> tag, of all that were trained there."""
    announced: bool = False
    """The clock of a stream: versions, also those of all weights, count what the trainer announces."""

    def own_step(self, adapter: str, step: int, published: Mapping[str, int]) -> int:
        """The step, in the adapter's own count, that `step` of the run belongs to; it trains version `own_step` - 1."""
        if self.announced:
            return 1 + max(0, published.get(adapter, 0))
        if adapter == "":
            return step
        account = self.accounts.get(adapter)
        return 1 + max(account.step if account else 0, published.get(adapter, 0))

    def settle(
        self, step: int, groups: Iterable[PooledGroup], config: BatcherConfig, published: Mapping[str, int]
    ) -> tuple[AdapterAccounts, dict[str, AdapterProgress]]:
        """The accounts once `step` is committed with `groups`, in the order of selection; and each one's progress."""
        tags = {env: dict(turns) for env, turns in self.tags.items()}
        sums: dict[str, list[int]] = {adapter: [0, 0] for adapter in self.accounts}
        for group in groups:
            total = sums.setdefault(group.adapter, [0, 0])
            total[0] += group.rollouts
            total[1] += group.tokens
            charge(tags.setdefault(group.env, {}), group, config.unit)
        accounts: dict[str, AdapterAccount] = {}
        progress: dict[str, AdapterProgress] = {}
        for adapter, (rollouts, tokens) in sorted(sums.items()):
            version = self.own_step(adapter, step, published) - 1
            before = self.accounts.get(adapter, AdapterAccount())
            gathered = 0 if self.announced else before.gathered + rollouts
            is_ready = gathered >= config.batch_size(adapter) if adapter else rollouts > 0
            is_ready = is_ready and not self.announced  # the trainer of a stream says itself when it has stepped
            makes = is_ready or not (adapter or self.announced)
            made = AdapterAccount(
                samples=before.samples + rollouts,
                tokens=before.tokens + tokens,
                step=version + 1 if makes else version,
                gathered=0 if makes else gathered,
            )
            accounts[adapter] = made
            progress[adapter] = AdapterProgress(
                samples=made.samples,
                tokens=made.tokens,
                step=made.step,
                ready_to_update=is_ready,
                version=version,
                gathered=gathered,
                rollouts=rollouts,
            )
        return replace(self, accounts=accounts, tags=tags), progress

    def dump(self) -> dict[str, Any]:
        """The accounts as msgpack types."""
        return {
            "adapters": {adapter: list(astuple(account)) for adapter, account in sorted(self.accounts.items())},
            "turns": {env: dict(sorted(turns.items())) for env, turns in sorted(self.tags.items())},
        }

    @staticmethod
    def load(state: Mapping[str, Any] | None, *, announced: bool = False) -> AdapterAccounts:
        """The inverse of `dump`; `announced` is the clock.

        Raises:
            RlbufferError: the state is not one that this version wrote.
        """
        state = state or {}
        try:
            accounts = {str(a): AdapterAccount(*map(int, values)) for a, values in state.get("adapters", {}).items()}
            tags = {
                str(env): {str(a): int(t) for a, t in turns.items()} for env, turns in state.get("turns", {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise RlbufferError(
                f"the batcher's saved state of its adapters cannot be read: {type(error).__name__}: {error}"
            ) from None
        return AdapterAccounts(accounts, tags, announced)


def at_step(
    state: Mapping[str, Any] | None, *, step: int, progress: Mapping[str, AdapterProgress] | None
) -> Mapping[str, Any] | None:
    """A saved state whose adapters are as after `step`, the run's last one.

    A run that was taken back (`runs rewind`), or that went on after a loss of writes, is at another step than
    the state. Then the last step's header tells how far each adapter is. Where it is gone, too, an older state counts
    on from the versions that are announced, and a newer one, of steps that are void, is forgotten.
    """
    saved = step if state is None else int(state.get("step", step))
    if state is None or saved == step:
        return state
    if progress is None:
        return state if saved < step else {**state, "step": step, "adapters": {}, "turns": {}}
    adapters = {a: [p.samples, p.tokens, p.step, 0 if p.ready_to_update else p.gathered] for a, p in progress.items()}
    return {**state, "step": step, "adapters": adapters, "turns": {}}


def charge(tags: Tags, group: PooledGroup, unit: str) -> None:
    """Moves an env's tags for one group that was selected: service begins where its adapter stood."""
    start = tags.get(group.adapter, 0)
    for other, tag in tags.items():
        tags[other] = max(0, tag - start)
    tags[group.adapter] = size_of(unit, tokens=group.tokens, rollouts=group.rollouts)


class Queue:
    """An env's ready groups in the order in which they should train, adapters taking turns.

    Groups that were trained before come after all that were not, whosever they are.

    Args:
        lanes: adapter -> its groups in order.
        tags: adapter -> tag, as after the last step.
        unit: tokens | rollouts | groups.
        is_last: tells whether a group can train at no later step. Those go before all others, whosever turn it is.
    """

    __slots__ = ("_heads", "_is_last", "_lanes", "_tags", "_unit", "head")

    def __init__(
        self,
        lanes: Mapping[str, Iterator[PooledGroup]],
        tags: Mapping[str, int] | None = None,
        unit: str = "tokens",
        is_last: Callable[[PooledGroup], bool] | None = None,
    ) -> None:
        self._lanes = {adapter: lanes[adapter] for adapter in sorted(lanes)}
        self._tags = dict(tags or {})
        self._unit, self._is_last = unit, is_last
        self._heads: dict[str, PooledGroup] = {}
        for adapter in self._lanes:
            self._advance(adapter)
        self.head: PooledGroup | None = self._first()
        """The group that goes next; None when there is none."""

    def take(self) -> None:
        """`head` is selected."""
        if self.head is not None:
            charge(self._tags, self.head, self._unit)
            self.skip()

    def skip(self) -> None:
        """`head` is left out: it costs its adapter no turn."""
        if self.head is not None:
            self._advance(self.head.adapter)
            self.head = self._first()

    def _advance(self, adapter: str) -> None:
        group = next(self._lanes[adapter], None)
        if group is None:
            self._heads.pop(adapter, None)
        else:
            self._heads[adapter] = group

    def _first(self) -> PooledGroup | None:
        # The first by name of equals: `min` keeps the first, and lanes are in order of names.
        if len(self._heads) < 2:
            return next(iter(self._heads.values()), None)
        there = [adapter for adapter in self._lanes if adapter in self._heads]
        return self._heads[min(there, key=self._rank)]

    def _rank(self, adapter: str) -> tuple[bool, bool, int]:
        head = self._heads[adapter]
        return head.used > 0, self._is_last is not None and not self._is_last(head), self._tags.get(adapter, 0)


def asking(
    progress: Mapping[str, AdapterProgress],
    published: Mapping[str, int],
    max_age_of: Callable[[str], int | None],
    step: int,
) -> tuple[dict[str, AdapterProgress], int | None]:
    """Finds the versions that `step` must ask for, because the published ones are too old for the step after it.

    With `trainer.publish.every` above 1 nobody might publish such a version, and the batcher would wait for ever. So
    the step after which it is needed asks for it, and the trainer publishes what it has made by then.

    Args:
        progress: adapter -> as after `step`.
        published: adapter -> version that can be sampled from.
        max_age_of: adapter -> smallest `max_age` of the envs that it is sampled in; None when it is in none.
        step: the one that is planned.

    Returns:
        The progress with each adapter's `waiting_for_version`, and that of all weights.
    """
    asked: dict[str, int | None] = {}
    for adapter in {"", *progress}:
        max_age = max_age_of(adapter)
        made = step if adapter == "" else progress[adapter].step
        needed = None if max_age is None else oldest_version(made + 1, max_age)
        there = published.get(adapter)
        asked[adapter] = needed if needed is not None and there is not None and there < needed else None
    new_progress = {adapter: replace(p, waiting_for_version=asked[adapter]) for adapter, p in progress.items()}
    return new_progress, asked[""]
