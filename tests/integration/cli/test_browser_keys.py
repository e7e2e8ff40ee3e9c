"""The keys at the foot of each screen of the browser: on the smallest terminal, every one that does something there."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer_cli.browse.screen import ALWAYS, key_rows

MOVES = {"j", "k"}
"""Twins of the arrows."""


def foot(person: Person) -> list[str]:
    """The last lines of the screen that name keys."""
    height = person.app.screen.query_one("#keys").size.height
    return person.lines()[-height:]


def named(rows: list[str]) -> set[str]:
    """The keys that the lines name."""
    keys: set[str] = set()
    for piece in re.split(r" {2,}", "  ".join(rows)):
        head = piece.split(" ")[0]
        if head == "1-8":
            keys |= set("12345678")
        else:
            keys |= {head} if head == "/" else set(head.split("/"))
    return keys


def bound(person: Person) -> set[str]:
    """The keys that the screen, or what has its focus, takes."""
    names = {"question_mark": "?", "slash": "/", "escape": "esc"}
    taken = {names.get(key, key) for key in person.app.screen.active_bindings}
    return {key for key in taken if len(key) == 1 or key in ("enter", "esc", "tab")} - MOVES


def test_at_80_columns_every_key_that_does_something_on_a_screen_stands_at_its_foot(tmp_path: Path) -> None:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    run.step("a.0")
    run.push("a.1", rewards=[0.25, 0.75])
    run.store.heartbeat("worker", "w-0", {"version": 1})
    idle = {
        "Pool": {"esc", "m"},  # without a filter, and without more groups
        "Group": set(),
        "Pair": {"enter", "y", "o", "e"},
        "OneRollout": set(),
        "Steps": {"e", "t"},
        "OneStep": set(),
        "Workers": {"e", "w"},
        "Raw": {"o", "e", "l", "r", "tab"},
        "Help": {"y", "o", "e", "l", "r", "tab"},
    }
    seen = set()

    async def tour(person: Person) -> None:
        for keys, words in (
            ((), "> a.1"),
            (("enter",), "group a.1"),
            (("b",), "they part at token"),
            (("escape", "enter"), "rollout a.1/0"),
            (("t",), "that can still be read"),
            (("enter",), "closed by capacity"),
            (("escape", "w"), "worker w-0"),
            (("o",), "worker w-0: raw"),
            (("question_mark",), "What each screen answers"),
        ):
            await person.press(*keys)
            await person.sees(words)
            screen = type(person.app.screen).__name__
            ends = {"g", "G"}  # where they are not named they only move
            assert bound(person) - ends - named(foot(person)) == idle[screen] - ends, screen
            assert len(foot(person)) <= 2
            seen.add(screen)
        assert seen == idle.keys()

    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        browse(buffer, tour)
    run.close()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_keys_that_find_no_room_are_left_out_from_the_end_and_help_never(width: int) -> None:
    keys = [f"{n} does something" for n in range(12)]
    rows = key_rows(keys, width)
    shown = [key for row in rows for key in row.split("  ")]
    assert shown == [*keys[: len(shown) - len(ALWAYS)], *ALWAYS]
    assert len(rows) <= 3
    assert max(map(len, rows)) <= width
    assert (len(shown) == len(keys) + len(ALWAYS)) is (width == 200)
