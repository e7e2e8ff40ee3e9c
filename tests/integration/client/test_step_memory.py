"""A rank's memory: a step that it keeps costs one copy of its payloads, and pulling one costs one more for a while.

Pulled in the test's own thread: each connection of a reader has a buffer of 1 MiB, and each of its two threads another
one, so a heartbeat that meets a pull costs as much once.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from store_runs import Run, plan_of

from rlbuffer.client.step_pull import StepPull
from rlbuffer.records.micro_batch import Step
from rlbuffer.store.payloads import Trainable

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
    store = run.again()
    source = StepPull(store, 0, 1, Trainable(), pad_token_id=0, pad_to_multiple_of=1)

    def pulled(number: int) -> Step:
        header = store.wait_step(number, block_seconds=0.0)
        assert header is not None
        return source.step(header, source.part(header))[0]

    kept = [pulled(1)]  # connections, and the block that payloads are received into
    tracemalloc.start()
    try:
        kept += [pulled(n) for n in range(2, STEPS + 1)]
        grown, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(micro_batch.length for step in kept for micro_batch in step) == STEPS * ROLLOUTS * TOKENS
    assert grown <= 1.3 * size * (STEPS - 1)  # blocks are a quarter larger at most, so that the next step fits, too
    assert peak <= grown + 1.3 * size
