"""What one rank counts while it trains a step, and the step's record, made of what all ranks counted."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlbuffer.config.losses import STAGES, LossChoice, corrections_of
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.step_record import StepRecord
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.update.drift import Drift, drift_of
from rlbuffer.trainer.update.ratios import Ratios, ratios_of
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.update import SUMS


class Tally:
    """The counts that one rank makes while it trains a step, by the loss that the settings choose."""

    def __init__(self, ranks: Ranks, step: Step, loss: LossChoice) -> None:
        self._ranks = ranks
        self._step = step
        self._loss = loss
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)
        """[len(SUMS)] over this rank's micro-batches and all updates."""
        self.ratios = Ratios()
        self.drift = Drift()
        self.bfloat16_rms: float | None = None
        """Of the trainer's start, over all ranks."""
        self.pass_times = Stopwatch(ranks.device)
        self.updates = 1
        """Optimizer updates of the step. Each has a loss of its own; what is reported is their mean."""
        self.gradient_norm = 0.0
        """Of the last update, before clipping; equal on all ranks."""
        self.learning_rate = 0.0
        """Of the last update."""
        self.damaged_tokens = 0

    def record(self, watch: Stopwatch, utilization: Utilization) -> StepRecord:
        """The step's record, but for what the run adds. All ranks call it, each with its own watch."""
        step, header = self._step, self._step.header
        sums = dict(zip(SUMS, self._ranks.sum(self.sums).tolist(), strict=True))
        parts = [json.loads(text) for text in self._ranks.gather_text(json.dumps(self._part(watch)))]
        envs, named, counts = (_added(part[table] for part in parts) for table in ("envs", "named", "counts"))
        trained, rollouts = (
            max(1.0, sums["loss_tokens"]),
            max(1.0, sum(amounts["rollouts"] for amounts in envs.values())),
        )
        squares = sum(amounts["length_squares"] for amounts in envs.values())
        total = max(watch.total, 1e-9)

        def share(name: str) -> float:
            return sum(amounts[name] for amounts in envs.values()) / rollouts

        def by_env(name: str) -> dict[str, float]:
            return {env: amounts[name] / amounts["rollouts"] for env, amounts in envs.items()}

        return StepRecord(
            step=step.number,
            epoch=step.epoch,
            digest=step.digest,
            time=time.time(),
            reward=header.reward,
            rewards={env: amounts["reward"] for env, amounts in header.envs.items()},
            reward_parts={
                env: {name: value / counts[env][name] for name, value in sorted(values.items())}
                for env, values in named.items()
            },
            reward_std={env: _spread(amounts) for env, amounts in envs.items() if amounts["scored"] > 1},
            loss=sums["loss"] / max(1, self.updates),
            entropy=sums["entropy"] / trained,
            kl=sums["kl"] / trained,
            ratio=ratios_of([part["ratios"] for part in parts]),
            drift=drift_of(self._ranks.sum(self.drift.sums)),
            bfloat16_rms=self.bfloat16_rms,
            clip_fraction=sums["masked/clip"] / trained,
            **self._masked(sums, sum(amounts["truncated_tokens"] for amounts in envs.values())),
            experts_unrecorded=sums["routed/unrecorded"] / sums["routed/tokens"] if sums["routed/tokens"] else None,
            support=_shares_of({name: sums[f"support/{name}"] for name in ("exact", "unrecorded", "too_wide")}),
            grad_norm=self.gradient_norm,
            learning_rate=self.learning_rate,
            tokens=header.tokens,
            tokens_by_env={env: amounts["tokens"] for env, amounts in header.envs.items()},
            loss_tokens=step.normalizers.loss_tokens,
            damaged_tokens=self.damaged_tokens,
            rollouts=step.rollouts,
            rollouts_by_env={env: int(amounts["rollouts"]) for env, amounts in header.envs.items()},
            groups=step.groups,
            age=header.age,
            max_age=header.max_age,
            ages={env: amounts["age"] for env, amounts in header.envs.items()},
            on_policy=share("on_policy"),
            on_policy_by_env=by_env("on_policy"),
            truncated=share("truncated"),
            truncated_by_env=by_env("truncated"),
            response_tokens=by_env("response_tokens"),
            fill=header.fill,
            padding=1.0 - sum(part["rank"]["tokens"] for part in parts) / max(1, sum(part["slots"] for part in parts)),
            closed_by=header.closed_by,
            tokens_per_second=round(header.tokens / total, 3),
            mfu=utilization.share(sums["tokens"], squares, total * self._ranks.world_size),
            memory_bytes=max(part["memory_bytes"] for part in parts),
            wait=round(watch.seconds.get("wait", 0.0) / total, 6),
            seconds=rounded({**watch.seconds, "total": total}),
            ranks=[part["rank"] for part in parts],
            world_size=self._ranks.world_size,
        )

    def _masked(self, sums: Mapping[str, float], truncated: float) -> dict[str, Any]:
        """The fields that say what became of the tokens that the rollouts brought to train: `truncated` of them were
        masked as such, and `damaged_tokens` of the rest could not be trained."""
        planned, passed = self._step.normalizers.loss_tokens, max(1.0, sums["loss_tokens"])
        corrections = corrections_of(self._loss)
        in_force = {"advantage", "clip", *corrections}
        in_force |= {"top_entropy"} if self._loss.top_entropy < 1 else set()
        in_force |= {"weights"} if any("weights" in micro_batch.columns for micro_batch in self._step) else set()
        by = {"truncated": truncated / max(1.0, planned + truncated)} if self._step.header.masks_truncated else {}
        by["damaged"] = self.damaged_tokens / max(1, planned)
        by |= {stage: sums[f"masked/{stage}"] / passed for stage in STAGES if stage in in_force}
        left = (planned - self.damaged_tokens) * (sums["loss_tokens"] - sums["masked"]) / passed
        return {
            "masked_fraction": 1.0 - left / max(1.0, planned + truncated),
            "masked_by": by,
            "correction_weight": {name: sums[f"weight/{name}"] / passed for name in corrections},
        }

    def _part(self, watch: Stopwatch) -> dict[str, Any]:
        """This rank's own, JSON types; tables are sums by env. A rollout counts where its first sequence is."""
        envs, named, counts = (defaultdict[str, Any](lambda: defaultdict(float)) for _ in range(3))
        step, header = self._step.number, self._step.header
        means = {env: amounts["reward"] for env, amounts in header.envs.items()}
        tokens = 0
        for sample in (s for micro_batch in self._step for s in micro_batch.samples):
            tokens += sample.length
            env = envs[sample.env]
            env["response_tokens"] += sample.length - sample.prompt_tokens
            env["length_squares"] += sample.length**2
            masked = sample.info if header.masks_truncated and sample.is_truncated else None
            env["truncated_tokens"] += 0 if masked is None else masked.loss_tokens
            if sample.sequence:
                continue  # its rollout counts once
            env["rollouts"] += 1
            env["truncated"] += sample.is_truncated
            env["on_policy"] += sample.policy_versions[0] >= version_trained(header.adapters, sample.adapter, step)
            # Of distances from the step's mean: those of the rewards themselves would lose the digits that matter.
            off = 0.0 if sample.reward is None else sample.reward - (means.get(sample.env) or 0.0)
            env["scored"] += sample.reward is not None
            env["off"] += off
            env["off_squares"] += off**2
            for name, value in sample.rewards.items():
                named[sample.env][name] += value
                counts[sample.env][name] += 1
        seconds = {"wait": watch.seconds.get("wait", 0.0), **self.pass_times.seconds}
        return {
            "envs": envs,
            "named": named,
            "counts": counts,
            "slots": sum(micro_batch.length for micro_batch in self._step),
            "ratios": self.ratios.counts(),
            "memory_bytes": memory_bytes(self._ranks.device),
            "rank": {"tokens": tokens, **rounded(seconds)},
        }


def _shares_of(counts: Mapping[str, float]) -> dict[str, float]:
    """The counts over their sum; nothing where nothing was counted."""
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else {}


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part as a record has them: to the microsecond."""
    return {part: round(value, 6) for part, value in seconds.items()}


def _added(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """env -> name -> sum over the ranks' tables."""
    out: dict[str, dict[str, float]] = {}
    for table in tables:
        for env, values in table.items():
            into = out.setdefault(env, {})
            for name, value in values.items():
                into[name] = into.get(name, 0.0) + value
    return dict(sorted(out.items()))


def _spread(amounts: Mapping[str, float]) -> float:
    """Standard deviation with n - 1 of an env's rewards."""
    squares = amounts["off_squares"] - amounts["off"] ** 2 / amounts["scored"]
    return math.sqrt(max(0.0, squares) / (amounts["scored"] - 1))


def memory_bytes(device: torch.device) -> int:
    """Most memory that this process has used so far: on the GPU where it trains on one, else resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
