"""A sampler of your own in one file: ``sampler = "own_sampler:OwnSampler"`` in ``[worker.NAME]``.

It asks a model from `transformers` for one token after the other, without a cache: what an engine does instead is its
own affair. ``rlbuffer.testing.check_sampler("own_sampler:OwnSampler", folder)`` tells whether a worker can rely on it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, PromptTooLong, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.samplers import Completion, SamplerTraits, Sampling


class OwnSampler:
    """Whoever reads its traits or options imports neither torch nor transformers."""

    traits = SamplerTraits(extra="train", needs=("torch", "transformers"))

    class Options(BaseModel, extra="forbid"):
        """``sampler_options``."""

        threads: int = 1

    @classmethod
    def make(cls, settings: WorkerSettings, options: Options, *, seed: int) -> Self:
        if settings.top_p != 1:
            raise ConfigError("own_sampler draws from the whole vocabulary: top_p = 1", setting="top_p")
        return cls(threads=options.threads, seed=seed)

    def __init__(self, *, threads: int, seed: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._generator = torch.Generator().manual_seed(seed)
        self._model: Any = None
        self.version, self.vocab_size, self.context = -1, 0, 0

    async def load(self, policy: PolicyVersion) -> None:
        model = await asyncio.to_thread(self._read, policy)
        self._model, self.version = model, policy.version
        self.vocab_size, self.context = model.config.vocab_size, model.config.max_position_embeddings

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        room = self.context - len(prompt)
        if room < 1:
            raise PromptTooLong(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}")
        most = min(room, sampling.max_new_tokens)
        # Requests in flight end with the model that they began with, and say so.
        return await asyncio.to_thread(self._draw, self._model, self.version, prompt, n, sampling, most)

    async def close(self) -> None:
        self._model = None

    def _read(self, policy: PolicyVersion) -> Any:
        from transformers import AutoModelForCausalLM

        from rlbuffer.weights.files import open_weights

        directory = open_weights(policy)  # checks size and digest
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype="float32", trust_remote_code=False, use_safetensors=True
        ).eval()
        if self._model is not None and _shapes(model) != _shapes(self._model):
            raise WeightsError(f"the weights at {directory} are of another model")
        return model

    def _draw(
        self, model: Any, version: int, prompt: NDArray[np.int32], n: int, sampling: Sampling, most: int
    ) -> list[Completion]:
        import torch

        ids = torch.from_numpy(prompt.astype(np.int64)).repeat(n, 1)
        told = torch.zeros(n, 0)
        ends = torch.full((n,), most)
        with torch.inference_mode():
            for step in range(most):
                logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
                logprobs = torch.log_softmax(logits / max(sampling.temperature, 1e-6), -1)  # 0: the likeliest token
                drawn = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
                ids, told = torch.cat([ids, drawn], 1), torch.cat([told, logprobs.gather(1, drawn)], 1)
                stops = torch.isin(drawn[:, 0], torch.tensor(sampling.stop_token_ids, dtype=torch.long))
                ends[stops & (ends == most)] = step + 1
                if bool((ends < most).all()):
                    break
        tokens, told = ids[:, len(prompt) :].numpy().astype(np.int32), told.numpy().astype(np.float32)
        return [
            Completion(
                tokens=tokens[row, :end],
                logprobs=told[row, :end],
                finish_reason="stop" if tokens[row, end - 1] in sampling.stop_token_ids else "length",
                version_spans=(VersionSpan(version, 0, end),),
            )
            for row, end in enumerate(ends.tolist())
        ]


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
