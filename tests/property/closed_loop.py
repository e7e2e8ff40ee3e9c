"""A closed loop without processes: workers take tickets, sample for a while and push; a trainer trains the steps.

Discrete events on a simulated clock; everything random comes from one seed.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlbuffer.batcher.admission import ANY_ENV
from rlbuffer.batcher.age import last_version
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.fractions import budgets_at
from rlbuffer.records.info import GroupInfo, RolloutInfo

_SHORT = re.compile(r"(?P<env>\S+) is (?P<groups>\d+) groups? short of its share")


@dataclass(frozen=True, kw_only=True)
class EnvSpeed:
    """Behaviour of an env: seconds per group (median of a lognormal), workers, rollouts per group, mean length; and the
    share of its tasks that take ten times as long, with ten times the tokens."""

    seconds: float
    workers: int
    size: int = 4
    length: int = 100
    slow: float = 0.0


@dataclass(kw_only=True)
class Outcome:
    steps: int = 0
    pushed: int = 0
    packed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    closed_by: Counter[str] = field(default_factory=Counter)
    fills: list[float] = field(default_factory=list)
    oldest: int = 0
    seconds: float = 0.0
    stuck: str = ""
    stale: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(env, step) -> groups dropped as stale when the step was decided about."""
    largest: int = 0
    """Tokens of the largest trained group."""
    drift: float = 0.0
    """Largest distance of an env's trained tokens from its share of all, after any step, in tokens."""
    idle: Counter[str] = field(default_factory=Counter)
    """env -> events at which the step waited for it, a worker of it had no ticket, and not one ticket was out."""
    thin: Counter[str] = field(default_factory=Counter)
    """The same as `idle`, with tickets out, but more than one fewer than the sentence says that groups are missing."""
    sampled: dict[str, float] = field(default_factory=dict)
    """Group that was trained or dropped -> mean tokens of its rollouts."""
    trained: set[str] = field(default_factory=set)
    awaited: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Group that a full step waited for -> the step, and since when."""
    lost: list[str] = field(default_factory=list)
    """Groups that were under way when a step was committed at which they passed their last one."""
    lost_though_awaited: list[str] = field(default_factory=list)
    """Those that came while their step waited, and were dropped for their age."""

    @property
    def distance(self) -> float:
        """Of the lengths trained from those sampled."""
        return distance([self.sampled[group] for group in self.trained], [*self.sampled.values()])

    @property
    def stale_percent(self) -> float:
        return 100 * self.dropped["stale"] / max(1, self.pushed)


def simulate(
    config: BatcherConfig,
    envs: dict[str, EnvSpeed],
    *,
    steps: int,
    seed: int = 0,
    world_size: int = 2,
    train_seconds: float = 1.0,
    spread: float = 0.5,
    loss: float = 0.0,
    ticket_seconds: float = 200.0,
) -> Outcome:
    """Runs until `steps` are trained or nothing can happen any more (then `stuck` is the batcher's sentence).

    `loss`: probability that a worker dies with its ticket, which then expires after `ticket_seconds`.
    """
    rng = np.random.default_rng(seed)
    batcher, out = Batcher(config), Outcome()
    now, order = 0.0, 0
    events: list[tuple[float, int, str, object]] = []
    idle = {env: speed.workers for env, speed in envs.items()}
    out_of: dict[str, dict[int, int]] = {env: {} for env in envs}
    """env -> number of a ticket that lives -> its version."""
    tickets = Counter[str]()
    came: dict[str, float] = {}
    committed_at: dict[int, float] = {}
    allowances: dict[str, int] = {}
    trained = committed = number = 0
    training = False
    batcher.set_published(0)

    def later(seconds: float, kind: str, what: object) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (now + seconds, order, kind, what))

    def decide() -> str:
        nonlocal committed, allowances
        while True:
            step = committed + 1
            if step > trained + 1 + config.lookahead:
                allowances = batcher.allowances(step, world_size=world_size)
                return "the trainer is busy"
            batcher.set_under_way({env: dict(numbers) for env, numbers in out_of.items()})
            decision = batcher.next(step, world_size=world_size, now=now, rng=rng)
            for names in batcher.waited_for.values():
                for name in names:
                    out.awaited.setdefault(name, (step, now))
            stale = {d.group_id for d in decision.drops if d.reason == "stale"}
            out.lost_though_awaited += [
                name for name in stale & out.awaited.keys() if came[name] < committed_at[out.awaited[name][0]]
            ]
            batcher.dropped(decision.drops)
            out.dropped.update(d.reason for d in decision.drops)
            out.stale.update((d.env, step) for d in decision.drops if d.reason == "stale")
            allowances = dict(decision.allowances)
            if decision.plan is None:
                return decision.waiting
            plan = decision.plan
            out.trained |= {*plan.group_ids}
            for env, numbers in out_of.items():
                last = last_version(step, config.for_env(env).max_age)
                out.lost += [f"{env}.{n}" for n, version in numbers.items() if version == last]
            out.packed += len(plan.group_ids)
            out.closed_by[plan.closed_by] += 1
            out.oldest = max(out.oldest, max(step - 1 - r.min_version for r in plan.rollouts))
            rows = world_size * config.micro_batches_per_rank * config.rows_per_micro_batch
            out.fills.append(plan.tokens / (rows * config.row_tokens))
            sizes = Counter[str]()
            for ref in plan.rollouts:
                out.tokens[ref.env] += ref.length
                sizes[ref.group_id] += ref.length
            out.largest = max(out.largest, *sizes.values())
            for env, share in budgets_at(config.budgets, step).items():
                out.drift = max(out.drift, abs(out.tokens[env] - share * out.tokens.total()))
            batcher.committed(plan)
            committed, committed_at[step] = step, now

    def work() -> None:
        nonlocal number, training
        for env, speed in envs.items():
            while idle[env] and tickets[env] < allowances.get(env, allowances.get(ANY_ENV, 0)):
                idle[env] -= 1
                tickets[env] += 1
                number += 1
                out_of[env][number] = trained
                if rng.random() < loss:
                    later(ticket_seconds, "lost", (env, number))
                else:
                    scale = 10 if speed.slow and rng.random() < speed.slow else 1
                    lengths = np.maximum(1, rng.lognormal(np.log(scale * speed.length), 0.4, speed.size)).astype(int)
                    lengths = np.minimum(lengths, config.row_tokens)
                    seconds = scale * float(rng.lognormal(np.log(speed.seconds), spread))
                    later(seconds, "group", (env, number, trained, lengths))
        if not training and trained < committed:
            training = True
            later(train_seconds, "trained", None)

    while trained < steps:
        sentence = decide()
        work()
        short = _SHORT.match(sentence)
        if short and idle[short["env"]]:
            env, held = short["env"], tickets[short["env"]]
            out.idle[env] += held == 0
            out.thin[env] += 0 < held < int(short["groups"]) - 1
        if not events:
            out.stuck = f"step {committed + 1} at {now:.1f} s: {sentence} {allowances} {dict(tickets)}"
            break
        now, _, kind, what = heapq.heappop(events)
        if kind == "trained":
            trained, training = trained + 1, False
            batcher.set_published(trained)
        elif kind == "lost":
            env, n = what  # type: ignore[misc]
            del out_of[env][n]
            idle[env] += 1
            tickets[env] -= 1
        else:
            env, n, version, lengths = what  # type: ignore[misc]
            idle[env] += 1
            tickets[env] -= 1
            del out_of[env][n]
            out.pushed += 1
            came[f"{env}.{n}"] = now
            out.sampled[f"{env}.{n}"] = float(np.mean(lengths))
            batcher.add(group_info(f"{env}.{n}", env, lengths, version), entry_id=f"{n}-0", now=now)
    out.steps, out.seconds = trained, now
    return out


def distance(some: Sequence[float], of_all: Sequence[float]) -> float:
    """Kolmogorov and Smirnov's: the largest between the two distributions."""
    points = np.unique(of_all)
    shares = [np.searchsorted(np.sort(values), points, side="right") / max(1, len(values)) for values in (some, of_all)]
    return float(np.abs(shares[0] - shares[1]).max()) if some else 1.0


def group_info(
    group_id: str,
    env: str,
    lengths: object,
    version: int = 0,
    *,
    planned_size: int | None = None,
    first: int = 0,
    rewards: list[float | None] | None = None,
    adapter: str = "",
) -> GroupInfo:
    """A push of rollouts of these lengths; rollout ids count from `first`."""
    sizes = [int(n) for n in lengths]  # type: ignore[attr-defined]
    return GroupInfo(
        group_id=group_id,
        env=env,
        prompt_id=group_id,
        adapter=adapter,
        planned_size=planned_size or len(sizes),
        rollouts=tuple(
            RolloutInfo(
                rollout_id=f"{group_id}/{first + i}",
                length=n,
                prompt_tokens=1,
                loss_tokens=n - 1,
                reward=float((i + n) % 2) if rewards is None else rewards[i],
                min_version=version,
                max_version=version,
            )
            for i, n in enumerate(sizes)
        ),
    )
