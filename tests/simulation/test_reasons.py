"""A leader that says nothing, or something else than what holds the step up, is found by what it says alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlbuffer.batcher import batcher
from rlbuffer.daemon import leadership
from rlbuffer.daemon.reporter import Reporter
from rlbuffer.daemon.watches import TrainerWord
from rlbuffer.records.waiting import Cause, Wait, Waiting
from simulation.__main__ import run_seed

report = Reporter.report
Patch = Callable[[pytest.MonkeyPatch], None]


def says_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reporter, "report", lambda self, waiting, *args: report(self, None, *args))


def says_nothing_of_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batcher, "reason", lambda *args: None)


def says_the_first_for_ever(patch: pytest.MonkeyPatch) -> None:
    first: dict[Reporter, Waiting] = {}

    def stale(self: Reporter, waiting: Waiting | None, *args: Any) -> None:
        report(self, first.setdefault(self, waiting) if waiting else None, *args)

    patch.setattr(Reporter, "report", stale)


def calls_the_trainer_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainerWord, "silence", lambda self, look: Waiting(kind=Wait.TRAINER_GONE))


def waits_for_a_version_that_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batcher, "reason", lambda *args: Waiting(kind=Wait.VERSION))


def calls_an_env_that_nobody_samples_generating(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        leadership, "explained", lambda waiting, *_: waiting and replace(waiting, cause=Cause.GENERATING, dropped="")
    )


def calls_what_is_short_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        leadership, "explained", lambda waiting, *_: waiting and replace(waiting, cause=Cause.DROPPED, dropped="x: y")
    )


@pytest.mark.parametrize(
    ("broken", "seeds"),
    [
        (says_nothing, (30, 34, 59)),
        (says_nothing_of_groups, (43, 34, 50)),
        (says_the_first_for_ever, (43, 59, 29)),
        (calls_the_trainer_gone, (24, 29, 49)),
        (waits_for_a_version_that_is_there, (43, 25, 59)),
        (calls_an_env_that_nobody_samples_generating, (30, 34, 59)),
        (calls_what_is_short_dropped, (30, 34, 59)),
    ],
)
def test_a_leader_whose_reason_is_x_is_found(
    broken: Patch, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seeds`: these found it first when this was written. One of them, or of the first hundred, must find it."""
    broken(monkeypatch)
    tried = (*seeds, *range(100))
    assert any(run_seed(seed).violation.startswith("waiting: ") for seed in tried)
