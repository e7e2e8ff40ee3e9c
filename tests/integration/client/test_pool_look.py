"""A second look at the pool reads what has changed, and counts what a first look would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_runs import Run

from rlbuffer.client.pool_look import PoolLook
from rlbuffer.client.views import count_pending
from rlbuffer.testing import make_group

pytest_plugins = ["store_fixtures"]


@pytest.fixture
def cursors(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each read of the pool began."""
    read = run.store.read_pool
    seen: list[str] = []

    def noted(after: str = "0-0", **fields: object) -> object:
        seen.append(after)
        return read(after, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(run.store, "read_pool", noted)
    return seen


def agrees(look: PoolLook, run: Run) -> bool:
    return sorted(look.groups()) == sorted(count_pending(run.store))


def test_a_later_look_reads_what_is_new_and_counts_the_same(run: Run, cursors: list[str]) -> None:
    run.lead()
    for number in range(6):
        run.push(f"a.{number}")
    look = PoolLook(run.store)
    assert agrees(look, run)
    run.commit(entries=run.pool()[:2])
    run.drop("stale", run.pool()[:1])
    run.push("a.9")
    last = run.pool()[-2].entry_id
    cursors.clear()
    assert len(list(look.groups())) == 4
    assert "0-0" not in cursors
    assert cursors[0] <= last
    assert agrees(look, run)


def test_what_names_no_group_makes_the_look_read_everything(run: Run, cursors: list[str]) -> None:
    run.lead()
    run.push("a.0")
    group = make_group(env="a", group_id="a.1", size=4)
    for rollouts in (group.rollouts[:1], group.rollouts[1:]):
        run.sequence += 1
        part = replace(group, rollouts=rollouts)
        run.store.push(part, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    look = PoolLook(run.store)
    assert agrees(look, run)
    run.drop("duplicate", run.pool()[-1:])  # a part of a group that stays
    cursors.clear()
    assert agrees(look, run)
    assert "0-0" in cursors
