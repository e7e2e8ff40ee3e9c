"""What a rank hears of rank 0, with a store that answers the same each time."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from rlbuffer.client import ranks
from rlbuffer.client.ranks import RankZeroWatch
from rlbuffer.errors import BatchTimeout
from rlbuffer.store.step_in_hand import NOTHING, RankZero, StepInHand


class Silent:
    """Rank 0 has registered, and says nothing more."""

    def rank_0(self) -> RankZero:
        return RankZero(attempt=1, world_size=2, at=0, seen_ms=5, hand=NOTHING)


@pytest.mark.parametrize("refusal", ["", "its disk is full"])
def test_rank_0_is_silent_by_itself_or_because_the_server_takes_nothing(refusal: str) -> None:
    watch = RankZeroWatch(Silent(), 2)  # type: ignore[arg-type]
    with pytest.raises(BatchTimeout) as caught:
        watch.has(4, "digest", silence_seconds=0.05, check=lambda: refusal)
    assert ("rank 0" in str(caught.value), "its disk is full" in str(caught.value)) == (not refusal, bool(refusal))


class Holding:
    """Rank 0 holds a step, and the server has one of that number, or none."""

    def __init__(self, hand: StepInHand, here: str = "") -> None:
        self._hand, self._here = hand, here

    def rank_0(self) -> RankZero:
        return RankZero(attempt=1, world_size=2, at=3, seen_ms=5, hand=self._hand)

    def wait_step(self, step: int, *, block_seconds: float) -> object:
        return SimpleNamespace(digest=self._here) if self._here else None


def given(hand: StepInHand, here: str = "") -> bool:
    watch = RankZeroWatch(Holding(hand, here), 2)  # type: ignore[arg-type]
    return watch.has(4, "ours", silence_seconds=5.0, check=lambda: "")


@pytest.mark.parametrize(
    ("hand", "here", "is_given"),
    [
        (StepInHand(4, "ours"), "", True),
        (StepInHand(4, "another"), "", False),
        (StepInHand(4, "another"), "ours", False),
        (StepInHand(4), "ours", True),  # it has let go of it: what the server has counts
        (StepInHand(4), "another", False),
        (StepInHand(4), "", False),
        (StepInHand(5, "next"), "ours", True),
        (StepInHand(5, "next"), "another", False),
    ],
)
def test_a_rank_gets_the_step_of_rank_0_and_no_other_of_its_number(hand: StepInHand, here: str, is_given: bool) -> None:
    assert given(hand, here) is is_given


@pytest.mark.parametrize("asks", ["for the step that it has", "for one that is not there"])
def test_a_step_that_only_rank_0_can_have_is_not_waited_for_for_ever(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None)
    monkeypatch.setattr(ranks, "time", clock)
    watch = RankZeroWatch(Holding(StepInHand(4, "another")), 2)  # type: ignore[arg-type]

    def ask_again_and_again() -> None:
        for _ in range(100):
            if asks == "for the step that it has":
                assert not watch.has(4, "ours", silence_seconds=500.0, check=lambda: "")
            else:
                watch.check(4, 3)

    with pytest.raises(BatchTimeout, match=r"rank 0 trains a step 4 \(digest another\) that the server has lost"):
        ask_again_and_again()


def test_a_step_that_rank_0_lets_go_of_in_time_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    holding = Holding(StepInHand(4, "another"))
    watch = RankZeroWatch(holding, 2)  # type: ignore[arg-type]
    for hand in (
        StepInHand(4, "another"),
        StepInHand(4),
        StepInHand(4, "another"),
        StepInHand(4, "a third"),
        StepInHand(4, "a third"),
    ):
        holding._hand = hand
        watch.check(4, 3)
        now[0] += ranks.LOST_SECONDS - 0.1
