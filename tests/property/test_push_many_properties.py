"""Groups that are pushed in calls of several leave the same bytes on the server as pushed one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlbuffer
from rlbuffer.store import producer as pushing
from rlbuffer.testing import make_group

shapes = st.tuples(st.integers(1, 3), st.integers(2, 40), st.booleans())
"""Rollouts of a group, their tokens, and whether it has an answer."""


def groups_of(drawn: list[tuple[int, int, bool]]) -> list[rlbuffer.Group]:
    return [
        make_group(seed=seed, size=size, lengths=[length] * size, answer="7" if has_answer else None)
        for seed, (size, length, has_answer) in enumerate(drawn)
    ]


def left_by(calls: list[list[rlbuffer.Group]]) -> dict[str, Any]:
    """Key -> content, of what a writer has stored; ids of entries are their places."""
    with rlbuffer.connect("memory://", run="same") as buffer:
        writer = buffer.writer("w", incarnation="u")
        for groups in calls:
            assert [one.status for one in writer.push_many(groups)] == ["stored"] * len(groups)
        keys, client = buffer.store.keys, buffer.store.client  # type: ignore[attr-defined]
        pool = [fields for _, fields in client.xrange(keys.pool)]
        payloads = {key: client.hgetall(key) for key in client.scan_iter(match=f"{keys.payload_prefix}*")}
        lifetimes = [client.pttl(key) for key in payloads]
        producer = client.hget(keys.producer("w", "u"), "sequence")
        return {
            "pool": pool,
            "payloads": payloads,
            "lifetimes": lifetimes,
            "producer": producer,
            "ledger": client.hgetall(keys.ledger),
        }


@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(shapes, min_size=1, max_size=9), cuts=st.sets(st.integers(0, 9)), most=st.integers(1, 4))
def test_calls_of_any_size_leave_the_same_bytes(drawn: list[tuple[int, int, bool]], cuts: set[int], most: int) -> None:
    groups = groups_of(drawn)
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(groups)), len(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pushing, "BATCH_PUSHES", most)
        together = left_by([groups[a:b] for a, b in pairwise(bounds)])
    assert together == left_by([[group] for group in groups])
