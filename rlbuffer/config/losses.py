"""The losses and corrections that there are, each with its options: a record of the numbers that it reads.

Known without torch, so that every command can refuse a loss that there is not, and an option that it does not have.
Their formulas are in :mod:`rlbuffer.trainer.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationInfo, create_model, field_validator

from rlbuffer.config.table import DOTTED, Table
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean, no_such_option, plural

Divisor = Literal["rollouts", "tokens", "longest"]
"""``rollouts``: each rollout's mean over its trained tokens, over the update's rollouts. ``tokens``: the update's
trained tokens. ``longest``: rollouts x a constant number of tokens."""


class Options(Table):
    """Numbers that a loss, or a correction, reads."""

    model_config = ConfigDict(validate_default=True)

    @field_validator("high", "cov_high", check_fields=False)
    @classmethod
    def _ordered(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get((info.field_name or "").replace("high", "low"))
        if low is not None and high <= low:
            raise ValueError(f"must be above {low:g}, the lower bound")
        return high


class ClipOptions(Options):
    """Of clip, dapo, tis, icepop and decoupled."""

    clip_low: float = Field(0.2, gt=0, le=1, description="Ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Ratio is clipped above at 1 + clip_high.")
    clip_ceiling: float | None = Field(
        None, gt=1, description="Two-sided clip: largest ratio of tokens with a negative advantage."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Dual clip: largest loss of such tokens, in units of -advantage."
    )


class LongestOptions(ClipOptions):
    """Of dr_grpo."""

    max_length: int = Field(0, ge=0, description="Constant of the divisor, in tokens; 0: row_tokens.")


class SequenceClipOptions(Options):
    """Of gspo."""

    clip_low: float = Field(3e-4, gt=0, le=1, description="The sequence's ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(4e-4, gt=0, description="And above at 1 + clip_high.")


class RatioOptions(Options):
    """Of ratio."""

    max_ratio: float = Field(8.0, gt=1, description="Cap of the ratio.")


class CispoOptions(Options):
    """Of cispo."""

    max_ratio: float = Field(5.0, gt=1, description="Cap of the ratio.")


class KlCovOptions(Options):
    """Of kl_cov."""

    cov_fraction: float = Field(0.002, gt=0, le=1, description="Share of an update's tokens selected; at least 1.")
    cov_coefficient: float = Field(1.0, ge=0, description="Weight of |logprob - old| on those.")


class ClipCovOptions(ClipOptions):
    """Of clip_cov."""

    cov_fraction: float = Field(0.0002, gt=0, le=1, description="Share of an update's tokens selected; at least 1.")
    cov_low: float = Field(1.0, description="Covariance that a selected token exceeds.")
    cov_high: float = Field(5.0, description="Covariance that it stays below.")


class DppoOptions(Options):
    """Of dppo_tv."""

    tv_low: float = Field(0.2, ge=0, le=1, description="Fall in probability beyond which a token is dropped.")
    tv_high: float = Field(0.2, ge=0, le=1, description="Rise beyond which it is.")
    tv_penalty: float = Field(1e-3, ge=0, description="Weight of the squared log ratio.")


class CapOptions(Options):
    """Of the corrections tis and sequence_tis."""

    cap: float = Field(2.0, gt=0, description="Cap of the weight.")


class MaskOptions(Options):
    """Of masked_ratio and of the correction icepop."""

    low: float = Field(0.5, ge=0, description="Ratio below which a token is left out.")
    high: float = Field(5.0, gt=0, description="Ratio above which it is.")


class SequenceMaskOptions(Options):
    """Of the corrections sequence_mask and geometric_mask."""

    low: float = Field(0.5, ge=0, description="Weight of a sequence below which it is left out.")
    high: float = Field(2.0, gt=0, description="Weight above which it is.")


class DriftOptions(Options):
    """Of the correction negative_mask."""

    most: float = Field(0.1, ge=0, description="Drift of a sequence, in nats per token, above which it is left out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Facts about a loss that are known before it is computed."""

    function: str = ""
    """``module:name`` in :mod:`rlbuffer.trainer.losses`, of a built-in one."""
    options: type[Options] | None = None
    """None: any, a table."""
    divisor: Divisor = "tokens"
    has_penalty: bool = False
    """A part of it has a gradient whatever the advantage is, as a penalty on the ratio."""
    columns: tuple[str, ...] = ()
    """Further columns that it reads: a rollout without one is not trained."""
    corrections: Mapping[str, Options] = field(default_factory=dict)
    """That are part of it, beside those that ``trainer.loss.correction`` names."""
    auto_corrections: Mapping[str, Options] = field(default_factory=dict)
    """That ``old_logprobs = "auto"`` brings, where ``correction`` names none that weighs. With them the old policy is
    the recomputed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFacts:
    """Facts about a correction."""

    options: type[Options]
    needs_old: bool = True
    """It compares the old policy with the inference policy, so both must be there."""
    weighs: bool = False
    """It weighs by the old policy over the inference policy: what was sampled counts as if the old one had sampled."""


LOSSES: dict[str, LossFacts] = {
    "clip": LossFacts(function="clipping:clipped", options=ClipOptions, divisor="rollouts"),
    "dapo": LossFacts(function="clipping:clipped", options=ClipOptions),
    "dr_grpo": LossFacts(function="clipping:clipped", options=LongestOptions, divisor="longest"),
    "ratio": LossFacts(function="weighting:capped_ratio", options=RatioOptions),
    "kl_cov": LossFacts(function="weighting:kl_cov", options=KlCovOptions, has_penalty=True),
    "clip_cov": LossFacts(function="clipping:clip_cov", options=ClipCovOptions),
    "gspo": LossFacts(
        function="clipping:sequence_clipped",
        options=SequenceClipOptions,
        divisor="rollouts",
        auto_corrections={"tis": CapOptions()},
    ),
    "cispo": LossFacts(function="weighting:cispo", options=CispoOptions),
    "masked_ratio": LossFacts(function="weighting:masked_ratio", options=MaskOptions),
    "dppo_tv": LossFacts(function="weighting:dppo_tv", options=DppoOptions, has_penalty=True),
    "tis": LossFacts(
        function="clipping:clipped", options=ClipOptions, divisor="rollouts", corrections={"tis": CapOptions()}
    ),
    "icepop": LossFacts(function="clipping:clipped", options=ClipOptions, corrections={"icepop": MaskOptions()}),
    "decoupled": LossFacts(function="clipping:clipped", options=ClipOptions, corrections={"tis": CapOptions(cap=5.0)}),
}
"""Every loss by its name in ``trainer.loss.name``."""

CORRECTION_FACTS: Mapping[str, CorrectionFacts] = {
    "tis": CorrectionFacts(options=CapOptions, weighs=True),
    "icepop": CorrectionFacts(options=MaskOptions, weighs=True),
    "sequence_tis": CorrectionFacts(options=CapOptions, weighs=True),
    "sequence_mask": CorrectionFacts(options=SequenceMaskOptions, weighs=True),
    "geometric_mask": CorrectionFacts(options=SequenceMaskOptions),
    "negative_mask": CorrectionFacts(options=DriftOptions, needs_old=False),
}
"""Every correction by its name in ``trainer.loss.correction``."""

STAGES = ("advantage", "clip", "top_entropy", "weights", *CORRECTION_FACTS)
"""Stages that may leave a trained token without a gradient."""

BUILT_IN_LOSSES = tuple(LOSSES)
"""Names of the losses above; :func:`declare` adds others to `LOSSES`."""


_OF_CORRECTIONS: dict[str, Any] = {name: (facts.options | None, None) for name, facts in CORRECTION_FACTS.items()}
_CORRECTIONS = create_model("Corrections", __base__=Table, **_OF_CORRECTIONS)


def _check_names(what: str, given: Any, record: type[Table]) -> None:
    """Raises ValueError for an option that there is not, with what was probably meant."""
    if isinstance(given, Mapping) and (text := no_such_option(what, given, record.model_fields)):
        raise ValueError(text)


class LossChoice(Table):
    """``[trainer.loss]``: which loss, and the numbers that it and its corrections read."""

    name: str = Field(
        "clip",
        validate_default=True,
        description="clip, dapo, dr_grpo, ratio, kl_cov, clip_cov, gspo, cispo, masked_ratio, dppo_tv, tis, icepop, "
        "decoupled, or a function of yours, `package.module:name`.",
    )
    options: Any = Field(
        default_factory=dict,
        validate_default=True,
        description="Its numbers, a table; which, the page of losses says. One of your own is passed all of it.",
    )
    columns: tuple[str, ...] = Field(
        (), description="Further columns that a loss of your own reads: a rollout without one is not trained."
    )
    normalizer: Literal["auto", "rollouts", "tokens", "longest"] = Field(
        "auto", description="What the loss is divided by, over all ranks; auto: the loss's own divisor."
    )
    correction: Mapping[str, Any] = Field(
        default_factory=dict,
        description="Weights for the distance from sampler to trainer, multiplied with the loss: name -> its numbers, "
        "as { tis = { cap = 2.0 } }.",
    )
    old_logprobs: Literal["auto", "inference", "recomputed"] = Field(
        "auto",
        validate_default=True,
        description="What ratios are against: the logprobs that came with the rollouts, or those of the policy at the "
        "start of the step (a pass without gradients where a step has several updates); auto: as the loss needs.",
    )
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the column ref_logprobs.")
    kl_estimator: Literal["k1", "k2", "k3", "weighted_k3"] = Field(
        "k3", description="Its estimate per token; weighted_k3 is unbiased on tokens of older policies, too."
    )
    entropy_bonus: float = Field(0.0, ge=0, description="Weight of the mean entropy of trained tokens.")
    top_entropy: float = Field(
        1.0, gt=0, le=1, description="Share of an update's tokens, those of the highest entropy, that the loss is on."
    )

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in LOSSES and not DOTTED.match(name):
            otherwise = " Your own is named as package.module:name." * ("." in name)
            hint = did_you_mean(name, LOSSES, otherwise=otherwise)
            raise ValueError(f"is not a loss: {', '.join(sorted(LOSSES))}{'.' * bool(hint)}{hint}")
        return name

    @field_validator("options")
    @classmethod
    def _of_the_loss(cls, options: Any, info: ValidationInfo) -> Any:
        record = LOSSES.get(info.data.get("name", ""), LossFacts()).options
        if record is not None:
            _check_names(f"the loss {info.data['name']}", options, record)
            return record.model_validate(options)
        if not isinstance(options, Mapping):
            raise ValueError("must be a table")
        return options

    @field_validator("columns")
    @classmethod
    def _of_your_own(cls, columns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if columns and info.data.get("name") in BUILT_IN_LOSSES:
            raise ValueError("is for a loss of your own")
        return columns

    @field_validator("correction")
    @classmethod
    def _corrections(cls, named: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        _check_names("correction", named, _CORRECTIONS)
        for name, options in named.items():
            _check_names(f"the correction {name}", options, CORRECTION_FACTS[name].options)
        brought = LOSSES.get(info.data.get("name", ""), LossFacts()).corrections
        if len(weighing := _weighing({**brought, **named})) > 1:
            raise ValueError(
                f"{' and '.join(weighing)} each weigh by the old policy over the inference policy, and together by its "
                "square: keep one of them"
            )
        made = _CORRECTIONS.model_validate(named)
        return {name: getattr(made, name) for name in named}

    @field_validator("old_logprobs")
    @classmethod
    def _there_is_an_old_one(cls, old: str, info: ValidationInfo) -> str:
        brought = LOSSES.get(info.data.get("name", ""), LossFacts()).corrections
        needing = [n for n in {**brought, **info.data.get("correction", {})} if CORRECTION_FACTS[n].needs_old]
        if old == "inference" and needing:
            raise ValueError(
                f"{', '.join(needing)} weighs tokens by the old policy over the inference policy, which would be 1: "
                "set it to 'auto' or 'recomputed'"
            )
        return old


def declare(name: str, facts: LossFacts) -> None:
    """Adds a loss, or declares it again.

    Raises:
        ConfigError: there is no such divisor.
    """
    if facts.divisor not in get_args(Divisor):
        raise ConfigError(f"loss {name!r}: divisor {facts.divisor!r} must be rollouts, tokens or longest")
    LOSSES[name] = facts


def facts_of(loss: LossChoice) -> LossFacts:
    """The facts about the chosen loss; a function of the user's own has the default ones."""
    return LOSSES.get(loss.name, LossFacts())


def corrections_of(loss: LossChoice) -> dict[str, Any]:
    """The corrections in force, each with its options: the loss's own, where the settings do not name them, too."""
    facts = facts_of(loss)
    brings = loss.old_logprobs == "auto" and not _weighing(loss.correction)
    return {**facts.corrections, **(facts.auto_corrections if brings else {}), **loss.correction}


def _weighing(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if CORRECTION_FACTS[name].weighs]


def uses_old(loss: LossChoice) -> bool:
    """True when ratios are against the policy at the start of the step, not against the inference policy."""
    if loss.old_logprobs != "auto":
        return loss.old_logprobs == "recomputed"
    return any(CORRECTION_FACTS[name].needs_old for name in corrections_of(loss))


def columns_of(loss: LossChoice) -> tuple[str, ...]:
    """Further columns without which the loss cannot train a rollout."""
    reference = ("ref_logprobs",) if loss.kl_beta else ()
    return tuple(dict.fromkeys((*reference, *facts_of(loss).columns, *loss.columns)))


def needs_advantage(loss: LossChoice) -> bool:
    """False where a token without an advantage has a gradient all the same: by the KL to the reference, or a teacher in
    its place, or by the columns that a loss learns from. Of a loss that says nothing it is True."""
    return not columns_of(loss)


NARROW_CLIP = 0.01
"""Share of a ratio within which the sampler's rounding alone moves it."""


BIAS_NATS = 3e-4
"""Nats by which a token's logprob in a sampler differs from the trainer's in the mean, either way: a small one."""


def doubts(loss: LossChoice, *, largest_age: int, row_tokens: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Losses whose gradient is not the policy's, or hardly is one: a sentence, and settings beside the loss's own."""
    for name, options in corrections_of(loss).items():
        if text := _of_products(name, options, row_tokens):
            yield text, ("trainer.loss.correction", "batcher.row_tokens")
    if uses_old(loss):
        if largest_age > 0 and not _weighing(corrections_of(loss)):
            sentence = (
                "ratios are against the policy at the start of the step, and rollouts up to "
                f"{plural(largest_age, 'version')} older train as if it had sampled them: parts of the gradient point "
                'the wrong way. Add correction = { tis = {} }, or set trainer.loss.old_logprobs = "inference", '
                "without corrections that need the old policy, or batcher.max_age = 0"
            )
            yield sentence, ("batcher.max_age",)
        return
    low, high = (getattr(loss.options, name, 1.0) for name in ("clip_low", "clip_high"))
    if min(low, high) < NARROW_CLIP:
        sentence = (
            f"ratios are against the sampler's logprobs and clipped at 1 - {low:g} and 1 + {high:g}, closer than "
            "a sampler's rounding and one update: hardly anything trains. Set trainer.loss.old_logprobs = "
            f'"recomputed" with correction = {{ tis = {{}} }}, or clips of {NARROW_CLIP:g} and more'
        )
        yield sentence, ("trainer.loss.options",)


def _of_products(name: str, options: Any, row_tokens: int) -> str:
    """The doubt about a correction whose weight is a product over a sequence: a small bias of each token has a large
    one over a long answer. "" where that is small, or of another correction."""
    bias = BIAS_NATS * row_tokens
    token = (
        f"{name} weighs by the product over a sequence's tokens: with a bias of {BIAS_NATS:g} nats a token between "
        f"sampler and trainer, one of batcher.row_tokens = {row_tokens} tokens"
    )
    instead = "Where answers are so long take tis, which weighs each token, with geometric_mask for whole answers"
    if name == "sequence_tis" and (weight := math.exp(-bias)) < 0.5:
        return f"{token} has a weight of {weight:.2g}, and hardly trains. {instead}"
    if name == "sequence_mask":
        most = min(math.log(options.high), -math.log(options.low) if options.low else math.inf) / BIAS_NATS
        if most < row_tokens:
            return f"{token} is left out, as is each of more than {max(0.0, most):.0f}. {instead}"
    return ""
