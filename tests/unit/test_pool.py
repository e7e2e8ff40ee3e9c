"""The batcher's index at its edges: what is remembered of groups that are gone, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbuffer.batcher.pool import TOMBSTONE_SECONDS, USUAL_SECONDS, Pool
from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import REMEMBERED_STEPS, BatcherConfig
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.testing import make_group


def pool(**settings: object) -> Pool:
    config = BatcherConfig(row_tokens=1000, **settings)  # type: ignore[arg-type]
    return Pool(config, Teaching(config))


def add(made: Pool, name: str, *, now: float = 0.0, version: int = 0, entry: str | None = None) -> None:
    made.add(make_group(group_id=name, size=2, version=version).info(), entry or f"{name}-0", now)


def reasons(made: Pool) -> list[tuple[str, str]]:
    return [(drop.group_id, drop.reason) for drop in made.drops.values()]


@pytest.mark.parametrize(("timeout", "kept"), [(10.0, TOMBSTONE_SECONDS), (TOMBSTONE_SECONDS, 2 * TOMBSTONE_SECONDS)])
@pytest.mark.parametrize(
    ("max_age", "steps"), [(1, REMEMBERED_STEPS), (REMEMBERED_STEPS - 2, REMEMBERED_STEPS), (100, 102)]
)
@pytest.mark.parametrize("missing", ["nothing", "time", "steps", "leave"])
def test_a_closed_group_is_remembered_for_some_time_and_some_steps_whichever_is_later(
    timeout: float, kept: float, max_age: int, steps: int, missing: str
) -> None:
    made = pool(group_timeout_seconds=timeout, max_age=max_age)
    made.advance(100.0, 5)
    made.close(["g"])
    now = 100.0 + kept + (0.0 if missing == "time" else 0.1)
    made.advance(now, 5 + steps + (0 if missing == "steps" else 1), forgets=missing != "leave")
    add(made, "g", now=made.now, version=4)
    assert reasons(made) == ([] if missing == "nothing" else [("g", "late")])


@pytest.mark.parametrize("first", ["advance", "add"])
def test_groups_closed_before_any_time_was_told_are_remembered_from_the_first_time_on(first: str) -> None:
    made = pool()
    made.close(["g"])
    if first == "add":
        add(made, "other", now=1000.0)
    made.advance(1000.0, 500)
    made.advance(1000.0 + TOMBSTONE_SECONDS, 500 + REMEMBERED_STEPS + 1)
    made.advance(1000.1 + TOMBSTONE_SECONDS, 500 + REMEMBERED_STEPS)
    add(made, "g", now=made.now)
    assert ("g", "late") in reasons(made)


def test_an_entry_that_is_gone_takes_its_own_drop_with_it() -> None:
    made = pool()
    made.close(["g"])
    add(made, "g")
    assert reasons(made) == [("g", "late")]
    made.remove("g-0")
    assert made.drops == {}


def test_a_group_from_the_future_that_is_gone_is_not_dropped_again() -> None:
    made = pool()
    made.sweep_future(lambda adapter: 2)
    add(made, "g", version=5)
    add(made, "h", version=5)
    made.remove("g-0")
    made.sweep_future(lambda adapter: 3)
    assert reasons(made) == [("h", "future")]
    assert made.is_empty is False
    made.confirm([*made.drops.values()])
    assert made.is_empty


@pytest.mark.parametrize("planned", [2, 4])
def test_a_group_of_a_version_that_is_not_made_goes_at_once_also_while_it_forms(planned: int) -> None:
    made = pool()
    group = make_group(group_id="g", size=2, version=3)
    made.add(replace(group, planned_size=planned).info(), "g-0", 0.0)
    made.sweep_future(lambda adapter: 2)
    assert reasons(made) == [("g", "future")]


@pytest.mark.parametrize(("planned", "again", "is_said"), [(2, 1, True), (4, 1, False), (4, 2, False), (4, 3, True)])
def test_rollouts_that_came_again_are_said_once_their_group_would_be_whole_with_them(
    planned: int, again: int, is_said: bool
) -> None:
    """As of parts that do not name their rollouts: each has the same name. One that a writer sends twice is no news."""
    made = pool()
    part = make_group(group_id="g", size=1, planned_size=planned).info()
    for number in range(1 + again):
        made.add(part, f"g-{number}", 0.0)
    assert reasons(made) == [("g", "duplicate")] * again
    assert made.env("a").loss(made.now) == ("duplicate: rollout g/0 came before" if is_said else "")
    add(made, "h")
    assert made.env("a").loss(made.now) == ""
    add(made, "h", entry="h-1")
    assert ("h", "late") in reasons(made) or ("h", "duplicate") in reasons(made)
    assert made.env("a").loss(made.now) == "", "h is ready, and waits for nothing"


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.FLAT, Reason.INVALID])
def test_what_an_env_loses_is_said_at_once_unless_some_of_it_is_usual(reason: Reason) -> None:
    made = pool()
    made.advance(5.0, 1)
    made.lose(Drop("g", "a", reason, rollouts=2, tokens=20, detail="why"))
    made.advance(5.0 + USUAL_SECONDS - 0.1, 1)
    made.lose(Drop("h", "a", reason, rollouts=2, tokens=20, detail="again"))
    assert made.env("a").loss(made.now) == ("" if reason is Reason.STALE else f"{reason}: again")
    made.advance(5.0 + USUAL_SECONDS, 1)
    assert made.env("a").loss(made.now) == f"{reason}: again"


@pytest.mark.parametrize("seconds", [49.0, 51.0])
def test_a_group_is_as_old_as_its_first_part_though_another_came_before_a_scorer_pushed_that_again(
    seconds: float,
) -> None:
    """As a leader knows it that has not read what the scorer replaced."""
    made = pool(group_timeout_seconds=50.0, max_age_seconds=45.0, min_group_size=1)
    parts = [make_group(group_id="g", rollout_ids=[f"g/{i}"], planned_size=4).info() for i in range(3)]
    made.add(parts[0], "3-0", 3.0)
    made.add(parts[1], "5-0", 0.0, 0.0, "0-0", 5.0)
    made.advance(45.5, 1)
    assert reasons(made) == [("g", "stale")]
    made = pool(group_timeout_seconds=50.0, min_group_size=1)
    made.add(parts[0], "3-0", 3.0)
    made.add(parts[1], "5-0", 0.0, 0.0, "0-0", 5.0)
    made.add(parts[2], "6-0", seconds)
    assert reasons(made) == ([] if seconds < 50.0 else [("g", "late")])


def test_a_group_is_as_old_as_its_first_part_after_a_takeover_too() -> None:
    """Time without a leader does not count against what is missing, but makes nothing younger."""
    made = pool(max_age_seconds=45.0)
    for entry, index, pushed in (("3-0", 0, 3.0), ("5-0", 1, 0.0)):
        part = make_group(group_id="g", rollout_ids=[f"g/{index}"], planned_size=4)
        made.add(part.info(), entry, 20.0, pushed)
    made.advance(45.5, 1)
    assert reasons(made) == [("g", "stale")]


def test_a_group_that_came_before_those_that_were_read_first_is_not_trained_beyond_its_limit() -> None:
    """A scorer has pushed it again, and no leader has read it before that."""
    made = pool(max_age_seconds=45.0)
    made.add(make_group(group_id="h", size=2).info(), "10-0", 10.0, 10.0)
    made.add(make_group(group_id="g", size=2).info(), "11-0", 11.0, 0.0)
    made.advance(46.0, 1)
    assert reasons(made) == [("g", "stale")]
    made.advance(55.5, 1)
    assert reasons(made) == [("g", "stale"), ("h", "stale")]
