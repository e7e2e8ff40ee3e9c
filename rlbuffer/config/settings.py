"""Settings of a whole run: what ``rlbuffer.toml`` may say, each with default, unit and reason.

The batcher's own settings are :class:`rlbuffer.config.batcher.BatcherConfig`. Values are found and traced by
:mod:`rlbuffer.config.loading`; nothing here reads a file or the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, field_validator

from rlbuffer.config import dotted
from rlbuffer.config.batcher import BatcherConfig, no_truth_as_number

LARGEST_SEED = 2**63 - 1
"""What torch takes, with room for the numbers of replicas."""
Names = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""What the user calls a worker, a scorer or an evaluation: part of the names of processes, files and metrics."""
OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty path is none: Python would take it for the current folder."""


def _given(value: Any) -> Any:
    if value == "":
        raise ValueError("must name a folder: write . for the current one")
    return value


GivenPath = Annotated[Path, BeforeValidator(_given)]
"""A path that is not empty."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        return no_truth_as_number(value, cls.model_fields[info.field_name or ""].annotation)


class ServerSettings(_Section):
    """``[server]``: the embedded server; ignored when `redis_url` is set."""

    maxmemory: str = Field("2gb", description="Memory the embedded server may use; it never evicts.")
    appendfsync: Literal["everysec", "always", "no"] = Field(
        "everysec",
        description="When the append-only file reaches the disk. What may be lost of acknowledged writes: `always` "
        "nothing, but every push waits for the disk; `no` the newest at a power cut; `everysec` those, and some at "
        "kill -9 while a sync is slow.",
    )


class ModelSettings(_Section):
    """``[model]``: the policy."""

    path: str = Field("", description="Directory with a Hugging Face model; empty: a fresh model from `config`.")
    config: Mapping[str, Any] = Field(
        default_factory=dict, description="Hugging Face config of a fresh model: model_type, hidden_size, ..."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="Dtype of products and published weights. With bfloat16 the trained weights stay in float32: an "
        "update below 1/256 of a weight would otherwise be lost.",
    )


class WeightsSettings(_Section):
    """``[weights]``: how policy versions reach workers on other hosts; nothing set: through a shared directory."""

    listen: str = Field(
        "", description="HOST:PORT where the trainer's host serves its versions over HTTP; empty: it does not."
    )
    url: str = Field("", description="Address under which workers reach that server; empty: paths are announced.")
    relays: tuple[str, ...] = Field(
        (), description="URLs of relays; workers ask them, in an order that spreads the load, before the trainer."
    )
    cache: OptionalPath = Field(
        None, description="Where downloaded versions are kept, on a local disk; empty: in the run's folder."
    )
    keep: int = Field(4, ge=2, description="Versions kept there, the most recently used ones.")


Correction = Literal["tis", "icepop", "sequence_tis", "sequence_mask", "geometric_mask", "negative_mask"]
"""Of `rlbuffer.trainer.losses.corrections`."""


Beta = Annotated[float, Field(ge=0, lt=1)]
"""One of AdamW's two."""


def _gpu(value: Any) -> int | str:
    """A GPU's number, or its UUID."""
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and _GPU.fullmatch(value):
        return value
    raise ValueError("must be the number of a GPU, from 0 on, or its UUID")


_GPU = re.compile(r"[A-Za-z0-9./:-]+")
Gpu = Annotated[int | str, PlainValidator(_gpu)]


class LoraSettings(_Section):
    """``[trainer.lora]``: train a low-rank adapter and leave the model's own weights as they are."""

    rank: int = Field(0, ge=0, description="Rank of the adapter's matrices; 0: no adapter, all weights are trained.")
    alpha: float = Field(16.0, gt=0, description="The adapter's product is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("all-linear",), min_length=1, description="Names of the modules that get one, as PEFT reads them."
    )


class TrainerSettings(_Section):
    """``[trainer]``: the data-parallel trainer."""

    world_size: int = Field(1, ge=1, description="Data-parallel ranks.")
    gpus: tuple[Gpu, ...] = Field(
        (), description="GPUs of the ranks, by number or UUID as nvidia-smi gives them; empty: all that are visible."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="Each rank holds the whole model (ddp), or a part of every tensor (fsdp)."
    )
    layout: Literal["packed", "padded"] = Field(
        "packed", description="padded: one rollout per row of the model's input, for models that cannot be packed."
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, about a third more time."
    )
    lora: LoraSettings = LoraSettings()
    steps: int = Field(1000, ge=1, description="Stop after this many steps.")
    seed: int = Field(
        0, ge=0, le=LARGEST_SEED, description="Of the fresh model's weights and everything random in training."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")
    learning_rate: float = Field(1e-3, gt=0, description="AdamW.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    schedule: Literal["constant", "linear", "cosine", "wsd_sqrt"] = Field(
        "constant", description="What the learning rate does after the warm-up. Counted in updates, as is all of it."
    )
    warmup_updates: int = Field(0, ge=0, description="Updates of linear warm-up.")
    stable: int = Field(0, ge=0, description="wsd_sqrt: the update from which the rate falls, from the run's start.")
    min_learning_rate: float = Field(0.0, ge=0, description="What the rate falls to at the last planned update.")
    gradient_clip: float = Field(1.0, gt=0, description="Global L2 norm that gradients are clipped to.")
    passes: int = Field(1, ge=1, description="Times that a step is trained.")
    updates_per_pass: int = Field(
        1, ge=1, description="Optimizer updates of one pass: consecutive slices of the ranks' micro-batches."
    )
    loss: str = Field(
        "clip",
        description="clip, dapo, dr_grpo, ratio, kl_cov, clip_cov, gspo, cispo, masked_ratio, dppo_tv, tis, icepop, "
        "decoupled, or a function of yours, `package.module:name`.",
    )
    loss_options: Mapping[str, Any] = Field(default_factory=dict, description="Passed to a loss of your own.")
    loss_columns: tuple[str, ...] = Field(
        (), description="Further columns that a loss of your own reads: a rollout without one is not trained."
    )
    normalizer: Literal["auto", "rollouts", "tokens", "longest"] = Field(
        "auto", description="What the loss is divided by, over all ranks; auto: the loss's own divisor."
    )
    old_logprobs: Literal["auto", "inference", "recomputed"] = Field(
        "auto",
        description="What ratios are against: the logprobs that came with the rollouts, or those of the policy at the "
        "start of the step (a pass without gradients where a step has several updates); auto: as the loss needs.",
    )
    correction: tuple[Correction, ...] = Field(
        (), description="Weights for the distance from sampler to trainer, multiplied with the loss."
    )
    correction_cap: float | None = Field(
        None, gt=0, description="Cap of tis and sequence_tis; empty: 2, in the loss `decoupled` 5."
    )
    mask_low: float = Field(0.5, ge=0, description="Ratio below which icepop and masked_ratio leave a token out.")
    mask_high: float = Field(5.0, gt=0, description="Ratio above which they do.")
    sequence_low: float = Field(0.5, ge=0, description="As mask_low, of a rollout, in the sequence corrections.")
    sequence_high: float = Field(2.0, gt=0, description="As mask_high, of a rollout.")
    mask_kl: float = Field(
        0.1, ge=0, description="negative_mask: drift of a rollout, in nats per token, above which it is left out."
    )
    clip_low: float | None = Field(
        None, gt=0, le=1, description="Ratio is clipped below at 1 - clip_low; empty: 0.2, in gspo 0.0003."
    )
    clip_high: float | None = Field(
        None, gt=0, description="Ratio is clipped above at 1 + clip_high; empty: 0.28, in gspo 0.0004."
    )
    clip_ceiling: float | None = Field(
        None, gt=1, description="Two-sided clip: largest ratio of tokens with a negative advantage; empty: none."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Dual clip: largest loss of such tokens, in units of -advantage; empty: none."
    )
    max_ratio: float | None = Field(None, gt=1, description="Cap of the ratio; empty: 8 in `ratio`, 5 in `cispo`.")
    max_length: int = Field(0, ge=0, description="Constant of the divisor `longest`, in tokens; 0: row_tokens.")
    cov_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of an update's tokens that kl_cov (empty: 0.002) and clip_cov (0.0002) select; at least 1.",
    )
    cov_coefficient: float = Field(1.0, ge=0, description="kl_cov: weight of |logprob - old| on those.")
    cov_low: float = Field(1.0, description="clip_cov: covariance that a selected token exceeds.")
    cov_high: float = Field(5.0, description="clip_cov: covariance that it stays below.")
    tv_low: float = Field(0.2, ge=0, le=1, description="dppo_tv: fall in probability beyond which a token is dropped.")
    tv_high: float = Field(0.2, ge=0, le=1, description="dppo_tv: rise beyond which it is.")
    tv_penalty: float = Field(1e-3, ge=0, description="dppo_tv: weight of the squared log ratio.")
    entropy_bonus: float = Field(0.0, ge=0, description="Weight of the mean entropy of trained tokens.")
    top_entropy: float = Field(
        1.0, gt=0, le=1, description="Share of an update's tokens, those of the highest entropy, that the loss is on."
    )
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the column ref_logprobs.")
    kl_estimator: Literal["k1", "k2", "k3", "weighted_k3"] = Field(
        "k3", description="Its estimate per token; weighted_k3 is unbiased on tokens of older policies, too."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature that the logits are divided by.")
    checkpoint_every: int = Field(50, ge=1, description="Steps between full checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Full checkpoints kept.")
    publish_every: int = Field(1, ge=1, description="Steps between published policy versions.")
    keep_versions: int = Field(4, ge=2, description="Published versions kept on disk.")
    timeout_seconds: float = Field(300.0, gt=0, description="How long to wait for a step before giving up (exit 5).")
    stall_seconds: float = Field(
        15.0,
        gt=0,
        description="How long ranks that have a step wait for one that still pulls it: longer, and it hangs (exit 5).",
    )
    max_damaged: float = Field(
        0.5, ge=0, le=1, description="Share of loss tokens damaged, in step after step, from which training ends."
    )
    pad_to_multiple_of: int = Field(1, ge=1, description="Rows are padded to a multiple of this many tokens.")
    check_parameters: bool = Field(
        False, description="Compare a hash of the parameters over all ranks after each step."
    )
    record_batches: bool = Field(False, description="Write the sha256 of every step's micro-batches to the metrics.")
    debug_samples: int = Field(
        0, ge=0, description="Rollouts of the first step that rank 0 prints token by token, with checks."
    )
    example_every: int = Field(
        10, ge=0, description="Steps between shown examples: the best and the worst rollout of a group; 0: none."
    )
    tensorboard: bool = Field(False, description="Write the metrics for TensorBoard, too: OUTPUT/tensorboard.")
    wandb_project: str = Field("", description="Weights & Biases project that gets the metrics, too; empty: none.")
    peak_flops: float = Field(
        0.0, ge=0, description="FLOP/s of one rank's device, for `mfu`; 0: known for common GPUs, else left out."
    )
    output: OptionalPath = Field(
        None, description="Where checkpoints, weights and metrics go; empty: the run's folder under `home`."
    )
    max_restarts: int = Field(10, ge=0, description="Times that the launcher restarts the ranks after a failure.")


def needed_columns(trainer: TrainerSettings) -> tuple[str, ...]:
    """Further columns without which this trainer cannot train a rollout."""
    reference = ("ref_logprobs",) if trainer.kl_beta else ()
    return tuple(dict.fromkeys((*reference, *trainer.loss_columns)))


class WorkerSettings(_Section):
    """``[worker.NAME]``: one kind of worker."""

    env: str = Field(
        description="Env to sample: vcopy, repeat, arithmetic, jsonl, reasoning_gym, verifiers, or "
        "`package.module:factory`."
    )
    env_options: Mapping[str, Any] = Field(default_factory=dict, description="Passed to the env's factory.")
    sampler: Literal["transformers", "vllm", "openai"] = Field(
        "transformers",
        description="What generates tokens: a Hugging Face model in process, vLLM in process, or OpenAI-compatible "
        "servers.",
    )
    sampler_options: Mapping[str, Any] = Field(default_factory=dict, description="The sampler's own options.")
    self_check: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Compare a few sampled logprobs with a forward pass of the published weights before anything is "
        "pushed; auto: with engines that are not our own.",
    )
    replicas: int = Field(1, ge=1, description="Processes of this kind that `rlbuffer run` starts.")
    python: str = Field(
        "",
        description="Python that `rlbuffer run` starts these processes with, e.g. that of vLLM's environment; it needs "
        "rlbuffer of the same version. Empty: its own.",
    )
    gpus: tuple[Gpu, ...] = Field(
        (),
        description="GPUs, by number or UUID as nvidia-smi gives them, dealt over the replicas in order; empty: all "
        "that are visible.",
    )
    environment: Mapping[str, str] = Field(
        default_factory=dict, description="Environment variables that `rlbuffer run` sets for these processes."
    )
    group_size: int = Field(16, ge=1, description="Rollouts per group.")
    groups_per_batch: int = Field(4, ge=1, description="Groups in flight at once; one batch of a batch sampler.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; logprobs are of the whole vocabulary all the same.")
    rollout_timeout_seconds: float = Field(
        600.0, gt=0, description="Longest that one rollout may take, sampling and scoring together."
    )
    rollout_retries: int = Field(1, ge=0, description="Times that a rollout that failed is tried again.")
    max_failures: int = Field(
        50,
        ge=0,
        description="Groups that cannot be made, with none made before, after which the worker ends and says why; "
        "0: it tries for ever.",
    )
    max_concurrent_rollouts: int = Field(
        0, ge=0, description="Rollouts that are played or scored at once; 0: what the env bears."
    )
    skip_visits: int = Field(
        0,
        ge=0,
        description="Skip a prompt after so many visits in a row in which all its rollouts solved it, or all failed; "
        "0: never.",
    )
    skip_failed: float = Field(0.0, description="All rewards of a group at or below this: it failed.")
    skip_solved: float = Field(1.0, description="All rewards of a group at or above this: it was solved.")
    skip_retry: float = Field(
        0.1, ge=0, le=1, description="Share of the tickets of skipped prompts that are sampled all the same."
    )
    max_new_tokens: int = Field(0, ge=0, description="Longest completion in tokens; 0: what the env asks for.")
    needs: tuple[str, ...] = Field(
        (),
        description="What scorers must add before the groups can train: ref_logprobs, or reward where the env gives "
        "none.",
    )
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Of sampling; replicas add their number.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="Where the sampler runs.")


INITIAL_MODEL = "initial"
"""A scorer's model that is the run's own, as training begins."""


class ScoreSettings(_Section):
    """``[score.NAME]``: processes that add what groups need before they can train."""

    model: str = Field(
        "",
        description="Adds its logprobs of the trained tokens as `column`: a directory with a Hugging Face model, or "
        "`initial`, the run's [model] as training begins; empty: none.",
    )
    column: str = Field("ref_logprobs", description="What the model's logprobs are called.")
    reward: str = Field(
        "",
        description="Adds rewards: `package.module:function`, plain or async, which is given a rollout and its group "
        "and answers a number, or {name: number}; empty: none.",
    )
    gives: tuple[str, ...] = Field(
        (), description="What `reward` adds, of what groups need: reward, rewards.NAME; empty: reward."
    )
    envs: tuple[str, ...] = Field((), description="Only groups of these envs; empty: all.")
    replicas: int = Field(1, ge=1, description="Processes of this kind that `rlbuffer run` starts.")
    gpus: tuple[Gpu, ...] = Field(
        (), description="GPUs, dealt over the replicas in order; empty: all that are visible."
    )
    groups_per_batch: int = Field(8, ge=1, description="Groups that are scored together, packed.")
    row_tokens: int = Field(0, ge=0, description="Tokens of one forward pass of the model; 0: batcher.row_tokens.")
    concurrent: int = Field(16, ge=1, description="Rollouts that the function is asked about at once.")
    timeout_seconds: float = Field(600.0, gt=0, description="Longest that the function may take for one rollout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Of the model; auto: CUDA where there is one.")

    @property
    def adds(self) -> tuple[str, ...]:
        """The columns and rewards that these processes add, as groups name them in `needs`."""
        columns = (self.column,) if self.model else ()
        return (*columns, *((self.gives or ("reward",)) if self.reward else ()))


class EvaluationSettings(_Section):
    """``[eval.NAME]``: how policy versions are measured on prompts that nothing trains on."""

    env: str = Field(description="Env to evaluate on: a built-in one, or `package.module:factory`.")
    env_options: Mapping[str, Any] = Field(
        default_factory=dict, description="Passed to the env's factory: another seed or file than the trained one's."
    )
    every: int = Field(10, ge=1, description="Policy versions between evaluations; version 0 is one.")
    prompts: int = Field(64, ge=1, description="Prompts, the same ones each time; one completion each.")
    temperature: float = Field(0.0, ge=0, description="0: the likeliest token.")
    max_new_tokens: int = Field(0, ge=0, description="Longest completion in tokens; 0: what the env asks for.")
    concurrent: int = Field(64, ge=1, description="Prompts in flight at once.")
    timeout_seconds: float = Field(600.0, gt=0, description="Longest that an evaluation may take.")


class RunSettings(_Section):
    """Everything that ``rlbuffer.toml`` may say."""

    run: str = Field("default", pattern=r"^[a-z0-9_-][a-z0-9_.-]{0,63}$", description="Name of the run on the server.")
    redis_url: str | None = Field(
        None, repr=False, description="redis://, rediss:// or unix://; empty: the embedded server."
    )
    redis_password_file: OptionalPath = Field(
        None, description="File with the password of redis_url, where that has none; RLBUFFER_REDIS_PASSWORD wins."
    )
    home: GivenPath = Field(
        Path("~/.rlbuffer"), description="Where the embedded server, weights, checkpoints and metrics are kept."
    )
    deterministic: bool = Field(
        False,
        description="The same settings train the same parameters, bit for bit: on policy, one worker, steps of as many "
        "groups as it samples at once.",
    )
    server: ServerSettings = ServerSettings()
    batcher: BatcherConfig = Field(default_factory=lambda: BatcherConfig(row_tokens=8192))
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightsSettings = WeightsSettings()
    worker: Mapping[Names, WorkerSettings] = Field(default_factory=dict)
    score: Mapping[Names, ScoreSettings] = Field(default_factory=dict)
    eval: Mapping[Names, EvaluationSettings] = Field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """The folder of this run's weights, checkpoints and metrics, unless `trainer.output` says otherwise."""
        return self.home.expanduser() / "runs" / self.run

    @property
    def output_dir(self) -> Path:
        """The folder that the trainer writes to. Another than the run's lets a second trainer replay its steps."""
        return self.trainer.output.expanduser() if self.trainer.output is not None else self.run_dir


_FOLDERS = "folders"
"""Beside the settings: where modules of the user's own are."""


def to_json(settings: RunSettings) -> str:
    """Settings as JSON, and where modules of the user's own are; :func:`from_json` is the inverse."""
    data = settings.model_dump(mode="json", exclude={"batcher"})
    return json.dumps({**data, "batcher": settings.batcher.as_dict(), _FOLDERS: dotted.FOLDERS})


def from_json(text: str) -> RunSettings:
    """The inverse of :func:`to_json`: modules of the user's own can be imported after it."""
    data = json.loads(text)
    dotted.make_importable(data.pop(_FOLDERS, ()))
    return RunSettings.model_validate(data)
