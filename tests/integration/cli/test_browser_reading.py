"""A screen that is still being read says so, and what somebody presses then is not lost in silence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import waits
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer_cli import sheets


@pytest.mark.parametrize("key", ["c", "b", "s", "enter", "y"])
def test_a_key_that_is_pressed_before_a_group_is_read_is_answered(
    run: Run, buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    run.push("a.0")
    may_read, read = threading.Event(), sheets.read

    def late(*given: Any) -> sheets.Sheet:
        if given[1].kind == "group":
            may_read.wait(60)
        return read(*given)

    monkeypatch.setattr(sheets, "read", late)

    async def tour(person: Person) -> None:
        await person.sees("a.0", "reading ...")
        await person.press(key)
        await person.sees("still reading")
        may_read.set()
        await person.sees("a.0/0", "as of")
        await person.until(lambda shown: "reading" not in shown, "the word is taken away")

    browse(buffer, tour, identifier="a.0")


def test_the_key_of_problems_has_their_number(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0")
    for name, env in (("w-0", "a"), ("w-1", "b")):
        run.store.heartbeat("worker", name, {"env": env, "problems": [{"kind": "worker_stuck", "detail": "no"}]})

    async def tour(person: Person) -> None:
        await person.sees("a.0", "! problems 2")
        run.store.heartbeat("worker", "w-1", {"env": "b"})
        await person.press("r")
        await person.sees("! problems 1")

    browse(buffer, tour, size=(140, 40))


def test_a_group_shows_its_rollouts_from_the_best_to_the_worst(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0", rewards=[0.25, -0.5, 0.75])

    async def tour(person: Person) -> None:
        shown = await person.sees("a.0/0", "bar: reward, full at 1", "bar: advantage, full at ±1", "● ready")
        assert shown.index("a.0/2") < shown.index("a.0/0 ") < shown.index("a.0/1 ")
        assert "\N{MINUS SIGN}0.500" in shown

    browse(buffer, tour, identifier="a.0", size=(140, 40))


@pytest.mark.parametrize("lines", [24, 29])
def test_the_head_of_the_pool_leaves_a_small_terminal_to_the_groups(
    run: Run, buffer: rlbuffer.Buffer, lines: int
) -> None:
    run.step("b.0")
    for at in range(30):
        run.push(f"a.{at}")
        trouble = {"kind": "env_fails", "count": 2, "detail": "KeyError: 'x' (envs.py:3 in score) " * 5}
        run.store.heartbeat("worker", f"w-{at}", {"env": f"env{at}", "problems": [trouble]})

    async def tour(person: Person) -> None:
        shown = (await person.sees("a.29", "■ a")).splitlines()
        head = next(at for at, line in enumerate(shown) if line.split()[:2] == ["group", "state"])
        assert head <= 1 + 8 + 2, "the title, the head, the legend"
        assert sum(line.strip().startswith("a.") for line in shown) >= 10

    browse(buffer, tour, size=(80, lines))


def test_every_screen_says_how_far_the_run_is_and_what_it_waits_for(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.step("a.0", "b.0")
    run.store.lease("batcher", ttl_seconds=3600)
    waits.says(run.store, Waiting(kind=Wait.ENV_SHORT, step=2, env="b", groups=6))

    async def tour(person: Person) -> None:
        for keys, words in (
            ((), "a.0/0"),
            (("enter",), "LIFE"),
            (("t",), "1 step"),
            (("enter",), "rank 0"),
            (("w",), "1 process"),
        ):
            await person.press(*keys)
            await person.sees(words, "step 1", "reward 0.", "b is 6 groups short")

    browse(buffer, tour, identifier="a.0", size=(140, 40))
