"""Circumstances that the simulation models beside a network that loses requests: each in a few seeds, and seen when it
goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from simulation.__main__ import run_seed
from simulation.defects import SHARES
from simulation.draws import ODD, draw
from simulation.mutations import Mutation
from simulation.network import SimulatedConnection
from simulation.world import World


def seeds_with(circumstance: str) -> Iterator[int]:
    return (seed for seed in count() if getattr(draw(seed), circumstance))


@pytest.mark.parametrize("circumstance", [*ODD, "away", "own", "clocks"])
def test_seeds_with_it_hold_every_invariant(circumstance: str) -> None:
    for seed in islice(seeds_with(circumstance), 2):
        result = run_seed(seed)
        assert not result.violation, f"seed {seed}: {result.violation}\n{chr(10).join(result.log)}"


def test_pools_that_keep_the_demoted_servers_connections_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedConnection, "_hang_up", lambda self: None)
    results = [run_seed(seed) for seed in islice(seeds_with("failover"), 3)]
    assert any("is not trained after" in result.violation for result in results)


def test_a_lease_that_is_renewed_once_a_turn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.daemon.lease_keeper.RENEWALS", 0.2)
    seeds = (seed for seed in seeds_with("planning") if draw(seed).planning == 1.0)
    assert any("is not trained after" in run_seed(seed).violation for seed in islice(seeds, 8))


def test_a_script_that_takes_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARES, "COMMIT", 1.0)
    text = "if seen[id] then return {'TWICE', id} end"
    mutation = Mutation(name="twice", script="commit", old=text, new="")
    found = (World(draw(seed, mutation=mutation)).simulate().violation for seed in range(40))
    # Either the answer is seen to be wrong, or what it did to the account.
    assert any(violation.startswith(("defect: COMMIT", "I10: ")) for violation in found)
