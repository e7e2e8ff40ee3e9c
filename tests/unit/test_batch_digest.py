"""The digest by which a replayed step shows that it is the same: nothing of a micro-batch may change unseen."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from step_headers import step_of

from rlbuffer.packing.pack import pack
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.records.step_digest import HASHED_ARRAYS, digest_step
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.testing import make_group


def micro_batch() -> MicroBatch:
    rollouts = make_group(
        size=2, lengths=[6, 7], columns=[{"entropy": np.ones(n, np.float32)} for n in (6, 7)]
    ).rollouts
    return pack(rollouts, [0.5, -0.5], row_tokens=16)


def digest(*micro_batches: MicroBatch) -> str:
    return digest_step(step_of(*micro_batches, normalizers=Normalizers(loss_tokens=1, rollouts=1, groups=1)))


def with_array(micro_batch: MicroBatch, name: str, array: Any) -> MicroBatch:
    """The same, but for one array, derived or not: the others are those of a micro-batch whose digest was taken."""
    changed = copy(micro_batch)
    vars(changed)[name] = array
    return changed


def test_equal_arrays_have_equal_digests() -> None:
    assert digest(micro_batch()) == digest(micro_batch())


@pytest.mark.parametrize("name", [*HASHED_ARRAYS, "entropy"])
def test_a_single_value_changes_the_digest(name: str) -> None:
    whole = micro_batch()
    array = (whole.columns[name] if name in whole.columns else getattr(whole, name)).copy()
    array[-1] = not array[-1] if array.dtype == bool else array[-1] + 1
    before = digest(whole)
    changed = replace(whole, columns={name: array}) if name in whole.columns else with_array(whole, name, array)
    assert digest(changed) != before


def test_names_dtypes_and_the_order_of_micro_batches_count() -> None:
    whole = micro_batch()
    entropy = whole.columns["entropy"]
    other = with_array(whole, "advantages", -whole.advantages)
    digests = {
        digest(whole),
        digest(replace(whole, columns={"renamed": entropy})),
        digest(replace(whole, columns={"entropy": entropy.view(np.int32)})),
        digest(whole, other),
        digest(other, whole),
    }
    assert len(digests) == 5
