"""Faults in a small asynchronous loop of real parts are named. The whole set is a script: support/planted_faults.py."""

from __future__ import annotations

import pytest
from planted_faults import CLEAN, FAULTS, Load, named, records_of

FEW = ("noise", "no_load", "top_p", "constant")
"""The others need more steps, or are found in the same way."""


@pytest.mark.parametrize("fault", FEW)
def test_a_planted_fault_is_named_within_three_steps(fault: str) -> None:
    found = named(records_of(fault, Load(seed=3), warm=2, steps=3))
    assert found[:2] == [set(), set()]
    assert FAULTS[fault] in found[-1]


@pytest.mark.parametrize("fault", ["", "bfloat16_engine"])
def test_a_run_without_a_fault_raises_nothing(fault: str) -> None:
    records = records_of(fault, Load(seed=4, **CLEAN[3]), warm=2, steps=3)
    assert named(records) == [set()] * 5
    assert (records[-1].drift["0"]["rms"] > 1e-3) is bool(fault)
