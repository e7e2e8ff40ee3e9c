"""Losses by name, and losses of the user's own by dotted path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache

import torch
from torch import Tensor

from rlbuffer.config import losses
from rlbuffer.config.dotted import load, refused
from rlbuffer.config.losses import Divisor, LossFacts, facts_of
from rlbuffer.config.trainer import LossChoice
from rlbuffer.trainer.losses.clipping import clip_cov, clipped, sequence_clipped
from rlbuffer.trainer.losses.selection import Score, covariance, drawn_covariance
from rlbuffer.trainer.losses.tokens import LossSettings, TrainedTokens
from rlbuffer.trainer.losses.weighting import capped_ratio, cispo, dppo_tv, kl_cov, masked_ratio

TokenLoss = Callable[[TrainedTokens, LossSettings], Tensor]
"""(tokens, settings) -> [N] loss per token, differentiable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered loss."""

    name: str
    per_token: TokenLoss
    facts: LossFacts = field(default_factory=LossFacts)
    """Settings and facts that it reads and divides by."""
    score: Score | None = None
    """Score that selects tokens over the whole update (`TrainedTokens.is_selected`); None: nothing is selected."""


_LOSSES: dict[str, Loss] = {}


def register_loss(
    name: str,
    per_token: TokenLoss,
    *,
    divisor: Divisor = "tokens",
    corrections: tuple[str, ...] = (),
    score: Score | None = None,
    defaults: Mapping[str, float] | None = None,
    reads: tuple[str, ...] | None = None,
) -> None:
    """Makes a loss available as ``trainer.loss.name = name``, in this process.

    `reads` are the settings of ``[trainer.loss]`` that it looks at. With it, a setting that only other losses read is
    refused; without it, none is. Ranks are processes of their own: where nothing registers it there, name the function
    by its dotted path instead.
    """
    facts = LossFacts(reads=reads, divisor=divisor, corrections=corrections, defaults=dict(defaults or {}))
    losses.declare(name, facts)
    _LOSSES[name] = Loss(name=name, per_token=_checked(per_token, name), facts=facts, score=score)


def get_loss(name: str) -> Loss:
    """The loss registered as `name`, or the function that ``package.module:name`` names.

    Raises:
        ConfigError: there is none.
    """
    if name in _LOSSES:
        return _LOSSES[name]
    facts_of(name)
    return _own(name)


@cache
def _own(path: str) -> Loss:
    """A loss of the user's own, named by its path."""
    return Loss(name=path, per_token=_checked(load("trainer.loss.name", path, "(tokens, settings)"), path))


def _checked(own: TokenLoss, name: str) -> TokenLoss:
    """A loss of the user's own; what it gives is checked, because a wrong shape would broadcast in silence."""

    def checked(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
        given = own(tokens, settings)
        if not isinstance(given, Tensor) or given.shape != tokens.logprobs.shape:
            what = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            requirement = f"it must give one loss per token, {list(tokens.logprobs.shape)}"
            raise refused("trainer.loss.name", name, f"gave {what}: {requirement}")
        if tokens.logprobs.requires_grad and torch.is_grad_enabled() and not given.requires_grad and given.any():
            requirement = "it must be computed from tokens.logprobs or tokens.ratio, not detached from them"
            raise refused("trainer.loss.name", name, f"gave a tensor without a gradient: {requirement}")
        return given

    return checked


def settings_of(choice: LossChoice) -> LossSettings:
    """The settings that a loss gets: the user's, else the loss's own defaults, else those of all losses."""
    values = {f.name: getattr(choice, f.name) for f in fields(LossSettings) if f.name != "options"}
    chosen = dict(get_loss(choice.name).facts.defaults) | {k: v for k, v in values.items() if v is not None}
    return replace(LossSettings(), **chosen, options=choice.options)


for _name, _per_token, _score in (
    ("clip", clipped, None),
    ("dapo", clipped, None),
    ("dr_grpo", clipped, None),
    ("ratio", capped_ratio, None),
    ("kl_cov", kl_cov, covariance),
    ("clip_cov", clip_cov, drawn_covariance),
    ("gspo", sequence_clipped, None),
    ("cispo", cispo, None),
    ("masked_ratio", masked_ratio, None),
    ("dppo_tv", dppo_tv, None),
    ("tis", clipped, None),
    ("icepop", clipped, None),
    ("decoupled", clipped, None),
):
    _LOSSES[_name] = Loss(name=_name, per_token=_per_token, facts=losses.LOSSES[_name], score=_score)
