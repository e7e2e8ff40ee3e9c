"""The losses and corrections that there are, and the settings that each of them reads.

Known without torch, so that every command can refuse a loss that there is not, and a setting that the chosen loss would
never look at. Their formulas are in :mod:`rlbuffer.trainer.losses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from rlbuffer.config.trainer import LossChoice
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean, plural

Divisor = Literal["rollouts", "tokens", "longest"]
"""``rollouts``: each rollout's mean over its trained tokens, over the update's rollouts. ``tokens``: the update's
trained tokens. ``longest``: rollouts x a constant number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Facts about a loss that are known before it is computed."""

    reads: tuple[str, ...] | None = None
    """Settings of ``[trainer.loss]`` that it looks at; None: it does not say, so none is refused."""
    divisor: Divisor = "tokens"
    corrections: tuple[str, ...] = ()
    """That are part of it, beside those that ``trainer.loss.correction`` names."""
    auto_corrections: tuple[str, ...] = ()
    """That ``old_logprobs = "auto"`` brings, where ``correction`` names none that weighs. With them the old policy is
    the recomputed one."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Its own values of `LossSettings`, where the user sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFacts:
    """Facts about a correction."""

    reads: tuple[str, ...]
    needs_old: bool = True
    """It compares the old policy with the inference policy, so both must be there."""
    weighs: bool = False
    """It weighs by the old policy over the inference policy: what was sampled counts as if the old one had sampled."""


_BOUNDS = ("clip_low", "clip_high")
_CLIPPED = (*_BOUNDS, "clip_ceiling", "dual_clip")
_MASK = ("mask_low", "mask_high")
_SEQUENCE = ("sequence_low", "sequence_high")

LOSSES: dict[str, LossFacts] = {
    "clip": LossFacts(reads=_CLIPPED, divisor="rollouts"),
    "dapo": LossFacts(reads=_CLIPPED),
    "dr_grpo": LossFacts(reads=_CLIPPED, divisor="longest"),
    "ratio": LossFacts(reads=("max_ratio",)),
    "kl_cov": LossFacts(reads=("cov_fraction", "cov_coefficient")),
    "clip_cov": LossFacts(reads=(*_CLIPPED, "cov_fraction", "cov_low", "cov_high"), defaults={"cov_fraction": 0.0002}),
    "gspo": LossFacts(
        reads=_BOUNDS,
        divisor="rollouts",
        auto_corrections=("tis",),
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": LossFacts(reads=("max_ratio",), defaults={"max_ratio": 5.0}),
    "masked_ratio": LossFacts(reads=_MASK),
    "dppo_tv": LossFacts(reads=("tv_low", "tv_high", "tv_penalty")),
    "tis": LossFacts(reads=_CLIPPED, divisor="rollouts", corrections=("tis",)),
    "icepop": LossFacts(reads=_CLIPPED, corrections=("icepop",)),
    "decoupled": LossFacts(reads=_CLIPPED, corrections=("tis",), defaults={"correction_cap": 5.0}),
}
"""Every loss by its name in ``trainer.loss.name``."""

CORRECTION_FACTS: Mapping[str, CorrectionFacts] = {
    "tis": CorrectionFacts(reads=("correction_cap",), weighs=True),
    "icepop": CorrectionFacts(reads=_MASK, weighs=True),
    "sequence_tis": CorrectionFacts(reads=("correction_cap",), weighs=True),
    "sequence_mask": CorrectionFacts(reads=_SEQUENCE, weighs=True),
    "geometric_mask": CorrectionFacts(reads=_SEQUENCE),
    "negative_mask": CorrectionFacts(reads=("mask_kl",), needs_old=False),
}
"""Every correction by its name in ``trainer.loss.correction``."""

BUILT_IN_LOSSES = tuple(LOSSES)
"""Names of the losses above; :func:`declare` adds others to `LOSSES`."""

OWN_ONLY, LONGEST_ONLY = ("options", "columns"), "max_length"
"""Settings that only a loss of the user's own reads; the setting that only the divisor ``longest`` reads."""


def declare(name: str, facts: LossFacts) -> None:
    """Adds a loss, or declares it again.

    Raises:
        ConfigError: there is no such divisor.
    """
    if facts.divisor not in get_args(Divisor):
        raise ConfigError(f"loss {name!r}: divisor {facts.divisor!r} must be rollouts, tokens or longest")
    LOSSES[name] = facts


def facts_of(name: str) -> LossFacts:
    """The facts about the loss `name`; a function of the user's own (``package.module:name``) has the default ones.

    Raises:
        ConfigError: there is no such loss.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" in name:
        return LossFacts()
    own = " Your own is named as package.module:name" * ("." in name)
    hint = did_you_mean(name, LOSSES, otherwise=own)
    raise ConfigError(
        f"trainer.loss.name = {name!r} is not a loss: {', '.join(sorted(LOSSES))}{'.' * bool(hint)}{hint}",
        setting="trainer.loss.name",
    )


def corrections_of(loss: LossChoice) -> tuple[str, ...]:
    """Names of the corrections in force: the loss's own, then the settings'."""
    facts = facts_of(loss.name)
    brings = loss.old_logprobs == "auto" and not _weighing(loss.correction)
    own = (*facts.corrections, *facts.auto_corrections) if brings else facts.corrections
    return tuple(dict.fromkeys((*own, *loss.correction)))


def _weighing(names: Iterable[str]) -> list[str]:
    return [name for name in names if CORRECTION_FACTS[name].weighs]


def uses_old(loss: LossChoice) -> bool:
    """True when ratios are against the policy at the start of the step, not against the inference policy."""
    if loss.old_logprobs != "auto":
        return loss.old_logprobs == "recomputed"
    return any(CORRECTION_FACTS[name].needs_old for name in corrections_of(loss))


def needs_advantage(loss: LossChoice) -> bool:
    """False where a token without an advantage has a gradient all the same: by the KL to the reference, or a teacher in
    its place, or by the columns that a loss of the user's own learns from. Of a loss that says nothing it is True."""
    return not loss.kl_beta and not loss.columns


NARROW_CLIP = 0.01
"""Share of a ratio within which the sampler's rounding alone moves it."""


def doubts(loss: LossChoice, *, largest_age: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Losses whose gradient is not the policy's, or hardly is one: a sentence, and settings beside the loss's own."""
    facts = LOSSES.get(loss.name, LossFacts())
    if uses_old(loss):
        if largest_age > 0 and not _weighing(corrections_of(loss)):
            sentence = (
                "ratios are against the policy at the start of the step, and rollouts up to "
                f"{plural(largest_age, 'version')} older train as if it had sampled them: parts of the gradient point "
                'the wrong way. Add correction = ["tis"], or set trainer.loss.old_logprobs = "inference", without '
                "corrections that need the old policy, or batcher.max_age = 0"
            )
            yield sentence, ("batcher.max_age",)
    elif facts.reads and "clip_low" in facts.reads:
        low = facts.defaults.get("clip_low", 1.0) if loss.clip_low is None else loss.clip_low
        high = facts.defaults.get("clip_high", 1.0) if loss.clip_high is None else loss.clip_high
        if min(low, high) < NARROW_CLIP:
            sentence = (
                f"ratios are against the sampler's logprobs and clipped at 1 - {low:g} and 1 + {high:g}, closer than "
                "a sampler's rounding and one update: hardly anything trains. Set trainer.loss.old_logprobs = "
                f'"recomputed" with correction = ["tis"], or clips of {NARROW_CLIP:g} and more'
            )
            yield sentence, ("trainer.loss.clip_low", "trainer.loss.clip_high")


def mistakes(loss: LossChoice) -> Iterator[ConfigError]:
    """A loss that there is not, corrections of ratios that correct nothing, settings that nothing reads."""
    try:
        facts = facts_of(loss.name)
    except ConfigError as error:
        yield error
        return
    idle = [name for name in corrections_of(loss) if CORRECTION_FACTS[name].needs_old]
    if idle and not uses_old(loss):
        yield ConfigError(
            f"trainer.loss.old_logprobs = 'inference', but {', '.join(idle)} weighs tokens by the old policy over the "
            "inference policy, which would be 1: set trainer.loss.old_logprobs = 'auto' or 'recomputed'",
            setting="trainer.loss.old_logprobs",
        )
    if len(weighing := _weighing(corrections_of(loss))) > 1:
        yield ConfigError(
            f"trainer.loss.correction: {' and '.join(weighing)} each weigh by the old policy over the inference policy "
            f"(trainer.loss.name = {loss.name!r}), and together by its square: keep one of them",
            setting="trainer.loss.correction",
        )
    yield from _unread(loss, facts)


def check_losses(loss: LossChoice) -> None:
    """Refuses the first of the :func:`mistakes`.

    Raises:
        ConfigError: says which.
    """
    for mistake in mistakes(loss):
        raise mistake


def _unread(loss: LossChoice, facts: LossFacts) -> Iterator[ConfigError]:
    if facts.reads is None:
        return
    chosen = f"trainer.loss.name = {loss.name!r}" + (
        f" with correction = {list(loss.correction)}" if loss.correction else ""
    )
    divisor = facts.divisor if loss.normalizer == "auto" else loss.normalizer
    read = {*facts.reads, *(name for c in corrections_of(loss) for name in CORRECTION_FACTS[c].reads)}
    for name, readers in _readers().items():
        value = getattr(loss, name)
        if name in read or value == LossChoice.model_fields[name].get_default(call_default_factory=True):
            continue
        if name == LONGEST_ONLY:
            if divisor != "longest":
                yield _nothing(name, value, f"the divisor {divisor!r}", "trainer.loss.normalizer = 'longest'")
            continue
        yield _nothing(name, value, chosen, readers)


def _nothing(name: str, value: object, chosen: str, readers: str) -> ConfigError:
    shown = dict(value) if isinstance(value, Mapping) else value
    return ConfigError(
        f"trainer.loss.{name} = {shown!r} does nothing: {chosen} does not read it. Leave it out; it is "
        f"read by {readers}",
        setting=f"trainer.loss.{name}",
    )


def _readers() -> dict[str, str]:
    """Setting that not every loss reads -> who does, for people."""
    readers: dict[str, list[str]] = {}
    for what, table in (("", LOSSES), ("the correction ", CORRECTION_FACTS)):
        for name, facts in table.items():
            for setting in facts.reads or ():
                readers.setdefault(setting, []).append(f"{what}{name}")
    own = dict.fromkeys(OWN_ONLY, "a loss of your own") | {LONGEST_ONLY: "the divisor longest"}
    return {name: ", ".join(who) for name, who in readers.items()} | own
