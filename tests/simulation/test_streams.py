"""Seeds whose trainer packs for itself hold every invariant, and a stream with a defect is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlbuffer.client.progress import Progress
from rlbuffer.client.stream import Stream
from rlbuffer.store import leader
from simulation.__main__ import replay_command, run_seed
from simulation.draws import draw
from simulation.mutations import Mutation
from simulation.world import World

SEEDS = [6, 10, 42, 54, 70, 88, 102, 109, 115, 248, 260, 595, 677, 1140, 1595, 1611, 2733, 9230, 10104]
"""Streams, by their draws. 260, 677, 2733: another server, while the trainer held a group and waited for the next one.
1595: a trainer that resumed without a state is refused when the server has forgotten what was trained. 1611, 9230,
10104: a recovery of groups of which something was not trained."""


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_of_streams_hold_every_invariant(seed: int) -> None:
    result = run_seed(seed)
    assert "stream True" in result.plan
    assert not result.violation, f"{result.violation}\n{replay_command(seed)}"


def _forgets_its_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """After a resume it begins one place too late."""

    def resume(self: Stream, state: Any = None) -> None:
        original(self, state)
        self._next += state is not None

    return resume


def _stays_with_a_server_that_is_gone(original: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer that waits for more groups never says that another server has those that it holds."""

    return lambda self, taken: False


def _trains_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """A recovery counts what was not trained as trained."""
    return lambda entries, unused: original(entries, ())


DEFECTS = [
    (leader, "_as_trained", _trains_all),
    (Stream, "resume", _forgets_its_part),
    (Progress, "_has_moved", _stays_with_a_server_that_is_gone),
]


@pytest.mark.parametrize(("owner", "name", "defect"), DEFECTS, ids=[defect.__name__ for _, _, defect in DEFECTS])
def test_a_stream_with_a_defect_is_found(owner: Any, name: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, defect(getattr(owner, name)))
    assert any(run_seed(seed).violation for seed in SEEDS)


def test_a_script_that_counts_what_was_unused_as_trained_is_found() -> None:
    counts = Mutation(
        name="report-trains-the-unused",
        script="report",
        old="tonumber(amount) - tonumber(left[unit] or '0')",
        new="tonumber(amount)",
    )
    plans = [replace(draw(seed), mutation=counts) for seed in SEEDS]
    assert any(World(plan).simulate().violation for plan in plans)
