"""The output of `train`: a line per event of rank 0."""

from __future__ import annotations

from typing import assert_never

from rlbuffer.events.event import MetricsServed, MetricsUnavailable
from rlbuffer.events.trainer import (
    CheckpointWritten,
    TrainerEvent,
    TrainerWarning,
    TrainingEnded,
    TrainingStarted,
    WaitingNoticed,
)
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import plural
from rlbuffer.state.trained import example_lines


def line_of(event: TrainerEvent) -> str:
    """An event as plain text: one line, and one for each example of a step."""
    match event:
        case StepRecord():
            return _step(event)
        case TrainingStarted():
            origin = f"from the checkpoint of step {event.step}" if event.step else "from step 0"
            ranks = plural(event.world_size, "rank")
            return (
                f"training {event.parameters:,} parameters on {ranks} ({event.device}, "
                f"{event.attention}), {origin} to {event.steps}; output in {event.output}"
            )
        case CheckpointWritten():
            return f"checkpoint of step {event.step} in {event.path}"
        case TrainingEnded(reason=reason):
            why = f": {reason[:1].lower()}{reason[1:]}" if reason else ""
            return f"{'finished' if event.finished else 'stopped'} at step {event.step}{why}"
        case MetricsServed(url=url):
            return f"metrics: {url}"
        case MetricsUnavailable():
            return f"! {event.sentence}"
        case TrainerWarning() | WaitingNoticed():
            return event.message
        case _:
            assert_never(event)


def _step(event: StepRecord) -> str:
    reward = "-" if event.reward is None else f"{event.reward:.3f}"
    rewards = " ".join(f"{env} {r:.3f}" for env, r in event.rewards.items() if r is not None)
    return (
        f"step {event.step}  reward {reward} ({rewards})  loss {event.loss:+.4f}  "
        f"entropy {event.entropy:.3f}  kl {event.kl:.4f}  clipped {event.clip_fraction:.1%}  "
        f"grad {event.grad_norm:.2f}  age {event.age:.2f}  tokens {event.tokens}  "
        f"{event.seconds['total']:.2f} s  wait {event.wait:.0%}"
        + "".join(f"\n  {line}" for line in example_lines(event.examples))
    )
