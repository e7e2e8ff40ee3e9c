"""Speed at which rollouts become micro-batches, beside copying the same bytes in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, best_of
from benchmarks.workloads import WORKLOADS, Workload
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.planner import plan
from rlbuffer.records.micro_batch import DERIVED_ARRAYS, MicroBatch, Sample
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.step_plan import Normalizers

STORED = ("input_ids", "loss_mask", "logprobs")
NORMALIZERS = Normalizers(loss_tokens=1, rollouts=1, groups=1)
"""Any: assembly only passes them on."""


def make_items(workload: Workload, *, wide: bool = False) -> list[PackItem]:
    """Rollouts of the workload's lengths, a quarter of each prompt; `wide` adds two further float columns."""
    rng = np.random.default_rng(0)
    items = []
    for number, length in enumerate(workload.lengths.tolist()):
        prompt = max(1, length // 4)
        mask = np.arange(length) >= prompt
        further = {n: -rng.random(length, np.float32) for n in ("ref_logprobs", "entropy")} if wide else {}
        rollout = Rollout(
            rollout_id=f"g{number // 8}/{number % 8}",
            tokens=rng.integers(0, 32000, length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            reward=0.0,
            version_spans=(VersionSpan(0, prompt, length),) if length > prompt else (VersionSpan(0, 0, length),),
            columns=further,
        )
        sample = Sample(
            rollout_id=rollout.rollout_id,
            group_id=f"g{number // 8}",
            env="bench",
            reward=0.0,
            rewards={},
            advantage=0.5,
            policy_versions=(0, 0),
            answer=None,
            prompt_tokens=prompt,
            length=length,
        )
        items.append(PackItem(rollout=rollout, length=length, sample=sample))
    return items


def rank_zero(workload: Workload, *, wide: bool) -> tuple[list[list[tuple[int, ...]]], list[PackItem]]:
    """The rows that a reader of rank 0 assembles in one step, and only its rollouts."""
    made = plan(workload.lengths, row_tokens=workload.row_tokens, world_size=workload.world_size)
    mine = [i for step in made.rows for row in step[0] for i in row]
    place = {index: k for k, index in enumerate(mine)}
    every = make_items(workload, wide=wide)
    return [[tuple(place[i] for i in row) for row in step[0]] for step in made.rows], [every[i] for i in mine]


def run(report: Report) -> None:
    """Assembles rank 0's part of two workloads."""
    report.begin(
        "assembly",
        measures="assemble() for one rank's step from decoded rollouts, one thread, best of five; `all`: every derived "
        "column read as well, as by a trainer that uses each of them on the host",
        not_measured="decoding, reading from the server, copies to a device",
    )
    lines = []
    for name, wide in (("a", False), ("a", True), ("d", False)):
        workload = WORKLOADS[name]
        rows, items = rank_zero(workload, wide=wide)
        tokens = sum(item.length for item in items)
        for how, names in (("stored", STORED), ("all", (*STORED, *DERIVED_ARRAYS))):
            made = partial(assemble, rows, items, row_tokens=workload.row_tokens, normalizers=NORMALIZERS)
            work = partial(_columns, made, names)
            cpu, wall = best_of(work, warm=2)
            arrays = work()
            into = [np.empty_like(v) for v in arrays]
            copy_cpu, _ = best_of(partial(_copy, arrays, into), warm=2)
            size = sum(v.nbytes for v in arrays)
            lines.append(
                [
                    f"{name}{' + 2 columns' if wide else ''}, {how}",
                    f"{tokens:,}",
                    f"{size / tokens:.0f}",
                    f"{tokens / cpu / 1e6:.0f}",
                    f"{tokens / wall / 1e6:.0f}",
                    f"{tokens / copy_cpu / 1e6:.0f}",
                    f"{cpu / copy_cpu:.1f}x",
                ]
            )
    head = ["workload, arrays", "tokens", "bytes/token", "M tokens/CPU s", "M tokens/s", "np.copy of the same", "time"]
    report.table(head, lines)


def _columns(made: Callable[[], Sequence[MicroBatch]], names: Sequence[str]) -> list[NDArray[Any]]:
    """The columns of these names and the further ones, of micro-batches that are made now."""
    return [v for b in made() for v in (*(getattr(b, name) for name in names), *b.columns.values())]


def _copy(sources: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
