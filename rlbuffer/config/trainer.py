"""Settings of the trainer: ``[trainer]`` and the tables in it, each setting with default, unit and reason."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from rlbuffer.config.losses import LossChoice
from rlbuffer.config.table import Gpu, OptionalPath, Table

Beta = Annotated[float, Field(ge=0, lt=1)]
"""One of AdamW's two."""


class LoraSettings(Table):
    """``[trainer.lora]``: train a low-rank adapter and leave the model's own weights as they are."""

    rank: int = Field(0, ge=0, description="Rank of the adapter's matrices; 0: no adapter, all weights are trained.")
    alpha: float = Field(16.0, gt=0, description="The adapter's product is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("all-linear",),
        min_length=1,
        description="Names of the modules that get one, as PEFT reads them; all-linear leaves out blocks with experts.",
    )
    path: str = Field(
        "",
        description="Directory of a LoRA adapter in PEFT's layout, such as an SFT run's, that training begins with; "
        "rank, alpha and targets are then those of its adapter_config.json. Empty: a fresh one.",
    )

    @property
    def is_used(self) -> bool:
        """An adapter is trained, and not the model's own weights."""
        return bool(self.rank or self.path)


class OptimizerSettings(Table):
    """``[trainer.optimizer]``: AdamW, its learning rate, and how many updates a step makes."""

    learning_rate: float = Field(1e-3, gt=0, description="AdamW.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    gradient_clip: float = Field(1.0, gt=0, description="Global L2 norm that gradients are clipped to.")
    schedule: Literal["constant", "linear", "cosine", "wsd_sqrt"] = Field(
        "constant",
        description="What the learning rate does after the warm-up. Counted in "
        "planned updates, as is all of it: each step takes an equal share.",
    )
    warmup_updates: int = Field(0, ge=0, description="Updates of linear warm-up.")
    decay_from_update: int = Field(
        0,
        ge=0,
        validate_default=True,
        description="wsd_sqrt: the update from which the rate falls, from the run's start.",
    )
    min_learning_rate: float = Field(0.0, ge=0, description="What the rate falls to at the last planned update.")
    passes: int = Field(1, ge=1, description="Times that a step is trained.")
    updates_per_pass: int = Field(
        1, ge=1, description="Optimizer updates of one pass: consecutive slices of the ranks' micro-batches."
    )

    @field_validator("min_learning_rate")
    @classmethod
    def _below_the_rate(cls, least: float, info: ValidationInfo) -> float:
        if least > info.data.get("learning_rate", least):
            raise ValueError(f"is above learning_rate = {info.data['learning_rate']:g}")
        return least

    @field_validator("decay_from_update")
    @classmethod
    def _after_the_warm_up(cls, stable: int, info: ValidationInfo) -> int:
        if info.data.get("schedule") == "wsd_sqrt" and stable < info.data.get("warmup_updates", 0):
            raise ValueError(f"is in the warm-up of {info.data['warmup_updates']}: the rate falls from that update on")
        return stable


class CheckpointSettings(Table):
    """``[trainer.checkpoint]``: what a trainer resumes from."""

    every: int = Field(50, ge=1, description="Steps between full checkpoints.")
    keep: int = Field(2, ge=1, description="Full checkpoints kept.")


class PublishSettings(Table):
    """``[trainer.publish]``: policy versions for the workers."""

    every: int = Field(1, ge=1, description="Steps between published policy versions.")


class ReportSettings(Table):
    """``[trainer.reports]``: what the trainer shows, checks and writes down beside its metrics."""

    example_every: int = Field(
        10, ge=0, description="Steps between shown examples: the best and the worst rollout of a group; 0: none."
    )
    tensorboard: bool = Field(False, description="Write the metrics for TensorBoard, too: OUTPUT/tensorboard.")
    wandb_project: str = Field("", description="Weights & Biases project that gets the metrics, too; empty: none.")
    check_ranks: bool = Field(
        False,
        description="Compare a hash of the parameters over all ranks after each step; write it, and that of the step's "
        "micro-batches, to the metrics.",
    )


class TrainerSettings(Table):
    """``[trainer]``: the data-parallel trainer."""

    world_size: int = Field(1, ge=1, description="Data-parallel ranks.")
    steps: int = Field(1000, ge=1, description="Stop after this many steps.")
    output: OptionalPath = Field(
        None, description="Where checkpoints, weights and metrics go; empty: the run's folder under `home`."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="Each rank holds the whole model (ddp), or a part of every tensor (fsdp)."
    )
    gpus: tuple[Gpu, ...] = Field(
        (), description="GPUs of the ranks, by number or UUID as nvidia-smi gives them; empty: all that are visible."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is one.")
    layout: Literal["packed", "padded"] = Field(
        "packed", description="padded: one rollout per row of the model's input, for models that cannot be packed."
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations again in the backward pass: less memory, about a third more time."
    )
    replay_experts: bool = Field(
        True,
        description="Compute with the experts that rollouts record (column routed_experts), where they do; false: the "
        "router chooses again.",
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature that the logits are divided by.")
    timeout_seconds: float = Field(300.0, gt=0, description="How long to wait for a step before giving up (exit 5).")
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossChoice = LossChoice()
    checkpoint: CheckpointSettings = CheckpointSettings()
    publish: PublishSettings = PublishSettings()
    lora: LoraSettings = LoraSettings()
    reports: ReportSettings = ReportSettings()
