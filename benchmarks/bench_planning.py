"""The time of a plan, the fill of its rows, and the wait of its ranks.

**span** = sum over micro-steps of the costliest rank's micro-batch, over the ideal (all cost spread evenly over ranks
and micro-steps): 1.0 is perfect, and nothing else than span is what a training step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.report import Report, best_of
from benchmarks.workloads import COST, WORKLOADS, Workload
from rlbuffer.packing.planner import fewest_rows, plan
from rlbuffer.records.step_plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The worth of a plan; checked to be a partition first."""

    rows: int
    padding: float
    """Share of the rows' capacity that holds no token."""
    span: float
    """See the module's docstring."""


def judge(made: Plan, workload: Workload) -> Quality:
    """Recomputes everything from the rows alone: every rollout once, no row too long, equal counts per rank."""
    lengths = workload.lengths
    a, b = COST
    costs = a * lengths + b * lengths * lengths
    placed = [i for step in made.rows for micro_batch in step for row in micro_batch for i in row]
    if sorted(placed) != list(range(len(lengths))):
        raise SystemExit("the plan is not a partition of the rollouts")
    if any(len(step) != workload.world_size for step in made.rows):
        raise SystemExit("the ranks do not have equally many micro-batches")
    filled = [int(lengths[list(row)].sum()) for step in made.rows for micro_batch in step for row in micro_batch]
    if max(filled) > workload.row_tokens:
        raise SystemExit(f"a row holds {max(filled)} tokens, more than {workload.row_tokens}")
    waits = [max(sum(int(costs[list(row)].sum()) for row in mb) for mb in step) for step in made.rows]
    return Quality(
        rows=len(filled),
        padding=1 - sum(filled) / (len(filled) * workload.row_tokens),
        span=sum(waits) / (int(costs.sum()) / workload.world_size),
    )


def run(report: Report) -> None:
    """Plans every workload and prints a line for each."""
    report.begin(
        "planning",
        measures="plan(): one thread, warm, best of five; padding and span recomputed from the plan",
        not_measured="selection of groups, the commit, training; span assumes the cost model of a 7B model",
    )
    lines = []
    for name, workload in WORKLOADS.items():

        def work(workload: Workload = workload) -> Plan:
            return plan(workload.lengths, row_tokens=workload.row_tokens, world_size=workload.world_size, cost=COST)

        cpu, wall = best_of(work)
        quality = judge(work(), workload)
        met = [
            report.target(f"planning {name}: {value:.4g} {unit}, target {limit:g}", value <= limit)
            for value, limit, unit in ((cpu * 1e3, workload.plan_ms, "CPU ms"), (quality.span, workload.span, "span"))
            if limit is not None
        ]
        lines.append(
            [
                f"{name}: {workload.what}",
                f"{cpu * 1e3:.2f}",
                f"{wall * 1e3:.2f}",
                f"{quality.rows}",
                f"{fewest_rows(workload.lengths, workload.row_tokens)}",
                f"{quality.padding:.2%}",
                f"{quality.span:.4f}",
                "-" if workload.plan_ms is None else f"{workload.plan_ms:g}",
                "-" if workload.span is None else f"{workload.span:g}",
                "-" if not met else "NO" if "NO" in met else "yes",
            ]
        )
    head = ["workload", "CPU ms", "wall ms", "rows", "bound", "padding", "span", "max ms", "max span", "met"]
    report.table(head, lines)
    report.line()
    for deep in (2, 4):
        workload = WORKLOADS["a"]
        made = plan(workload.lengths, row_tokens=workload.row_tokens, world_size=8, rows_per_micro_batch=deep)
        report.line(f"a with {deep} rows per micro-batch: span {judge(made, workload).span:.4f}")
    names = np.random.default_rng(1).choice(["x", "y", "z"], 2048, p=[0.6, 0.3, 0.1]).tolist()
    made = plan(WORKLOADS["a"].lengths, row_tokens=16384, world_size=8, adapters=names)
    report.line(f"a with 3 adapters (60/30/10 %): span {judge(made, WORKLOADS['a']).span:.4f}")
