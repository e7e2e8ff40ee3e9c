"""Losses by name, and losses of the user's own by dotted path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlbuffer.config import losses
from rlbuffer.config.imports import defined_at, load, refused
from rlbuffer.config.losses import Divisor, LossFacts, Options
from rlbuffer.errors import RlbufferError
from rlbuffer.trainer.losses.selection import SCORES, Score
from rlbuffer.trainer.losses.tokens import TrainedTokens

TokenLoss = Callable[[TrainedTokens, Any], Tensor]
"""(tokens, options) -> [N] loss per token, differentiable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered loss."""

    per_token: TokenLoss
    facts: LossFacts = field(default_factory=LossFacts)
    """Its options, its divisor, its corrections."""
    score: Score | None = None
    """Score that selects tokens over the whole update (`TrainedTokens.is_selected`); None: nothing is selected."""


_LOSSES: dict[str, Loss] = {}
"""Those that were asked for, or registered."""


def register_loss(
    name: str,
    per_token: TokenLoss,
    *,
    divisor: Divisor = "tokens",
    options: type[Options] | None = None,
    columns: tuple[str, ...] = (),
    score: Score | None = None,
) -> None:
    """Makes a loss available as ``trainer.loss.name = name``, in this process.

    `options` is the record of ``trainer.loss.options``; None: the table as it stands. `columns` are further ones that
    it reads. Ranks are processes of their own: where nothing registers it there, name the function by its dotted path
    instead.
    """
    facts = LossFacts(options=options, divisor=divisor, columns=columns)
    losses.declare(name, facts)
    _LOSSES[name] = Loss(per_token=_checked(per_token, name), facts=facts, score=score)


def get_loss(name: str) -> Loss:
    """The loss registered as `name`, or the function that ``package.module:name`` names.

    Raises:
        ConfigError: there is none.
    """
    if name not in _LOSSES:
        facts = losses.LOSSES.get(name, LossFacts())
        path = f"rlbuffer.trainer.losses.{facts.function}" if facts.function else name
        function = load("trainer.loss.name", path, "(tokens, options)")
        _LOSSES[name] = Loss(per_token=_checked(function, name), facts=facts, score=SCORES.get(name))
    return _LOSSES[name]


def _checked(loss: TokenLoss, name: str) -> TokenLoss:
    """Checks what a loss gives, which may be the user's own: a wrong shape would broadcast in silence."""

    is_users = name not in losses.BUILT_IN_LOSSES

    def checked(tokens: TrainedTokens, options: Any) -> Tensor:
        given = loss(tokens, options)
        if not isinstance(given, Tensor) or given.shape != tokens.logprobs.shape:
            what = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            requirement = f"it must give one loss per token, {list(tokens.logprobs.shape)}"
            raise refused("trainer.loss.name", name, f"gave {what}: {requirement}{defined_at(loss)}")
        if tokens.logprobs.requires_grad and torch.is_grad_enabled() and not given.requires_grad and given.any():
            requirement = "it must be computed from tokens.logprobs or tokens.ratio, not detached from them"
            what = f"a tensor without a gradient: {requirement}{defined_at(loss)}"
            raise refused("trainer.loss.name", name, f"gave {what}")
        if is_users and not given.isfinite().all() and tokens.logprobs.isfinite().all():
            odd = float(given.detach()[~given.isfinite()][0])
            # Of this step, perhaps, and of no other: whoever made the pass names its rollouts and how to go on.
            where = defined_at(loss)
            raise RlbufferError(f"trainer.loss.name = {name!r} gave {odd} for a token: it must be finite{where}")
        return given

    return checked
