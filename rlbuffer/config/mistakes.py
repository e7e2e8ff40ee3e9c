"""Mistakes in the settings: each one text that begins with its place, all of them found before any is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlbuffer.config.refusal import sentence
from rlbuffer.errors import ConfigError

Places = Callable[..., str]
"""Names of settings -> where they came from."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something that cannot work, as one text with its place."""

    text: str
    settings: tuple[str, ...]
    """The settings that make it."""
    works: bool = False
    """It works all the same, though hardly as meant: a warning."""


class Mistakes:
    """The mistakes so far."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        """Text -> the setting."""
        self._left_out: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each mistake as (text, setting)."""
        return iter(self._found.items())

    def note(self, text: str, *settings: str) -> None:
        """Takes in a mistake, unless one of its settings was left out: it may only follow from that."""
        if not any(map(self._is_left_out, settings)):
            self._found.setdefault(text, settings[0] if settings else "")

    def leave_out(self, *settings: str) -> None:
        """Nothing more is said of these: their values are not what was meant."""
        self._left_out |= set(settings)

    def refuse(self) -> None:
        """Raises ConfigError when there are any."""
        if not self._found:
            return
        texts, first = list(self._found), next(iter(self._found.values()))
        if len(texts) > 1:
            lines = "\n".join(f"  {text}".replace("\n", "\n  ") for text in texts)
            texts = [f"{len(texts)} mistakes in the settings:\n{lines}"]
        raise ConfigError(texts[0], setting=first)

    def _is_left_out(self, setting: str) -> bool:
        return any(
            setting == other or setting.startswith(f"{other}.") or other.startswith(f"{setting}.")
            for other in self._left_out
        )


def placed(error: ConfigError, places: Places, setting: str = "") -> Mistake:
    """A refusal as a mistake of `setting`, or of the one that it names."""
    name = shown = setting or error.setting
    while (place := places(shown)) == "default" and "." in shown:
        shown = shown.rpartition(".")[0]  # what is missing stands nowhere: where it should
    return Mistake(str(error) if place == "default" else f"{place}  {error}", (name,))


def never(text: str, places: Places, *settings: str) -> Mistake:
    """A mistake of settings of which no batch comes."""
    return Mistake(f"these settings can never make a batch: {text} ({places(*settings)}).", settings)


def complaint_at(complaint: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """One of pydantic's complaints as one line, with the place of the setting or of the section that lacks it."""
    name = ".".join(str(part) for part in complaint["loc"])
    text = sentence(complaint, name)
    if complaint["type"] == "missing":
        return with_place(text, place_of(name.rpartition(".")[0], sources))
    name = name.removesuffix(".[key]")
    place = place_of(name, sources)
    while not place and "." in name:
        name = name.rpartition(".")[0]
        place = place_of(name, sources)
    return with_place(text, place)


def with_place(text: str, place: str) -> str:
    """The text behind its place, where there is one."""
    return f"{place}  {text}" if place else text


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Place of `name`, else of something inside it, else of what it is in; "" when it was never given."""
    if name in sources:
        return sources[name]
    for other, place in sources.items():
        if other.startswith(f"{name}."):
            return place
    return ""


def places_of(names: tuple[str, ...], sources: Mapping[str, str]) -> str:
    """Places of several settings, a repeated file name left out: ``rlbuffer.toml:9, :21``."""
    out: list[str] = []
    last = ""
    for name in names:
        place = place_of(name, sources) or "default"
        file, colon, line = place.rpartition(":")
        out.append(f":{line}" if colon and file == last else place)
        last = file if colon else ""
    return ", ".join(out)
