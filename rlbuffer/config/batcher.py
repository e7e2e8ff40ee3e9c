"""Settings of the batcher, with default, unit and reason. Everything that can never make a batch is refused here."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn

from pydantic import ConfigDict, PlainValidator, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from rlbuffer.config.fractions import Points, budgets_at, read_budget, read_flat
from rlbuffer.config.refusal import refusing_as_config_error
from rlbuffer.errors import ConfigError
from rlbuffer.records.checks import MAX_COUNT
from rlbuffer.records.info import ENV_NAME

ESTIMATOR_NAMES = ("rloo", "grpo", "dr_grpo", "max_rl", "opo", "reinforce", "length_penalty")
"""Built-in estimators of advantages (:mod:`rlbuffer.batcher.advantages`)."""
ORDERS = ("newest_first", "oldest_first", "priority")
"""Built-in orders of an env's groups."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
"""The user's own selector or estimator: ``package.module:name``."""
ADAPTER_LENGTH = 128
"""Longest name of an adapter, in characters."""


def no_truth_as_number(value: Any, annotation: Any) -> Any:
    """`value`; ValueError where it is true or false, or holds one, and a number is asked for: Python counts them as 1
    and 0."""
    if "bool" not in str(annotation):
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, bool):
                raise ValueError(f"{str(inner).lower()} is no value of this setting")
    return value


class _Section:
    @field_validator("*", mode="before")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        for inner in value if isinstance(value, list | tuple) else (value,):
            # The run's record, and what is computed from it, hold no larger ones.
            if isinstance(inner, int | float) and MAX_COUNT < abs(inner) < math.inf:
                raise ValueError(f"must lie between -{MAX_COUNT:,} and {MAX_COUNT:,}")
        return no_truth_as_number(value, cls.__annotations__[info.field_name or ""])


@refusing_as_config_error
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EnvConfig(_Section):
    """Overrides for one env; where one is not set, the batcher's own value counts."""

    max_age: int | None = None
    """Policy versions."""
    max_age_seconds: float | None = None
    """Seconds since a group's first push."""
    min_group_size: int | None = None
    """Rollouts."""
    advantage: str | None = None
    """Estimator by name, or the user's own."""


@refusing_as_config_error
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class AdapterConfig(_Section):
    """Settings of one LoRA adapter."""

    batch_size: int
    """Rollouts of one of its optimizer steps, at least."""


@refusing_as_config_error
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BatcherConfig(_Section):
    """The settings by which the batcher forms steps.

    Raises:
        ConfigError: a value is outside its range or can never make a batch; the message names the setting.
    """

    row_tokens: int
    """Tokens a row may hold: the longest rollout, and what one forward pass has memory for."""
    micro_batches_per_rank: int = 1
    """Forward passes per rank and step. A step's capacity is world size x this x rows_per_micro_batch rows."""
    rows_per_micro_batch: int = 1
    """Rows of one forward pass."""
    step_rollouts: int | None = None
    """Close a step at this many rollouts instead of by capacity."""
    step_groups: int | None = None
    """Close a step at this many groups instead of by capacity."""
    close_fill: float = 0.95
    """Share of the capacity at which a step with every env near its share closes at once. 0-1."""
    lookahead: int = 1
    """Steps that may be committed ahead of the trainer: 1 is one-step off-policy, 0 waits for each step."""
    max_age: int = 1
    """Policy versions: a rollout older than this at the step that would train it is dropped as stale."""
    max_age_seconds: float | None = None
    """Seconds since a group's first push; not set: no limit."""
    min_group_size: int = 1
    """Rollouts with which a group may still be trained after the timeout."""
    group_timeout_seconds: float = 300.0
    """Seconds after which a group that is not full closes with what it has, or is dropped as small."""
    flat: Annotated[str | float, PlainValidator(read_flat)] = "keep"
    """Groups that teach nothing, as where rewards differ by at most 1e-6 of the largest: keep (dropping can starve an
    env that is solved), drop, or the share of a step, 0-1, up to which they are kept; what exceeds it is dropped."""
    oversized: Literal["drop", "truncate"] = "drop"
    """Rollouts longer than a row: dropped by the batcher, or cut by the writer at push and flagged is_truncated."""
    advantage: str = "rloo"
    """Estimator by name: rloo, grpo, dr_grpo, max_rl, opo, reinforce, length_penalty, or the user's own,
    ``package.module:name``."""
    budgets: Mapping[str, Annotated[float | Points, PlainValidator(read_budget)]] = field(default_factory=dict)
    """env -> fraction of a step's tokens, or a list of [step, fraction], linear in between. Sum at most 1 at every
    step; the remainder goes to the envs not named."""
    remainder: str = "proportional"
    """Receiver of what budgets leave over: proportional | equal | the name of an env."""
    unit: Literal["tokens", "rollouts", "groups"] = "tokens"
    """Unit that budgets count."""
    order: str = "newest_first"
    """Order of the groups of an env: newest_first (the freshest data), oldest_first (fewer groups thrown away),
    priority (largest variance in reward), or the user's own selector, ``package.module:name``."""
    spillover: Literal["block", "borrow", "partial"] = "block"
    """Behaviour while an env is short of its share: wait for it; let the other envs fill its place, which it gets back
    later; or close the step with what is there."""
    spill_after_seconds: float = 60.0
    """Seconds that an env is short before spillover acts; `block` never does."""
    max_uses: int = 1
    """Number of steps that may train a group. Fresh groups go first: used ones only fill what they leave."""
    replay_fraction: float = 0.5
    """Largest share of a step that was trained before. 0-1. Without effect while `max_uses` is 1."""
    cost: tuple[int, int] = (24576, 1)
    """(a, b): a rollout of L tokens costs a*L + b*L^2; the default fits a 7B model."""
    envs: Mapping[str, EnvConfig] = field(default_factory=dict)
    """Overrides per env."""
    # Only by name: what stands above has a public order.
    env_dead_after_seconds: float = field(default=120.0, kw_only=True)
    """Seconds that a step waits for an env without hearing of it before the env counts as dead."""
    on_dead_env: Literal["wait", "borrow", "stop"] = field(default="wait", kw_only=True)
    """Behaviour then: wait on, with an alert; go on without it until it sends something; or stop the run."""
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict, kw_only=True)
    """LoRA adapter -> its batch size, where it differs."""
    adapter_batch_size: int = field(default=64, kw_only=True)
    """Rollouts of one optimizer step of an adapter that `adapters` does not name, at least."""
    fill_timeout_seconds: float | None = field(default=None, kw_only=True)
    """Seconds that a step waits to fill, since the one before was committed and the first group came that could train;
    then what is ready trains, and what an env was short of it gets later. Not set: it waits until it is full."""
    advantage_scale: Literal["none", "batch"] = field(default="none", kw_only=True)
    """Divisor of advantages: none, or the standard deviation of all rewards of the step."""
    truncated: Literal["train", "mask"] = field(default="train", kw_only=True)
    """Rollouts that are flagged is_truncated: trained, or masked once their rewards have counted in their group."""
    flat_by: str = field(default="", kw_only=True)
    """Number by which a group is flat where all rollouts have it: the name of one of their `rewards`, or `reward`, the
    whole one. Not set: no trained token has an advantage, no column `advantages` brings one, and the trainer's loss
    needs one (`kl_beta` and `columns` of ``[trainer.loss]`` say that it does not)."""

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_shares(self)
        _check_overrides(self)
        object.__setattr__(self, "budgets", MappingProxyType(dict(self.budgets)))
        object.__setattr__(self, "envs", MappingProxyType(dict(self.envs)))
        object.__setattr__(self, "adapters", MappingProxyType(dict(self.adapters)))

    def for_env(self, env: str) -> EnvSettings:
        """The settings that hold for `env`: its overrides, and the batcher's own where it has none."""
        return self._overridden.get(env, self._plain)

    @cached_property
    def _plain(self) -> EnvSettings:
        return EnvSettings.of(self, EnvConfig())

    @cached_property
    def _overridden(self) -> Mapping[str, EnvSettings]:
        return {env: EnvSettings.of(self, override) for env, override in self.envs.items()}

    @property
    def largest_max_age(self) -> int:
        """The largest `max_age` of all envs."""
        return max((self.max_age, *(env.max_age or 0 for env in self.envs.values())))

    def batch_size(self, adapter: str) -> int:
        """Rollouts of one optimizer step of `adapter`, at least."""
        own = self.adapters.get(adapter)
        return self.adapter_batch_size if own is None else own.batch_size

    def as_dict(self) -> dict[str, Any]:
        """Every setting as msgpack types; what the run's config digest is made of."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in ("envs", "adapters"):
                value = {k: dataclasses.asdict(v) for k, v in value.items()}
            elif isinstance(value, Mapping):
                value = {k: [list(point) for point in v] if isinstance(v, tuple) else v for k, v in value.items()}
            elif isinstance(value, tuple):
                value = list(value)
            out[f.name] = value
        return out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """The settings of one env, every value decided. Made once per env of a :class:`BatcherConfig`.

    Example:
        >>> BatcherConfig(8192, max_age=1, envs={"math": EnvConfig(max_age=4)}).for_env("math").max_age
        4
    """

    max_age: int
    """Policy versions."""
    max_age_seconds: float | None
    """Seconds since a group's first push; not set: no limit."""
    min_group_size: int
    """Rollouts."""
    advantage: str
    """Estimator by name, or the user's own."""

    @classmethod
    def of(cls, config: BatcherConfig, override: EnvConfig) -> EnvSettings:
        """`override` where it says something, else `config`."""
        seconds, least = override.max_age_seconds, override.min_group_size
        return cls(
            max_age=config.max_age if override.max_age is None else override.max_age,
            max_age_seconds=config.max_age_seconds if seconds is None else seconds,
            min_group_size=config.min_group_size if least is None else least,
            advantage=config.advantage if override.advantage is None else override.advantage,
        )


def _refuse(setting: str, why: str) -> NoReturn:
    raise ConfigError(f"batcher.{setting} {why}", setting=f"batcher.{setting}")


def _check_ranges(config: BatcherConfig) -> None:
    for names, least, what in (
        (("row_tokens", "micro_batches_per_rank", "rows_per_micro_batch"), 1, "must be at least 1"),
        (("min_group_size", "max_uses", "step_rollouts", "step_groups", "adapter_batch_size"), 1, "must be at least 1"),
        (("lookahead", "max_age"), 0, "must not be negative"),
    ):
        for name in names:
            value = getattr(config, name)
            if value is not None and value < least:
                _refuse(name, f"= {value} {what}")
    if config.step_rollouts is not None and config.step_groups is not None:
        _refuse("step_rollouts", "and batcher.step_groups exclude each other: set one")
    for name in ("close_fill", "replay_fraction"):
        value = getattr(config, name)
        if not 0 <= value <= 1:
            _refuse(name, f"= {value} must lie between 0 and 1")
    for name in (
        "group_timeout_seconds",
        "spill_after_seconds",
        "env_dead_after_seconds",
        "fill_timeout_seconds",
        "max_age_seconds",
    ):
        _check_seconds(name, getattr(config, name))
    if config.order not in ORDERS and not DOTTED.match(config.order):
        _refuse(
            "order",
            f"= {config.order!r} must be {', '.join(ORDERS)} or a selector of yours as package.module:name",
        )
    if min(config.cost) < 0 or sum(config.cost) == 0:
        _refuse("cost", f"= {list(config.cost)} must be two numbers >= 0, not both 0")


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        _refuse(name, f"= {value} must be a positive number of seconds")


def _check_shares(config: BatcherConfig) -> None:
    steps = {1}
    for env, budget in config.budgets.items():
        if not ENV_NAME.match(env):
            _refuse(f"budgets.{env}", "is not an env name")
        if isinstance(budget, tuple):
            steps |= _check_points(f"budgets.{env}", budget)
        elif not (math.isfinite(budget) and 0 < budget <= 1):
            _refuse(f"budgets.{env}", f"= {budget} must be above 0 and at most 1")
    # Between two points the sum is linear: it is largest at one of them.
    for step in sorted(steps):
        total = sum(budgets_at(config.budgets, step).values())
        if total > 1 + 1e-9:
            when = f" at step {step}" if len(steps) > 1 else ""
            _refuse("budgets", f"sum to {total:g}{when}: fractions above 1 can never be met")
    if config.remainder not in ("proportional", "equal") and not ENV_NAME.match(config.remainder):
        _refuse("remainder", f"= {config.remainder!r} must be proportional, equal or the name of an env")


def _check_points(name: str, points: Points) -> set[int]:
    """Returns the steps of a schedule."""
    shown = [list(point) for point in points]
    steps = [step for step, _ in points]
    if any(step < 1 for step in steps) or any(b <= a for a, b in itertools.pairwise(steps)):
        _refuse(name, f"= {shown} must name steps from 1 on, in ascending order")
    if not all(math.isfinite(fraction) and 0 <= fraction <= 1 for _, fraction in points):
        _refuse(name, f"= {shown} must hold fractions between 0 and 1")
    if not any(fraction for _, fraction in points):
        _refuse(name, f"= {shown} is 0 at every step: leave the env out")
    return set(steps)


def _check_overrides(config: BatcherConfig) -> None:
    _check_estimator("advantage", config.advantage, scale=config.advantage_scale)
    for env, override in config.envs.items():
        place = f"envs.{env}"
        if not ENV_NAME.match(env):
            _refuse(place, "is not an env name")
        if override.advantage is not None:
            _check_estimator(f"{place}.advantage", override.advantage, scale=config.advantage_scale)
        _check_seconds(f"{place}.max_age_seconds", override.max_age_seconds)
        if override.max_age is not None and override.max_age < 0:
            _refuse(f"{place}.max_age", f"= {override.max_age} must not be negative")
        if override.min_group_size is not None and override.min_group_size < 1:
            _refuse(f"{place}.min_group_size", f"= {override.min_group_size} must be at least 1")

    for adapter, settings in config.adapters.items():
        place = f"adapters.{adapter}"
        if not adapter:
            _refuse("adapters", "names the adapter '': all weights make an optimizer step with every step")
        if len(adapter) > ADAPTER_LENGTH:
            _refuse(place, f"is not an adapter name: it has {len(adapter)} characters, at most {ADAPTER_LENGTH}")
        if settings.batch_size < 1:
            _refuse(f"{place}.batch_size", f"= {settings.batch_size} must be at least 1")


def _check_estimator(setting: str, name: str, *, scale: str) -> None:
    if name not in ESTIMATOR_NAMES and not DOTTED.match(name):
        names = ", ".join(ESTIMATOR_NAMES)
        _refuse(setting, f"= {name!r} is not an estimator: {names}, or one of yours as package.module:name")
    if name == "grpo" and scale == "batch":
        _refuse(
            setting, "= 'grpo' divides by each group's deviation: with batcher.advantage_scale = 'batch' use dr_grpo"
        )


REMEMBERED_STEPS = 64
"""Steps for which a closed group is remembered at least."""


def remembered_steps(max_age: int) -> int:
    """Steps for which a closed group is remembered at least: data that could be pushed of it when it was closed is too
    old for every step after them. More than that needs, for a `max_age` that an operator raises."""
    return max(REMEMBERED_STEPS, max_age + 2)
