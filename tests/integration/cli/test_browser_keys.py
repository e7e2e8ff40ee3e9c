"""The foot of the browser: keys that can be clicked, and every one that does something is on the page of keys."""

from __future__ import annotations

from browsing import Person, browse
from store_runs import Run
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

import rlbuffer
from rlbuffer_cli.browse.pages import HELP

NAMES = {"question_mark": "?", "slash": "/", "escape": "esc", "exclamation_mark": "!"}
MOVES = {"j", "k", "g", "G", "up", "down", "left", "right", "home", "end", "tab", "enter", "esc"}


def test_every_screen_fits_into_80_columns_and_its_keys_stand_on_the_page_of_keys(
    run: Run, buffer: rlbuffer.Buffer
) -> None:
    run.step("a.0")
    run.push("a.1", rewards=[0.25, 0.75])
    run.store.heartbeat("worker", "w-0", {"version": 1})
    words = HELP.split()

    async def tour(person: Person) -> None:
        for keys, seen in (
            ((), "a.1"),
            (("enter",), "group a.1"),
            (("b",), "they part at token"),
            (("escape", "enter"), "rollout a.1/1"),
            (("5",), "entropy: not kept per token"),
            (("escape", "escape", "t"), "1 step"),
            (("enter",), "closed by capacity"),
            (("w",), "worker w-0"),
            (("o",), "worker w-0: raw"),
            (("question_mark",), "What each screen answers"),
        ):
            await person.press(*keys)
            await person.sees(seen, "q quit")
            assert max(map(len, person.lines())) <= 80
            taken = {NAMES.get(key, key) for key in person.app.screen.active_bindings}
            assert {key for key in taken if len(key) == 1} - MOVES - set("12345678") <= set(words)
        foot = person.app.screen.query_one(Footer)
        shown = {key.description for key in foot.query(FooterKey)}
        assert {"steps", "processes", "problems", "quit"} <= shown

    browse(buffer, tour)


def test_a_click_on_a_key_presses_it_and_one_on_a_head_sorts(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0", rewards=[1.0, 1.0])
    run.push("a.1", rewards=[0.25, 0.75])

    async def tour(person: Person) -> None:
        await person.sees("a.1", "share: of tokens so far")  # what stands above the table has its place
        heads = next(n for n, line in enumerate(person.lines()) if line.split()[:2] == ["group", "state"])
        await person.pilot.click(offset=(person.lines()[heads].index("reward") + 1, heads))
        await person.sees("by reward")
        problems = person.lines()[-1].index("problems")
        await person.pilot.click(offset=(problems + 1, len(person.lines()) - 1))
        await person.sees("No problems." if not person.app.screen.is_away else "problems")

    browse(buffer, tour, size=(120, 30))
