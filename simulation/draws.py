"""Draws that a seed makes before anything runs, and how likely each of them is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.config.batcher import AdapterConfig, BatcherConfig
from simulation.mutations import Mutation
from simulation.plan import Plan

FAULTS = ("lost request", "lost reply", "late", "twice", "killed", "stopped", "restart", "cut")

PROFILES: dict[str, Mapping[str, float]] = {
    "calm": {},
    "network": {"lost request": 0.01, "lost reply": 0.015, "late": 0.006, "twice": 0.03},
    "deaths": {"killed": 0.01, "lost reply": 0.005},
    "late": {"late": 0.03, "lost reply": 0.005},
    "stops": {"stopped": 0.004, "lost reply": 0.003, "late": 0.002},
    "halts": {"stopped": 0.02},
    "server": {"restart": 0.002, "cut": 0.002, "lost reply": 0.004},
    "all": {
        "lost request": 0.004,
        "lost reply": 0.006,
        "late": 0.003,
        "twice": 0.012,
        "killed": 0.003,
        "stopped": 0.002,
        "restart": 0.0005,
        "cut": 0.001,
    },
}
"""Chance of each fault at a round trip."""

REFUSALS = (
    "MISCONF Errors writing to the AOF file: No space left on device",
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "CLUSTERDOWN The cluster is down",
)

DEMOTED = ("READONLY", "MOVED 1234 127.0.0.1:7001", "MASTERDOWN Link with MASTER is down and no primary is known")
"""Refusals of a server that is no primary any more."""

ROLLBACKS = 0.2
"""Share of seeds in which the server forgets what came after its last fsync."""

CALMER = 0.6
"""Share of those, and of seeds in which steps are made void or ends are said, in which less goes wrong otherwise: where
hardly a step is trained there is little to lose, and little to end."""
CALMER_RATE = 0.15
"""Factor on the other faults in those seeds."""

CLOCK_STEPS = 0.2
"""Share of seeds in which the server's clock is set forward."""
CLOCK_STEP_SECONDS = (1.0, 30.0, 3700.0, 8 * 86_400.0)
"""Seconds that it is set forward: longer than a lease, a tombstone of this simulation, an hour, a week."""
CLOCK_STEPS_BACK = 0.1
"""Share of seeds in which the server's clock is set back."""
CLOCK_STEP_BACK_SECONDS = (-0.2, -1.0, -4.0)
"""Seconds that it is set back: shorter and longer than a lease. Timed events wait as much longer."""
CLOCKS_OFF = 0.15
"""Share of seeds in which clocks are far off for a while, and right again."""
CLOCKS = ("server", "server", "batcher", "writer", "scorer", "rank")
CLOCK_OFF_SECONDS = (60.0, 600.0, 3600.0)
"""Seconds that a clock is ahead or behind: longer than anything is given for, up to an hour."""

ODD = {
    "memory": 0.1,
    "planning": 0.12,
    "adapters": 0.1,
    "stops": 0.1,
    "strangers": 0.08,
    "failover": 0.1,
    "too_large": 0.08,
    "said": 0.12,
    "together": 0.15,
}
"""Circumstance that is not in every seed -> its share of the seeds."""

LATER = ("said", "together")
"""Circumstances that are drawn apart, so that the other draws of a seed stay what they were."""

WHOSE_ROLLOUTS = (("", "a1"), ("a1", "a2"), ("", "a1", "a2"))
"""Adapters whose rollouts writers sample, where there are any."""

BATCHER: Mapping[str, tuple[Any, ...]] = {
    "close_fill": (0.7, 0.95),
    "lookahead": (0, 1, 1),
    "max_age": (0, 1, 1, 2),
    "group_timeout_seconds": (0.5, 1.5),
    "min_group_size": (1, 2),
    "flat": ("keep", "drop"),
    "order": ("newest_first", "oldest_first"),
}
"""Setting of the batcher -> what it may be. The order of this table, and of those below, is the order of the draws."""

PROCESSES: Mapping[str, tuple[Any, ...]] = {
    "batchers": (1, 2, 2),
    "writers": (1, 2, 3),
    "world_sizes": ((1,), (1, 2), (2,), (2, 1)),
}
CHANCES = {"tickets": 0.6, "operator": 0.3, "reset": 0.1, "full": 0.15}
SPREAD = 0.15
"""Share of the seeds whose payloads lie on shards of their own."""
BESIDE_SEEDS = 0.5
"""Share of seeds whose trainer publishes while it trains the next step."""
OWN_LOOPS = 0.25
"""Share of the seeds whose trainer is a loop of somebody's own, with two ranks."""
OWN_LOSSES = 0.5
"""Share of those in which the server loses a step that one rank has and another has not."""
SLOW_GROUPS = 0.25
"""Share of the seeds whose steps wait for slow groups, where they are no stream."""
STREAMS = 0.15
"""Share of the seeds whose trainer packs for itself, from a stream."""
GATEWAYS = 0.5
"""Share of the seeds with tickets in which agents sample through gateways."""
AWAY = 0.05
"""Share of the seeds in which the trainer ends for a while, and the server is started again meanwhile."""
AWAY_SECONDS = (4.0, 8.0)
SLOW = (0.0, 0.02, 0.1)
PACES: Mapping[str, tuple[Any, ...]] = {
    "lease_seconds": (0.6, 1.0),
    "patience_seconds": (0.4, 2.0),
    "train_seconds": (0.1, 0.4),
    "sample_seconds": (0.1, 0.3),
    "checkpoint_every": (1, 2, 3),
    "parts": (0.1, 0.5),
    "careless": (0.0, 0.2),
    "small": (0.0, 0.1),
    "tombstone_seconds": (4.0, 20.0),
}
"""Field of the plan -> what it may be."""


def draw(seed: int, *, mutation: Mutation | None = None, rollback: bool = False) -> Plan:
    """The plan of a seed; a mutation may ask for the circumstances in which it matters.

    Each subject has dice of its own, so that a new one leaves the other draws of a seed as they were.
    """
    dice = random.Random(f"plan {seed}")
    profile = dice.choice([*PROFILES, "all", "network"])
    config = _batcher(dice)
    asks = dict(mutation.asks) if mutation is not None else {}
    if mutation is None and random.Random(f"rollback {seed}").random() < ROLLBACKS:
        rollback = True
    own = mutation is None and random.Random(f"own {seed}").random() < OWN_LOOPS
    rollback = rollback or (own and random.Random(f"own loss {seed}").random() < OWN_LOSSES)
    values = _people(seed, rollback=rollback, is_lossy=rollback or bool(asks.get("rollback")))
    goes_back = rollback or bool(values["taken_back"])
    config = _with_reuse(config, seed, is_asked=asks.pop("reuse", False), goes_back=goes_back)
    values["releaser"] = values["releaser"] and config.max_uses > 1
    config, ends = _with_end(config, seed)
    values |= {"clock_steps": _clock_steps(seed), "scorers": _scorers(seed)}
    is_odd, odd, later = _what_is_odd(seed)
    values |= _oddities(is_odd, odd, values, rollback=rollback)
    if rollback and mutation is None and (lost := random.Random(f"lost {seed}")).random() < 0.6:
        # The version that a trainer has published and the server has forgotten differs by adapter.
        values["adapters"] = lost.choice(WHOSE_ROLLOUTS)
    if values["adapters"]:
        size = AdapterConfig(batch_size=odd.choice((2, 5)))
        config = replace(config, adapters=dict.fromkeys(filter(None, values["adapters"]), size))
    values |= {name: dice.choice(choices) for name, choices in PROCESSES.items()}
    values |= {name: dice.random() < share for name, share in CHANCES.items()}
    # Prompts of groups that a person throws away are not given again, and who numbers groups alone has no end.
    is_spoilt = not values["tickets"] or values["reset"] or values["taken_back"]
    values["ends"] = 0 if is_spoilt or mutation is not None else ends
    values["said"] = is_odd["said"] and not is_spoilt and mutation is None
    # A server that has lost a reset has the old run again: a person must reset it again.
    values["reset"] = values["reset"] and not (rollback or values["failover"])
    values["left"] = values["reset"] and later.random() < 0.5
    values["spread"] = mutation is None and random.Random(f"shapes {seed}").random() < SPREAD
    values["away"] = (
        _away(seed) if mutation is None and not (own or is_spoilt or values["ends"] or values["said"]) else 0.0
    )
    values["clocks"] = _clocks(seed) if mutation is None else ()
    gateways = random.Random(f"gateways {seed}")
    if mutation is None and gateways.random() < GATEWAYS and values["tickets"]:
        values |= {"gateways": gateways.choice((1, 2, 2)), "agents": gateways.choice((1, 2, 3))}
    values["own"] = own
    values["beside"] = mutation is None and not own and random.Random(f"beside {seed}").random() < BESIDE_SEEDS
    if own:
        values["world_sizes"] = (2,)
    values["stream"] = (
        mutation is None and not (own or values["adapters"]) and random.Random(f"stream {seed}").random() < STREAMS
    )
    if values["stream"]:
        config, values["world_sizes"], values["releaser"] = _streamed(config, seed), (1,), False
    elif mutation is None:
        config, found = _with_slow_groups(config, seed)
        values |= found
    values["batches"] = mutation is None and random.Random(f"batches {seed}").random() < 0.3
    if mutation is not None:
        profile = mutation.profile or profile
    has_little = mutation is None and bool(rollback or values["taken_back"] or values["said"])
    values["slow"] = dice.choice(SLOW)
    values["fault_seconds"] = dice.uniform(2.5, 5.0)
    paces = PACES | ({"checkpoint_every": (1, 2, 4)} if rollback else {})
    values |= {name: dice.choice(choices) for name, choices in paces.items()}
    plan = Plan(
        seed=seed,
        profile=profile,
        faults=_faults(profile, seed, has_little=has_little),
        config=config,
        rollback=rollback,
        mutation=mutation,
        **values,
    )
    return replace(plan, **asks)


def _batcher(dice: random.Random) -> BatcherConfig:
    closing = dice.choice(("capacity", "groups", "rollouts"))
    return BatcherConfig(
        row_tokens=48,
        micro_batches_per_rank=2,
        step_groups=dice.choice((2, 3)) if closing == "groups" else 0,
        step_rollouts=dice.choice((5, 8)) if closing == "rollouts" else None,
        **{name: dice.choice(choices) for name, choices in BATCHER.items()},
    )


def _streamed(config: BatcherConfig, seed: int) -> BatcherConfig:
    """The settings of a stream in place of those of rows."""
    return BatcherConfig(
        48,
        feeds="stream",
        lookahead=random.Random(f"ahead {seed}").choice((0, 1, 3)),
        max_age=config.max_age,
        group_timeout_seconds=config.group_timeout_seconds,
        min_group_size=config.min_group_size,
        flat="drop" if config.flat == "drop" else "keep",
    )


def _with_reuse(config: BatcherConfig, seed: int, *, is_asked: bool, goes_back: bool) -> BatcherConfig:
    """Groups that may train more than once. `goes_back`: steps are lost or taken back, that of a use too."""
    dice = random.Random(f"reuse {seed}")
    is_drawn = dice.random() < (0.5 if goes_back else 0.3)
    if not (is_asked or is_drawn):
        return config
    config = replace(config, max_uses=dice.choice((2, 3)), replay_fraction=dice.choice((0.5, 1.0)))
    # A group is used again soon, so that just that use may go, and there is time for another one after it.
    return replace(config, max_age=2, replay_fraction=1.0) if goes_back else config


def _with_slow_groups(config: BatcherConfig, seed: int) -> tuple[BatcherConfig, dict[str, Any]]:
    """Small steps that wait for what is sampled yet, for a short while or until its tickets have lapsed; and what is
    drawn for that anew."""
    dice = random.Random(f"slow groups {seed}")
    if dice.random() >= SLOW_GROUPS:
        return config, {}
    config = replace(
        config,
        slow="wait",
        order="oldest_first",
        slow_wait_seconds=dice.choice((0.3, 3.0, 60.0)),
        max_age=config.max_age if config.max_uses > 1 else dice.choice((0, 1, 1)),
        step_groups=dice.choice((1, 2, 3)),
        step_rollouts=None,
    )
    return config, {"tickets": True, "writers": dice.choice((2, 3, 4))}


def _with_end(config: BatcherConfig, seed: int) -> tuple[BatcherConfig, int]:
    """Steps that close by the clock; and tickets of an env in all, 0 for no end."""
    dice = random.Random(f"tail {seed}")
    ends = dice.choice((2, 5, 9)) if dice.random() < 0.15 else 0
    if dice.random() < 0.3:
        config = replace(config, fill_timeout_seconds=dice.choice((0.3, 1.5)))
    return config, ends


def _people(seed: int, *, rollback: bool, is_lossy: bool) -> dict[str, Any]:
    """Draws acts of people, and what chance does to payloads and writes."""
    dice = random.Random(f"people {seed}")
    draws = [dice.random() for _ in range(4)]
    return {
        "releaser": draws[0] < 0.5 and not rollback,
        "taken_back": dice.uniform(0.3, 0.95) if draws[1] < 0.12 and not is_lossy else 0.0,
        "damages": tuple(dice.uniform(0.2, 1.0) for _ in range(3)) if draws[2] < 0.15 else (),
        "refusal": dice.choice(REFUSALS) if draws[3] < 0.1 else "",
    }


def _clock_steps(seed: int) -> tuple[tuple[float, float], ...]:
    """Draws the times at which the server's clock is set, and by how much."""
    clock, back = random.Random(f"clock {seed}"), random.Random(f"clock back {seed}")
    count = clock.choice((1, 1, 2, 3)) if clock.random() < CLOCK_STEPS else 0
    steps = tuple((clock.uniform(0.1, 1.0), clock.choice(CLOCK_STEP_SECONDS)) for _ in range(count))
    if back.random() < CLOCK_STEPS_BACK:
        steps += ((back.uniform(0.1, 1.0), back.choice(CLOCK_STEP_BACK_SECONDS)),)
    return steps


def _clocks(seed: int) -> tuple[tuple[str, float, float, float], ...]:
    """Draws whose clocks are far off, from when, until when, and by how much."""
    dice = random.Random(f"clocks {seed}")
    count = dice.choice((1, 1, 2)) if dice.random() < CLOCKS_OFF else 0
    return tuple(
        (
            dice.choice(CLOCKS),
            *sorted((dice.uniform(0.0, 1.0), dice.uniform(0.0, 1.0))),
            dice.choice(CLOCK_OFF_SECONDS) * dice.choice((1.0, -1.0)),
        )
        for _ in range(count)
    )


def _away(seed: int) -> float:
    """Draws for how many seconds no trainer is there; 0.0 for none."""
    dice = random.Random(f"away {seed}")
    return dice.uniform(*AWAY_SECONDS) if dice.random() < AWAY else 0.0


def _scorers(seed: int) -> int:
    dice = random.Random(f"scoring {seed}")
    return dice.choice((1, 2, 2)) if dice.random() < 0.2 else 0


def _what_is_odd(seed: int) -> tuple[dict[str, bool], random.Random, random.Random]:
    """Draws the circumstances of ODD in a seed. -> them, and the dice for more of each."""
    odd, later = random.Random(f"odd {seed}"), random.Random(f"later {seed}")
    return {name: (later if name in LATER else odd).random() < share for name, share in ODD.items()}, odd, later


def _oddities(
    is_odd: Mapping[str, bool], dice: random.Random, people: Mapping[str, Any], *, rollback: bool
) -> dict[str, Any]:
    """Draws the circumstances that are not in every seed; they move the time at which people take the run back."""
    taken_back, late = people["taken_back"], 0.0
    out = {
        "memory": is_odd["memory"],
        "planning": dice.choice((0.3, 1.0)) if is_odd["planning"] else 0.0,
        "adapters": dice.choice(WHOSE_ROLLOUTS) if is_odd["adapters"] else (),
        "too_large": 0.1 if is_odd["too_large"] else 0.0,
        "stops": is_odd["stops"],
        "strangers": is_odd["strangers"] or (taken_back > 0.0 and dice.random() < 0.8),
        "together": is_odd["together"],
        "failover": dice.choice(DEMOTED) if is_odd["failover"] and not (rollback or taken_back) else "",
    }
    if taken_back and dice.random() < 0.15:
        taken_back, late = 0.01, dice.uniform(0.0, 0.5)
    return out | {"taken_back": taken_back, "late": late}


def _faults(profile: str, seed: int, *, has_little: bool) -> Mapping[str, float]:
    """Chance of each fault; smaller where little would be left to lose or to end."""
    faults = PROFILES[profile]
    if has_little and random.Random(f"calmer {seed}").random() < CALMER:
        return {name: CALMER_RATE * chance for name, chance in faults.items()}
    return faults
