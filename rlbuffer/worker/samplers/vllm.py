"""Sampling with vLLM in this process: many requests in flight, weights changed under them.

A newer version is loaded between two of the engine's steps: requests are kept (paused, not aborted), the cache is
dropped, the weights are read and checked before the engine is touched, then requests go on and the engine labels every
token with the version that sampled it.

A version that is a LoRA adapter makes the engine start with its base model and LoRA; each later one takes the place of
the one before, so that requests in flight go on with it as they do with whole weights.

Imports vllm only where an engine is at work.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, model_validator

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.config.table import Table
from rlbuffer.errors import ConfigError, SamplerUnavailable, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.samplers.base import (
    ADAPTER_NAME,
    LEAST_TEMPERATURE,
    Completion,
    Opened,
    SamplerTraits,
    Sampling,
    finish_reason,
    fitted,
    logprobs_mode,
    of_an_engine,
    opened,
    seeds_of,
    support_told,
    tell_record,
    with_record,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

OWN = ("model", "logprobs_mode", "return_sampling_mask", "worker_extension_cls", "skip_tokenizer_init")
"""Engine arguments that the sampler sets itself."""
SPECULATION = (
    "logprobs of speculated tokens were missing or wrong in several releases of vLLM (its issues 17876 and 34497), "
    "some of its methods draw other tokens than the policy, and no version reaches a draft model"
)
BENDING = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), SPECULATION),
    **dict.fromkeys(
        ("logits_processors", "watermark_config", "generation_config", "override_generation_config"),
        "tokens would be drawn from another distribution than the one that their logprobs, and every ratio, are of",
    ),
    "seed": "every worker of the section would draw the same random numbers, again after each start of its engine; "
    "`seed`, at the top of the settings, is of sampling too",
}
"""Engine arguments that no worker has, and why: nothing after them could tell."""
SAMPLING_REPLAY = "sampling distribution replay"
"""Begins what vLLM 0.32 says where it cannot tell the tokens that it leaves, as on a CPU."""
EXTENSION = "rlbuffer.worker.samplers.vllm_extension.WeightsExtension"
"""Name of the extension: the engine's own processes import it."""
LOAD_SECONDS = 600.0
"""Longest that loading a version may take."""
CONTROL_SECONDS = 60.0
"""Longest that pausing, labelling and resuming may take beside it."""
ENGINE_LOOK_SECONDS = 0.5
"""Seconds between looks at the engine while an answer is waited for."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `max_lora_rank` may have (vLLM 0.32)."""


class VllmOptions(Table):
    """``sampler_options`` of a worker with an engine: engine arguments of vLLM by name (``max_model_len``, ``dtype``,
    ``gpu_memory_utilization``, ...)."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _leaves_our_own(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if taken := sorted(set(given) & set(OWN)):
            raise ConfigError(f"sampler_options.{taken[0]} is set by the sampler itself", setting="sampler_options")
        for name in BENDING.keys() & given.keys():
            raise ConfigError(f"sampler_options.{name}: {BENDING[name]}", setting="sampler_options")
        return given


class VllmSampler:
    """See the module's docstring.

    Args:
        seed: of sampling. Each start of an engine gets one that is drawn from it: with the same one a restarted engine
            would draw again what it has drawn before.
        top_p, top_k: of what is trained; they decide which logprobs the engine gives, and whether it tells the tokens
            that it leaves.
        records_experts: completions say which experts took each token in. vLLM does so on GPUs alone.
        options: engine arguments of vLLM by name.
    """

    traits = SamplerTraits(
        extra="vllm",
        needs=("vllm",),
        least_temperature=LEAST_TEMPERATURE,
        nucleus_at_any_temperature=False,
        records_experts=True,
        records_support=True,
    )
    Options = VllmOptions

    @classmethod
    def make(cls, settings: WorkerSettings, options: VllmOptions, *, seed: int) -> Self:
        return cls(
            seed=seed,
            top_p=settings.top_p,
            top_k=settings.top_k,
            options=options.model_extra or {},
            records_experts=settings.record_experts,
        )

    def __init__(
        self,
        *,
        seed: int,
        top_p: float,
        top_k: int = 0,
        options: Mapping[str, Any],
        records_experts: bool = False,
    ) -> None:
        self._options = {"enable_log_requests": False, "disable_log_stats": True, **options}
        self._records_experts = records_experts
        if records_experts:
            self._options["enable_return_routed_experts"] = True
        if top_k:
            self._options["return_sampling_mask"] = True
        self._seeds = seeds_of(seed)
        self._logprobs_mode = logprobs_mode(top_p, top_k)
        self._engine: AsyncLLM | None = None
        self._opened: Opened | None = None
        """The version that is served."""
        self._adapter: LoRARequest | None = None
        """What requests name when adapters are served."""
        self._loading = asyncio.Lock()
        self._starts, self._trouble = 0, ""
        """Starts of an engine that were tried, and why the last one failed."""

    @property
    def version(self) -> int:
        return -1 if self._opened is None else self._opened.policy.version

    @property
    def vocab_size(self) -> int:
        return 0 if self._opened is None else self._opened.vocab_size

    @property
    def context(self) -> int:
        return 0 if self._engine is None else int(self._engine.model_config.max_model_len)

    async def load(self, policy: PolicyVersion) -> None:
        async with self._loading:
            if self._engine is None:
                await self._start(await asyncio.to_thread(opened, policy))
            else:
                await self._replace(self._engine, await asyncio.to_thread(opened, policy, self._opened))

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = await self._alive()
        sampling = fitted(sampling, len(prompt), engine.model_config.max_model_len)
        asked = of_an_engine(sampling)
        parameters = SamplingParams(
            n=n,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop tokens are those that were asked for, not the model's own
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        try:
            async for output in engine.generate(
                {"prompt_token_ids": prompt.tolist()},
                parameters,
                request_id=uuid.uuid4().hex,
                lora_request=self._adapter,
            ):
                final = output
        except EngineDeadError as error:
            await self._drop(engine)
            raise SamplerUnavailable(f"the vLLM engine has died ({error}); it is started again") from error
        if final is None:
            raise SamplerUnavailable("the vLLM engine ended a request without an answer")
        made = [_completion(choice, sampling) for choice in sorted(final.outputs, key=lambda choice: choice.index)]
        if not self._records_experts:
            return made
        records = (choice.routed_experts for choice in sorted(final.outputs, key=lambda choice: choice.index))
        return [with_record(one, len(prompt), rows) for one, rows in zip(made, records, strict=True)]

    async def close(self) -> None:
        if self._engine is not None:
            await self._drop(self._engine)

    # -- engine --------------------------------------------------------------------------------------------------------
    async def _alive(self) -> AsyncLLM:
        """The engine; started again with the version that served, if it has died.

        A start that fails is the answer to all who waited for it: each would try another one, one after the other, and
        nobody would hear of it meanwhile.
        """
        if self._engine is not None and not self._loading.locked():
            return self._engine
        starts = self._starts
        async with self._loading:
            if self._engine is None and self._starts != starts:
                raise SamplerUnavailable(self._trouble)
            if self._engine is None:
                if self._opened is None:
                    raise ConfigError("the sampler has no weights yet: load a policy version first")
                await self._start(await asyncio.to_thread(opened, self._opened.policy))
            engine = self._engine
        if engine is None:
            raise SamplerUnavailable("the vLLM engine is not there")
        return engine

    async def _start(self, version: Opened) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlbuffer.weights.adapters import rank_and_scale

        adapter, options = None, self._options
        if self._records_experts:
            tell_record(version.config)
        if version.base:
            adapter = LoRARequest(ADAPTER_NAME, 1, str(version.directory))
            rank, _ = rank_and_scale(version.directory)
            room = next((most for most in RANKS if most >= rank), rank)
            options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **options}
        try:
            arguments = AsyncEngineArgs(
                model=str(version.model),
                skip_tokenizer_init=True,
                logprobs_mode=self._logprobs_mode,
                worker_extension_cls=EXTENSION,
                seed=next(self._seeds),
                **options,
            )
        except TypeError as error:
            raise ConfigError(f"sampler_options: vLLM refuses them: {error}", setting="sampler_options") from error
        self._starts += 1
        self._trouble = "the vLLM engine was started, and is not there any more"
        engine: Any = None
        try:
            engine = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
            if adapter is not None:
                await engine.add_lora(adapter)
            await engine.update_weight_version(str(version.policy.version))
        except (RuntimeError, ValueError, OSError) as error:
            if engine is not None:
                await self._drop(engine)
            if SAMPLING_REPLAY in str(error):
                cannot = f"vLLM cannot tell here which tokens top_k leaves: {error}"
                raise ConfigError(cannot, setting="top_k") from error
            why = self._trouble = f"the vLLM engine does not start: {type(error).__name__}: {error}"
            if self._records_experts and isinstance(error, ValueError):  # its settings cannot work, here or at all
                raise ConfigError(f"record_experts = true: {why}", setting="record_experts") from error
            raise SamplerUnavailable(why) from error
        self._engine, self._adapter, self._opened = engine, adapter, version

    async def _replace(self, engine: AsyncLLM, version: Opened) -> None:
        """Changes the weights under the requests that are in flight."""
        try:
            refusal = await answer_of(engine, self._change(engine, version))
        except asyncio.CancelledError:  # half a load, and requests are held back: nothing of it serves any more
            await self._drop(engine)
            raise
        except Exception as error:  # half a load: nobody knows what the engine would sample with
            await self._drop(engine)
            self._opened = version
            raise SamplerUnavailable(
                f"vLLM failed while it loaded version {version.policy.version} ({type(error).__name__}: {error}); "
                "it is started again with it"
            ) from error
        if refusal:
            raise WeightsError(refusal)
        self._opened = version

    async def _change(self, engine: AsyncLLM, version: Opened) -> str:
        """Returns the reason why the engine refuses the weights; it goes on with what it had."""
        method = "rlbuffer_load" if self._adapter is None else "rlbuffer_load_adapter"
        await engine.pause_generation(mode="keep", clear_cache=True)
        loads = await engine.collective_rpc(method, timeout=LOAD_SECONDS, args=(str(version.directory), version.shapes))
        refusals = [text for text in loads if text]
        if not refusals:
            await engine.update_weight_version(str(version.policy.version))
            await engine.reset_prefix_cache()
        await engine.resume_generation()
        return refusals[0] if refusals else ""

    async def _drop(self, engine: AsyncLLM) -> None:
        if self._engine is engine:
            self._engine = None
        await asyncio.to_thread(engine.shutdown)


async def answer_of(engine: AsyncLLM, calls: Coroutine[Any, Any, str]) -> str:
    """Waits for the answer of control calls. An engine whose process is killed answers none of them, ever.

    Raises:
        EngineDeadError: it died meanwhile.
        TimeoutError: no answer within :data:`CONTROL_SECONDS` beyond what a load may take.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(calls)
    looks = round((LOAD_SECONDS + CONTROL_SECONDS) / ENGINE_LOOK_SECONDS)
    try:
        for _ in range(looks):
            if (await asyncio.wait({task}, timeout=ENGINE_LOOK_SECONDS))[0]:
                return task.result()
            if engine.errored:
                raise EngineDeadError
        raise TimeoutError(f"no answer for {LOAD_SECONDS + CONTROL_SECONDS:g} s")
    finally:
        task.cancel()


def _completion(choice: Any, sampling: Sampling) -> Completion:
    tokens = np.asarray(choice.token_ids, np.int32)
    if sampling.temperature == 0:
        logprobs = np.zeros(len(tokens), np.float32)
    else:
        steps = zip(choice.logprobs or (), tokens.tolist(), strict=True)
        logprobs = np.array([step[token].logprob for step, token in steps], np.float32)
    mask = getattr(choice, "sampling_mask", None)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=finish_reason(choice.finish_reason, tokens, sampling),
        version_spans=tuple(VersionSpan(int(s.version), s.start, s.end) for s in choice.weight_versions or ()),
        support=support_told(None if mask is None else mask.token_ids, len(tokens), sampling),
    )
