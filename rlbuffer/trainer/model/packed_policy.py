"""A Hugging Face causal LM that takes packed rows, checked at start: packed must equal separate.

Libraries decide from subtle signs whether a row is packed (transformers 5 honours restarting position ids only with
``use_cache=False`` and without a mask; otherwise it silently attends across rollouts, 0.4 nats off). So nothing is
taken on trust: :mod:`rlbuffer.trainer.model.selftest` runs short segments both ways before anything is trained.

Two layouts. *Packed*: the row goes through the model as it is, and attention keeps its segments apart. *Padded*: for
models that carry a state from token to token, which no attention can keep apart. There the row's rollouts go through
the model as right-padded batches of similar lengths; only the head still sees one row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlbuffer.errors import ConfigError, PackedForwardError
from rlbuffer.records.routed import ROUTED_EXPERTS
from rlbuffer.trainer.model.attention import ATTENTION, Mask, SegmentPlan
from rlbuffer.trainer.model.logprobs import PLAIN, LogitShape, token_logprobs
from rlbuffer.trainer.model.selftest import PackedForward, logit_shape_of, replay_test, self_test
from rlbuffer.trainer.model.wide import in_float64
from rlbuffer.weights.blocks import backbone_of, decoder_layers, text_model
from rlbuffer.weights.experts import Experts, experts_of, has_experts

_log = logging.getLogger(__name__)
Layout = Literal["packed", "padded"]

ATTENTIONS: dict[str, tuple[str, ...]] = {"packed": (ATTENTION, "sdpa", "eager"), "padded": ("sdpa", "eager")}
"""Layout -> kernels to try, the cheapest first. sdpa and eager need a dense [T, T] mask for a packed row."""


class PackedPolicy(nn.Module):
    """A causal LM whose forward pass takes one packed row and gives logprobs and entropies of chosen tokens.

    Made by :func:`prepare`. The language model is `model`; parameters are its own, under the prefix ``model.``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: str,
        layout: Layout = "packed",
        shape: LogitShape = PLAIN,
        compute: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        """:data:`rlbuffer.trainer.model.attention.ATTENTION`, or the library's ``sdpa`` or ``eager`` where that does
        not fit."""
        self.refused = ""
        """Why the cheaper kernels do not fit; empty where none was refused."""
        self.layout: Layout = layout
        self.shape = shape
        self.compute = compute
        """Dtype of the products, where it is not the parameters' own (autocast)."""
        self.experts: Experts | None = None
        """What replays the choice among experts; None where the model has none, or it cannot be replayed."""
        self.no_replay = ""
        """Why it cannot."""
        self._is_told = False
        self.in_one_batch = False
        """Padded: one call of the model per micro-batch, also where that pads more. Sharded ranks need equal calls."""
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise PackedForwardError(f"{type(model).__name__} has no output embeddings: it is not a causal LM")
        self._head: list[nn.Module] = [head]

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        """[T, D] last hidden states of a packed row; every segment sees only itself."""
        together = self.in_one_batch and self.layout == "padded"
        plan = SegmentPlan(cu_seqlens.cpu().numpy(), input_ids.device, in_one_batch=together)
        if self.layout == "padded":
            return plan.map(self._padded, input_ids.long(), *(() if routed is None else (routed,)))
        with self._replaying(routed):
            output = backbone_of(self.model)(
                input_ids=input_ids[None].long(),
                position_ids=position_ids[None].long(),
                use_cache=False,
                **({"segments": plan} if self.attention == ATTENTION else {}),
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _padded(self, width: int, parts: Sequence[Tensor], mask_of: Mask) -> Tensor:
        """[n, width] tokens, and [n, width, layers, K] experts where they are recorded -> [n, width, D]. Padding stands
        to the right: no real token can see it."""
        mask, (tokens, *routed) = mask_of(), parts
        with self._replaying(routed[0].flatten(0, 1) if routed else None):
            output = backbone_of(self.model)(
                input_ids=tokens, attention_mask=None if mask is None else mask.long(), use_cache=False
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _replaying(self, routed: Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if routed is None or self.experts is None else self.experts.replaying(routed)

    def _fitting(self, routed: Tensor | None) -> Tensor | None:
        """Recorded experts [T, ...] where they are of such a model. Others are no record, which is said once: else
        whoever pushes could end all ranks."""
        if routed is None or (self.experts is not None and self.experts.fits(routed)):
            return routed
        if not self._is_told:
            self._is_told = True
            why = self.no_replay or f"{type(self.model).__name__} has no experts"
            if self.experts is not None:
                why = f"this model has {[self.experts.layers, self.experts.top_k]}: they are of another one"
            _log.warning(
                "rollouts record experts (column %s, %s for a token), and %s. The column is not used",
                ROUTED_EXPERTS,
                [*routed.shape[1:]],
                why,
            )
        return None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        chosen: Tensor,
        temperature: Tensor | float = 1.0,
        routed: Tensor | None = None,
        support: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of the chosen tokens, under all tokens before them in their segment.

        Shapes: ``input_ids``, ``position_ids`` [T]; ``cu_seqlens`` [S + 1]; ``chosen`` [N] indices of tokens, none of
        them the first of its segment; ``temperature`` a number or [N]; ``routed`` [T, layers, K] int32, the experts to
        compute with; ``support`` [N, W], the tokens that restricted sampling left; -> ([N], [N]), nats.

        Where `routed` is not of such a model, its routers choose.
        """
        routed = self._fitting(routed)
        kind = input_ids.device.type
        with torch.autocast(kind, dtype=self.compute or torch.bfloat16, enabled=self.compute is not None):
            hidden = self.hidden_states(input_ids, position_ids, cu_seqlens, routed)
        head = self._head[0]
        if self.compute is not None:
            hidden = hidden.to(self.compute)
        with torch.autocast(kind, enabled=False):
            logprobs, entropy = token_logprobs(
                hidden[chosen - 1],
                head.weight,  # type: ignore[arg-type]
                input_ids[chosen].long(),
                bias=getattr(head, "bias", None),
                support=support,
                temperature=temperature,
                shape=self.shape,
            )
        return logprobs, entropy


def prepare(
    model: PreTrainedModel,
    *,
    layout: Layout = "packed",
    compute: torch.dtype | None = None,
    longest: int | None = None,
    recompute: bool = False,
) -> PackedPolicy:
    """Makes a packed policy of `model`, on the device that it is on, and proves that packed equals separate.

    Dropout is turned off: with it the trained policy would not be the one that sampled. The segment attention is tried
    first; models with needs of their own (attention sinks) fall back to the library's, with a dense mask.

    Args:
        compute: dtype of the products, when it is another one than the parameters'; both are tested.
        longest: tokens of the longest rollout; a sliding window that is no shorter cannot act, and is not tested.
        recompute: activations inside each layer are computed again in the backward pass instead of being kept.

    Raises:
        PackedForwardError: nothing gives the same logprobs packed as separately (models with state across tokens, or
            whose head does more than a matrix product, a scale and a cap); the message has every reason.
    """
    model.eval()  # type: ignore[no-untyped-call]
    # cuDNN's attention, torch's first choice on Hopper, takes tenths of a second for a plan of each length that it has
    # not met, and rollouts have every length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    freeze_what_texts_leave_out(model)
    if next(model.parameters()).dtype == torch.float64:
        in_float64(model)
    experts, no_replay = _experts_of(model)
    if recompute:
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        again |= {} if experts is None else {"context_fn": experts.contexts}
        for layer in decoder_layers(model):
            layer.forward = partial(checkpoint, layer.forward, **again)
    name = type(model).__name__
    reasons = []
    try:
        shape = logit_shape_of(model)
    except torch.OutOfMemoryError:
        raise
    except (PackedForwardError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise PackedForwardError(f"{name} cannot be trained: {error}") from error
    for attention in ATTENTIONS[layout]:
        policy = PackedPolicy(model, attention=attention, layout=layout, shape=shape)
        try:
            model.set_attn_implementation(attention)
            for policy.compute in (None,) if compute is None else (None, compute):
                forward, keeps_rows = packed_forward(policy), layout == "padded"
                near = self_test(model, forward, longest=longest, compute=policy.compute, keeps_rows=keeps_rows)
                if experts is not None:
                    policy.experts = experts
                    replay_test(model, experts, forward, tolerance=near, compute=policy.compute)
        except (PackedForwardError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reasons.append(f"{attention}: {str(error).partition('. ')[0]}")
            continue
        policy.refused, policy.no_replay = "; ".join(reasons), no_replay
        return policy
    if layout == "packed":
        raise PackedForwardError(
            f"{name} cannot be trained on packed rows. {'; '.join(reasons)}. "
            'Models that carry a state from token to token need trainer.layout = "padded"'
        )
    raise PackedForwardError(f"{name} cannot be trained on padded rows either. {'; '.join(reasons)}")


def packed_forward(policy: PackedPolicy) -> PackedForward:
    """The policy's forward pass in the form that :func:`self_test` takes."""

    def forward(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, routed: Tensor | None = None) -> Tensor:
        chosen = torch.nonzero(position_ids > 0)[:, 0]
        logprobs, _ = policy(input_ids, position_ids, cu_seqlens, chosen, routed=routed)
        out = logprobs.new_zeros(len(input_ids))
        out[chosen] = logprobs
        scattered: Tensor = out
        return scattered

    return forward


def _experts_of(model: PreTrainedModel) -> tuple[Experts | None, str]:
    """What replays the choice among the model's experts, and why there is none though the model has experts."""
    if not has_experts(model):
        return None, ""
    try:
        return experts_of(model), ""
    except ConfigError as error:
        return None, str(error)


def freeze_what_texts_leave_out(model: PreTrainedModel) -> None:
    """Lets nothing wait for gradients that no text brings: ranks would wait for them, and DDP fails."""
    parts = (text_model(model), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    used = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)
