"""The training loop of one rank, in one function: read it from top to bottom.

    pull -> agree -> updates -> publish -> report -> checkpoint
                                  |
                                  '- rank 0, beside the next step: write -> announce -> acknowledge

A crash anywhere in between loses nothing: until the checkpoint that contains it is written, a step can be pulled and
trained again with the same bytes; what was announced before is not announced again.

Where each is made: `session` (device, ranks, policy), `pulls` (one step that all ranks hold), `update` and `losses`,
`publishing` (versions for the workers), `reports` (metrics, lines), `checkpoints`.
"""

from __future__ import annotations

from rlbuffer.client.serverless import Source
from rlbuffer.config.schedules import learning_rate_at, planned_updates
from rlbuffer.config.settings import RunSettings
from rlbuffer.process.signals import StopRequest
from rlbuffer.trainer.checkpoints.resuming import checkpoint, resume
from rlbuffer.trainer.publishing import Publishing
from rlbuffer.trainer.pulls import Pulls
from rlbuffer.trainer.reports.debug_samples import show_samples
from rlbuffer.trainer.reports.reports import Reports
from rlbuffer.trainer.reports.tally import Tally
from rlbuffer.trainer.session import attempt_settings, open_session
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.update import Updates, take_step


def train(
    settings: RunSettings,
    *,
    rank: int,
    world_size: int,
    stop: StopRequest | None = None,
    source: Source | None = None,
    debug_samples: int = 0,
) -> bool:
    """Trains until ``settings.trainer.steps`` or the end of the run, from the newest checkpoint if there is one.

    With a world size above 1 the process group is joined from the environment (MASTER_ADDR and so on, as torchrun
    sets it). A `source` stands in for the server: made-up steps, or those of an archive.

    Returns:
        True when the planned steps are trained, or the run has ended; False when it was asked to stop before (with a
        checkpoint written).

    Raises:
        BatchTimeout: no step came in time, or another rank hangs in its data. RankFailed: another rank could not go
            on. Further rlbuffer errors: see `Reader.steps`, `agree`, `prepare`.
    """
    trainer = settings.trainer
    with (
        open_session(settings, rank=rank, world_size=world_size, stop=stop, source=source) as session,
        Publishing(session) as publishing,
        Reports(session) as reports,
    ):
        place = resume(session, warn=reports.warn)
        reports.start(place)
        if place.step >= trainer.steps and session.ranks.first(int(session.reader.is_trained())):
            reports.end(place, finished=True)
            return True
        # A run that has been taken back, or has lost steps, refuses a checkpoint of them here, or takes them from it.
        session.reader.start(place.step, settings=attempt_settings(session))
        session.when_there_is_room(session.write_pids)
        session.ranks.barrier()  # rank 0 has registered the attempt: the others' reports are not fenced by an older one
        # After a resume samplers have this version, or a newer one, unless the server lost what was newer.
        publishing.publish(place.step)
        publishing.finish()  # nothing is sampled before it is there

        pulls = Pulls(session, publishing)
        watch = Stopwatch()
        bfloat16_rms: float | None = None
        while place.step < trainer.steps:
            with watch.measure("wait"):
                pulled = pulls.next(place.step + 1)  # the reader made it while the last step trained
            if pulled is None:
                break
            step, damaged_tokens = pulled
            if debug_samples and place.step == place.resumed_from:
                show_samples(session, step, debug_samples)

            tally = Tally(session.ranks, step, trainer.loss)
            with watch.measure("train"):
                updates = Updates(
                    session.module,
                    step,
                    trainer,
                    session.ranks,
                    longest=settings.batcher.row_tokens,
                    ratios=tally.ratios,
                    drift=tally.drift,
                    pass_times=tally.pass_times,
                )
                # What a sampler may be off by its numbers alone is the model's, and hardly changes with its training.
                bfloat16_rms = updates.bfloat16_rms() if bfloat16_rms is None else bfloat16_rms
            tally.updates, tally.damaged_tokens = len(updates.parts), damaged_tokens
            tally.bfloat16_rms = bfloat16_rms
            for number, part in enumerate(updates.parts, start=1):
                with watch.measure("train"):
                    tally.sums += updates.accumulate(part)
                with watch.measure("optimizer"):
                    steps = place.step + number / len(updates.parts)
                    tally.learning_rate = learning_rate_at(planned_updates(trainer, steps), trainer)
                    tally.gradient_norm = take_step(
                        session.policy,
                        session.optimizer,
                        learning_rate=tally.learning_rate,
                        gradient_clip=trainer.optimizer.gradient_clip,
                        step=step.number,
                    )
            place.step = step.number

            with watch.measure("publish"):
                publishing.after_step(step)
            reports.step(step, tally, watch, place, publishing.newest)

            watch = Stopwatch()  # what follows belongs to the next step's time
            if step.number % trainer.checkpoint.every == 0 or step.header.checkpoint_now:
                with watch.measure("checkpoint"):
                    publishing.finish()  # the reader's place is part of it
                    reports.written()
                    reports.checkpoint(place, checkpoint(session, place))

        pulls.close()
        publishing.finish()
        reports.written()
        if place.step > place.checkpointed:
            reports.checkpoint(place, checkpoint(session, place))
        if pulls.has_ended:
            publishing.publish(place.step)  # data may end between two of `publish.every`
            publishing.finish()
        finished = place.step >= trainer.steps or pulls.has_ended
        if finished:
            session.reader.finished()
        reports.end(place, finished=finished, has_ended=pulls.has_ended)
        return finished
