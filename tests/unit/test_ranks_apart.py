"""Ranks that do not train the same steps at the same time are reported, and slow heartbeats are not."""

from __future__ import annotations

import pytest

from rlbuffer.client.ranks import Skew


def beats(step: int, ago: float = 0.5) -> dict[str, dict[str, float]]:
    return {"0": {"step": 0, "seconds_ago": 0.0}, "1": {"step": step, "seconds_ago": ago}}


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        (5, 3, "rank 0 has trained step 5, rank 1 step 3"),
        (3, 5, "rank 0 has trained step 3, rank 1 step 5"),
        (5, 4, ""),
        (4, 5, ""),
        (5, 5, ""),
    ],
)
def test_ranks_that_are_two_steps_apart_for_three_looks_are_told_once(own: int, theirs: int, said: str) -> None:
    skew = Skew(0, 2)
    told = [skew.fault(own, beats(theirs), now=float(now)) for now in range(10, 20)]
    assert [text.partition(":")[0] for text in told if text] == [said] * bool(said)


def test_an_old_heartbeat_is_compared_with_what_this_rank_had_then() -> None:
    skew = Skew(0, 2)  # a step takes 0.1 s: what the other rank said 1.2 s ago is twelve steps old
    assert [skew.fault(10 * now, beats(10 * now - 12, ago=1.2), now=float(now)) for now in range(1, 9)] == [""] * 8


def test_a_rank_that_is_gone_says_nothing() -> None:
    skew = Skew(0, 2)
    assert [skew.fault(9, beats(3, ago=2.1), now=float(now)) for now in range(1, 9)] == [""] * 8


def test_only_rank_0_of_several_looks() -> None:
    assert [Skew(*place).watches for place in ((0, 1), (0, 2), (1, 2))] == [False, True, False]
