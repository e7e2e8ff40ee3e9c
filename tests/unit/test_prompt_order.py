"""The order of prompts: a ticket number is an epoch and a place, the same in every process and release."""

from __future__ import annotations

import random

import pytest

from rlbuffer.worker.envs.order import KEPT_EPOCHS, PromptOrder


@pytest.mark.parametrize("size", [1, 2, 7, 200])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_prompt_comes_once_an_epoch(size: int, shuffle: bool) -> None:
    order = PromptOrder(size, seed=3, shuffle=shuffle)
    for epoch in range(3):
        places = [order.place(number) for number in range(epoch * size, (epoch + 1) * size)]
        assert {e for e, _ in places} == {epoch}
        assert sorted(index for _, index in places) == list(range(size))


def test_the_order_is_the_same_in_every_process_whatever_tickets_it_met_before() -> None:
    numbers = list(range(50 * (KEPT_EPOCHS + 3)))
    order = PromptOrder(50, seed=1)
    straight = {n: order.place(n) for n in numbers}
    random.Random(0).shuffle(numbers)
    other = PromptOrder(50, seed=1)
    assert all(other.place(n) == straight[n] for n in numbers)


def test_epochs_and_seeds_are_shuffled_differently_and_no_shuffling_keeps_the_order() -> None:
    def epoch(number: int, **options: object) -> list[int]:
        order = PromptOrder(20, **options)  # type: ignore[arg-type]
        return [order.place(20 * number + i)[1] for i in range(20)]

    assert epoch(0, seed=0) != epoch(1, seed=0) != epoch(1, seed=1)
    assert epoch(0, shuffle=False) == epoch(5, shuffle=False) == list(range(20))


def test_the_order_never_changes_between_releases() -> None:
    order = PromptOrder(8, seed=0)
    assert [order.place(n)[1] for n in range(16)] == [3, 2, 1, 6, 0, 7, 4, 5, 7, 4, 5, 1, 6, 2, 0, 3]


def test_no_prompts_have_no_order() -> None:
    with pytest.raises(ValueError, match="a data set of 0 prompts has no order"):
        PromptOrder(0)


@pytest.mark.parametrize(("passes", "tickets"), [(0, None), (1, 7), (3, 21)])
def test_how_many_tickets_there_are_in_all_follows_from_the_passes(passes: int, tickets: int | None) -> None:
    assert PromptOrder(7, passes=passes).tickets == tickets
