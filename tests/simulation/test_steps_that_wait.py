"""Steps that wait for slow groups: no fault makes a step lose what it waited for, and a batcher that does is found."""

from __future__ import annotations

from itertools import count, islice

import pytest

from rlbuffer.batcher import slow
from simulation.__main__ import run_seed
from simulation.draws import draw


def test_seeds_that_wait_hold_every_invariant() -> None:
    for seed in islice((seed for seed in count() if draw(seed).config.slow == "wait"), 6):
        result = run_seed(seed)
        assert not result.violation, f"seed {seed}: {result.violation}\n{chr(10).join(result.log)}"


@pytest.mark.parametrize("seed", [2, 17])
def test_a_batcher_that_forgets_what_it_waits_for_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = slow.awaited, count()
    monkeypatch.setattr(slow, "awaited", lambda *args: real(*args) if next(asked) % 3 else {})
    assert run_seed(seed).violation.startswith("slow: ")
