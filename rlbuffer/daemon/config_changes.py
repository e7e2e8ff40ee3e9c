"""Changes of the batcher's settings while a run is at work: what differs, and what follows from it.

Pure. `rlbuffer config apply` shows it, the leader refuses by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ConfigError
from rlbuffer.wire import payload

CONSEQUENCES: Mapping[str, str] = MappingProxyType(
    {
        "row_tokens": "a smaller one drops pending rollouts that are longer than a row as oversized",
        "micro_batches_per_rank": "the next step has another size",
        "rows_per_micro_batch": "the next step has another size",
        "step_rollouts": "the next step has another size",
        "step_groups": "the next step has another size",
        "close_fill": "",
        "lookahead": "steps that are committed stay: a smaller one waits until the trainer has caught up",
        "max_age": "a smaller one drops what is pending and too old by it as stale; a larger one brings nothing back",
        "max_age_seconds": "a smaller one drops what has been pending for longer as stale",
        "min_group_size": "it counts for groups that are pending, too",
        "group_timeout_seconds": "it counts for groups that are forming, too",
        "flat": "pending groups are judged anew",
        "flat_by": "pending groups are judged anew",
        "oversized": "writers follow within 30 s; until then what is too long drops",
        "advantage": "from the next step on, for groups that are pending, too",
        "advantage_scale": "from the next step on, for groups that are pending, too",
        "truncated": "from the next step on, for groups that are pending, too",
        "budgets": "what envs are owed stays owed, at most one step's share of each",
        "remainder": "what envs are owed stays owed, at most one step's share of each",
        "unit": "",
        "order": "a selector of yours must be importable where the batcher runs",
        "spillover": "",
        "spill_after_seconds": "",
        "max_uses": "groups that were trained that often by now are let go; what was let go does not come back",
        "replay_fraction": "",
        "cost": "",
        "envs": "as the settings that they override",
        "adapters": "an adapter's progress so far stays counted",
        "fill_timeout_seconds": "it counts for the step that is waited for, too",
        "slow": "it counts for the step that is full, and for tickets that are out, too",
        "slow_wait_seconds": "it counts for the step that waits, too",
        "env_dead_after_seconds": "silence is counted anew",
        "feeds": "",
        "on_dead_env": "with `stop`, an env that is dead already stops the run",
    }
)
"""Setting -> what changing it does to what is there; "" when nothing but the next step is concerned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that differs."""

    setting: str
    """Dotted, with its section: ``batcher.max_age``, ``batcher.budgets.math``."""
    old: Any
    """None where it was not set."""
    new: Any
    consequence: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.old!r} -> {self.new!r}"


def config_digest(config: BatcherConfig) -> str:
    """SHA-256 of every setting that decides what a step contains."""
    return hashlib.sha256(payload.dumps(config.as_dict())).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The differences between two configs (:meth:`BatcherConfig.as_dict`), per env where settings are.

    Example:
        >>> [str(c) for c in changes({"max_age": 1, "budgets": {"a": 0.5}}, {"max_age": 2, "budgets": {}})]
        ['batcher.budgets.a: 0.5 -> None', 'batcher.max_age: 1 -> 2']
    """
    differences = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        pairs = [(name, before, after)]
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            one, other = before or {}, after or {}
            pairs = [(f"{name}.{key}", one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
        differences += [
            Change(setting=f"batcher.{place}", old=a, new=b, consequence=CONSEQUENCES.get(name, ""))
            for place, a, b in pairs
            if a != b
        ]
    return differences


def check_change(old: Mapping[str, Any], new: Mapping[str, Any], *, step: int) -> None:
    """Refuses what cannot change in a run that has steps.

    Raises:
        ConfigError: the deficits that the run has saved are counted in the old unit; or its steps are for another kind
            of trainer.
    """
    if old and step and old.get("feeds", "ranks") != new.get("feeds", "ranks"):
        raise ConfigError(
            f"batcher.feeds = {new.get('feeds')!r} cannot be taken by a run that has steps for "
            f"{old.get('feeds', 'ranks')!r}, and counts its policy versions so. Use another run name",
            setting="batcher.feeds",
        )
    if old and step and old.get("unit") != new.get("unit"):
        raise ConfigError(
            f"batcher.unit = {new.get('unit')!r} cannot be taken by a run that has steps: what its envs are owed is "
            f"counted in {old.get('unit')}. Use another run name",
            setting="batcher.unit",
        )
