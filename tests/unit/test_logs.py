"""What processes log: lines for people, objects, and what stands in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from step_headers import step_of

from rlbuffer.daemon.reporter import step_line
from rlbuffer.packing.pack import pack
from rlbuffer.process import logs
from rlbuffer.process.logs import fields
from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.history import Dropped, RetiredEarly
from rlbuffer.testing import make_group

BATCH = pack(make_group(size=2).rollouts, row_tokens=64)
HEADER = step_of(BATCH, number=7).header
DROP = Drop("a.1", "a", Reason.STALE, 2, 30, ("5-0",), "age 3", 4, 0.5)
log = logging.getLogger("rlbuffer.somewhere")


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    logs.stop()


def test_a_line_has_its_text_for_people_and_its_fields_for_programs() -> None:
    for display in ("plain", "json", "none"):
        lines: list[str] = []
        logs.start(display, clock=False, write=lines.append)
        log.warning("step %d of \x1b[2J", 7, extra=fields("step", HEADER, drops={"stale": [2, 30]}))
        log.debug("group %s", "a.1", extra=fields("drop", DROP))
        logs.stop()
        if display == "plain":
            assert lines == ["! step 7 of \\x1b[2J"]
        elif display == "none":
            assert lines == []
        else:
            step, drop = map(json.loads, lines)
            assert (step["event"], step["step"], step["drops"]) == ("step", 7, {"stale": [2, 30]})
            assert (step["level"], step["logger"]) == ("warning", "rlbuffer.somewhere")
            assert (drop["text"], drop["reason"], drop["entry_ids"]) == ("group a.1", "stale", ["5-0"])


def test_a_step_that_teaches_nothing_or_not_all_says_so() -> None:
    def line(flat: int, rollouts: int) -> str:
        return step_line(replace(HEADER, group_ids=("a.0", "a.1"), rollouts=rollouts), 1.5, {}, flat)

    assert "teach" not in line(0, 8)
    assert "1 of 2 groups teach nothing" in line(1, 8)
    assert "! it teaches nothing: no rollout" in line(2, 8)
    assert "! it teaches nothing: each group is one rollout, and none has an advantage" in line(2, 2)


@pytest.mark.parametrize("closed_by", [*ClosedBy])
def test_a_step_that_closed_at_a_number_does_not_say_how_full_its_rows_are(closed_by: ClosedBy) -> None:
    line = step_line(replace(HEADER, closed_by=closed_by, fill=0.25), 1.5, {}, 0)
    assert ("25%" in line) == (closed_by not in (ClosedBy.GROUPS, ClosedBy.ROLLOUTS))


def test_a_record_of_the_history_leaves_out_what_need_not_be_there() -> None:
    drop = Dropped(
        group_id="a.1", env="a", reason=Reason.STALE, rollouts=2, tokens=3, detail="d", min_version=4, reward=None
    )
    kept = {"event", "group_id", "env", "reason", "rollouts", "tokens", "detail", "min_version", "reward"}
    assert drop.as_object().keys() == kept
    assert replace(drop, worker="w").as_object().keys() == {*kept, "worker"}
    assert RetiredEarly(step=1, used=2, limit=3).as_object() == {
        "event": "retired early",
        "step": 1,
        "used": 2,
        "limit": 3,
    }
