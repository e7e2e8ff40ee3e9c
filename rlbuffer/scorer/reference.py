"""Logprobs of rollouts under a fixed model, computed packed with the trainer's own forward pass.

So the reference and the policy that is compared with it are computed alike: the same attention, head and temperature,
over the same tokens where sampling was restricted.
Imports torch and transformers: import this module lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbuffer.config.settings import INITIAL_MODEL, RunSettings, ScoreSettings
from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.packing.pack import pack
from rlbuffer.packing.planner import plan
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.support import SUPPORT, is_support
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.model.selftest import vocabulary_of
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.weights.adapters import state_of
from rlbuffer.weights.model import build_model, load_into, narrow_dtype


class Reference:
    """A model that never changes.

    Args:
        policy: as :func:`rlbuffer.trainer.model.packed_policy.prepare` makes it, on its device.
        row_tokens: tokens of a packed row; a longer rollout gets a row of its own length.
        temperature: that the logits are divided by where a rollout has no column ``temperatures``.
    """

    def __init__(self, policy: PackedPolicy, *, row_tokens: int, temperature: float) -> None:
        self._policy = policy
        self._row_tokens = row_tokens
        self._temperature = temperature
        self._device = next(policy.parameters()).device
        self._vocabulary = vocabulary_of(policy.model)

    def check(self, rollout: Rollout) -> None:
        """Raises InvalidRollout when the model has no embedding for a token."""
        highest = max(int(sequence.tokens.max()) for sequence in rollout.sequences)
        if highest >= self._vocabulary:
            raise InvalidRollout(
                f"rollout {rollout.rollout_id}: token {highest} is outside the model's vocabulary of {self._vocabulary}"
            )

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Per sequence the logprob of every trained token given those before it, 0 elsewhere: [T] float32, nats."""
        out: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        row_tokens = max(self._row_tokens, *lengths)
        bare = [self._bare(sequence) for sequence in sequences]
        for micro_step in plan(lengths, row_tokens=row_tokens, world_size=1).rows:
            row = micro_step[0][0]
            packed: Any = pack([bare[index] for index in row], row_tokens=row_tokens).to(self._device)
            tokens = trained_tokens(self._policy, packed)
            values = torch.zeros(len(packed.input_ids), dtype=torch.float32, device=self._device)
            values[torch.nonzero(packed.loss_mask)[:, 0]] = tokens.logprobs.float()
            for index, piece in zip(row, packed.unpack(values.cpu().numpy()), strict=True):
                out[index] = np.ascontiguousarray(piece)
        return out

    def _bare(self, sequence: TokenSequence) -> Rollout:
        """Without columns that the forward pass does not look at: those of different envs need not go together."""
        temperatures = sequence.columns.get("temperatures")
        support = sequence.columns.get(SUPPORT)
        if temperatures is None:
            temperatures = np.full(len(sequence.tokens), self._temperature, np.float32)
        return Rollout(
            tokens=sequence.tokens,
            loss_mask=sequence.loss_mask,
            logprobs=sequence.logprobs,
            version_spans=sequence.version_spans,
            columns={
                "temperatures": temperatures,
                **({SUPPORT: support} if support is not None and is_support(support) else {}),
            },
        )


def make_reference(settings: RunSettings, options: ScoreSettings) -> Reference:
    """The reference that ``[score.NAME]`` asks for.

    Raises:
        ConfigError: there is no such model, or no such device. WeightsError: the adapter that training begins with
            does not fit the model. PackedForwardError: it cannot be run packed.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("score.device = cuda, but torch sees no CUDA device", setting="score.device")
    is_on_gpu = options.device != "cpu" and torch.cuda.is_available()
    model_settings = settings.model
    if options.model != INITIAL_MODEL:
        model_settings = settings.model.model_copy(update={"path": options.model, "config": {}})
    model = build_model(model_settings, seed=settings.seed)
    begun = settings.trainer.lora.path
    if begun and options.model == INITIAL_MODEL:
        load_into(model, state_of(Path(begun).expanduser(), base=model.state_dict()))
    torch.nn.Module.to(model, torch.device("cuda" if is_on_gpu else "cpu"))
    # As the trainer makes its policy: layout and dtypes are part of what is compared.
    policy = prepare(
        model,
        layout=settings.trainer.layout,
        compute=narrow_dtype(model_settings),
        longest=settings.batcher.row_tokens,
    )
    return Reference(
        policy,
        row_tokens=settings.batcher.row_tokens,
        temperature=settings.trainer.temperature,
    )
