"""A trained step: a line of ``metrics.jsonl``, of which TensorBoard, W&B, Prometheus and every view are made.

A new number is a field here, and the line of `rlbuffer/trainer/reports/tally.py` that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

from rlbuffer.state.metric import Metric, metric, metrics

ByEnv = Mapping[str, float | None]
DRIFT_AGES = ("0", "1", "2", "3", "4", "rest")
"""Ages that have a row of their own in `StepRecord.drift`; older tokens share one."""
DRIFT_NUMBERS = (
    *("tokens", "ratio", "ratio_error", "far", "mean", "rms", "kl", "slope", "slope_error", "fit"),
    *("surprise", "surprise_error", "entropy", "clipped", "corrected"),
)
"""The numbers of a row without which nothing is judged."""
_KINDS: Mapping[type, Any] = {
    int: int,
    float: int | float,
    NoneType: int | float,
    str: str,
    dict: Mapping,
    tuple: list | tuple,
}
"""Type of a field's default -> what a line may hold for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that was trained. A field at its default was not measured.

    Units: nats, seconds, bytes, policy versions (ages), fractions from 0 to 1.
    """

    event: str = "step"
    step: int = metric("train_step", "gauge", "Last trained step.")
    epoch: int = 0
    """The run's, when the step was committed."""
    digest: str = ""
    """SHA-256 of the step, chained on the one before."""
    time: float = 0.0
    """Since 1970."""
    # -- what was learned
    reward: float | None = None
    """Mean over the rollouts that have one."""
    rewards: ByEnv = metric("train_reward_mean", "gauge", "Mean over the step's rollouts.", dict, labels="env")
    reward_parts: Mapping[str, ByEnv] = metric(
        "train_reward_part_mean", "gauge", "Mean of each named reward.", dict, labels="env name"
    )
    reward_std: ByEnv = metric("train_reward_std", "gauge", "Of the same, with n - 1.", dict, labels="env")
    loss: float | None = metric("train_loss", "gauge", "Mean over the step's updates.", None)
    entropy: float | None = metric("train_entropy", "gauge", "Mean over the trained tokens, in nats.", None)
    kl: float | None = metric("train_kl", "gauge", "Estimate (k3) of the distance to the inference policy.", None)
    ratio: Mapping[str, float] = field(default_factory=dict)
    """Policy over inference policy, per trained token: mean, min, max; 99 % are within a factor of p99."""
    drift: Mapping[str, Mapping[str, float]] = metrics(
        dict,
        *(
            Metric(f"train_drift_{name}", "gauge", f"By the tokens' age: {meaning}", ("age",), item=item)
            for name, item, meaning in (
                ("tokens", "tokens", "trained tokens."),
                ("probability_ratio_mean", "ratio", "policy over inference policy."),
                ("far_ratio", "far", "share whose ratio is off by more than 10 %."),
                ("ess_ratio", "ess", "effective sample size over tokens; 1: as good as the policy's own."),
                ("rms_nats", "rms", "root mean square of the difference of logprobs."),
                ("kl", "kl", "estimate (k3) of the distance to the inference policy."),
                ("slope", "slope", "of the difference over the sampler's logprob: temperature - 1."),
                ("surprise_nats", "surprise", "mean of -logprob less the entropy: 0 where drawn as it says."),
                ("clipped_ratio", "clipped", "share from which the loss takes the gradient."),
                ("corrected_ratio", "corrected", "share from which a correction takes it."),
            )
        ),
    )
    """Age of the tokens (:data:`DRIFT_AGES`) -> how far the policy that the step began with is from the one that
    sampled them. With d the difference of logprobs: `tokens`; `ratio`, mean of e^d; `ess`, the effective sample size of
    the weights e^d over the tokens; `far`, the share of those beyond a factor of 1.1; `mean` and `rms` of d; `kl`;
    `slope` of d over the sampler's logprob, and `fit`, the share of d that this explains; `surprise`, -logprob less the
    entropy; `entropy`; standard errors `NAME_error`; the shares `clipped` and `corrected`, of all updates. The rest is
    of the first update."""
    bfloat16_rms: float | None = metric(
        "train_bfloat16_rms_nats",
        "gauge",
        "What computing in bfloat16 changes in this model's logprobs: a sampler that does is so far off.",
        None,
    )
    """Root mean square; measured when the trainer started."""
    clip_fraction: float | None = metric(
        "train_clip_ratio", "gauge", "Trained tokens from which the loss takes the gradient: clip, cap, mask.", None
    )
    masked_fraction: float | None = metric(
        "train_masked_ratio", "gauge", "Tokens brought to train that end without a gradient; 1: nothing trains.", None
    )
    masked_by: Mapping[str, float] = metric(
        "train_masked_by_ratio",
        "gauge",
        "Share of the tokens that come to a stage which it leaves without a gradient, whatever the others do.",
        dict,
        labels="stage",
    )
    """Stages: `truncated` (masked as such) and `damaged` (missing, broken, or without a column that the loss needs), of
    the tokens that come from the batcher; of those that are trained `advantage` (it is 0), `clip` (the loss itself, as
    `clip_fraction`), `top_entropy`, `weights` (a column that is 0), and each correction by its name."""
    correction_weight: Mapping[str, float] = metric(
        "train_correction_weight_mean", "gauge", "Mean over the trained tokens.", dict, labels="correction"
    )
    experts_unrecorded: float | None = metric(
        "train_experts_unrecorded_ratio",
        "gauge",
        "Tokens that took the router's own choice of experts, for want of a record, in a step that has records.",
        None,
    )
    support: Mapping[str, float] = metric(
        "train_support_ratio",
        "gauge",
        "Tokens of restricted sampling: exact, unrecorded, too_wide; of all of them.",
        dict,
        labels="record",
    )
    """Of the tokens of rollouts with a column ``support``: `exact` are trained over the tokens that sampling left,
    `unrecorded` over the whole vocabulary, `too_wide` not at all."""
    grad_norm: float | None = metric("train_gradient_norm", "gauge", "Of the last update, before clipping.", None)
    learning_rate: float | None = metric("train_learning_rate", "gauge", "Of the last update.", None)
    # -- what was trained on
    tokens: int = 0
    """Without padding, all ranks; so are the next two."""
    tokens_by_env: Mapping[str, int] = metric("train_tokens", "gauge", "Without padding.", dict, labels="env")
    loss_tokens: int = 0
    """Those that were trained."""
    damaged_tokens: int = metric("train_damaged_tokens", "gauge", "Missing or damaged, and trained as masked padding.")
    rollouts: int = 0
    rollouts_by_env: Mapping[str, int] = field(default_factory=dict)
    groups: int = 0
    age: float | None = None
    """Mean over the rollouts."""
    max_age: int = 0
    ages: ByEnv = metric("train_age_mean", "gauge", "Mean age of the step's rollouts, in versions.", dict, labels="env")
    on_policy: float | None = None
    """Rollouts of age 0."""
    on_policy_by_env: ByEnv = metric("train_on_policy_ratio", "gauge", "Rollouts of age 0.", dict, labels="env")
    truncated: float | None = None
    """Rollouts that ended at a length limit."""
    truncated_by_env: ByEnv = metric(
        "train_truncated_ratio", "gauge", "Rollouts that ended at a length limit.", dict, labels="env"
    )
    response_tokens: ByEnv = metric(
        "train_response_tokens_mean", "gauge", "Mean tokens behind the prompt.", dict, labels="env"
    )
    fill: float | None = metric("train_batch_fill_ratio", "gauge", "Tokens over the step's capacity.", None)
    padding: float | None = metric("train_padding_ratio", "gauge", "Share of what went through the model.", None)
    closed_by: str = ""
    """Rule that ended the step's selection."""
    buffer: Mapping[str, Any] = field(default_factory=dict)
    """The leader's figures of the pool, after the step that it calls `step`."""
    examples: Sequence[Mapping[str, Any]] = ()
    """Every few steps: the best and the worst rollout of one group."""
    # -- how fast
    tokens_per_second: float | None = metric("train_tokens_per_second", "gauge", "Without padding, all ranks.", None)
    mfu: float | None = metric("train_mfu_ratio", "gauge", "Share of the GPUs' arithmetic, of GPUs known.", None)
    memory_bytes: int = metric("train_memory_bytes", "gauge", "Most that any rank has used: of a GPU, or resident.")
    wait: float | None = metric("train_wait_ratio", "gauge", "Share of rank 0's time that it waited for data.", None)
    slow_side: str = ""
    """A sentence when the trainer waits too long for data."""
    seconds: Mapping[str, float] = metric(
        "train_step_seconds", "gauge", "Where rank 0's time went; total: all of it.", dict, labels="part"
    )
    ranks: Sequence[Mapping[str, float]] = metrics(
        (),
        Metric("train_rank_tokens", "gauge", "Of the last step.", ("rank",), item="tokens"),
        Metric("train_rank_wait_seconds", "gauge", "Waited for data and other ranks.", ("rank",), item="wait"),
    )
    """Of each rank: tokens; seconds of wait, forward, backward, and exchange: the last backward pass, with waiting."""
    published: int = metric("train_published_version", "gauge", "Newest version that was announced by then.", -1)
    publish_seconds: Mapping[str, float] = metric(
        "train_publish_seconds",
        "gauge",
        "What its stages took: gather, in which training stands still; write, hash, delta, flush, announce beside it.",
        dict,
        labels="stage",
    )
    # -- which step it was
    world_size: int = 0
    resumed_from: int = 0
    """Step of the checkpoint that this process began with."""
    checkpointed: int = metric("train_checkpoint_step", "gauge", "Newest checkpoint when the step was trained.")
    parameters_sha256: Sequence[str] = ()
    """Of every rank, with `trainer.reports.check_ranks`; so is the next one, of the step's micro-batches."""
    batch_sha256: Sequence[str] = ()

    @property
    def ess(self) -> float | None:
        """Effective sample size over the number of tokens, of all ages together: (sum w)^2 / (n sum w^2). The rows of
        `drift` have the mean of w (`ratio`), and its square over that of w^2 (`ess`). None: not measured."""
        rows = [(row.get("tokens", 0), row.get("ratio", 1.0), row.get("ess")) for row in self.drift.values()]
        measured = [(count, ratio, ess) for count, ratio, ess in rows if count and ratio and ess]
        if not measured:
            return None
        weights = sum(count * ratio for count, ratio, _ in measured)
        squares = sum(count * ratio**2 / ess for count, ratio, ess in measured)
        return weights**2 / (sum(count for count, _, _ in measured) * squares)

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> StepRecord:
        """The record that somebody wrote: what is missing, or of another kind than it should be, was not measured."""
        empty = cls()
        values = {
            part.name: _numbers(line[part.name])
            for part in fields(cls)
            if isinstance(line.get(part.name), _KINDS[type(getattr(empty, part.name))])
        }
        if "ranks" in values:
            values["ranks"] = [_numbers(rank) if isinstance(rank, Mapping) else {} for rank in values["ranks"]]
        return cls(**values)

    def as_object(self) -> dict[str, Any]:
        """What was measured, by field, in their order: the line of ``metrics.jsonl``."""
        values = ((part.name, getattr(self, part.name)) for part in fields(self))
        return {name: value for name, value in values if value or value == 0}


def _numbers(value: Any) -> Any:
    """The numbers of a mapping, at any depth; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return {k: _numbers(v) for k, v in value.items() if v is None or isinstance(v, int | float | Mapping)}


def scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by path: ``rewards/math``, ``ratio/p99``. Lists, texts and histograms are left out."""
    out: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and "buckets" not in value:
            out |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[f"{prefix}{name}"] = float(value)
    return out
