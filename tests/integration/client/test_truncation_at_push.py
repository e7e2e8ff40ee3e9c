"""`oversized = "truncate"`: the writer cuts, by the run's config, and what is sent again is the same."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

import rlbuffer
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.store.leader import LeaderStore
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

CUTS = rlbuffer.BatcherConfig(10, oversized="truncate")
DROPS = rlbuffer.BatcherConfig(10)


@pytest.fixture
def buffer(redis_url: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(redis_url, run=f"cut-{uuid.uuid4().hex[:8]}") as made:
        made.store.role(LeaderStore).open_run()
        yield made


def serve(buffer: rlbuffer.Buffer, config: rlbuffer.BatcherConfig) -> None:
    buffer.store.role(LeaderStore).lease("leader", ttl_seconds=30.0)
    buffer.store.role(LeaderStore).set_config(config.as_dict(), "digest")


def lengths(buffer: rlbuffer.Buffer) -> list[list[tuple[int, bool]]]:
    return [[(r.length, r.is_truncated) for r in e.info.rollouts] for e in buffer.store.read_pool() if e.info]


@pytest.mark.parametrize(
    ("config", "stored"),
    [(CUTS, [(8, False), (10, True)]), (DROPS, [(8, False), (20, False)]), (None, [(8, False), (20, False)])],
)
def test_the_runs_config_decides_whether_long_rollouts_are_cut(
    buffer: rlbuffer.Buffer, config: rlbuffer.BatcherConfig | None, stored: list[tuple[int, bool]]
) -> None:
    if config is not None:
        serve(buffer, config)
    buffer.writer("w").push(make_group(size=2, lengths=[8, 20]))
    assert lengths(buffer) == [stored]
    assert buffer.ledger().envs["a"].pushed == (2, sum(length for length, _ in stored))
    (entry,) = buffer.store.read_pool()
    data = buffer.store.client.hget(entry.payload_key, "1")  # type: ignore[attr-defined]
    assert payload.decode_rollout(data, expected=entry.info.rollouts[1]).length == stored[1][0]  # type: ignore[union-attr]


def test_before_a_batcher_has_served_the_run_the_writers_own_settings_count() -> None:
    with rlbuffer.connect("memory://", config=CUTS) as buffer:
        buffer.writer("w").push(make_group(size=2, lengths=[8, 20]))
        assert lengths(buffer) == [[(8, False), (10, True)]]


def test_a_rollout_whose_prompt_fills_the_row_is_dropped_and_counted_in_no_step() -> None:
    """Cut, it would train nothing and still count among the rollouts that the loss is divided by."""
    config = rlbuffer.BatcherConfig(10, oversized="truncate", step_groups=1, min_group_size=1)
    rollouts = tuple(
        rlbuffer.Rollout.from_completion(
            prompt_ids=[1] * prompt, token_ids=[2] * 4, logprobs=[-0.5] * 4, reward=reward, policy_version=0
        )
        for prompt, reward in ((2, 0.0), (8, 1.0), (10, 0.5), (12, 1.0))
    )
    with rlbuffer.connect("memory://", config=config) as buffer:
        group = rlbuffer.Group(group_id="a.0", env="a", prompt_id="p", rollouts=rollouts, planned_size=4)
        buffer.writer("w").push(group)
        (entry,) = buffer.store.read_pool()
        assert entry.info is not None
        batcher = Batcher(config)
        batcher.add(entry.info, entry_id=entry.entry_id, now=0.0)
        batcher.set_published(0)
        plan = batcher.next(1, world_size=1, now=0.0, rng=np.random.default_rng(0)).plan
        assert plan is not None
        assert [ref.rollout_id for ref in plan.rollouts] == ["a.0/0", "a.0/1"]
        assert (plan.normalizers.rollouts, plan.normalizers.loss_tokens) == (2, 4 + 2)
