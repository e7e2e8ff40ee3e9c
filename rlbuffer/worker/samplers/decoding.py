"""Sampling with a Hugging Face model: batched, with the model's own KV cache and a decode loop of our own.

For small models and CPUs. The loop is ours because ``generate`` spends more time around a tiny model than inside it,
and because the logprobs must be those of the distribution that was drawn from: ``log_softmax(logits / temperature)``
in float32, computed once, used for both. A nucleus alone leaves out tokens; the logprobs of the others stay what they
were. With ``top_k`` the distribution is that over the tokens which are left, and they are recorded.

Prompts of unequal lengths are padded on the left, so that every row's next token is in the last column; position ids
count real tokens only and a mask hides the padding. Every prompt is read once and its cache repeated for its group.

Imports torch: :mod:`rlbuffer.worker.samplers.transformers` does so when it makes a sampler.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from rlbuffer.errors import ConfigError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.routed import routed_column
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.support import NO_TOKEN
from rlbuffer.weights.adapters import model_directory, state_of
from rlbuffer.weights.experts import Experts, experts_of
from rlbuffer.weights.files import load_state, open_weights, read_config
from rlbuffer.weights.layout import base_of, is_adapter
from rlbuffer.weights.model import in_own_names, load_into, model_from_config
from rlbuffer.worker.samplers.base import Completion, Sampling, tell_record


class Decoder:
    """See the module's docstring. Used from one thread at a time. Always samples in float32, whatever the trainer's
    dtype.

    Args:
        records_experts: completions say which experts took each token in.
    """

    def __init__(self, *, seed: int, device: str = "cpu", records_experts: bool = False) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = cuda, but torch sees no CUDA device here", setting="device")
        self._device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._model: PreTrainedModel | None = None
        self._version = -1
        self._records_experts = records_experts
        self._experts: Experts | None = None
        self._base: tuple[str, Mapping[str, torch.Tensor]] = ("", {})
        """Checksum and tensors of the model that adapters are merged into."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def vocab_size(self) -> int:
        return 0 if self._model is None else int(self._model.config.get_text_config().vocab_size)

    @property
    def context(self) -> int:
        text = None if self._model is None else self._model.config.get_text_config()
        return int(getattr(text, "max_position_embeddings", 0) or 0)

    def load(self, policy: PolicyVersion) -> None:
        directory = open_weights(policy)
        model = self._made(directory) if self._model is None else self._model
        load_into(model, self._state(model, directory))
        self._model, self._version = model, policy.version

    def _made(self, directory: Path) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            model = model_from_config(read_config(model_directory(directory)))
        model.train(False).requires_grad_(False)
        torch.nn.Module.to(model, self._device)
        if self._records_experts:
            tell_record(model.config.to_dict())
            try:
                self._experts = experts_of(model)
            except ConfigError as error:
                raise ConfigError(f"record_experts = true: {error}", setting="record_experts") from error
        return model

    def _state(self, model: PreTrainedModel, directory: Path) -> Mapping[str, torch.Tensor]:
        if not is_adapter(directory):
            return load_state(directory)
        checksum = base_of(directory).checksum
        if self._base[0] != checksum:
            # An adapter names the model's own modules, which checkpoints may name otherwise.
            self._base = checksum, in_own_names(model, load_state(model_directory(directory)))
        return state_of(directory, base=self._base[1])

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        *,
        n: int,
        sampling: Sampling,
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """Samples `n` completions of every prompt, all together. -> one list per prompt, in order.

        Shapes: each prompt [P] int32, P >= 1, lengths may differ.

        `stopped` is asked now and then; once it says True the unfinished completions come back as ``abort``.
        """
        if self._model is None:
            raise ConfigError("the sampler has no weights yet: load a policy version first")
        max_new_tokens = sampling.max_new_tokens
        model, device = self._model, self._device
        ids, mask = _left_padded(prompts, device)
        rows = len(prompts) * n
        is_padded = not bool(mask.all())
        cache = DynamicCache(config=model.config)
        # Without padding the model derives mask and positions from the cache, which is the faster path.
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_padded else {}
        always = {_name_of_cache(model): cache, "use_cache": True, "logits_to_keep": 1}
        logits, read = self._passed(model, input_ids=ids, **always, **extra)
        record = None if read is None else _Record(read.view(*ids.shape, *read.shape[1:]))
        cache.batch_repeat_interleave(n)
        logits = logits.repeat_interleave(n, dim=0)
        mask = mask.repeat_interleave(n, dim=0)
        position = mask.sum(1, keepdim=True)

        eos = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.long, device=device)
        tokens = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(rows, max_new_tokens, dtype=torch.float32, device=device)
        width = min(sampling.top_k, self.vocab_size) if sampling.temperature else 0
        support = torch.full((rows, max_new_tokens, width), NO_TOKEN, dtype=torch.int32, device=device)
        lengths = torch.full((rows,), max_new_tokens, device=device)
        is_finished = torch.zeros(rows, dtype=torch.bool, device=device)
        is_aborted = False
        step = 0
        while True:
            distribution = distribution_of(logits[:, -1].float(), sampling.temperature)
            if width:
                distribution, support[:, step] = restricted(distribution, sampling)
                probabilities = distribution.exp()
            else:
                probabilities = nucleus(distribution.exp(), sampling.top_p)
            drawn = torch.multinomial(probabilities, 1, generator=self._generator)
            tokens[:, step] = drawn[:, 0]
            logprobs[:, step] = distribution.gather(1, drawn)[:, 0]
            ends = torch.isin(drawn[:, 0], eos) & ~is_finished
            lengths[ends] = step + 1
            is_finished |= ends
            step += 1
            if step == max_new_tokens or bool(is_finished.all()):
                break
            if stopped is not None and stopped():
                is_aborted = True
                lengths[~is_finished] = step
                break
            if is_padded:
                mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
                extra = {"attention_mask": mask, "position_ids": position}
                position = position + 1
            logits, read = self._passed(model, input_ids=drawn, **always, **extra)
            if record is not None and read is not None:
                record.steps.append(read)

        reasons = ["stop" if finished else "abort" if is_aborted else "length" for finished in is_finished.tolist()]
        completions = _completions(tokens, logprobs, support, lengths, reasons, self._version)
        if record is not None:
            sizes = [len(prompt) for prompt in prompts for _ in range(n)]
            completions = record.beside(completions, sizes, n)
        return [completions[start : start + n] for start in range(0, rows, n)]

    def _passed(self, model: PreTrainedModel, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits of a forward pass, and the experts [tokens, layers, K] that it took, where they are recorded."""
        if self._experts is None:
            return model(**inputs).logits, None
        with self._experts.recording() as recording:
            logits = model(**inputs).logits
        return logits, recording.rows()


class _Record:
    """The experts of a batch: those that read the prompts, then those of each token that was drawn and taken in.

    Shapes: ``prompts`` [prompts, longest, layers, K], padded on the left; each of ``steps`` [rows, layers, K].
    """

    def __init__(self, prompts: torch.Tensor) -> None:
        self._prompts = prompts
        self.steps: list[torch.Tensor] = []

    def beside(self, completions: Sequence[Completion], sizes: Sequence[int], n: int) -> list[Completion]:
        """The completions with their records; `sizes` are the tokens of each one's prompt."""
        prompts = self._prompts.cpu().numpy()
        steps = torch.stack(self.steps).cpu().numpy() if self.steps else None
        out = []
        for row, (completion, size) in enumerate(zip(completions, sizes, strict=True)):
            parts = [prompts[row // n, prompts.shape[1] - size :]]
            if steps is not None:
                parts.append(steps[: len(completion.tokens) - 1, row])  # the last token was never taken in
            rows = np.concatenate(parts)
            out.append(replace(completion, routed_experts=routed_column(rows, size + len(completion.tokens))))
        return out


def _completions(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    support: torch.Tensor,
    lengths: torch.Tensor,
    reasons: Sequence[str],
    version: int,
) -> list[Completion]:
    """One of each row, without what was drawn after its end. Shapes: tokens, logprobs [rows, C], support [rows, C, W]
    (W 0: nothing is restricted)."""
    all_tokens = tokens.cpu().numpy().astype(np.int32)
    all_logprobs = logprobs.cpu().numpy()
    all_supports = support.cpu().numpy()
    return [
        Completion(
            tokens=all_tokens[row, :length].copy(),
            logprobs=all_logprobs[row, :length].copy(),
            finish_reason=reason,
            version_spans=(VersionSpan(version, 0, int(length)),),
            support=_trimmed(all_supports[row, :length]) if all_supports.shape[2] else None,
        )
        for row, (length, reason) in enumerate(zip(lengths.tolist(), reasons, strict=True))
    ]


def _name_of_cache(model: PreTrainedModel) -> str:
    """The argument that takes the cache: transformers 5.24 renamed it in its own models, and warns of the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def distribution_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities over the whole vocabulary. At temperature 0 the likeliest token has all of the mass.

    Shapes: logits [rows, vocabulary] float32 -> the same.
    """
    if temperature == 0:
        best = torch.full_like(logits, -torch.inf)
        return best.scatter_(1, logits.argmax(dim=-1, keepdim=True), 0.0)
    return torch.log_softmax(logits / temperature, dim=-1)


def _trimmed(support: NDArray[np.int32]) -> NDArray[np.int32]:
    """[C, W] as wide as its widest row."""
    return support[:, : max(1, int((support >= 0).sum(axis=1).max(initial=0)))].copy()


def restricted(distribution: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution that min_p, top_k and top_p leave, in this order, which is vLLM's, and the tokens in it.

    Of tokens that tie at the edge some are left, never more than `top_k`. The likeliest token always is.

    Shapes: log-probabilities [rows, vocabulary] -> the same, -inf where nothing is left; [rows, W] int32, W at most
    `top_k`, -1 behind a row's tokens.
    """
    values, ids = distribution.topk(min(sampling.top_k, distribution.shape[1]), dim=-1)  # the likeliest first
    if sampling.min_p:
        values = values.masked_fill(values < values[:, :1] + math.log(sampling.min_p), -torch.inf)
    values = values.log_softmax(-1)
    if sampling.top_p < 1:
        mass = values.exp()
        values = values.masked_fill(mass.cumsum(-1) - mass >= sampling.top_p, -torch.inf).log_softmax(-1)
    out = torch.full_like(distribution, -torch.inf).scatter_(1, ids, values)
    return out, torch.where(values > -torch.inf, ids, NO_TOKEN).int()


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The nucleus of a distribution, not renormalised: the smallest set of likeliest tokens with at least `top_p` of
    the mass (Holtzman et al. 2020, arXiv:1904.09751).

    Shapes: probabilities [rows, vocabulary] -> the same.
    """
    if top_p == 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True)
    beyond = ordered.cumsum(dim=-1) - ordered >= top_p  # the mass before this token is enough already
    return probabilities.masked_fill(beyond.gather(1, order.argsort(dim=-1)), 0.0)


def _left_padded(prompts: Sequence[NDArray[np.int32]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask, both [prompts, longest] int64; padding is token 0 and masked."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
