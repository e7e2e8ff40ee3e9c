"""Losses by name, and losses of the user's own by dotted path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Literal, get_args

from torch import Tensor

from rlbuffer.dotted import load, refused
from rlbuffer.errors import ConfigError
from rlbuffer.settings import TrainerSettings
from rlbuffer.trainer.losses.clipping import clip_cov, clipped, sequence_clipped
from rlbuffer.trainer.losses.corrections import CORRECTIONS
from rlbuffer.trainer.losses.selection import Score, covariance, drawn_covariance
from rlbuffer.trainer.losses.tokens import LossSettings, TrainedTokens
from rlbuffer.trainer.losses.weighting import capped_ratio, cispo, dppo_tv, kl_cov, masked_ratio

Divisor = Literal["rollouts", "tokens", "longest"]
"""``rollouts``: each rollout's mean over its trained tokens, over the update's rollouts. ``tokens``: the update's
trained tokens. ``longest``: rollouts x a constant number of tokens."""

TokenLoss = Callable[[TrainedTokens, LossSettings], Tensor]
"""(tokens, settings) -> [N] loss per token, differentiable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered loss."""

    name: str
    per_token: TokenLoss
    divisor: Divisor = "tokens"
    corrections: tuple[str, ...] = ()
    """That are part of it, beside those that ``trainer.correction`` names."""
    score: Score | None = None
    """What tokens are selected by, over the whole update (`TrainedTokens.is_selected`); None: nothing is selected."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Its own values of `LossSettings`, where the user sets none."""


_LOSSES: dict[str, Loss] = {}


def register_loss(
    name: str,
    per_token: TokenLoss,
    *,
    divisor: Divisor = "tokens",
    corrections: tuple[str, ...] = (),
    score: Score | None = None,
    defaults: Mapping[str, float] | None = None,
) -> None:
    """Makes a loss available as ``trainer.loss = name``, in this process.

    Ranks are processes of their own: where nothing registers it there, name the function by its dotted path instead.
    """
    if divisor not in get_args(Divisor):
        raise ConfigError(f"loss {name!r}: divisor {divisor!r} must be rollouts, tokens or longest")
    _LOSSES[name] = Loss(
        name=name,
        per_token=per_token,
        divisor=divisor,
        corrections=corrections,
        score=score,
        defaults=dict(defaults or {}),
    )


def get_loss(name: str) -> Loss:
    """The loss registered as `name`, or the function that ``package.module:name`` names.

    Raises:
        ConfigError: there is none.
    """
    if name in _LOSSES:
        return _LOSSES[name]
    if ":" in name:
        return _own(name)
    near = get_close_matches(name, _LOSSES, n=1)
    hint = f". Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"trainer.loss = {name!r} is not a loss: {', '.join(sorted(_LOSSES))}{hint}", setting="trainer.loss"
    )


@cache
def _own(path: str) -> Loss:
    """A loss of the user's own; what it gives is checked, because a wrong shape would broadcast in silence."""
    own = load("trainer.loss", path, "(tokens, settings)")

    def checked(tokens: TrainedTokens, settings: LossSettings) -> Tensor:
        given = own(tokens, settings)
        if not isinstance(given, Tensor) or given.shape != tokens.logprobs.shape:
            what = f"shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            wanted = f"it must give one loss per token, {list(tokens.logprobs.shape)}"
            raise refused("trainer.loss", path, f"gave {what}: {wanted}")
        return given

    return Loss(name=path, per_token=checked)


def settings_of(trainer: TrainerSettings) -> LossSettings:
    """What a loss is told: what the user set, else the loss's own defaults, else those of all losses."""
    values = {f.name: getattr(trainer, f.name) for f in fields(LossSettings) if f.name != "options"}
    chosen = dict(get_loss(trainer.loss).defaults) | {k: v for k, v in values.items() if v is not None}
    return replace(LossSettings(), **chosen, options=trainer.loss_options)


def corrections_of(trainer: TrainerSettings) -> tuple[str, ...]:
    """Names of the corrections in force: the loss's own, then the settings'."""
    return tuple(dict.fromkeys((*get_loss(trainer.loss).corrections, *trainer.correction)))


def uses_old(trainer: TrainerSettings) -> bool:
    """Whether ratios are against the policy at the start of the step, and not against the inference policy."""
    if trainer.old_logprobs != "auto":
        return trainer.old_logprobs == "recomputed"
    return any(CORRECTIONS[name].needs_old for name in corrections_of(trainer))


def check_losses(trainer: TrainerSettings) -> None:
    """Refuses a loss that there is not, and corrections of ratios that correct nothing.

    Raises:
        ConfigError: says which.
    """
    idle = [name for name in corrections_of(trainer) if CORRECTIONS[name].needs_old]
    if idle and not uses_old(trainer):
        raise ConfigError(
            f"trainer.old_logprobs = 'inference', but {', '.join(idle)} weighs tokens by the old policy over the "
            "inference policy, which would be 1: set trainer.old_logprobs = 'auto' or 'recomputed'",
            setting="trainer.old_logprobs",
        )


register_loss("clip", clipped, divisor="rollouts")
register_loss("dapo", clipped)
register_loss("dr_grpo", clipped, divisor="longest")
register_loss("ratio", capped_ratio)
register_loss("kl_cov", kl_cov, score=covariance)
register_loss("clip_cov", clip_cov, score=drawn_covariance, defaults={"cov_fraction": 0.0002})
register_loss("gspo", sequence_clipped, divisor="rollouts", defaults={"clip_low": 3e-4, "clip_high": 4e-4})
register_loss("cispo", cispo, defaults={"max_ratio": 5.0})
register_loss("masked_ratio", masked_ratio)
register_loss("dppo_tv", dppo_tv)
register_loss("tis", clipped, divisor="rollouts", corrections=("tis",))
register_loss("icepop", clipped, corrections=("icepop",))
register_loss("decoupled", clipped, corrections=("tis",), defaults={"correction_cap": 5.0})

BUILT_IN = tuple(_LOSSES)
"""Names of the losses above."""
