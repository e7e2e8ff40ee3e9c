"""What is wrong with settings that are each fine: a text that names their places."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuffer.config.refusal import Places, at_place
from rlbuffer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that cannot work, as one text with its place."""

    text: str
    settings: tuple[str, ...]
    """The settings that make it."""
    works: bool = False
    """It works all the same, though hardly as meant: a warning."""


def placed(error: ConfigError, places: Places, setting: str = "") -> Mistake:
    """A refusal as a mistake of `setting`, or of the one that it names."""
    name = setting or error.setting
    return Mistake(at_place(str(error), name, places), (name,))


def never(text: str, places: Places, *settings: str) -> Mistake:
    """A mistake of settings of which no batch comes."""
    return Mistake(f"these settings can never make a batch: {text} ({places(*settings)}).", settings)
