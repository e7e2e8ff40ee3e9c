"""The filter language, field by field, and what it says to a typing mistake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlbuffer.client.filters import parse
from rlbuffer.errors import FilterError


def group(**changes: Any) -> SimpleNamespace:
    values = {
        "group_id": "math.7f3a",
        "env": "math",
        "state": "dropped",
        "reason": "stale",
        "worker": "inf-3",
        "age": 2,
        "reward": 0.25,
        "tokens": 8000,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("   ", True),
        ("env:math", True),
        ("env:mat", False),
        ("env:code,math", True),
        ("env!=math", False),
        ("ENV:math", True),
        ("state:dropped reason:stale", True),
        ("state:dropped reason:small", False),
        ("worker:inf-3", True),
        ("id:math.7f", True),
        ("id:7f3a", False),
        ("id!=math.7f", False),
        ("age>=2", True),
        ("age>2", False),
        ("age<=2", True),
        ("age<2", False),
        ("age:2", True),
        ("age=2", True),
        ("age!=2", False),
        ("reward<0.1", False),
        ("reward<.3", True),
        ("reward>-1e-3", True),
        ("tokens>=8k", True),
        ("tokens>8K", False),
        ("tokens<1M", True),
        ("env:math age>=2 reward<0.1", False),
    ],
)
def test_a_filter_matches_what_it_says(text: str, matches: bool) -> None:
    assert parse(text).matches(group()) is matches


@pytest.mark.parametrize("text", ["reward<1", "reward>=0", "reward!=0"])
def test_a_missing_number_satisfies_nothing(text: str) -> None:
    assert parse(text).matches(group(reward=None)) is False


def test_allows_tells_what_need_not_be_read() -> None:
    chosen = parse("state:forming,ready age>1")
    assert [s for s in ("forming", "ready", "packed", "dropped") if chosen.allows("state", s)] == ["forming", "ready"]
    assert parse("age>1").allows("state", "packed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "stat:ready",
            (
                "'stat' is not a field to filter by. Did you mean state? "
                "Fields: env, state, reason, worker, adapter, id, age, reward, tokens."
            ),
        ),
        ("state:redy", "'redy' is not a state. Did you mean ready? One of: forming, ready, packed, trained, dropped."),
        (
            "reason:old",
            (
                "'old' is not a reason. One of: stale, future, small, flat, oversized, invalid, late, duplicate, void, "
                "operator."
            ),
        ),
        ("age>=two", "age is compared with a number (8, 0.5, 8k, 2M), got 'two'"),
        ("age>=", "'age>=' in the filter has no value"),
        ("env>math", "env is text: write env:math (or env!=math), not 'env>math'"),
        ("math", "cannot read 'math' in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. env:math age>=2"),
    ],
)
def test_a_typing_mistake_is_explained(text: str, message: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert str(caught.value) == message
