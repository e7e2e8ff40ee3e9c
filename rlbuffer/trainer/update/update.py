"""One micro-batch through the policy, and one optimizer update made of micro-batches.

Alignment: everything in a micro-batch belongs to the token itself, and the logits that predict a token stand one
place before it. Only trained tokens pass the head, so prompts and padding cost no logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlbuffer.config.losses import CORRECTION_FACTS, STAGES
from rlbuffer.config.trainer import OptimizerSettings, TrainerSettings
from rlbuffer.errors import RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Step
from rlbuffer.records.routed import ROUTED_EXPERTS
from rlbuffer.records.support import SUPPORT, TOO_WIDE
from rlbuffer.trainer.losses import TrainedTokens, loss_of, masks_of, per_token_of, uses_old, weights_of
from rlbuffer.trainer.model.logprobs import has_record
from rlbuffer.trainer.model.packed_policy import PackedPolicy
from rlbuffer.trainer.ranks.parallel import clip_gradients, exchanging
from rlbuffer.trainer.update.blame import naming, way_out
from rlbuffer.trainer.update.drift import Drift
from rlbuffer.trainer.update.ratios import Ratios
from rlbuffer.trainer.update.slices import Slice, slices_of
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.token_choice import choose, chooses, draws
from rlbuffer.weights.experts import Experts, is_recorded

_MASKED = {stage: f"masked/{stage}" for stage in STAGES}
_WEIGHTS = {name: f"weight/{name}" for name in CORRECTION_FACTS}
_ROUTED = ("routed/tokens", "routed/unrecorded")
_SUPPORT = ("support/exact", "support/unrecorded", "support/too_wide")
SUMS = (
    *("loss", "entropy", "kl", "loss_tokens", "tokens", "masked"),
    *_ROUTED,
    *_SUPPORT,
    *_MASKED.values(),
    *_WEIGHTS.values(),
)
"""Quantities that every update sums over its micro-batches, and the ranks over each other. ``tokens`` is without
padding; ``masked`` are trained tokens that any stage leaves without a gradient, ``masked/STAGE`` those of each, and
``weight/NAME`` is what a correction weighs. ``routed/tokens`` are those with another one behind them, in steps whose
experts are replayed; ``routed/unrecorded`` those of them without a record. ``support/WHAT`` are tokens of rollouts
whose sampling was restricted: trained over what was left, over the whole vocabulary for want of a record, and not
trained."""


def trained_tokens(
    policy: nn.Module,
    micro_batch: MicroBatch,
    *,
    temperature: float = 1.0,
    version: int | None = None,
    replays_experts: bool = True,
) -> TrainedTokens:
    """Runs the policy over a micro-batch that holds torch tensors and gives what the losses need of it.

    A column ``temperatures`` wins over `temperature`, for the rollouts that have it; a column ``weights`` weighs tokens
    in the loss; a column ``routed_experts`` says which experts compute, unless `replays_experts` is False; with a
    column ``support`` logprobs and entropy are of the tokens that it has. `version` is the policy version that is
    trained, which ages are counted from.
    """
    arrays: Any = micro_batch
    chosen = torch.nonzero(arrays.loss_mask)[:, 0]
    if len(chosen) and int(chosen[0]) == 0:
        raise RlbufferError("micro-batch: token 0 is trained, but nothing predicts it")
    temperatures = arrays.columns.get("temperatures")
    scale: Tensor | float = temperature
    if temperatures is not None:
        scale = temperatures[chosen]
        if "temperatures" in arrays.lacking:
            scale = torch.where(arrays.lacking["temperatures"][chosen], temperature, scale)
    recorded = arrays.columns.get(ROUTED_EXPERTS) if replays_experts else None
    further = {} if recorded is None else {"routed": recorded.int()}
    if SUPPORT in arrays.columns:
        further[SUPPORT] = arrays.columns[SUPPORT][chosen]
    logprobs, entropy = policy(arrays.input_ids, arrays.position_ids, arrays.cu_seqlens, chosen, scale, **further)
    reference, weights = arrays.columns.get("ref_logprobs"), arrays.columns.get("weights")
    return TrainedTokens(
        logprobs=logprobs,
        entropy=entropy,
        inference_logprobs=arrays.logprobs[chosen].to(logprobs.dtype),
        advantages=arrays.advantages[chosen].to(logprobs.dtype),
        rollout=arrays.sample_index[chosen].long(),
        ref_logprobs=None if reference is None else reference[chosen].to(logprobs.dtype),
        weights=None if weights is None else weights[chosen].to(logprobs.dtype),
        samples=micro_batch.samples,
        ages=None if version is None else version - arrays.policy_versions[chosen],
        columns={name: values[chosen] for name, values in arrays.columns.items()},
        lacking={name: mask for name, is_bare in arrays.lacking.items() if (mask := is_bare[chosen]).any()},
    )


class Updates:
    """The updates of one step: their slices, in order, and what must be known of the step before the first of them.

    All ranks make the same updates of the same step; making the object may run the policy, and exchange counts.
    `ratios` takes in every trained token's ratio to the inference policy, `drift` the same by the tokens' ages, and
    `pass_times` the time of the passes: ``forward``, ``backward``, and the last backward pass, in which the ranks wait
    for each other, as ``exchange``.

    Where a step has several updates, ratios may be against the policy that it started from: its logprobs come from a
    pass without gradients. With one update they are those of the training pass itself, and cost nothing.
    """

    def __init__(
        self,
        policy: nn.Module,
        step: Step,
        settings: TrainerSettings,
        ranks: Ranks,
        *,
        longest: int,
        ratios: Ratios | None = None,
        drift: Drift | None = None,
        pass_times: Stopwatch | None = None,
    ) -> None:
        self._policy = policy
        self._packed = next((part for part in policy.modules() if isinstance(part, PackedPolicy)), None)
        self._experts = None if self._packed is None else self._packed.experts
        self._step = step
        self._number = step.number
        self._settings = settings
        self._ranks = ranks
        self._longest = longest
        self._ratios = ratios or Ratios()
        self._drift = drift or Drift()
        self._is_first = True
        """No update was made yet."""
        self._times = pass_times or Stopwatch(ranks.device)
        self.parts: tuple[Slice, ...] = (
            slices_of(step, ranks, settings.optimizer.updates_per_pass) * settings.optimizer.passes
        )
        """One per update."""
        self._uses_old = uses_old(settings.loss)
        self._old: list[Tensor] | None = None
        if self._uses_old and len(self.parts) > 1:
            self._old = [self._measured(micro_batch, 0).logprobs for micro_batch in step]

    def accumulate(self, part: Slice) -> Tensor:
        """Adds the gradients of one update, exchanged and averaged over ranks in the last backward pass. -> sums
        [SUMS].

        Gradients are averaged over ranks, so the loss is multiplied by their number: what remains is the sum over all
        ranks of terms over global counts. A dummy micro-batch has no trained token, so its loss is an empty sum; that
        is still a function of every parameter (with gradient 0), so every rank makes the same exchanges.

        What it raises names the rollouts that were in training.
        """
        loss, world_size = self._settings.loss, self._ranks.world_size
        chosen = self._chosen(part)
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        for i, host_batch in enumerate(part.micro_batches):
            is_last = i == len(part.micro_batches) - 1
            with naming(self._number, host_batch), exchanging(self._policy, is_last):
                micro_batch = host_batch.to(self._ranks.device)
                with self._times.measure("forward"):
                    tokens = self._tokens(micro_batch, part.start + i)
                    # What wraps the policy acts when a gradient reaches its output, and one is asked for below.
                    tokens = replace(tokens, logprobs=tokens.logprobs.clone(), **chosen[i])
                    per_token = per_token_of(tokens, loss)
                    corrections = weights_of(tokens, loss)
                    masks = masks_of(tokens, loss, per_token, corrections)
                    share = loss_of(
                        tokens,
                        loss,
                        part.normalizers,
                        longest=self._longest,
                        per_token=per_token,
                        corrections=corrections,
                    )
                with self._times.measure("exchange" if is_last and world_size > 1 else "backward"):
                    (share * world_size).backward()  # type: ignore[no-untyped-call]
                sums += _sums(tokens, share, masks, corrections, micro_batch)
                self._drift.add(tokens, masks, [*corrections], is_first=self._is_first)
                if self._settings.replay_experts and ROUTED_EXPERTS in micro_batch.columns:
                    sums += _routed_sums(micro_batch, self._experts)
            self._ratios.add(tokens.logprobs.detach() - tokens.inference_logprobs)
        self._is_first = False
        return sums

    def bfloat16_rms(self) -> float | None:
        """What computing in bfloat16 changes in the logprobs of the step's first micro-batch: their root mean square,
        over all ranks; None where nothing of it is trained, for a policy in float64, and for one that is not the
        project's own.

        All ranks call it: it runs the policy twice, without gradients.
        """
        policy = self._packed
        if policy is None or not len(self._step) or next(policy.parameters()).dtype == torch.float64:
            return None
        first, given = self._step.micro_batches[0], policy.compute
        there = self._measured(first, 0).logprobs.double()
        policy.compute = torch.bfloat16 if given is None else None
        try:
            difference = self._measured(first, 0).logprobs.double() - there
        finally:
            policy.compute = given
        row = torch.stack([difference.square().sum(), difference.new_tensor(float(len(difference)))])
        squares, count = self._ranks.sum(row).tolist()
        return math.sqrt(squares / count) if count else None

    def _chosen(self, part: Slice) -> Sequence[Mapping[str, Any]]:
        """Fields of each micro-batch's tokens that must be known of all the update's tokens before the first gradient.

        All ranks choose together. Where nothing is chosen, nothing is run.
        """
        if not chooses(self._settings.loss):
            return [{}] * len(part.micro_batches)
        tokens = [
            replace(self._measured(micro_batch, part.start + i), draws=draws(micro_batch, self._ranks.device))
            for i, micro_batch in enumerate(part.micro_batches)
        ]
        return choose(tokens, self._settings.loss, self._ranks.sum)

    @torch.no_grad()
    def _measured(self, micro_batch: MicroBatch, index: int) -> TrainedTokens:
        with naming(self._number, micro_batch):
            return self._tokens(micro_batch.to(self._ranks.device), index)

    def _tokens(self, micro_batch: MicroBatch, index: int) -> TrainedTokens:
        """The tokens of the step's micro-batch `index`, beside the logprobs that their ratios are against."""
        settings = self._settings
        tokens = trained_tokens(
            self._policy,
            micro_batch,
            temperature=settings.temperature,
            version=self._number - 1,
            replays_experts=settings.replay_experts,
        )
        if not self._uses_old:
            return tokens
        return replace(tokens, old_logprobs=tokens.logprobs.detach() if self._old is None else self._old[index])


def take_step(
    policy: nn.Module, optimizer: torch.optim.Optimizer, *, learning_rate: float, gradient_clip: float, step: int
) -> float:
    """Clips the averaged gradient and updates the parameters. -> the gradient's norm before clipping.

    Raises:
        RlbufferError: the norm is not finite. Every rank sees the same one, and so all stop.
    """
    parameters = [p for p in policy.parameters() if p.grad is not None]
    norm = clip_gradients(parameters, gradient_clip)
    if not torch.isfinite(torch.tensor(norm)):
        raise RlbufferError(
            f"step {step}: the gradient's norm is {norm}. The parameters are left as they were. {way_out(step)} If "
            "other steps end so, too, lower trainer.optimizer.learning_rate or trainer.loss.options.max_ratio, or "
            "resume from an older checkpoint"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def make_optimizer(policy: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices only, since norms and biases have nothing to shrink to."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        foreach=True,
    )


@torch.no_grad()
def _sums(
    tokens: TrainedTokens,
    share: Tensor,
    masks: Mapping[str, Tensor],
    corrections: Mapping[str, Tensor],
    micro_batch: MicroBatch,
) -> Tensor:
    """The sums of one micro-batch, in the order of :data:`SUMS`. kl is the k3 estimate to the inference policy."""
    difference = (tokens.logprobs - tokens.inference_logprobs).double()
    measured = {
        "loss": share,
        "entropy": tokens.entropy.sum(dtype=torch.float64),
        "kl": (torch.exp(difference) - 1 - difference).sum(),
        "masked": torch.stack([*masks.values()]).any(0).sum(),
        **{_MASKED[stage]: mask.sum() for stage, mask in masks.items()},
        **{_WEIGHTS[name]: weight.sum(dtype=torch.float64) for name, weight in corrections.items()},
        **_of_support(micro_batch),
    }
    numbers = torch.stack([value.double() for value in measured.values()]).tolist()
    sums = dict.fromkeys(SUMS, 0.0) | dict(zip(measured, numbers, strict=True))
    sums["loss_tokens"], sums["tokens"] = len(difference), sum(sample.length for sample in micro_batch.samples)
    return torch.tensor([*sums.values()], dtype=torch.float64)


def _routed_sums(micro_batch: MicroBatch, experts: Experts | None) -> Tensor:
    """The sums of one micro-batch of tensors that tell how many of its tokens take the router's own choice."""
    arrays: Any = micro_batch
    rows, counts = arrays.columns[ROUTED_EXPERTS].int(), arrays.sample_index >= 0
    recorded = torch.zeros_like(counts)
    if experts is not None and experts.fits(rows):
        recorded = is_recorded(rows, experts.num_experts).any(dim=-1)  # the rows of dense layers are none
    counts[arrays.cu_seqlens[1:].long() - 1] = False  # no engine takes a sequence's last token in
    sums = dict.fromkeys(SUMS, 0.0)
    sums["routed/tokens"], sums["routed/unrecorded"] = int(counts.sum()), int((counts & ~recorded).sum())
    return torch.tensor([*sums.values()], dtype=torch.float64)


def _of_support(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """The sums that say what became of restricted sampling; none where no rollout of the step has the column."""
    arrays: Any = micro_batch
    support = arrays.columns.get(SUPPORT)
    if support is None:
        return {}
    is_trained = arrays.loss_mask & ~arrays.lacking[SUPPORT] if SUPPORT in arrays.lacking else arrays.loss_mask
    is_exact = has_record(support, arrays.input_ids)
    parts = (is_trained & is_exact, is_trained & ~is_exact, support[:, 0] == TOO_WIDE)
    return {name: part.sum() for name, part in zip(_SUPPORT, parts, strict=True)}
