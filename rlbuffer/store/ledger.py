"""The ledger: what became of every rollout and token that was pushed, per env."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlbuffer.store.records import EnvLedger, Ledger
from rlbuffer.store.session import text

UNITS = ("rollouts", "tokens")
COUNTERS = ("damaged", "lost")
"""Fields beside the accounts."""
_AMOUNT = re.compile(r"-?[0-9]{1,19}\Z")


def parse_ledger(fields: Mapping[Any, Any]) -> Ledger:
    """The account from its hash; pending is what pushed leaves over, the pool's own sums are `verify`'s business."""
    amounts: dict[str, dict[str, list[int]]] = {}
    counters = dict.fromkeys(COUNTERS, 0)
    for name, value in fields.items():
        field, amount = text(name), amount_of(value)
        if amount is None:
            continue  # `verify` names it
        if field in counters:
            counters[field] = amount
            continue
        env, fate, unit = _split(field)
        if unit in UNITS:
            amounts.setdefault(env, {}).setdefault(fate, [0, 0])[UNITS.index(unit)] += amount
    return Ledger(envs={env: _account(amounts[env]) for env in sorted(amounts)}, **counters)


def amount_of(value: Any) -> int | None:
    """The amount that a field of the ledger holds; None for what is no number."""
    return int(value) if _AMOUNT.match(text(value)) else None


def _split(field: str) -> tuple[str, str, str]:
    env, _, rest = field.partition(":")
    fate, _, unit = rest.rpartition(":")
    return env, fate, unit


def _account(fates: Mapping[str, list[int]]) -> EnvLedger:
    def pair(fate: str) -> tuple[int, int]:
        rollouts, tokens = fates.get(fate, (0, 0))
        return rollouts, tokens

    dropped = {fate.removeprefix("dropped:"): pair(fate) for fate in sorted(fates) if fate.startswith("dropped:")}
    spent = [pair("packed"), pair("trained"), *dropped.values()]
    pushed = pair("pushed")
    return EnvLedger(
        pushed=pushed,
        pending=(pushed[0] - sum(s[0] for s in spent), pushed[1] - sum(s[1] for s in spent)),
        packed=pair("packed"),
        trained=pair("trained"),
        dropped=dropped,
        reused=pair("reused"),
    )
