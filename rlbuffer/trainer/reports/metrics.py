"""The record of a trained step: one JSON object per step in ``metrics.jsonl``, written by rank 0."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlbuffer.events.trainer import StepTrained
from rlbuffer.metrics.moments import NOTHING, merged, moments_of, spread
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_plan import version_trained
from rlbuffer.trainer.update.pass_times import PassTimes
from rlbuffer.trainer.update.ratios import Ratios, ratios_of
from rlbuffer.trainer.update.update import SUMS

FILE_NAME = "metrics.jsonl"
SUMMED = ("rollouts", "truncated", "on_policy", "response_tokens")
"""Counts of an env that ranks add up."""


class Stopwatch:
    """Seconds per part of a step, and in all since it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since it was made, measured parts or not."""
        return time.perf_counter() - self._began

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the block's time to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


class Tally:
    """The counts that one rank makes while it trains a step."""

    def __init__(self, ranks: Ranks, step: Step) -> None:
        self._ranks = ranks
        self._step = step
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)
        """[len(SUMS)] over this rank's micro-batches and all updates."""
        self.ratios = Ratios()
        self.pass_times = PassTimes(ranks.device)
        self.updates = 1
        """Optimizer updates of the step. Each has a loss of its own; what is reported is their mean."""
        self.gradient_norm = 0.0
        """Of the last update, before clipping; equal on all ranks."""
        self.learning_rate = 0.0
        """Of the last update."""

    def over_ranks(self, watch: Stopwatch) -> dict[str, Any]:
        """The parts of a step's record that ranks must add up. All ranks call it, each with its own watch."""
        totals = dict(zip(SUMS, self._ranks.sum(self.sums).tolist(), strict=True))
        parts = [json.loads(text) for text in self._ranks.gather_text(json.dumps(self._part(watch)))]
        trained = max(1.0, totals["loss_tokens"])
        envs = _added(part["envs"] for part in parts)
        rollouts = sum(env["rollouts"] for env in envs.values())
        tokens, slots = sum(part["rank"]["tokens"] for part in parts), sum(part["slots"] for part in parts)
        return {
            "loss": totals["loss"] / max(1, self.updates),
            "entropy": totals["entropy"] / trained,
            "kl": totals["kl"] / trained,
            "ratio": ratios_of([part["ratios"] for part in parts]),
            "clip_fraction": totals["clipped"] / trained,
            "reward_parts": {
                env: {name: total / n for name, (total, n) in sorted(values["rewards"].items())}
                for env, values in envs.items()
                if values["rewards"]
            },
            "reward_std": {env: std for env, its in envs.items() if (std := spread(its["scores"])) is not None},
            "on_policy": sum(env["on_policy"] for env in envs.values()) / max(1, rollouts),
            "on_policy_by_env": {env: values["on_policy"] / values["rollouts"] for env, values in envs.items()},
            "response_tokens": {env: values["response_tokens"] / values["rollouts"] for env, values in envs.items()},
            "padding": 1.0 - tokens / max(1, slots),
            "truncated": sum(env["truncated"] for env in envs.values()) / max(1, rollouts),
            "truncated_by_env": {env: values["truncated"] / values["rollouts"] for env, values in envs.items()},
            "trained_tokens": int(totals["tokens"]),
            "length_squares": sum(part["length_squares"] for part in parts),
            "memory_bytes": max(part["memory_bytes"] for part in parts),
            "ranks": [part["rank"] for part in parts],
        }

    def _part(self, watch: Stopwatch) -> dict[str, Any]:
        """This rank's own, JSON types. Rewards are of the rollouts that it holds: no rollout is on two ranks."""
        envs: dict[str, dict[str, Any]] = {}
        rewards: dict[str, list[float]] = {}
        squares = tokens = 0
        step, adapters = self._step.number, self._step.header.adapters
        for sample in (s for micro_batch in self._step for s in micro_batch.samples):
            squares += sample.length**2
            tokens += sample.length
            env = envs.setdefault(sample.env, _no_counts())
            env["rollouts"] += 1
            env["truncated"] += int(sample.is_truncated)
            env["on_policy"] += int(sample.policy_versions[0] >= version_trained(adapters, sample.adapter, step))
            env["response_tokens"] += sample.length - sample.prompt_tokens
            if sample.reward is not None:
                rewards.setdefault(sample.env, []).append(sample.reward)
            for name, value in sample.rewards.items():
                total, n = env["rewards"].get(name, (0.0, 0))
                env["rewards"][name] = (total + value, n + 1)
        for name, values in rewards.items():
            envs[name]["scores"] = moments_of(values)
        memory = memory_bytes(self._ranks.device)
        wait = watch.seconds.get("wait", 0.0)
        seconds = {part: round(value, 6) for part, value in {"wait": wait, **self.pass_times.seconds()}.items()}
        return {
            "envs": envs,
            "length_squares": squares,
            "slots": sum(micro_batch.length for micro_batch in self._step),
            "ratios": self.ratios.counts(),
            "memory_bytes": memory,
            "rank": {"tokens": tokens, **seconds},
        }


def _no_counts() -> dict[str, Any]:
    """The counts of an env before its first rollout."""
    return {**dict.fromkeys(SUMMED, 0), "scores": NOTHING, "rewards": {}}


def _added(parts: Iterator[Mapping[str, Any]] | Any) -> dict[str, dict[str, Any]]:
    """env -> counts, summed over the ranks' parts."""
    out: dict[str, dict[str, Any]] = {}
    for part in parts:
        for env, values in part.items():
            into = out.setdefault(env, _no_counts())
            for name in SUMMED:
                into[name] += values[name]
            into["scores"] = merged((into["scores"], values["scores"]))
            for name, (total, n) in values["rewards"].items():
                before, m = into["rewards"].get(name, (0.0, 0))
                into["rewards"][name] = (before + total, m + n)
    return dict(sorted(out.items()))


def memory_bytes(device: torch.device) -> int:
    """Most memory that this process has used so far: on the GPU where it trains on one, else resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def step_record(
    step: Step,
    counted: Mapping[str, Any],
    *,
    gradient_norm: float,
    learning_rate: float,
    damaged_tokens: int,
    watch: Stopwatch,
    world_size: int,
) -> StepTrained:
    """The record of one step. `counted` is :meth:`Tally.over_ranks`."""
    header = step.header
    total = max(watch.total, 1e-9)
    seconds = {part: round(value, 6) for part, value in watch.seconds.items()}
    return StepTrained(
        step=step.number,
        epoch=step.epoch,
        digest=step.digest,
        time=time.time(),
        reward=header.reward,
        rewards={env: values["reward"] for env, values in header.envs.items()},
        loss=counted["loss"],
        entropy=counted["entropy"],
        kl=counted["kl"],
        ratio=counted["ratio"],
        clip_fraction=counted["clip_fraction"],
        reward_parts=counted["reward_parts"],
        reward_std=counted["reward_std"],
        on_policy=counted["on_policy"],
        on_policy_by_env=counted["on_policy_by_env"],
        response_tokens=counted["response_tokens"],
        fill=header.fill,
        padding=counted["padding"],
        closed_by=header.closed_by,
        truncated=counted["truncated"],
        truncated_by_env=counted["truncated_by_env"],
        memory_bytes=counted["memory_bytes"],
        ranks=counted["ranks"],
        grad_norm=gradient_norm,
        learning_rate=learning_rate,
        age=header.age,
        max_age=header.max_age,
        ages={env: values["age"] for env, values in header.envs.items()},
        tokens=header.tokens,
        tokens_by_env={env: values["tokens"] for env, values in header.envs.items()},
        tokens_per_second=round(header.tokens / total, 3),
        loss_tokens=step.normalizers.loss_tokens,
        damaged_tokens=damaged_tokens,
        rollouts=step.rollouts,
        groups=step.groups,
        world_size=world_size,
        wait=round(watch.seconds.get("wait", 0.0) / total, 6),
        seconds=seconds | {"total": round(total, 6)},
    )


def finite(value: Any) -> Any:
    """`value` as JSON may hold it: what is not finite becomes None, as JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value


class MetricsFile:
    """Appends to ``metrics.jsonl``. A step that is trained again after a restart has a second line."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, readable at once. A number that is not finite becomes null."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
