"""Does the sampler say the truth? A few sampled tokens are compared with a forward pass of the published weights.

Wrong logprobs (another temperature, another model, a stale cache, a quantised engine) train quietly wrong: a worker
that has them must not feed a trainer.

Imports torch and transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlbuffer.errors import WrongLogprobs
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.support import left_out
from rlbuffer.weights.adapters import model_directory, state_of
from rlbuffer.weights.files import open_weights, read_config
from rlbuffer.weights.model import load_into
from rlbuffer.worker.samplers.base import Completion, Sampler, Sampling, logprobs_mode
from rlbuffer.worker.samplers.decoding import distribution_of

SELFCHECK_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of one logprob, by the sampler's dtype. Measured with vLLM on the CPU: 5e-6 in float32, 0.1 in
bfloat16; float16 has eight times bfloat16's resolution."""
ROUNDING = 3.0
"""How far 16 bit may move a logprob, in what it moves those of the same tokens in a pass of our own: a trained model
is moved further than a fresh one, one with experts most."""
TOKENS = 16
"""New tokens per completion that is checked."""
PROMPT_TOKENS = 64
"""Tokens of a prompt that are used, its last ones: the pass runs in this process, on the CPU, in float32."""
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of published weights that are widened for the pass."""


def model_of(directory: Path) -> PreTrainedModel:
    """The model of a published version, on the CPU: in the dtype of its files, whose pages all workers of a host share,
    or in float32 where an adapter is merged into it."""
    base = model_directory(directory)
    dtype = torch.float32 if base != directory else NARROW.get(_dtype_of(base), torch.float32)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    if base != directory:
        load_into(model, state_of(directory, base=model.state_dict()))
    return model


def _dtype_of(directory: Path) -> str:
    config = read_config(directory)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


@contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Inside, each module computes in float32, and has its parameters in it while it runs: never all of them at once,
    which takes 30 GB of every worker for a model of 8 billion. A layer has all of its own, as one of its modules may
    use another one's: where both are multiplied as they are, 16 bit would stay unnoticed."""
    layers = {layer for stack in model.modules() if isinstance(stack, torch.nn.ModuleList) for layer in stack}
    narrow: dict[torch.nn.Module, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}

    def widen(module: torch.nn.Module, _: object) -> None:
        parameters = [p for p in module.parameters(recurse=module in layers) if p.dtype in NARROW.values()]
        narrow[module] = [(parameter, parameter.data) for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, *_: object) -> None:
        for parameter, data in narrow.pop(module, ()):
            parameter.data = data

    hooks = [module.register_forward_pre_hook(widen) for module in model.modules()]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def logprobs_of(
    model: PreTrainedModel,
    prompt: NDArray[np.int32],
    tokens: NDArray[np.int32],
    sampling: Sampling,
    support: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """Logprobs [C] of `tokens` after `prompt` by one forward pass, at the temperature: over the whole vocabulary, or
    over the tokens that restricted sampling left.

    Shapes: prompt [P], tokens [C], support [C, W].
    """
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    drawn = ids[0, len(prompt) :]
    if support is not None:
        logits = logits.masked_fill(torch.from_numpy(left_out(support, tokens, logits.shape[1])), -torch.inf)
    logprobs = distribution_of(logits, sampling.temperature).gather(1, drawn[:, None])[:, 0]
    out: NDArray[np.float32] = logprobs.numpy()
    return out


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters alone: rotary tables stay in float32, as engines have them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a sampler drew to be compared: the end of one prompt, and short completions of it."""

    prompt: NDArray[np.int32]
    completions: Sequence[Completion]
    sampling: Sampling


async def check_sampler(
    sampler: Sampler, policy: PolicyVersion, prompt: NDArray[np.int32], sampling: Sampling
) -> float:
    """Samples a little and compares it. -> the largest difference of a logprob.

    A sample of tokens: the end of one prompt, two short completions. The model must fit into memory as it was
    published, once on a host; one with experts, or an adapter, once for every worker. The tolerance is that of the
    dtype in the published config: engines use it unless they are set otherwise.

    Raises:
        WrongLogprobs: it is beyond the tolerance; the message names what usually causes it.
    """
    return await asyncio.to_thread(compared, policy, await drawn(sampler, prompt, sampling))


async def drawn(sampler: Sampler, prompt: NDArray[np.int32], sampling: Sampling) -> Drawn:
    """Samples a little with the version that serves."""
    sampling = replace(sampling, max_new_tokens=min(TOKENS, sampling.max_new_tokens))
    prompt = prompt[-PROMPT_TOKENS:]
    completions = await sampler.sample(prompt, n=2, sampling=sampling)
    return Drawn(prompt=prompt, completions=completions, sampling=sampling)


def compared(policy: PolicyVersion, sample: Drawn) -> float:
    """Compares what was drawn with a forward pass of this version. -> the largest difference of a logprob.

    Raises:
        WrongLogprobs: it is beyond the tolerance. WeightsError: the version's files are gone.
    """
    prompt, completions, sampling = sample.prompt, sample.completions, sample.sampling
    directory = open_weights(policy)
    dtype = _dtype_of(model_directory(directory))
    limit = SELFCHECK_TOLERANCES.get(dtype, SELFCHECK_TOLERANCES["bfloat16"])
    try:
        model = model_of(directory)

        def computed() -> NDArray[np.float32]:
            return np.concatenate([logprobs_of(model, prompt, c.tokens, sampling, c.support) for c in completions])

        try:
            with widened(model):
                expected = computed()
        except RuntimeError:  # a module that takes a weight from inside another one
            _cast(model, torch.float32)
            expected = computed()
        if dtype in NARROW:
            _cast(model, NARROW[dtype])
            rounded = computed()
            limit = max(limit, ROUNDING * float(np.abs(rounded - expected).max()))
    except (RuntimeError, IndexError) as error:  # a token that the model does not have, a model that cannot be mapped
        raise WrongLogprobs(
            f"the sampler's tokens cannot be compared with the published weights ({type(error).__name__}: {error}): "
            'does it serve this model? (worker.*.self_check = "never" leaves this check out)'
        ) from error
    told = np.concatenate([c.logprobs for c in completions])
    at = int(np.abs(expected - told).argmax())
    worst = float(np.abs(expected - told)[at])
    if not worst <= limit:
        raise WrongLogprobs(
            f"the sampler's logprobs are not those of the published weights: a token has {told[at]:.4f}, a forward "
            f"pass gives {expected[at]:.4f} (tolerance {limit:g} for {dtype}). Is the server started with "
            f"--logprobs-mode {logprobs_mode(sampling.top_p, sampling.top_k)}, and does it serve this model? "
            '(worker.*.self_check = "never" leaves this check out)'
        )
    return worst
