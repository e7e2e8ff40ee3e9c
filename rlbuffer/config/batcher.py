"""Settings of the batcher, with default, unit and reason. Everything that can never make a batch is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.refusal import refusing_as_config_error
from rlbuffer.config.table import DOTTED, Age, Budget, Count, Flat, Names, NoTruth, Seconds, Share
from rlbuffer.records.checks import MAX_COUNT

ESTIMATOR_NAMES = ("rloo", "grpo", "dr_grpo", "max_rl", "opo", "reinforce", "length_penalty")
"""Built-in estimators of advantages (:mod:`rlbuffer.batcher.advantages`)."""


def compares(estimator: str) -> bool:
    """True for an estimator that compares a rollout with the others of its group: one alone has an advantage of 0. One
    of the user's own says itself what one alone has."""
    return estimator in ESTIMATOR_NAMES and estimator != "reinforce"


ORDERS = ("newest_first", "oldest_first", "priority")
"""Built-in orders of an env's groups."""


def _estimator(name: str) -> str:
    if name not in ESTIMATOR_NAMES and not DOTTED.match(name):
        raise ValueError(f"is none of {', '.join(ESTIMATOR_NAMES)}, nor one of yours as package.module:name")
    return name


def _order(name: str) -> str:
    if name not in ORDERS and not DOTTED.match(name):
        raise ValueError(f"must be {', '.join(ORDERS)} or a selector of yours as package.module:name")
    return name


ADAPTER_BATCH_SIZE = 64
"""Rollouts of one optimizer step of an adapter that `adapters` does not name, at least."""
Estimator = Annotated[str, AfterValidator(_estimator)]
Adapter = Annotated[str, Field(min_length=1, max_length=128)]
Cost = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Groups = Annotated[int, Field(ge=0, le=MAX_COUNT), BeforeValidator(lambda value: 0 if value is None else value)]
"""Number of groups, 0 for no limit. A run that an older checkout began has None for that."""
_RECORD = ConfigDict(extra="forbid", allow_inf_nan=False)


@refusing_as_config_error
@dataclass(frozen=True, kw_only=True, config=_RECORD)
class EnvConfig(NoTruth):
    """Overrides for one env; where one is not set, the batcher's own value counts."""

    max_age: Age | None = None
    """Policy versions."""
    max_age_seconds: Seconds | None = None
    """Seconds since a group's first push."""
    min_group_size: Count | None = None
    """Rollouts."""
    advantage: Estimator | None = None
    """Estimator by name, or the user's own."""


@refusing_as_config_error
@dataclass(frozen=True, kw_only=True, config=_RECORD)
class AdapterConfig(NoTruth):
    """Settings of one LoRA adapter."""

    batch_size: Count
    """Rollouts of one of its optimizer steps, at least."""


STREAM: Mapping[str, Any] = {
    "step_groups": 1,
    "order": "oldest_first",
    "lookahead": 8,
    "row_tokens": 2**20,
}
"""What holds for a stream where the settings say nothing else."""
WAITING: Mapping[str, Any] = {"order": "oldest_first"}
"""What holds where steps wait for slow groups and the settings say nothing else."""
ONLY_RANKS: Mapping[str, Any] = {
    "micro_batches_per_rank": 1,
    "rows_per_micro_batch": 1,
    "step_rollouts": None,
    "step_groups": 1,
    "close_fill": 0.95,
    "order": "oldest_first",
    "max_uses": 1,
    "replay_fraction": 0.5,
    "cost": (24576, 1),
    "fill_timeout_seconds": None,
    "advantage_scale": "none",
    "truncated": "train",
    "slow": "drop",
}
"""Settings of steps that are planned in rows, each with the only value that a stream may have."""


@refusing_as_config_error
@dataclass(frozen=True, config=_RECORD)
class BatcherConfig(NoTruth):
    """The settings by which the batcher forms steps.

    Raises:
        ConfigError: a value is outside its range or can never make a batch; the message names the setting.
    """

    row_tokens: Count
    """Tokens a row may hold: the longest rollout, and what one forward pass has memory for."""
    micro_batches_per_rank: Count = 1
    """Forward passes per rank and step. A step's capacity is world size x this x rows_per_micro_batch rows."""
    rows_per_micro_batch: Count = 1
    """Rows of one forward pass."""
    step_rollouts: Count | None = None
    """Close a step at this many rollouts, in place of a number of groups."""
    step_groups: Groups = 32
    """Close a step at this many groups. 0: by capacity alone, when its rows are full; so it is with `step_rollouts`."""
    close_fill: Share = 0.95
    """Share of the capacity at which a step with every env near its share closes at once. 0-1."""
    lookahead: Age = 1
    """Steps that may be committed ahead of the trainer: 1 is one-step off-policy, 0 waits for each step."""
    max_age: Age = 1
    """Policy versions: a rollout older than this at the step that would train it is dropped as stale."""
    max_age_seconds: Seconds | None = None
    """Seconds since a group's first push; not set: no limit."""
    min_group_size: Count = 1
    """Rollouts with which a group may still be trained after the timeout."""
    group_timeout_seconds: Seconds = 300.0
    """Seconds after which a group that is not full closes with what it has, or is dropped as small."""
    flat: Flat = "keep"
    """Groups that teach nothing, as where rewards differ by at most 1e-6 of the largest: keep (dropping can starve an
    env that is solved), drop, or the share of a step, 0-1, up to which they are kept; what exceeds it is dropped."""
    oversized: Literal["drop", "truncate"] = "drop"
    """Rollouts longer than a row: dropped by the batcher, or cut by the writer at push and flagged is_truncated."""
    advantage: Estimator = "rloo"
    """Estimator by name: rloo, grpo, dr_grpo, max_rl, opo, reinforce, length_penalty, or the user's own,
    ``package.module:name``."""
    budgets: Mapping[Names, Budget] = field(default_factory=dict)
    """env -> fraction of a step's tokens, or a list of [step, fraction], linear in between. Sum at most 1 at every
    step; the remainder goes to the envs not named."""
    remainder: Names = "proportional"
    """Receiver of what budgets leave over: proportional | equal | the name of an env."""
    unit: Literal["tokens", "rollouts", "groups"] = "tokens"
    """Unit that budgets count."""
    order: Annotated[str, AfterValidator(_order)] = "newest_first"
    """Order of the groups of an env: newest_first (the freshest data), oldest_first (fewer groups thrown away),
    priority (largest variance in reward), or the user's own selector, ``package.module:name``."""
    spillover: Literal["block", "borrow", "partial"] = "block"
    """Behaviour while an env is short of its share: wait for it; let the other envs fill its place, which it gets back
    later; or close the step with what is there."""
    spill_after_seconds: Seconds = 60.0
    """Seconds that an env is short before spillover acts; `block` never does."""
    max_uses: Count = 1
    """Number of steps that may train a group. Fresh groups go first: used ones only fill what they leave."""
    replay_fraction: Share = 0.5
    """Largest share of a step that was trained before. 0-1. Without effect while `max_uses` is 1."""
    cost: tuple[Cost, Cost] = (24576, 1)
    """(a, b): a rollout of L tokens costs a*L + b*L^2; the default fits a 7B model."""
    envs: Mapping[Names, EnvConfig] = field(default_factory=dict)
    """Overrides per env."""
    # Only by name: what stands above has a public order.
    env_dead_after_seconds: Seconds = field(default=120.0, kw_only=True)
    """Seconds that a step waits for an env without hearing of it before the env counts as dead."""
    on_dead_env: Literal["wait", "borrow", "stop"] = field(default="wait", kw_only=True)
    """Behaviour then: wait on, with an alert; go on without it until it sends something; or stop the run."""
    adapters: Mapping[Adapter, AdapterConfig] = field(default_factory=dict, kw_only=True)
    """LoRA adapter -> its batch size, where it is not 64."""
    fill_timeout_seconds: Seconds | None = field(default=None, kw_only=True)
    """Seconds that a step waits to fill, since the one before was committed and the first group came that could train;
    then what is ready trains, and what an env was short of it gets later. Not set: it waits until it is full."""
    advantage_scale: Literal["none", "batch"] = field(default="none", kw_only=True)
    """Divisor of advantages: none, or the standard deviation of all rewards of the step."""
    truncated: Literal["train", "mask"] = field(default="train", kw_only=True)
    """Rollouts that are flagged is_truncated: trained, or masked once their rewards have counted in their group."""
    slow: Literal["drop", "wait"] = field(default="drop", kw_only=True)
    """Fate of groups that are still sampled when a step is full, and would be too old for the next one. drop: they are
    lost as stale. wait: the step waits for them and trains them; groups train oldest first then."""
    slow_wait_seconds: Seconds = field(default=60.0, kw_only=True)
    """Longest that a full step waits for them: above what the slowest rollouts take."""
    flat_by: str = field(default="", kw_only=True)
    """Number by which a group is flat where all rollouts have it: the name of one of their `rewards`, or `reward`, the
    whole one. Not set: no trained token has an advantage, no column `advantages` brings one, and the trainer's loss
    needs one (`kl_beta` and `columns` of ``[trainer.loss]`` say that it does not)."""

    feeds: Literal["ranks", "stream"] = field(default="ranks", kw_only=True)
    """Who reads the run. ranks: steps are planned in rows, a part for each rank. stream: one trainer takes group after
    group, the oldest first, and packs for itself; it counts policy versions as it announces them."""

    def __post_init__(self) -> None:
        if self.step_rollouts is not None:
            object.__setattr__(self, "step_groups", 0)  # its default is not meant then

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, given: Any) -> Any:
        """Fills in what follows from other settings where nothing else is said."""
        named = given.kwargs or {} if isinstance(given, ArgsKwargs) else given
        if not isinstance(named, Mapping):
            return given
        implied = {
            **(STREAM if named.get("feeds") == "stream" else {}),
            **(WAITING if named.get("slow") == "wait" else {}),
        }
        if not implied:
            return given
        by_place = given.args if isinstance(given, ArgsKwargs) else ()
        filled = {**implied, **named}
        for name, _ in zip(_PLACES, by_place, strict=False):
            filled.pop(name, None)
        return ArgsKwargs(by_place, filled) if isinstance(given, ArgsKwargs) else filled

    @field_validator("feeds")
    @classmethod
    def _plans_no_rows(cls, value: str, info: ValidationInfo) -> str:
        if value == "stream":
            for name, only in ONLY_RANKS.items():
                if name in info.data and info.data[name] != only:
                    raise ValueError(
                        f"cannot stand beside batcher.{name} = {info.data[name]!r}: a stream hands over one group "
                        f"after the other, oldest first, each once, and plans no rows"
                    )
        return value

    @field_validator("slow")
    @classmethod
    def _in_order(cls, value: str, info: ValidationInfo) -> str:
        if value == "wait" and (order := info.data.get("order", "oldest_first")) != "oldest_first":
            raise ValueError(
                f"cannot stand beside batcher.order = {order!r}: a step that waits for what is oldest takes it first. "
                f"Leave batcher.order out, or set oldest_first"
            )
        return value

    @field_validator("step_groups")
    @classmethod
    def _one_end(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("step_rollouts") is not None:
            raise ValueError("cannot stand beside batcher.step_rollouts: set one of the two")
        return value

    @field_validator("budgets")
    @classmethod
    def _at_most_all(cls, budgets: Mapping[str, Any]) -> Mapping[str, Any]:
        # Between two points the sum is linear: it is largest at one of them.
        for step in sorted({1, *(step for b in budgets.values() if isinstance(b, tuple) for step, _ in b)}):
            if (total := sum(budgets_at(budgets, step).values())) > 1 + 1e-9:
                raise ValueError(f"sum to {total:g} at step {step}: fractions above 1 can never be met")
        return budgets

    @field_validator("cost")
    @classmethod
    def _costs(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not any(value):
            raise ValueError("must not be both 0")
        return value

    @field_validator("advantage_scale")
    @classmethod
    def _divided_once(cls, value: str, info: ValidationInfo) -> str:
        named = [info.data.get("advantage"), *(env.advantage for env in info.data.get("envs", {}).values())]
        if value == "batch" and "grpo" in named:
            raise ValueError("advantage grpo divides by each group's deviation already: use dr_grpo")
        return value

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

    @property
    def is_stream(self) -> bool:
        """True for a run whose groups one trainer takes one by one."""
        return self.feeds == "stream"

    def batch_size(self, adapter: str) -> int:
        """Rollouts of one optimizer step of `adapter`, at least."""
        settings = self.adapters.get(adapter)
        return ADAPTER_BATCH_SIZE if settings is None else settings.batch_size

    def as_dict(self) -> dict[str, Any]:
        """Every setting as msgpack types; what the run's config digest is made of."""
        return dict(_ADAPTER.dump_python(self, mode="json"))


_PLACES = tuple(f.name for f in dataclasses.fields(BatcherConfig))
_ADAPTER = TypeAdapter(BatcherConfig)


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


REMEMBERED_STEPS = 64
"""Steps for which a closed group is remembered at least."""


def remembered_steps(max_age: int) -> int:
    """Steps for which a closed group is remembered at least: data that could be pushed of it when it was closed is too
    old for every step after them. More than that needs, for a `max_age` that an operator raises."""
    return max(REMEMBERED_STEPS, max_age + 2)
