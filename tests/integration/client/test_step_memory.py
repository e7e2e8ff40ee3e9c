"""A rank's memory: a step that it keeps costs one copy of its payloads, and pulling one costs one more for a while."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from store_runs import Run, plan_of

from rlbuffer.client.reader import Reader

pytest_plugins = ("store_fixtures",)
ROLLOUTS, TOKENS = 8, 20_000
STEPS = 4


def test_a_step_costs_a_rank_one_copy_of_it(run: Run) -> None:
    run.lead()
    for n in range(STEPS):
        run.push(f"a.{n}", lengths=[TOKENS] * ROLLOUTS, version=n)
        plan = plan_of(run.pool(), n + 1, world_size=1)
        run.commit(world_size=1, plan=replace(plan.plan, row_tokens=TOKENS))
    size = 9 * TOKENS * ROLLOUTS
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=30.0)
    kept = [reader.pull(1)]  # connections, and the block that payloads are received into
    tracemalloc.start()
    try:
        kept += [reader.pull(n) for n in range(2, STEPS + 1)]
        grown, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        reader.close()
    assert sum(micro_batch.length for step in kept for micro_batch in step) == STEPS * ROLLOUTS * TOKENS
    assert grown <= 1.3 * size * (STEPS - 1)  # blocks are a quarter larger at most, so that the next step fits, too
    assert peak <= grown + 1.3 * size
