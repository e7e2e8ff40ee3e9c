"""The rollouts of a part: the same in columns and as records, whichever they were made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlbuffer.errors import PayloadError
from rlbuffer.store.part_rollouts import PartRollouts
from rlbuffer.store.records import PartRollout
from rlbuffer.store.step_format import decode_part
from rlbuffer.wire import payload
from rlbuffer.wire.payload import Announced

SOURCES = [["g:b.1:w.1", "b.1", "b", "", "p1", 2, "w", 17], ["g:a.0:w.2", "a.0", "a", "lora", "p0", 4, "w", 18]]


def item(source: int, index: int, **changes: Any) -> list[Any]:
    values = {
        "rollout_id": f"{SOURCES[source][1]}/{index}",
        "length": 9 + index,
        "prompt_tokens": 2,
        "loss_tokens": 7,
        "reward": 0.5 if index else None,
        "rewards": {"format": 1.0},
        "min_version": 3,
        "max_version": 4,
        "turns": 2,
        "is_truncated": bool(index),
        "size": 200 + index,
        "checksum": 2**32 - 1 - index,
    }
    return [source, index, 0.25 * index, *(values | changes).values()]


ITEMS = [item(1, 0), item(0, 1), item(1, 3)]


def rollouts() -> PartRollouts:
    return PartRollouts(ITEMS, SOURCES, "rlb:r:")


def test_columns_hold_what_the_records_hold() -> None:
    part = rollouts()
    records = list(part)
    assert (len(part), part[1], part[1:]) == (3, records[1], tuple(records[1:]))
    assert records[0].payload_key == "rlb:r:g:a.0:w.2"
    for name in ("payload_key", "group_id", "env", "adapter", "index", "advantage"):
        assert list(part.column(name)) == [getattr(record, name) for record in records]
    for name in Announced._fields:
        assert [getattr(its, name) for its in part.announced] == [getattr(record.info, name) for record in records]


@pytest.mark.parametrize("number", [-1, 2, 0.5])
def test_a_push_that_the_part_does_not_have_is_no_push_of_it(number: Any) -> None:
    with pytest.raises(ValueError, match="a rollout names a push that the part does not have"):
        PartRollouts([[number, *ITEMS[0][1:]]], SOURCES, "rlb:r:")


def test_records_make_the_same_columns() -> None:
    part = rollouts()
    again = PartRollouts.of(list(part))
    assert again == part == tuple(part)
    assert again.announced == part.announced
    assert PartRollouts.of(part) is part
    assert len(PartRollouts.of([])) == len(PartRollouts([], []).announced) == 0


def test_parts_join_by_the_places_of_their_rollouts() -> None:
    one, other = rollouts(), PartRollouts([item(0, 7)], SOURCES[1:], "rlb:r:")
    joined = PartRollouts.joined([(one, (2, 0)), (other, (0,)), (one, (1,)), (other, ())])
    assert list(joined) == [one[2], one[0], other[0], one[1]]
    assert list(PartRollouts.joined([])) == []


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"size": "200"}, "TypeError: size is not a whole number"),
        ({"length": 9.5}, "TypeError: length is not a whole number"),
        ({"loss_tokens": True}, "TypeError: loss_tokens is not a whole number"),
        ({"checksum": None}, "TypeError: checksum is not a whole number"),
        ({"size": -1}, "OverflowError"),
        ({"max_version": 2**64 - 1, "min_version": -2}, "OverflowError"),
        ({"length": 0}, "ValueError: a rollout has no tokens"),
    ],
)
def test_numbers_that_are_none_are_a_part_that_cannot_be_read(changes: dict[str, Any], wrong: str) -> None:
    items = [*ITEMS, item(0, 2, **changes)]
    part = {"step": 1, "rank": 0, "row_tokens": 64, "rows_per_micro_batch": 1, "sources": SOURCES, "rollouts": items}
    data = payload.dumps(part | {"rows": [[list(range(len(items)))]]})
    with pytest.raises(PayloadError, match=rf"^step part: unexpected content \({wrong}"):
        decode_part(data)


def test_a_record_of_another_part_is_another_one() -> None:
    part = rollouts()
    changed: list[PartRollout] = [replace(part[0], advantage=9.0), *part[1:]]
    assert part != changed
    assert PartRollouts.of(changed)[0].advantage == 9.0
