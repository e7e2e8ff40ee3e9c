"""What the batcher waits for: the kind of a reason. Its sentence, for people, stands beside it."""

from __future__ import annotations

from enum import StrEnum


class Wait(StrEnum):
    """What is waited for."""

    NO_TRAINER = "no_trainer"
    """No trainer has joined since the run began."""
    TRAINER_GONE = "trainer_gone"
    """A trainer was there and is silent, or none has come since the run was restored or taken back."""
    TRAINER_BUSY = "trainer_busy"
    """The trainer has `lookahead` committed steps before it."""
    TAKEOVER = "takeover"
    """A new leader waits for the trainer's first word."""
    VERSION = "version"
    """Nothing sampled from the published version could still train, or none is published."""
    ENV_SHORT = "env_short"
    """An env with a budget is owed more than a group and has none ready."""
    FILLING = "filling"
    """The step is not full, and no env is short."""
    NOTHING_TO_LEARN = "nothing_to_learn"
    """The groups that are here teach nothing, and would only move the learning rate."""
    STEP_IN_HAND = "step_in_hand"
    """Rank 0 has a step of this number that the server has lost, and hands it back first."""
    PAUSED = "paused"
    """All that could give something is paused."""
    LAST_STEP = "last_step"
    """Every env is done; the trainer is at the last step."""
    SERVER_START = "server_start"
    """The server's append-only file is rewritten first."""
    ENDED = "ended"
    """The trainer has made its steps."""
