"""A leader that says nothing, or something else than what holds the step up, is found by what it says alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlbuffer.batcher import situation
from rlbuffer.daemon.teller import Teller
from rlbuffer.daemon.watches import TrainerWord
from rlbuffer.records.waiting import Wait, Waiting
from simulation.__main__ import run_seed

SEEDS = 100
"""Each must be found within as many."""
say = Teller.say
Patch = Callable[[pytest.MonkeyPatch], None]


def says_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Teller, "say", lambda self, waiting, *args: say(self, None, *args))


def says_nothing_of_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(situation, "reason", lambda *args: None)


def says_the_first_for_ever(patch: pytest.MonkeyPatch) -> None:
    first: dict[Teller, Waiting] = {}

    def stale(self: Teller, waiting: Waiting | None, *args: Any) -> None:
        say(self, first.setdefault(self, waiting) if waiting else None, *args)

    patch.setattr(Teller, "say", stale)


def calls_the_trainer_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainerWord, "silence", lambda self, look: Waiting(kind=Wait.TRAINER_GONE))


def waits_for_a_version_that_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(situation, "reason", lambda *args: Waiting(kind=Wait.VERSION))


@pytest.mark.parametrize(
    "broken",
    [
        *(says_nothing, says_nothing_of_groups, says_the_first_for_ever),
        *(calls_the_trainer_gone, waits_for_a_version_that_is_there),
    ],
)
def test_a_leader_whose_reason_is_x_is_found(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    found = next((violation for seed in range(SEEDS) if (violation := run_seed(seed).violation)), "")
    assert found.startswith("waiting: ")
