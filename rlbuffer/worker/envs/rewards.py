"""Rewards: several functions with weights, and what a length does to their sum.

    reward = length(sum of weight * function(answered)),    each function's own value by name beside it

Functions score one completion at a time and know nothing of the group: what a group makes of its rewards is the
estimator's business (`batcher.advantage`).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, ValidationError, validate_call

from rlbuffer.config.imports import target
from rlbuffer.config.refusal import refusal
from rlbuffer.config.table import Count, Share, Table
from rlbuffer.errors import ConfigError, RewardFailed
from rlbuffer.worker.envs.prompt import Prompt, Score

OnError = Literal["fail", "zero"]
"""Cost of an exception in a reward function: the rollout, or that function's share."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One completion, as reward functions see it."""

    prompt: Prompt
    tokens: NDArray[np.int32]
    """[C] int32; what was sampled, the end token included when it was."""
    finish_reason: str
    """``stop`` or ``length``."""
    render: Callable[[NDArray[np.int32]], str]
    """The env's tokens as text, without its end tokens."""

    @cached_property
    def text(self) -> str:
        """The completion as text; made when the first function asks for it."""
        return self.render(self.tokens)


RewardFunction = Callable[[Answered], float]
"""Earned by one completion; finite. True and False count as 1 and 0."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A reward function that compares the text with the prompt's answer. It raises ValueError where there is none."""

    is_right: Callable[[str, str], bool]
    """Comparison of (text, answer)."""

    def __call__(self, answered: Answered) -> float:
        answer = answered.prompt.answer
        if why := not_comparable(answer):
            raise ValueError(why)
        return float(self.is_right(answered.text, str(answer)))


def not_comparable(answer: object) -> str:
    """The reason why no text can be compared with an answer; "" when there is none."""
    if answer is None:
        return "there is no answer to compare with"
    is_one = isinstance(answer, str | int | float)
    return "" if is_one else f"an answer that is compared must be text or a number, got {str(answer)[:40]!r}"


@validate_call
def exact_match(*, strip: bool = True, ignore_case: bool = False) -> RewardFunction:
    """1 when the text is the prompt's answer, else 0.

    Args:
        strip: white space around both does not count.
        ignore_case: neither do capitals.
    """

    def same(*texts: str) -> bool:
        if strip:
            texts = tuple(text.strip() for text in texts)
        if ignore_case:
            texts = tuple(text.casefold() for text in texts)
        return texts[0] == texts[1]

    return Compared(same)


@validate_call
def regex_match(pattern: str, *, compare: bool = False, last: bool = True) -> RewardFunction:
    """1 when `pattern` is found in the text, else 0.

    Args:
        pattern: `re` syntax; ``.`` matches new lines, too.
        compare: what is found must also be the prompt's answer, white space around it aside: the group named
            ``answer`` when there is one, else the first group, else all of it.
        last: of several matches the last one is compared; False: the first.

    Raises:
        ConfigError: the pattern is none.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward pattern {pattern!r} is not a regular expression: {error}") from error
    group: str | int = "answer" if "answer" in compiled.groupindex else min(compiled.groups, 1)

    def holds(text: str, answer: str) -> bool:
        matches = list(compiled.finditer(text))
        return bool(matches) and (matches[-1 if last else 0].group(group) or "").strip() == answer.strip()

    return Compared(holds) if compare else lambda answered: float(compiled.search(answered.text) is not None)


class Length(Table):
    """The effect of a completion's length, in tokens, on its reward R; L is the target, n the length.

    ==========  ==================================================
    ``exact``   R - coefficient * abs(L - n)
    ``max``     R * clip(coefficient * (L - n) + slack, 0, 1)
    ``clip``    R if n <= L else 0
    ==========  ==================================================

    Source: ``exact`` and ``max`` are LCPO's (Aggarwal and Welleck 2025, "L1: Controlling How Long A Reasoning Model
    Thinks With Reinforcement Learning", section 3; there R is 0 or 1); ``clip`` is the hard limit.

    Example:
        >>> Length(form="exact", target=10, coefficient=0.01).applied(1.0, 30)
        0.8
        >>> [Length(form="max", target=10, coefficient=0.1).applied(1.0, n) for n in (5, 10, 12, 15)]
        [1.0, 0.5, 0.3, 0.0]
    """

    form: Literal["exact", "max", "clip"]
    target: Count
    """Tokens; a prompt's metadata may name another one as ``target_length``."""
    coefficient: float = Field(0.0003, ge=0)
    """Reward per token."""
    slack: Share = 0.5
    """Share of the reward that ``max`` leaves at the target itself."""

    def applied(self, reward: float, tokens: int, *, target: int | None = None) -> float:
        """The reward of a completion of `tokens` tokens; `target` instead of the setting's own."""
        over = tokens - (self.target if target is None else target)
        if self.form == "exact":
            return reward - self.coefficient * abs(over)
        if self.form == "max":
            return reward * min(1.0, max(0.0, self.slack - self.coefficient * over))
        return reward if over <= 0 else 0.0


OptionalLength = Annotated[Length | None, BeforeValidator(lambda given: None if given == {} else given)]
"""A length reward; an empty table is none."""


class Rewards:
    """Several reward functions, and how they become one score.

    Args:
        functions: name -> (function, weight). A weight of 0 only records.
        length: what the length does to the weighted sum; None: nothing.
        success: name of the function whose value of 1 or more is called a success, under its own name; "": none.
        on_error: ``fail``: an exception in a function costs the rollout, which counts as failed: a defect must not
            look like a bad answer. ``zero``: the function counts 0, and the score's metadata says why in
            ``reward_errors``: for functions that are known to raise on nonsense.

    Raises:
        ConfigError: no function, or one that is a coroutine, a weight that is not finite.
    """

    def __init__(
        self,
        functions: Mapping[str, tuple[RewardFunction, float]],
        *,
        length: Length | None = None,
        success: str = "",
        on_error: OnError = "fail",
    ) -> None:
        for name, (function, weight) in functions.items():
            if inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"reward {name}: a coroutine; an env whose score waits writes `async def score` itself"
                )
            if not math.isfinite(weight):
                raise ConfigError(f"reward {name}: weight {weight} is not finite")
        for what, value, allowed in (("on_error", on_error, get_args(OnError)), ("success", success, ["", *functions])):
            if value not in allowed:
                raise ConfigError(f"rewards: {what} = {value!r} is not one of {', '.join(filter(None, allowed))}")
        if not functions:
            raise ConfigError("rewards: at least one function is needed")
        self.functions, self.length, self.success, self.on_error = dict(functions), length, success, on_error

    @property
    def compares(self) -> bool:
        """True where one of the functions compares with the prompt's answer."""
        return any(isinstance(function, Compared) for function, _ in self.functions.values())

    def score(self, answered: Answered) -> Score:
        """Scores a completion.

        Raises:
            RewardFailed: a function raised or returned no finite number, and `on_error` is ``fail``.
        """
        values: dict[str, float] = {}
        errors: dict[str, str] = {}
        for name, (function, _) in self.functions.items():
            try:
                values[name] = _finite(function(answered))
            except Exception as error:  # the function is the user's code
                if self.on_error == "fail":
                    raise RewardFailed(f"reward {name}: {type(error).__name__}: {error}") from error
                values[name], errors[name] = 0.0, f"{type(error).__name__}: {error}"
        reward = sum(weight * values[name] for name, (_, weight) in self.functions.items())
        rewards = dict(values)
        if self.length is not None:
            target_length = answered.prompt.metadata.get("target_length")
            shaped = self.length.applied(
                reward, len(answered.tokens), target=None if target_length is None else int(target_length)
            )
            rewards["length"] = shaped - reward
            reward = shaped
        return Score(
            reward=reward,
            rewards=rewards,
            successes={self.success: values[self.success] >= 1} if self.success else {},
            metadata={"reward_errors": errors} if errors else {},
        )


KINDS: Mapping[str, Callable[..., RewardFunction]] = {"exact": exact_match, "regex": regex_match}
"""Kinds of reward that settings may name; the user's own is ``package.module:function``."""


def make_rewards(options: Mapping[str, Any], *, length: Length | None = None, on_error: OnError = "fail") -> Rewards:
    """Makes rewards from settings.

    Each option is ``name = weight`` (the kind is the name) or ``name = { kind = ..., weight = 1.0, ... }`` with the
    kind's own options; a kind is ``exact``, ``regex``, or ``package.module:function`` of the user's, which is called
    with an :class:`Answered`. The first one is the success.

    Raises:
        ConfigError: an unknown kind or option, or a value out of range.
    """
    functions = {name: _function(name, option) for name, option in options.items()}
    success = next(iter(functions), "")
    return Rewards(functions, length=length, success=success, on_error=on_error)


def _function(name: str, option: Any) -> tuple[RewardFunction, float]:
    table = dict(option) if isinstance(option, Mapping) else {"weight": option}
    kind, weight = str(table.pop("kind", name)), table.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"reward {name}: weight = {weight!r} is not a number")
    try:
        if kind in KINDS:
            return KINDS[kind](**table), float(weight)
        if ":" in kind and not table:
            return target(kind), float(weight)
    except ValidationError as error:
        parameters = tuple(inspect.signature(KINDS[kind]).parameters)
        raise refusal(error, section=f"env_options.rewards.{name}", fields=parameters) from None
    except ImportError as error:
        raise ConfigError(f"reward {name}: {error}") from error
    raise ConfigError(
        f"reward {name}: kind = {kind!r} must be one of {', '.join(KINDS)}, or package.module:function of your own, "
        f"which takes no options, got {table}"
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
