from dataclasses import dataclass

import pytest

from rlbuffer.batcher.age import VersionIndex


@dataclass(frozen=True)
class Item:
    group_id: str
    min_version: int


def index(*versions):
    made = VersionIndex()
    for number, version in enumerate(versions):
        made.add(Item(f"g{number}", version))
    return made


@pytest.mark.parametrize(
    ("newest_first", "oldest", "expected"),
    [
        (True, 0, ["g1", "g4", "g0", "g3", "g2"]),
        (False, 0, ["g2", "g0", "g3", "g1", "g4"]),
        (True, 2, ["g1", "g4", "g0", "g3"]),
        (False, 3, ["g1", "g4"]),
        (False, 4, []),
    ],
)
def test_walking_goes_by_version_and_in_order_of_arrival_inside_one(newest_first, oldest, expected):
    walked = index(2, 3, 1, 2, 3).walk(newest_first=newest_first, oldest=oldest)
    assert [item.group_id for item in walked] == expected


def test_popping_takes_whole_buckets_below_the_version():
    made = index(2, 3, 1, 2, 3)
    assert [item.group_id for item in made.pop_older_than(3)] == ["g2", "g0", "g3"]
    assert (len(made), made.count(), made.count(4)) == (2, 2, 0)
    assert made.pop_older_than(3) == []


def test_discarding_twice_or_something_unknown_changes_nothing():
    made = index(1, 1)
    made.discard(Item("g0", 1))
    made.discard(Item("g0", 1))
    made.discard(Item("other", 7))
    assert [item.group_id for item in made.walk(newest_first=True, oldest=0)] == ["g1"]
