"""Filters about rollouts in the browser and its plain twin: what is listed, and which rollouts of a group are meant."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from browsing import Person, browse
from store_runs import Run
from textual import events

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.main import main
from rlbuffer_cli.whole_run import WholeRun


@pytest.fixture(autouse=True)
def groups(run: Run) -> None:
    """One group with a rollout that was cut, one without."""
    run.push("a.0")
    group = make_group(env="a", group_id="a.1", size=3)
    cut = replace(group.rollouts[1], finish_reason="length", is_truncated=True, text="the answer is\n42")
    run.push(replace(group, rollouts=(group.rollouts[0], cut, group.rollouts[2])))


def test_a_filter_about_rollouts_chooses_groups_and_marks_the_rollouts_that_match(buffer: rlbuffer.Buffer) -> None:
    async def tour(person: Person) -> None:
        await person.sees("a.0", "a.1")
        await person.press("slash", *"stop:length text:/answer", "space", *"is/", "enter")
        shown = await person.sees("1 group where stop:length text:/answer is/")
        assert "a.0" not in shown
        await person.press("enter")
        shown = await person.sees("group a.1: 1 of 3 rollouts match stop:length text:/answer is/")
        marked = [line for line in shown.splitlines() if "*" in line]
        assert [line.split()[:2] for line in marked] == [["*", "a.1/1"]]

    browse(buffer, tour, size=(120, 30))


def test_a_filter_is_named_when_the_groups_obey_it(buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer, read = threading.Event(), threading.Event(), WholeRun.groups

    def slow(run: WholeRun, where: str, *rest: Any) -> Any:
        if where:
            asked.set()
            assert may_answer.wait(60)
        return read(run, where, *rest)

    monkeypatch.setattr(WholeRun, "groups", slow)

    async def tour(person: Person) -> None:
        await person.sees("a.0", "a.1")
        await person.press("slash", *"env:b", "enter")
        await person.until(lambda shown: asked.is_set() and "env:a" not in shown, "the groups are read")
        assert ("a.0" in person.text(), "where env:b" in person.text()) == (True, False)
        may_answer.set()
        shown = await person.sees("0 groups where env:b")
        assert "a.0" not in shown

    browse(buffer, tour, size=(120, 30))


def test_keys_typed_ahead_of_an_enter_are_not_taken_for_the_filter(buffer: rlbuffer.Buffer) -> None:
    async def tour(person: Person) -> None:
        await person.sees("a.0", "a.1")
        await person.press("slash")
        for key in (*"stop", "colon", *"length", "enter", "S", "l"):  # all before the application sees the first
            person.app.post_message(events.Key(key, ":" if key == "colon" else key if len(key) == 1 else None))
        await person.sees("[live] 1 group where stop:length, newest first, reversed")

    browse(buffer, tour, size=(120, 30))


def test_the_plain_twin_lists_the_same_groups(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    where = "stop:length text:/ANSWER is\\s42/i"
    assert main(["inspect", "--json", "--redis", run.url, "--run", run.store.run, "--where", where]) == 0
    assert [line.split('"group_id": ')[1][:5] for line in capsys.readouterr().out.splitlines()] == ['"a.1"']
    assert main(["inspect", "--redis", run.url, "--run", run.store.run, "--where", "text:/(/"]) == 2
    assert "Error: text:/(/ is no regular expression: missing )" in capsys.readouterr().err
