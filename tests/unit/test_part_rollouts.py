"""The rollouts of a part as columns and as records, and parts that cannot be any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import ROW_DTYPE
from rlbuffer.store.part_rollouts import PART_ROW, PartRollouts, SourcePush
from rlbuffer.store.step_format import decode_part
from rlbuffer.wire.checksum import sealed

SOURCES = [
    SourcePush("g:b.1:w.1", "b.1", "b", "", "p1", 2, "w", 17),
    SourcePush("g:a.0:w.2", "a.0", "a", "lora", "p", 4, "w", 18),
]
NUMBERS = dict.fromkeys(ROW_DTYPE.names or (), 1) | {
    "length": 9,
    "prompt_tokens": 2,
    "loss_tokens": 7,
    "turns": 2,
    "largest_token": 99,
    "reward": 0.5,
    "min_version": 3,
    "max_version": 4,
    "flags": 1,
    "size": 200,
    "checksum": 2**32 - 1,
}


def table(*rows: tuple[int, int], **changes: Any) -> Any:
    """A row of each (push, payload field)."""
    numbers = NUMBERS | changes
    values = [
        (*row, row[1], 0, 1, 4, 7, 0.25 * row[1], *(numbers[name] for name in ROW_DTYPE.names or ())) for row in rows
    ]
    return np.array(values, PART_ROW)


def rollouts() -> PartRollouts:
    its = table((1, 0), (0, 1), (1, 3))
    its["flags"], its["reward"], its["length"] = [0, 3, 1], [0.0, 0.5, 2.0], [9, 10, 11]
    return PartRollouts(its, SOURCES, rewards=[{"format": 1.0}, {}, {}])


def encoded(**changes: Any) -> bytes:
    rows = changes.pop("rows", [[2, 0], [1]])
    part = {"step": 1, "rank": 0, "row_tokens": 64, "rows_per_micro_batch": 2, "sources": SOURCES, "ids": None}
    its = {"rollouts": rollouts().table.tobytes(), "rewards": None, "rows": rows}
    return sealed(msgspec.msgpack.encode(part | its | changes))


def test_rows_name_the_rollouts_one_after_the_other() -> None:
    part = decode_part(encoded(), "rlb:r:")
    assert part.rows == (((0, 1), ()), ((2,),))
    assert part.rollouts[0] == replace(rollouts()[0], payload_key="rlb:r:g:a.0:w.2", info=part.rollouts[0].info)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [[2, 0], [2]]},
        {"rows": [[2, 0]]},
        {"rows": [[-1, 4]]},
        {"rows": [[2**53 - 1]]},
        {"sources": SOURCES[:1]},
        {"sources": []},
        {"sources": [["k", "g"]]},
        {"ids": ["a"]},
        {"rewards": [{}]},
        {"rewards": [{"a": float("nan")}, {}, {}]},
        {"rollouts": rollouts().table.tobytes()[:-1]},
        {"rollouts": table((0, 0), (0, 1), (0, 2), length=0).tobytes()},
        {"rollouts": table((0, 0), (0, 1), (0, 2), flags=4).tobytes()},
        {"rollouts": table((0, 0), (0, 1), (0, 2), reward=float("inf")).tobytes()},
        {"rank": -1},
        {"more": 1},
    ],
)
def test_a_part_that_holds_what_no_step_has_cannot_be_read(changes: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match=r"^step part: "):
        decode_part(encoded(**changes))
