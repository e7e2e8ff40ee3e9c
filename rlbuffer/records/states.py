"""The words of an account: the states of a group, why rollouts drop, what closes a step, the outcomes of requests.

They are strings: what is stored and printed is the value.

Example:
    >>> print(State.READY, Reason.STALE == "stale")
    ready True
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class State(StrEnum):
    """The state of a group, in the order of its life; ``dropped`` can follow the first two."""

    FORMING = "forming"
    """Rollouts are missing, or something that a scorer has yet to add."""
    READY = "ready"
    """It is whole: from here on nothing is added to it."""
    PACKED = "packed"
    """A committed step holds it."""
    TRAINED = "trained"
    """The trainer has acknowledged that step."""
    DROPPED = "dropped"
    """It will not be trained; its reason says why."""


class Trait(Enum):
    """What the rest of the code asks of a reason."""

    CLOSES = auto()
    """It ends a group as a whole, which leaves a tombstone. The others concern rollouts or parts of one: the group may
    still be trained with the rest, so a tombstone would lose it at the next takeover."""
    INSTEAD = auto()
    """A rollout that it drops came all the same, as one of those that were planned: its group waits for no other."""
    TOO_LATE = auto()
    """What it drops came too late: whether long rollouts are lost goes by it. The others say something of what a group
    holds."""
    USUAL = auto()
    """Some groups of a sound env are dropped so: people are told only of an env that loses nothing but these, for a
    while."""
    AGAIN = auto()
    """What it drops came again, or to a group that wants no more: fewer rollouts than a group has are stragglers of one
    that trained."""
    OF_OTHERS = auto()
    """The batcher alone does not decide it: when decisions are made again (`rlbuffer.what_if`), such a drop is taken as
    it was."""


class Reason(StrEnum):
    """The rule by which rollouts are dropped, in the order of tables and metrics."""

    traits: tuple[Trait, ...]
    """They stand behind its value."""

    def __new__(cls, value: str, *traits: Trait) -> Reason:
        made = str.__new__(cls, value)
        made._value_, made.traits = value, traits
        return made

    STALE = "stale", Trait.CLOSES, Trait.TOO_LATE, Trait.USUAL
    """It is older than its env's `max_age` or `max_age_seconds` allow, or the run ends and no step can hold it."""
    FUTURE = "future", Trait.CLOSES
    """A version newer than the step could train has sampled it."""
    SMALL = "small", Trait.CLOSES, Trait.TOO_LATE
    """Too few of its rollouts came in time, or a scorer did not."""
    FLAT = "flat", Trait.CLOSES
    """It teaches nothing, and no more of such groups are wanted."""
    OVERSIZED = "oversized", Trait.INSTEAD
    """It is longer than a row."""
    INVALID = "invalid", Trait.INSTEAD, Trait.OF_OTHERS
    """It is malformed, has no reward, or holds a number that cannot be trained."""
    FAILED = "failed", Trait.INSTEAD
    """It is an attempt that failed, and has no reward."""
    LATE = "late", Trait.TOO_LATE, Trait.AGAIN
    """Its group was whole or closed when it arrived."""
    DUPLICATE = "duplicate", Trait.AGAIN
    """The same rollout came before."""
    VOID = "void", Trait.CLOSES, Trait.OF_OTHERS
    """Its step was taken back, or it cannot be trained again."""
    UNUSED = "unused"
    """A stream's trainer was given it, and has not trained it."""
    OPERATOR = "operator", Trait.CLOSES, Trait.OF_OTHERS
    """An operator dropped it while it was pending."""


class ClosedBy(StrEnum):
    """The rule that ended the selection of a step."""

    CAPACITY = "capacity"
    """The next group would need more rows than the step has."""
    FILL = "fill"
    """Tokens reach `close_fill`, and every env is near its share."""
    GROUPS = "groups"
    """It holds `step_groups` groups."""
    ROLLOUTS = "rollouts"
    """It holds `step_rollouts` rollouts."""
    PARTIAL = "partial"
    """An env was short for too long."""
    TIMEOUT = "timeout"
    """It has waited for `fill_timeout_seconds`."""
    END = "end"
    """No env sends anything more."""


class PushStatus(StrEnum):
    """The outcome of a push."""

    STORED = "stored"
    """It is pending now."""
    DUPLICATE = "duplicate"
    """It was stored before, or what it was to replace is gone."""


class CommitStatus(StrEnum):
    """The outcome of the commit of a step."""

    OK = "ok"
    """The step is committed."""
    DUPLICATE = "duplicate"
    """The same bytes were committed before."""
    GONE = "gone"
    """Entries of its plan are not pending any more."""


class ReportStatus(StrEnum):
    """The outcome of a trainer's report."""

    OK = "ok"
    """It is noted, and the step in hand is on the server or trained."""
    LOST = "lost"
    """It is noted, and the step in hand is not on the server."""
    HANDED_BACK = "handed back"
    """The server has lost what was trained, and keeps it for the leader to recover."""


class SettingsState(StrEnum):
    """Outcome of a wish for other settings of a run."""

    SAME = "same"
    """They are in force, and nothing else is wanted."""
    ASKED = "asked"
    """The leader takes or refuses them at its next step boundary."""
    STORED = "stored"
    """No batcher is at work: the next one takes or refuses them."""
    TAKEN = "taken"
    """They hold from the next step on."""
    REFUSED = "refused"
    """The old ones go on."""
