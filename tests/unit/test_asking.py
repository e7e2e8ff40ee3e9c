"""Whoever waits for a ticket asks often at first, and ever less often."""

from __future__ import annotations

from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlbuffer.client.asking import TOGETHER_SECONDS, pauses_between_asks, together
from rlbuffer.client.writer import Writer
from rlbuffer.process.heartbeat import LATE_SECONDS
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.store.viewer import Viewer


class Nothing:
    """A store without a ticket, and the clock of whoever waits for one."""

    run = "r"

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[float] = []

    def take_tickets(self, env: str, n: int, **rest: Any) -> list[int]:
        self.asked.append(self.now)
        return []

    def waiting(self) -> dict[str, str]:
        return {}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds at which a writer has asked that waited for two minutes."""
    store = Nothing()
    clock = SimpleNamespace(sleep=store.sleep, monotonic=lambda: store.now)
    monkeypatch.setattr("rlbuffer.client.writer.time", clock)
    assert Writer(cast(Viewer, store), "w0", epoch=1).take("a", timeout_seconds=120.0) == []
    return store.asked


def test_a_writer_that_waits_for_two_minutes_has_not_asked_ten_times_a_second(asked: list[float]) -> None:
    assert len(asked) < 200


def test_where_tickets_flow_a_writer_asks_ten_times_a_second_and_sooner_at_first(asked: list[float]) -> None:
    assert asked[0] == 0
    assert asked[1] <= 0.0125
    assert all(after - before <= 0.125 for before, after in pairwise(asked) if before < 2)


def test_a_ticket_is_never_late_by_more_than_a_share_of_the_wait_for_it(asked: list[float]) -> None:
    late = [(before, after - before) for before, after in pairwise(asked) if before >= 2]
    assert all(pause <= max(0.125, before / 15) for before, pause in late)
    assert 3.75 < max(pause for _, pause in late) <= 6.25


def test_an_idle_worker_whose_asks_tell_of_it_is_never_taken_for_gone(asked: list[float]) -> None:
    longest = max(after - before for before, after in pairwise(asked)) + TOGETHER_SECONDS
    assert longest + LATE_SECONDS < FRESH_SECONDS


@pytest.mark.parametrize(
    ("pause", "now", "later"),
    [
        (5.0, 1_764_000_000.0, 5.0),
        (5.0, 1_764_000_000.1, 5.4),
        (5.3, 1_764_000_000.1, 5.4),
        (5.45, 1_764_000_000.1, 5.9),
    ],
)
def test_long_pauses_of_several_workers_end_together(pause: float, now: float, later: float) -> None:
    assert together(pause, now) == pytest.approx(later, abs=1e-6)


def test_those_who_begin_together_do_not_go_on_asking_together() -> None:
    first, second = (list(islice(pauses_between_asks(), 50)) for _ in range(2))
    assert first != second
