"""What to do where a committed step cannot be trained: a restart meets the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlbuffer.errors import ConfigError
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.trainer.ranks.stalls import is_lost_peer

NAMED = 3
"""Rollouts that a message names; the others it counts."""


@contextmanager
def naming(step: int, micro_batch: MicroBatch) -> Iterator[None]:
    """Adds to an error in here which rollouts were in training. Not to one whose cause is another rank or a setting."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, ConfigError) or is_lost_peer(error)):
            ids = [sample.rollout_id for sample in micro_batch.samples]
            error.add_note(f"Step {step} was training {_named(ids)}. {way_out(step)}")
        raise


def way_out(step: int) -> str:
    """What a person can do about a step that cannot be trained."""
    return (
        "The step is committed, so a restart trains the same bytes: if it ends so again, look at them with "
        f"`rlbuffer inspect step:{step}` and take the step back with `rlbuffer runs rewind {step - 1} --keep-pending`."
    )


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return (f"rollout{'s' if len(ids) > 1 else ''} {', '.join(ids[:NAMED])}{more}") if ids else "no rollout"
