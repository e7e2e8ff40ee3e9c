"""The server memory that a run needs, against what server.maxmemory says there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.models import config_of, experts_in
from rlbuffer.config.settings import RunSettings, ServerSettings, WorkerSettings
from rlbuffer.config.table import SIZE
from rlbuffer.state.text import plural

FORECAST_SHARE = 0.60
"""Share of maxmemory that the steps may take that must be there at the same time."""
ASK_SHARE = 0.70
"""Share of maxmemory from which a checkpoint is asked for."""
FULL_SHARE = 0.97
"""Share of maxmemory from which pushes may be refused."""
LEAST_BYTES = 2**22
"""A maxmemory below this holds the server itself, and hardly anything else."""
TOKEN_BYTES = 9
"""Bytes of a token in the required columns: tokens int32, loss_mask bool, logprobs float32."""
ROLLOUT_BYTES = 450
"""Bytes that the server holds of a rollout beyond its required columns: details and alignment (90), keys and the
allocator's rounding (160-410), its places in the pool and in its step's part (150). Measured with Valkey 9.1.2, groups
of 8."""

GROUP_SIZE: int = WorkerSettings.model_fields["group_size"].default
"""Rollouts of a group, where the settings name no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The memory that the steps of a run take on the server."""

    step_bytes: int
    """One step, by the settings."""
    steps: int
    """Steps that must be there at once: lookahead + max_age + 3."""
    limit: int
    """The server's maxmemory, bytes."""
    is_most: bool = False
    """`step_bytes` is what a step takes at most: it closes at a number of groups or rollouts, whatever their length."""

    @property
    def needed(self) -> int:
        """Bytes of the steps that must be there at once."""
        return self.steps * self.step_bytes

    @property
    def fits(self) -> bool:
        """They take at most :data:`FORECAST_SHARE` of the limit."""
        return self.needed <= FORECAST_SHARE * self.limit


def forecast_of(settings: RunSettings, limit: int) -> Forecast | None:
    """The memory that these settings need of a server of `limit` bytes; None of a stream, whose steps have no rows."""
    batcher, world_size = settings.batcher, settings.trainer.world_size
    group_size = max([worker.group_size for worker in settings.worker.values()], default=GROUP_SIZE)
    recorded = recorded_bytes(settings)
    size = capacity_bytes(batcher, world_size, recorded)
    most = most_bytes(batcher, world_size, group_size, recorded)
    step_bytes = most if size is None else size
    if step_bytes is None:
        return None
    return Forecast(step_bytes=step_bytes, steps=steps_at_once(batcher), limit=limit, is_most=size is None)


def recorded_bytes(settings: RunSettings) -> int:
    """Bytes of a token in the column of its experts; 0 where nobody records them, or the model's config is not here."""
    if not settings.gateway.record_experts and not any(one.record_experts for one in settings.worker.values()):
        return 0
    counts = experts_in(config_of(settings.model))
    return 0 if counts is None else counts.bytes_per_token


def steps_at_once(config: BatcherConfig) -> int:
    """``lookahead + max_age + 3``, with the largest max_age of all envs: ``lookahead`` + 1 steps that are committed and
    not trained, ``max_age`` + 1 of what is pushed and not committed, and one that is trained and not retired.

    Example:
        >>> steps_at_once(BatcherConfig(8192, lookahead=1, max_age=2))
        6
    """
    ages = [config.max_age, *(env.max_age for env in config.envs.values() if env.max_age is not None)]
    return config.lookahead + max(ages) + 3


def capacity_bytes(config: BatcherConfig, world_size: int, recorded: int = 0) -> int | None:
    """Bytes that a full step takes: ``rows x (row_tokens x (9 + recorded) + 450)``, rows = world size x rows per rank,
    `recorded` as :func:`recorded_bytes` has it.

    A row is counted as one rollout: the least there can be, so that nothing is refused that could have worked. Other
    columns and texts are not known either. None when steps close at a number of rollouts or groups: how long those are
    is known when the first step is there, and :func:`most_bytes` what they take at most.
    """
    if config.step_rollouts is not None or config.step_groups:
        return None
    rows = _rows(config, world_size)
    return rows * (config.row_tokens * (TOKEN_BYTES + recorded) + ROLLOUT_BYTES)


def most_bytes(config: BatcherConfig, world_size: int, group_size: int, recorded: int = 0) -> int | None:
    """Bytes that a step takes at most which closes at a number of groups or rollouts, without other columns and
    texts: its rows are full all the same, ``rows x row_tokens x (9 + recorded)``, and it holds so many rollouts, 450
    each. None when
    steps close by capacity, and of a stream, whose steps have no rows.

    Args:
        group_size: rollouts of a group, at most.
    """
    rollouts = config.step_groups * group_size if config.step_rollouts is None else config.step_rollouts
    if not rollouts or config.is_stream:
        return None
    return _rows(config, world_size) * config.row_tokens * (TOKEN_BYTES + recorded) + rollouts * ROLLOUT_BYTES


def _rows(config: BatcherConfig, world_size: int) -> int:
    return world_size * config.micro_batches_per_rank * config.rows_per_micro_batch


def does_not_fit(forecast: Forecast, config: BatcherConfig, *, world_size: int) -> str:
    """The reason why a run cannot work there, with the numbers and what to change."""
    rows = _rows(config, world_size)
    least = math.ceil(forecast.needed / FORECAST_SHARE / 2**20)
    oldest = forecast.steps - config.lookahead - 3
    return (
        f"the run does not fit the server's memory: a step takes {mib(forecast.step_bytes)} ({plural(rows, 'row')} of "
        f"{config.row_tokens} tokens, world size {world_size}), and {forecast.steps} of them (lookahead "
        f"{config.lookahead} + max_age {oldest} + 3) take {mib(forecast.needed)}, above {100 * FORECAST_SHARE:.0f} % "
        f"of its maxmemory of {mib(forecast.limit)}. Give it at least {least} MiB (server.maxmemory; `redis-cli config "
        f"set maxmemory` on a server of your own), or make steps smaller (batcher.row_tokens, micro_batches_per_rank "
        f"or rows_per_micro_batch, trainer.world_size), or lower batcher.lookahead or max_age"
    )


def may_not_fit(forecast: Forecast, config: BatcherConfig) -> str:
    """What a run may need at most that is above what there is, with the numbers."""
    oldest = forecast.steps - config.lookahead - 3
    return (
        f"the run may not fit the server's memory: a step takes up to {mib(forecast.step_bytes)} where its rows are "
        f"full, and {forecast.steps} of them (lookahead {config.lookahead} + max_age {oldest} + 3) up to "
        f"{mib(forecast.needed)}, above {100 * FORECAST_SHARE:.0f} % of its maxmemory of {mib(forecast.limit)}"
    )


def mib(size: int) -> str:
    """Bytes as mebibytes, for people."""
    return f"{size / 2**20:.1f} MiB"


def memory_bytes(settings: ServerSettings) -> int:
    """`maxmemory` in bytes, as the server reads it; 0: no limit."""
    number, unit = SIZE.fullmatch(settings.maxmemory.lower()).groups()  # type: ignore[union-attr]
    thousands = {"": 1, "b": 1, "k": 1000, "kb": 1024, "m": 1000**2, "mb": 1024**2, "g": 1000**3, "gb": 1024**3}
    return int(number) * thousands[unit]
