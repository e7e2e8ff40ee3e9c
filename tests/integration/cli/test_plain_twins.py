"""Every screen of the browser has a printed and a JSON twin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer_cli.whole_run import WholeRun

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def filled(run: Run) -> None:
    """A committed step, a group that is ready, a worker with a failure."""
    run.step("a.0", "b.0")
    run.push("a.1", rewards=[0.25, 0.75, 0.5])
    problem = {"kind": "env_fails", "count": 2, "detail": "KeyError 2, the last: KeyError: 'x' (envs.py:3 in score)"}
    beat = {"version": 3, "env": "a", "problems": [problem]}
    run.store.heartbeat("worker", "w-0", beat)


@pytest.fixture
def call(run: Run, typed: Call) -> Call:
    return lambda *words: typed("inspect", *words, "--redis", run.url, "--run", run.store.run)


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_steps_are_printed_as_rows_and_one_by_ranks_with_their_cost(call: Call) -> None:
    code, out, _ = call("steps")
    assert (code, out.split()[:3]) == (0, ["step", "state", "groups"])
    assert re.search(r"^ *1 +◆ packed +2 ", out, re.MULTILINE)
    code, out, _ = call("step:1")
    assert code == 0
    assert "closed by capacity: the next group would have needed more rows than a step has" in out
    work = r"(sets the pace|\d+% of the work of the busiest rank)$"
    ranks = re.findall(rf"^rank [01]: \d+ tokens in 2 rows, \d+% empty, {work}", out, re.MULTILINE)
    assert len(ranks) == 2
    assert "sets the pace" in ranks
    step = records(call("step:1", "--json")[1])[0]
    assert (step["schema"], step["step"], step["closed_by"]) == ("rlbuffer.step/1", 1, "capacity")
    assert [rank["rank"] for rank in step["ranks"]] == [0, 1]
    assert sum(rank["tokens"] for rank in step["ranks"]) == step["tokens"]
    assert sorted(name for rank in step["ranks"] for row in rank["rows"] for name in row) == [
        *("a.0/0", "a.0/1", "b.0/0", "b.0/1")
    ]
    assert [record["step"] for record in records(call("steps", "--json")[1])] == [1]
    code, out, err = call("step:7")
    assert (code, out) == (1, "")
    assert "has no step 7: the last committed one is 1" in err


def test_workers_are_printed_with_what_failed_last(call: Call) -> None:
    code, out, _ = call("processes")
    assert code == 0
    assert re.search(r"^worker w-0 +0\.\d s ago +v3 +a ", out, re.MULTILINE)
    assert "KeyError: 'x' (envs.py:3 in score)" in out
    beats = records(call("processes", "--json")[1])
    assert [(beat["schema"], beat["kind"], beat["name"]) for beat in beats] == [("rlbuffer.process/1", "worker", "w-0")]


def test_two_rollouts_are_printed_from_where_they_part(call: Call) -> None:
    code, out, _ = call("a.1/0", "a.1/1")
    assert code == 0
    assert "a.1/0: reward 0.250" in out
    assert "they part at token 0" in out
    assert "≠ first" in out
    pair = records(call("a.1/0", "a.1/1", "--json")[1])[0]
    assert pair == {
        "schema": "rlbuffer.pair/1",
        "rollouts": ["a.1/0", "a.1/1"],
        "rewards": [0.25, 0.75],
        "part_at_token": 0,
    }
    assert "their tokens are the same" in call("a.1/0", "a.1/0")[1]


def test_a_rollout_of_another_group_is_not_compared_with_one_of_this(run: Run, call: Call) -> None:
    run.push("a.12", rewards=[0.25, 0.75])  # `a.1` begins its id, and is another group
    for one, other, others_group in (("a.1/0", "b.0/1", "b.0"), ("a.12/0", "a.1/1", "a.1")):
        code, out, err = call(one, other)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1] == (
            f"Error: only rollouts of one group are compared; {one} is of group {one.partition('/')[0]!r}, {other} of "
            f"{others_group!r}"
        )
    code, out, err = call("a.1/0", "nosuch/1")
    assert (code, out) == (1, "")
    assert "has no group 'nosuch/1'" in err
    assert "they part at token 0" in call("a.12/0", "1")[1]


def test_a_word_that_finds_nothing_may_be_a_table(run: Run, call: Call) -> None:
    code, _, err = call("drft")
    assert (code, "Did you mean drift?" in err) == (1, True)
    code, _, err = call("nothing")
    assert (code, "The tables are groups, steps, " in err) == (1, True)
    assert "tables" not in call("a.99")[2]  # an id


def test_a_missing_rollouts_error_says_how_many_more_than_it_names_there_are(run: Run, call: Call) -> None:
    run.push("d.0", size=12)
    known = ", ".join(f"d.0/{i}" for i in range(8))
    code, _, err = call("d.0/77")
    assert (code, err.splitlines()[-1]) == (
        1,
        f"Error: group 'd.0' has no rollout '77'. Its rollouts: {known} and 4 more.",
    )


def test_what_is_printed_is_read_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("group", ("a.1",)), ("group", ("a.1/0", "a.1/1")), ("step", ("step:1",))):
        read, asked = getattr(WholeRun, name), []
        monkeypatch.setattr(
            WholeRun, name, lambda run, what, read=read, asked=asked: asked.append(what) or read(run, what)
        )
        assert call(*words)[0] == 0
        assert len(asked) == 1


def test_a_rollouts_life_says_step_rank_and_row(call: Call) -> None:
    assert re.search(r"-> packed into step 1, rank [01], row [01], .* after the push$", call("b.0/1")[1], re.M)
    rollout = records(call("b.0/1", "--json")[1])[0]
    step = records(call("step:1", "--json")[1])[0]
    assert "b.0/1" in step["ranks"][rollout["rank"]]["rows"][rollout["row"]]


def test_best_and_worst_are_compared_by_one_key(run: Run) -> None:
    async def tour(person: Person) -> None:
        await person.sees("a.1/2")
        await person.press("b")
        await person.sees("a.1/1 and a.1/0", "a.1/1: reward 0.750", "a.1/0: reward 0.250", "they part at token 0")

    async def flat(person: Person) -> None:
        await person.sees("c.1/1")
        await person.press("b")
        await person.sees("no rollout is better than another")

    run.push("c.1", rewards=[1.0, 1.0])
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        browse(buffer, tour, identifier="a.1")
        browse(buffer, flat, identifier="c.1")


def test_a_dropped_group_has_its_age_and_a_dash_for_what_is_not_kept(run: Run, call: Call) -> None:
    run.push("c.7", version=0)
    run.drop("stale", [entry for entry in run.pool() if entry.group_id == "c.7"])
    code, out, err = call("--limit", "4")
    assert code == 0
    assert re.search(r"^c\.7 +✕ dropped stale +\S+ +- +1 +\d+ ", out, re.MULTILINE), out
    assert "-: not kept of a dropped group" in out
    order = "those in the pool, then those in steps, then dropped ones, the newest of each first"
    assert f"the first 4 (first {order}): --limit shows more" in err
    assert [record["group_id"] for record in records(call("--json")[1])] == ["a.1", "a.0", "b.0", "c.7"]
    assert [record["age"] for record in records(call("--json", "--where", "state:dropped")[1])] == [1]
    assert call("--json", "--where", "state:dropped age>=2")[1] == ""
    run.client.delete(*run.store.dropped_payloads(["c.7"])["c.7"])
    code, _, err = call("c.7/0")
    assert (code, "group 'c.7' was dropped (stale: because): its rollouts are no longer kept" in err) == (1, True)


def test_a_share_says_what_it_is_of(run: Run, call: Call) -> None:
    meta = run.store.meta()
    run.client.hset(run.store.keys.meta, "config", msgpack.packb({**meta.config, "budgets": {"a": 0.4, "b": 0.6}}))
    _, out, _ = call()
    assert re.search(r"^■ a .* 50% +40% ", out, re.MULTILINE), out
    assert "share: of tokens so far, ┃ target" in out
