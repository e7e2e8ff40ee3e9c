"""What leaves a trained token without a gradient, stage by stage; each by itself, whatever the others do.

A loss of 0 and a gradient of 0 have many causes, and no sum of either tells one from the other: a correction that
leaves out every rollout looks like a step in which all rewards were alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlbuffer.config.losses import LossChoice, facts_of
from rlbuffer.trainer.losses.tokens import TrainedTokens
from rlbuffer.trainer.losses.total import per_token_of


def clipped_of(tokens: TrainedTokens, per_token: Tensor) -> Tensor:
    """[N] bool; tokens that have an advantage, and from which the loss took the gradient: by a clip, a cap or a mask.

    `per_token` is :func:`~rlbuffer.trainer.losses.total.per_token_of` those tokens, or their part that goes by
    advantages.
    """
    return _without_gradient(tokens, per_token) & (tokens.advantages != 0)


def masks_of(
    tokens: TrainedTokens, choice: LossChoice, per_token: Tensor, corrections: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tokens that each stage in force leaves without a gradient by their advantage: stage -> [N] bool.

    Stages, in the order of :data:`~rlbuffer.config.losses.STAGES`: ``advantage``, which is 0; ``clip``, by the loss
    itself; ``top_entropy``, not among the most uncertain; ``weights``, a column that is 0; and each correction whose
    weight is 0. `corrections` are :func:`~rlbuffer.trainer.losses.total.weights_of` these tokens.

    A loss that needs no advantage (one of the user's own, from a teacher) leaves a gradient where the advantage is 0.
    """
    if facts_of(choice).has_penalty:
        without = replace(tokens, advantages=torch.zeros_like(tokens.advantages))
        per_token = per_token - per_token_of(without, choice)
    has_none = _without_gradient(tokens, per_token)
    masks = {"advantage": has_none & (tokens.advantages == 0), "clip": has_none & (tokens.advantages != 0)}
    if tokens.is_uncertain is not None:
        masks["top_entropy"] = ~tokens.is_uncertain
    if tokens.weights is not None:
        masks["weights"] = tokens.weights == 0
    return masks | {name: weight == 0 for name, weight in corrections.items()}


def _without_gradient(tokens: TrainedTokens, per_token: Tensor) -> Tensor:
    """[N] bool; True where the sum of `per_token` has no gradient in the token's logprob."""
    gradient = None
    if per_token.requires_grad and len(per_token):
        (gradient,) = torch.autograd.grad(per_token.sum(), tokens.logprobs, retain_graph=True, allow_unused=True)
    return torch.ones_like(tokens.advantages, dtype=torch.bool) if gradient is None else gradient == 0
