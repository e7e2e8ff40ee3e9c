"""The rollouts at fault where a committed step cannot be trained, and what to do: a restart meets the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlbuffer.errors import ConfigError
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Sample
from rlbuffer.trainer.losses import TrainedTokens
from rlbuffer.trainer.ranks.stalls import is_lost_peer

NAMED = 3
"""Rollouts that a message names; the others it counts."""


class Blame:
    """One update of a step, and how much of its gradient each rollout made."""

    def __init__(self, step: int, ranks: Ranks) -> None:
        self.step = step
        self._ranks = ranks
        self._gradients: list[tuple[Tensor, Tensor, tuple[Sample, ...]]] = []

    @contextmanager
    def naming(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Adds to an error in here which rollouts were in training. Not to one whose cause is another rank or a
        setting."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, ConfigError) or is_lost_peer(error)):
                ids = [sample.rollout_id for sample in micro_batch.samples]
                error.add_note(f"Step {self.step} was training {_named(ids)}. {self._advice}")
            raise

    def add(self, tokens: TrainedTokens) -> None:
        """Takes in the gradient that a backward pass left at the logprobs."""
        if tokens.logprobs.grad is not None:
            self._gradients.append((tokens.logprobs.grad, tokens.rollout, tuple(tokens.samples)))

    def not_finite(self, norm: float) -> str:
        """The message about an update whose gradient has this norm. All ranks must ask for it."""
        # As in `accumulate`, a rank's loss was multiplied by the number of ranks.
        own = [[size / self._ranks.world_size, name] for part in self._gradients for size, name in _largest(*part)]
        found = [(size, name) for text in self._ranks.gather_text(json.dumps(own)) for size, name in json.loads(text)]
        found.sort(key=lambda pair: (-pair[0], pair[1]))
        broken = [name for size, name in found if math.isinf(size)]
        where = ""
        if broken:
            where = f"The loss has no finite gradient at the logprobs of {_named(broken)}. "
        elif found:
            names = _named([name for _, name in found[:NAMED]])
            where = f"The loss has its largest gradients, up to {found[0][0]:.3g}, at the logprobs of {names}. "
        return (
            f"step {self.step}: the gradient's norm is {norm}. The parameters are left as they were. {where}"
            f"{self._advice} If other steps end so, too, lower trainer.optimizer.learning_rate or "
            "trainer.loss.options.max_ratio, or resume from an older checkpoint"
        )

    @property
    def _advice(self) -> str:
        return (
            "The step is committed, so a restart trains the same bytes: if it ends so again, look at them with "
            f"`rlbuffer inspect step:{self.step}` and take the step back with `rlbuffer runs void {self.step}`."
        )


def _largest(gradient: Tensor, rollout: Tensor, samples: Sequence[Sample]) -> Iterator[tuple[float, str]]:
    """Each rollout's largest |d loss / d logprob|; inf where one is not finite."""
    size = gradient.detach().abs().double().nan_to_num(nan=math.inf, posinf=math.inf)
    largest = torch.zeros(len(samples), dtype=size.dtype, device=size.device)
    largest.scatter_reduce_(0, rollout, size, "amax")
    return zip(largest.tolist(), (sample.rollout_id for sample in samples), strict=True)


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return (f"rollout{'s' if len(ids) > 1 else ''} {', '.join(ids[:NAMED])}{more}") if ids else "no rollout"
