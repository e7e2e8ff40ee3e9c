"""Rollouts that bring their own advantages: whoever shows one shows what trains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from store_runs import Run

import rlbuffer
from rlbuffer.archive.rows import Source, rollout_table
from rlbuffer.client.reader import Reader
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def push(run: Run, group_id: str, *values: float | None) -> None:
    """A rollout for each value: its own advantage on every token that trains, with one of 9 on the others; None: it
    brings none."""
    group = make_group(env="a", group_id=group_id, size=len(values), rewards=[0.0, 1.0])
    rollouts = tuple(
        r if value is None else replace(r, columns={"advantages": np.where(r.loss_mask, value, 9.0).astype(np.float32)})
        for r, value in zip(group.rollouts, values, strict=True)
    )
    run.sequence += 1
    run.store.push(
        replace(group, rollouts=rollouts), producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch
    )


def test_the_advantage_that_trains_is_shown_by_samples_views_archive_and_filters(run: Run) -> None:
    push(run, "a.0", 0.75, -0.25)
    push(run, "a.1", None, 0.5)
    run.lead()
    run.commit(world_size=1)
    planned = {r.rollout_id: a for p in run.store.read_parts(1) for r, a in ((x.info, x.advantage) for x in p.rollouts)}
    expected = {"a.0/0": 0.75, "a.0/1": -0.25, "a.1/0": planned["a.1/0"], "a.1/1": 0.5}

    step = next(run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=30.0)).steps())
    samples = {s.rollout_id: s.advantage for mb in step for s in mb.samples}
    trained = {
        s.rollout_id: float(mb.advantages[(mb.sample_index == i) & mb.loss_mask].mean())
        for mb in step
        for i, s in enumerate(mb.samples)
    }
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        members = [m for name in ("a.0", "a.1") for m in buffer.group(name).members]
        chosen = {n: [g.group_id for g in buffer.groups(f"rollout.advantage={n}")] for n in (0.75, -0.25, 0.5, 9)}
    refs = [ref for part in run.store.read_parts(1) for ref in part.rollouts]
    data = run.store.read_payloads(refs)
    table = rollout_table([Source(ref=ref, data=d, rank=0) for ref, d in zip(refs, data, strict=True)])
    archived = dict(zip(*(table.column(name).to_pylist() for name in ("rollout_id", "advantage")), strict=True))

    assert trained == pytest.approx(expected)
    assert samples == pytest.approx(expected)
    assert {m.rollout_id: m.advantage for m in members} == pytest.approx(expected)
    assert archived == pytest.approx(expected)
    assert chosen == {0.75: ["a.0"], -0.25: ["a.0"], 0.5: ["a.1"], 9: []}


def test_a_pack_outside_of_any_run_shows_it_too() -> None:
    rollout = make_group(env="a", size=1, seed=1).rollouts[0]
    own = replace(rollout, columns={"advantages": np.full(rollout.length, 0.75, np.float32)})
    packed = rlbuffer.packing.pack([own, rollout], [0.25, 0.25], row_tokens=512)
    assert [sample.advantage for sample in packed.samples] == [0.75, 0.25]
