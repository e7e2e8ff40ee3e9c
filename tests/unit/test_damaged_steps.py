"""Damage ends training not by one step, whoever made it, but by many in a row that give nothing sound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlbuffer.errors import StepDamaged
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.pulls import MOST_DAMAGED_STEPS, Pulls


def pulls(*, lookahead: int = 1) -> Pulls:
    session: Any = SimpleNamespace(settings=SimpleNamespace(batcher=SimpleNamespace(lookahead=lookahead)))
    publishing: Any = None  # counting asks for no step
    return Pulls(session, publishing)


def count(into: Pulls, damaged: int, *, step: int = 1) -> None:
    normalizers = Normalizers(loss_tokens=20, rollouts=2, groups=1)
    taken: Any = SimpleNamespace(number=step, normalizers=normalizers)
    into._count(taken, damaged)


def test_steps_of_which_nothing_can_be_read_are_borne_for_a_while() -> None:
    made = pulls()
    for step in range(1, MOST_DAMAGED_STEPS + 2):
        count(made, 20, step=step)
    with pytest.raises(StepDamaged, match=r"^step 10: 15 of 20 "):
        count(made, 15, step=10)


def test_one_step_that_is_sound_enough_begins_the_count_anew() -> None:
    made = pulls()
    for _ in range(5):
        for _ in range(MOST_DAMAGED_STEPS + 1):
            count(made, 11)
        count(made, 10)  # the limit itself is allowed
