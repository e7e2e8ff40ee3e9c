"""The settings that a run's archive keeps of each attempt of its trainer: those that decide what a step trains.

Addresses, passwords and keys are in other tables, and stay out; a test holds the list of what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.config.settings import RunSettings

RECORDED = ("run", "seed", "deterministic", "model", "trainer")
"""Settings that are kept, tables whole."""


def recorded(settings: RunSettings) -> dict[str, Any]:
    """The kept settings as plain values; `trainer.output` is the folder that was written to."""
    kept = settings.model_dump(mode="json", include=set(RECORDED))
    kept["trainer"]["output"] = str(settings.output_dir.absolute())
    return kept


def settings_of(kept: Mapping[str, Any], **tables: Mapping[str, Any]) -> RunSettings:
    """The settings of what :func:`recorded` kept, and further tables.

    Raises:
        pydantic.ValidationError: another version kept it, which had other settings.
    """
    return RunSettings.model_validate({**{name: kept[name] for name in RECORDED if name in kept}, **tables})
