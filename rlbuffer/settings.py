"""Settings of a whole run: what ``rlbuffer.toml`` may say, each with default, unit and reason.

The batcher's own settings are :class:`rlbuffer.config.BatcherConfig`. Values are found and traced by
:mod:`rlbuffer.loading`; nothing here reads a file or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlbuffer.config import BatcherConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="Dtype of the trained weights.")


class TrainerSettings(_Section):
    """``[trainer]``: the data-parallel trainer."""

    world_size: int = Field(1, ge=1, description="Data-parallel ranks.")
    steps: int = Field(1000, ge=1, description="Stop after this many steps.")
    seed: int = Field(0, ge=0, description="Of the fresh model's weights and everything random in training.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")
    learning_rate: float = Field(1e-3, gt=0, description="AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up; constant afterwards.")
    gradient_clip: float = Field(1.0, gt=0, description="Global L2 norm that gradients are clipped to.")
    loss: str = Field("clip", description="clip | dapo | dr_grpo | ratio, or a name registered by the user.")
    clip_low: float = Field(0.2, gt=0, description="Ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Ratio is clipped above at 1 + clip_high.")
    max_ratio: float = Field(8.0, gt=1, description="Cap of the ratio in the `ratio` loss.")
    max_length: int = Field(0, ge=0, description="Constant of the dr_grpo normaliser, in tokens; 0: row_tokens.")
    entropy_bonus: float = Field(0.0, ge=0, description="Weight of the mean entropy of trained tokens.")
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the column ref_logprobs.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature that the logits are divided by.")
    checkpoint_every: int = Field(50, ge=1, description="Steps between full checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Full checkpoints kept.")
    publish_every: int = Field(1, ge=1, description="Steps between published policy versions.")
    keep_versions: int = Field(4, ge=2, description="Published versions kept on disk.")
    timeout_seconds: float = Field(300.0, gt=0, description="How long to wait for a step before giving up (exit 5).")
    max_damaged: float = Field(0.02, ge=0, le=1, description="Share of a step's loss tokens that may be damaged.")
    pad_to_multiple_of: int = Field(1, ge=1, description="Rows are padded to a multiple of this many tokens.")
    check_parameters: bool = Field(
        False, description="Compare a hash of the parameters over all ranks after each step."
    )
    record_batches: bool = Field(False, description="Write the sha256 of every step's micro-batches to the metrics.")
    output: Path | None = Field(
        None, description="Where checkpoints, weights and metrics go; empty: the run's folder under `home`."
    )
    max_restarts: int = Field(10, ge=0, description="Times that the launcher restarts the ranks after a failure.")


class WorkerSettings(_Section):
    """``[worker.NAME]``: one kind of worker."""

    env: str = Field(description="Env to sample: vcopy, repeat, or `package.module:factory`.")
    env_options: Mapping[str, Any] = Field(default_factory=dict, description="Passed to the env's factory.")
    sampler: Literal["transformers"] = Field("transformers", description="What generates tokens.")
    replicas: int = Field(1, ge=1, description="Processes of this kind that `rlbuffer run` starts.")
    group_size: int = Field(16, ge=1, description="Rollouts per group.")
    groups_per_batch: int = Field(4, ge=1, description="Groups generated together in one batch.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    max_new_tokens: int = Field(0, ge=0, description="Longest completion in tokens; 0: what the env asks for.")
    seed: int = Field(0, ge=0, description="Of sampling; replicas add their number.")
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="Where the sampler runs.")


class RunSettings(_Section):
    """Everything that ``rlbuffer.toml`` may say."""

    run: str = Field("default", pattern=r"^[a-z0-9_.-]{1,64}$", description="Name of the run on the server.")
    redis_url: str | None = Field(None, description="redis://, rediss:// or unix://; empty: the embedded server.")
    home: Path = Field(
        Path("~/.rlbuffer"), description="Where the embedded server, weights, checkpoints and metrics are kept."
    )
    server: ServerSettings = ServerSettings()
    batcher: BatcherConfig = Field(default_factory=lambda: BatcherConfig(row_tokens=8192))
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    worker: Mapping[str, WorkerSettings] = Field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Where this run's weights, checkpoints and metrics live, unless `trainer.output` says otherwise."""
        return self.home.expanduser() / "runs" / self.run

    @property
    def output_dir(self) -> Path:
        """Where the trainer writes. Another one than the run's lets a second trainer replay the recorded steps."""
        return self.trainer.output.expanduser() if self.trainer.output is not None else self.run_dir
