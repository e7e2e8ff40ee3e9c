"""The settings that a run's archive keeps of each attempt of its trainer: those that decide what a step trains.

Addresses, passwords and keys are in other tables, and stay out; a test holds the list of what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlbuffer.config.loading import validated
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError

RECORDED = ("run", "seed", "deterministic", "model", "trainer")
"""Settings that are kept, tables whole."""


def recorded(settings: RunSettings) -> dict[str, Any]:
    """The kept settings as plain values; `trainer.output` is the folder that was written to."""
    kept = settings.model_dump(mode="json", include=set(RECORDED))
    kept["trainer"]["output"] = str(settings.output_dir.absolute())
    return kept


def settings_of(
    kept: Mapping[str, Any],
    *,
    batcher: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    origin: str = "--set",
) -> RunSettings:
    """The settings of what :func:`recorded` kept.

    Args:
        kept: may have more beside it.
        batcher: the table ``[batcher]``, which the archive keeps for itself.
        changes: dotted name -> another value. Another loss has its own options, not those of the kept one.
        origin: where they come from, for people.

    Raises:
        ConfigError: a setting that there is not, or a value that it cannot have.
    """
    data = {name: _copied(kept[name]) for name in RECORDED if name in kept}
    if batcher is not None:
        data["batcher"] = dict(batcher)
    if "trainer.loss.name" in changes and changes["trainer.loss.name"] != data["trainer"]["loss"]["name"]:
        data["trainer"]["loss"]["options"] = {}
    for name, value in changes.items():
        *tables, last = name.split(".")
        table: Any = data
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{origin} {name}: {part} is no table", setting=name)
        table[last] = value
    return validated(data, dict.fromkeys(changes, origin))


def _copied(value: Any) -> Any:
    return {name: _copied(each) for name, each in value.items()} if isinstance(value, Mapping) else value
