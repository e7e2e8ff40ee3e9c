"""A diagnosis: one thing that a run needs, whether it is well, and what to do where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

REMEDIES = (
    "\n",
    *(" Did you mean ", ": pip install ", ": use another run name"),
    *(". Give ", ". Nothing is ", ". `rlbuffer "),
)
"""Beginnings of the part of a message that says what to do."""


class Health(StrEnum):
    """The outcome of a look at one thing."""

    OK = "ok"
    """It is as it should be."""
    WARNING = "warning"
    """A run works, but hardly as meant, or not for long."""
    FAILURE = "failure"
    """A run cannot work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that was looked at."""

    subject: str
    """In a word: ``server``, ``disk``."""
    verdict: Health
    text: str
    """Says what was seen, with its values; one line."""
    fix: str = ""
    """Says what to do; one line, "" where all is well."""


def well(subject: str, text: str) -> Diagnosis:
    """Nothing to do."""
    return Diagnosis(subject=subject, verdict=Health.OK, text=text)


def doubtful(subject: str, text: str, fix: str) -> Diagnosis:
    """A warning."""
    return Diagnosis(subject=subject, verdict=Health.WARNING, text=_line(text), fix=_line(fix))


def failed(subject: str, message: str, fix: str) -> Diagnosis:
    """A failure, from a message that may end with what to do; `fix` counts where it does not.

    Example:
        >>> failed("settings", "max_agee is not a setting. Did you mean max_age?", "look it up").fix
        'Did you mean max_age?'
    """
    ends = [message.index(remedy) for remedy in REMEDIES if remedy in message.strip()]
    text, own = (message[: min(ends)], message[min(ends) :]) if ends else (message, "")
    own = _line(own.lstrip(".: \n"))
    return Diagnosis(subject=subject, verdict=Health.FAILURE, text=_line(text), fix=own or fix)


def _line(text: str) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines())
