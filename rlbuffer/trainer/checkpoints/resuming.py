"""The place of a run, and its way on from there: from the newest whole checkpoint, and into the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlbuffer.errors import clause
from rlbuffer.trainer.checkpoints import checkpoint as checkpoints
from rlbuffer.trainer.checkpoints.checkpoint import Checkpoint
from rlbuffer.trainer.session import TrainerSession


@dataclass(slots=True, kw_only=True)
class Place:
    """The place of the run; the loop moves it."""

    step: int = 0
    """Last trained step."""
    checkpointed: int = 0
    """Step of the last checkpoint."""
    resumed_from: int = 0
    """Step of the checkpoint that this attempt began with; 0: fresh weights."""


def resume(session: TrainerSession, *, warn: Callable[[str], None]) -> Place:
    """Loads the newest whole checkpoint. Rank 0's `warn` hears of newer ones that cannot be used."""
    folder = _folder(session)
    step, problems = checkpoints.newest(folder, session.ranks)
    instead = "an older checkpoint is used" if step else "there is no older one: training begins again at step 1"
    for problem in problems if session.is_first else ():
        warn(f"{clause(problem)}; {instead}")
    if step == 0:
        return Place()
    loaded = checkpoints.load(folder, step, run=session.settings.run)
    session.reader.load_state_dict(loaded.reader)
    checkpoints.restore(checkpoints.path_of(folder, step), session.policy, session.optimizer, rank=session.ranks.rank)
    return Place(step=loaded.step, checkpointed=loaded.step, resumed_from=loaded.step)


def checkpoint(session: TrainerSession, place: Place) -> Path:
    """Writes a checkpoint, each rank its part, and says so to the server. -> where it is."""
    save = partial(
        checkpoints.save,
        _folder(session),
        Checkpoint(
            step=place.step,
            reader=session.reader.state_dict(),
            run=session.settings.run,
            learning_rate=float(session.optimizer.param_groups[0]["lr"]),
        ),
        session.policy,
        session.optimizer,
        keep=session.settings.trainer.checkpoint.keep,
        ranks=session.ranks,
    )
    saved = session.when_there_is_room(save)
    # The fresh weights count as checkpoint 0, because they can be made again: nothing is retired before a real
    # checkpoint is the oldest of `keep`, so a short run can be replayed, and looked into, from step 1.
    kept = saved[0] if len(saved) >= session.settings.trainer.checkpoint.keep else 0
    place.checkpointed = place.step
    session.reader.checkpointed(place.step, oldest_kept=session.ranks.first(kept))
    return checkpoints.path_of(_folder(session), place.step)


def _folder(session: TrainerSession) -> Path:
    return session.settings.output_dir / "checkpoints"
