"""The sampler as a worker uses it: policy versions in, token ids with the logprobs they were really sampled with out.

A :class:`Sampler` is asynchronous: many prompts are in flight at once, and a newer version is loaded while they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.models import experts_in
from rlbuffer.errors import ConfigError, InvalidRollout, PromptTooLong, RequestFailed, WeightsError
from rlbuffer.process.logs import fields
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.routed import routed_column
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.support import support_of
from rlbuffer.weights.layout import base_of, is_adapter

ADAPTER_NAME = "rlbuffer"
"""Name of the served LoRA adapter in engines and requests."""
LEAST_TEMPERATURE = 0.01
"""Below it vLLM samples with this one and says nothing in the answer (`_MAX_TEMP` of vLLM 0.32)."""

_log = logging.getLogger(__name__)


def seeds_of(seed: int) -> Iterator[int]:
    """Seeds of 32 bits that follow from one: for what draws from the beginning each time it is started."""
    draws = np.random.default_rng(seed)
    while True:
        yield int(draws.integers(2**32))


def logprobs_mode(top_p: float, top_k: int) -> str:
    """The mode in which vLLM gives the logprobs that a trainer computes.

    Its processed logprobs have the temperature and what was left out, its raw ones neither. With `top_k` the trainer
    leaves out the same. With a nucleus alone the raw ones are right, at temperature 1, which is why the settings refuse
    any other there.
    """
    return "processed_logprobs" if top_k or top_p == 1 else "raw_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The settings by which tokens are drawn."""

    max_new_tokens: int
    """Longest completion, in tokens, >= 1."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token, with logprob 0 (only for evaluation)."""
    top_k: int = 0
    """The likeliest tokens, of which one is drawn; 0: of all. Above 0 the tokens that are left are recorded."""
    top_p: float = 1.0
    """Nucleus: tokens beyond this probability mass are never drawn. (0, 1]."""
    min_p: float = 0.0
    """Tokens with less than this share of the likeliest one's probability are never drawn. [0, 1); needs `top_k`."""
    stop_token_ids: tuple[int, ...] = ()
    """Drawing one of these ends the completion; it is part of it."""


def fitted(sampling: Sampling, prompt: int, context: int) -> Sampling:
    """The sampling of a completion behind so many tokens of a prompt, within the model's context (0: no limit).

    Raises:
        PromptTooLong: there is no room.
    """
    if not context:
        return sampling
    if prompt >= context:
        raise PromptTooLong(f"a prompt of {prompt} tokens leaves no room in a context of {context}")
    return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, context - prompt))


def of_an_engine(sampling: Sampling) -> Sampling:
    """What an engine is asked for. One that tells the tokens which it leaves refuses temperature 0 (vLLM 0.32): the
    likeliest of one token is the same."""
    if sampling.top_k and sampling.temperature == 0:
        return replace(sampling, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    return sampling


def support_told(rows: Sequence[Sequence[int]] | None, tokens: int, sampling: Sampling) -> NDArray[np.int32] | None:
    """The tokens that an engine left for each of `tokens`, as :class:`Completion` has them.

    Raises:
        RequestFailed: it does not tell them, and they were asked for.
    """
    if not sampling.top_k or sampling.temperature == 0:
        return None
    if rows is None or len(rows) != tokens:
        came = "nothing" if rows is None else f"{len(rows)} lists"
        raise RequestFailed(
            f"the engine does not tell which tokens top_k = {sampling.top_k} left: {came} came for {tokens} sampled "
            "tokens. vLLM's server needs --return-sampling-mask, SGLang's is 0.5.23 or newer"
        )
    return support_of(rows, sampling.top_k)


def finish_reason(told: object, tokens: NDArray[np.int32], sampling: Sampling) -> str:
    """Why a completion ended, as :class:`Completion` has it: what the engine has told, else what its tokens show.

    Args:
        told: its ``finish_reason``; some servers give null, and any may give a name of its own.
        tokens: [C] int32.
        sampling: what was asked for, within the model's context.

    Raises:
        RequestFailed: neither says it, so nobody knows whether the completion is whole.
    """
    if told in ("stop", "length", "abort"):
        return str(told)
    if len(tokens) and int(tokens[-1]) in sampling.stop_token_ids:
        return "stop"
    if len(tokens) >= sampling.max_new_tokens:
        return "length"
    raise RequestFailed(
        f"a completion of {len(tokens)} tokens came with finish_reason {told!r}: it has no stop token and is shorter "
        f"than the {sampling.max_new_tokens} tokens that were asked for"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A policy version as its files have it, for an engine that reads them itself."""

    policy: PolicyVersion
    directory: Path
    model: Path
    """The directory of the whole model: that of the version, or of the base model of an adapter."""
    shapes: dict[str, list[int]]
    """Name -> shape."""
    vocab_size: int
    config: Mapping[str, Any]
    """Hugging Face config of the whole model."""
    base: str
    """sha256 of the model that an adapter is for; "" of a whole model."""


def opened(policy: PolicyVersion, served: Opened | None = None) -> Opened:
    """Opens a version, for an engine that is to be started with it, or that has `served` until now.

    Raises:
        WeightsError: it is not there, not what was announced, or does not fit what is served.
    """
    from rlbuffer.weights.adapters import model_directory, require_base
    from rlbuffer.weights.files import open_weights, read_config
    from rlbuffer.weights.shapes import differing, names_and_shapes

    directory = open_weights(policy)
    shapes = names_and_shapes(directory)
    if served is not None:
        if wrong := differing(shapes, served.shapes):
            raise WeightsError(f"the weights do not fit the model: {wrong} differ")
        require_base(directory, served.base)
        model = served.model if served.base else directory
        return replace(served, policy=policy, directory=directory, model=model)
    model = model_directory(directory)
    config = read_config(model)
    return Opened(
        policy=policy,
        directory=directory,
        model=model,
        shapes=shapes,
        config=config,
        vocab_size=int((config.get("text_config") or config).get("vocab_size") or config.get("vocab_size") or 0),
        base=base_of(directory).checksum if is_adapter(directory) else "",
    )


def tell_record(config: Mapping[str, Any]) -> None:
    """Says what recording the experts of a model takes, by its Hugging Face config.

    Raises:
        ConfigError: it has none.
    """
    counts = experts_in(config)
    if counts is None:
        kind = config.get("model_type")
        raise ConfigError(f"record_experts = true, but a model of kind {kind} has no experts", setting="record_experts")
    _log.info("experts are recorded: %s", counts.words, extra=fields("record", experts=counts.words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    tokens: NDArray[np.int32]
    """[C] int32, C >= 1 unless aborted; with the stop token when it was sampled."""
    logprobs: NDArray[np.float32]
    """[C] float32; log-probability of each token at the temperature. That of a token with a `support` is over it, that
    of another over the whole vocabulary, whatever the nucleus was. That is what a trainer computes, so its ratio to it
    is 1 while the policy is the same."""
    finish_reason: str
    """``stop`` (a stop token), ``length`` (the limit), ``abort`` (told to stop: not to be trained on)."""
    version_spans: tuple[VersionSpan, ...]
    """Version that sampled each range of tokens: ascending, together [0, C)."""
    routed_experts: NDArray[Any] | None = None
    """[P + C, layers, K]; the experts that took each token in, those of the prompt first, as
    :mod:`rlbuffer.records.routed` has them. None where they are not recorded."""
    support: NDArray[np.int32] | None = None
    """[C, W] int32; the tokens that `top_k`, `top_p` and `min_p` left, as :mod:`rlbuffer.records.support` has them;
    None without `top_k`."""


def with_record(completion: Completion, prompt: int, rows: Any) -> Completion:
    """The completion behind so many tokens of a prompt, with the experts that an engine says took both in: [T, layers,
    K], without the last token.

    Raises:
        RequestFailed: it says nothing of them, or what is no record of these tokens.
    """
    length = prompt + len(completion.tokens)
    if rows is None:
        raise RequestFailed("record_experts = true, but the engine does not say which experts it took")
    try:
        column = routed_column(rows, length)
    except InvalidRollout as error:
        raise RequestFailed(f"the engine's record of {length} tokens is none: {error}") from error
    if len(rows) < length - 1:
        raise RequestFailed(f"the engine's record has {len(rows)} of {length} tokens")
    return replace(completion, routed_experts=column)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerTraits:
    """What the rest of the project must know of a kind of sampler: nothing else asks which one it is."""

    extra: str = ""
    """Extra of rlbuffer that brings what it needs, such as ``vllm``."""
    needs: tuple[str, ...] = ()
    """Modules that must be importable, such as ``torch``."""
    is_exact: bool = False
    """Its logprobs are of this project's own forward pass: ``self_check = "auto"`` has nothing to compare."""
    is_reproducible: bool = False
    """The same seed gives the same tokens, as ``deterministic`` wants it."""
    least_temperature: float = 0.0
    """Below it the engine samples at this one and says nothing."""
    nucleus_at_any_temperature: bool = True
    """False: with ``top_p`` below 1, and without ``top_k``, its logprobs are of the whole vocabulary at temperature 1
    alone."""
    records_support: bool = False
    """It takes ``top_k`` and ``min_p``, and gives the tokens that they leave."""
    records_experts: bool = False
    """It can say which experts took each token in (``record_experts``)."""
    takes_batches: bool = False
    """Prompts should come together, and the next ones after these are finished."""


class Sampler(Protocol):
    """Generates tokens. Used from one event loop; calls of `sample` overlap each other and `load`.

    One of your own is a class that ``sampler = "package.module:Class"`` names. It also has ``Options``, a record
    (pydantic) of its ``sampler_options``, and a class method ``make(settings, options, *, seed)``, for a sampler
    of a worker without weights yet. It draws from `seed` (32 bits) and from nothing else: each life of each worker has
    another one, unless the run is ``deterministic``. Its module is imported without its engine: `make` imports that.
    :func:`rlbuffer.testing.check_sampler` tries one.
    """

    @property
    def traits(self) -> SamplerTraits:
        """What settings may ask of it; of the class, so that it is known before one is made."""

    @property
    def version(self) -> int:
        """The policy version that serves now; -1 before the first load."""

    @property
    def vocab_size(self) -> int:
        """Token ids that the loaded model knows are below this; 0 before the first load."""

    @property
    def context(self) -> int:
        """Tokens that prompt and completion may have together; 0: no limit, or not known yet."""

    async def load(self, policy: PolicyVersion) -> None:
        """Serves `policy` from now on. Requests in flight go on, with the new version from their next token on.

        Raises:
            WeightsError: the weights are missing, not those announced, or do not fit the model. Everything is checked
                before the model is touched: the version that served before goes on serving.
            SamplerUnavailable: the sampler cannot be reached, or has broken.
        """

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        """Samples `n` completions of a prompt [P] int32, P >= 1. Cancelled, it gives up what is in flight.

        Raises:
            PromptTooLong: prompt and completion do not fit the model's context.
            SamplerUnavailable: the sampler cannot be reached, or has broken; the same call may be repeated later.
        """

    async def close(self) -> None:
        """Frees what the sampler holds. Safe to repeat."""
