"""One rank of :mod:`test_gradients_over_ranks`: trains given steps and leaves gradients, parameters and digests behind.

All rollouts are the same ones on every rank; a rank takes its part of a plan, as a reader would.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.ranks.parallel import digest_parameters
from rlbuffer.trainer.update.update import Updates, make_optimizer, take_step
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

ROW_TOKENS = 64
COUNT = 18
"""Rollouts."""
GROUP_SIZE = 3

LOSSES: list[dict[str, Any]] = [
    {"name": "clip"},
    {"name": "dapo", "top_entropy": 0.3},
    {"name": "dr_grpo", "options": {"max_length": 30}},
    {"name": "ratio", "options": {"max_ratio": 1.2}},
    {"name": "kl_cov", "options": {"cov_fraction": 0.1}},
    {"name": "clip_cov", "options": {"cov_fraction": 0.1, "cov_low": 0.0, "clip_low": 0.6, "clip_high": 2.0}},
    {"name": "gspo", "options": {"clip_low": 0.05, "clip_high": 0.1}},
    {"name": "cispo", "options": {"max_ratio": 1.1}},
    {"name": "masked_ratio", "options": {"low": 0.8, "high": 1.4}},
    {"name": "dppo_tv", "options": {"tv_low": 0.02, "tv_high": 0.02, "tv_penalty": 0.1}},
    {"name": "tis", "correction": {"tis": {"cap": 1.1}}},
    {"name": "icepop", "correction": {"icepop": {"low": 0.8, "high": 1.4}}},
    {"name": "decoupled", "correction": {"tis": {"cap": 1.2}, "geometric_mask": {}}},
]
"""Every built-in one, with bounds that some tokens are beyond."""

Rows = list[list[list[list[int]]]]
"""``rows[micro_step][rank]`` is a list of rows of rollouts; [[]] is a dummy."""


def items() -> list[PackItem]:
    """Rollouts of unequal lengths, with every column that a loss looks at."""
    rng = np.random.default_rng(5)
    made = []
    for i in range(COUNT):
        prompt, sampled = int(rng.integers(1, 6)), int(rng.integers(1, 16))
        length = prompt + sampled
        rollout = Rollout.from_completion(
            prompt_ids=rng.integers(0, 13, prompt),
            token_ids=rng.integers(0, 13, sampled),
            logprobs=rng.normal(-2.6, 0.3, sampled).clip(max=0),
            reward=float(rng.random()),
            policy_version=0,
            columns={
                "ref_logprobs": rng.normal(-2.5, 0.3, length).astype(np.float32),
                "weights": rng.uniform(0.5, 1.5, length).astype(np.float32),
                "temperatures": np.full(length, rng.uniform(0.8, 1.2), np.float32),
            },
        )
        sample = Sample(
            rollout_id=f"g{i // GROUP_SIZE}/{i}",
            group_id=f"g{i // GROUP_SIZE}",
            env="a",
            reward=rollout.reward,
            rewards={},
            advantage=float(rng.normal()),
            policy_versions=(0, 0),
            answer=None,
            prompt_tokens=prompt,
            length=length,
        )
        made.append(PackItem(rollout=rollout, sample=sample))
    return made


def counts_of(made: Sequence[PackItem]) -> Normalizers:
    """Counts of these rollouts."""
    return Normalizers(
        loss_tokens=sum(item.rollout.loss_tokens for item in made if item.rollout is not None),
        rollouts=len(made),
        groups=len({item.sample.group_id for item in made}),
    )


def step_of(micro_batches: tuple[MicroBatch, ...], world_size: int) -> Step:
    """A step of ready-made micro-batches."""
    return Step(
        number=1,
        epoch=0,
        digest="",
        world_size=world_size,
        normalizers=counts_of(items()),
        rollouts=COUNT,
        groups=len({item.sample.group_id for item in items()}),
        micro_batches=micro_batches,
    )


def packed_step(rows: Rows, rank: int, world_size: int) -> Step:
    """This rank's part of `rows`, several rollouts to a row."""
    part = [[tuple(row) for row in micro_step[rank]] for micro_step in rows]
    made = assemble(part, items(), row_tokens=ROW_TOKENS, normalizers=counts_of(items()), pad_to_multiple_of=4)
    return step_of(made, world_size)


def unpacked_step(slices: Sequence[Sequence[int]]) -> Step:
    """Each rollout a micro-batch of its own; `slices` are the rollouts of each update.

    Dummies make the updates equally long, so that the trainer cuts the step just there.
    """
    most = max(map(len, slices))
    rows: list[list[tuple[int, ...]]] = []
    for chosen in slices:
        rows += [[(i,)] for i in chosen] + [[()]] * (most - len(chosen))
    return step_of(assemble(rows, items(), row_tokens=ROW_TOKENS, normalizers=counts_of(items())), 1)


class Trainee:
    """A policy that begins again for each job: making and proving one takes longer than training it here."""

    def __init__(self, dtype: str, world_size: int, device: str = "cpu", *, compute: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        model = model_from_config(TINY_QWEN3)  # drawn in float32: the same of any dtype
        self.policy = prepare(nn.Module.to(model, torch.device(device), getattr(torch, dtype)), compute=compute)
        self.module = self.policy if world_size == 1 else DistributedDataParallel(self.policy)
        self._fresh = {name: value.clone() for name, value in self.policy.state_dict().items()}

    def reset(self) -> None:
        """Its first parameters."""
        self.policy.load_state_dict(self._fresh)


def work(trainee: Trainee, step: Step, ranks: Ranks, settings: TrainerSettings) -> dict[str, Any]:
    """Trains `step`. -> ``gradients`` of each update [parameters], ``parameters`` at the end, digests of both."""
    trainee.reset()
    policy, module = trainee.policy, trainee.module
    optimizer = make_optimizer(policy, settings.optimizer)
    updates = Updates(module, step, settings, ranks, longest=ROW_TOKENS)
    gradients, counts = [], []
    for part in updates.parts:
        updates.accumulate(part)
        found = [p.grad.reshape(-1).double() for p in policy.parameters() if p.grad is not None]
        gradients.append(torch.cat(found).cpu().numpy())
        counts.append([part.normalizers.loss_tokens, part.normalizers.rollouts, part.normalizers.groups])
        take_step(policy, optimizer, learning_rate=1e-2, gradient_clip=1.0, step=1)
    return {
        "gradients": gradients,
        "counts": counts,
        "parameters": torch.cat([p.detach().reshape(-1).double() for p in policy.parameters()]).cpu().numpy(),
        "digests": [hashlib.sha256(g.tobytes()).hexdigest() for g in gradients] + [digest_parameters(policy)],
    }


def run_rank(
    rank: int, world_size: int, folder: str, jobs: list[tuple[str, dict[str, Any], dict[str, int]]], rows: Rows
) -> None:
    """The whole life of one rank; what it leaves in `folder`: ``N.npz`` of rank 0, ``RANK.json`` of every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    trainees = {dtype: Trainee(dtype, world_size) for dtype in sorted({dtype for dtype, *_ in jobs})}
    told = []
    for number, (dtype, loss, optimizer) in enumerate(jobs):
        step = packed_step(rows, rank, world_size)
        done = work(trainees[dtype], step, ranks, TrainerSettings(loss=loss, optimizer=optimizer))
        told.append({"digests": done["digests"], "counts": done["counts"]})
        if rank == 0:
            arrays = {f"gradient{i}": gradient for i, gradient in enumerate(done["gradients"])}
            np.savez(Path(folder) / f"{number}.npz", parameters=done["parameters"], **arrays)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    ranks.barrier()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), *json.loads(sys.argv[2]))
    os._exit(0)  # as a rank of the trainer ends: threads of gloo outlive main, and may abort the process
