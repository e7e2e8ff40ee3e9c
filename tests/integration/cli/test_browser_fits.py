"""The browser on narrow terminals: what a screen has no room for is marked, and nothing is beyond its right edge."""

from __future__ import annotations

import pytest
import waits
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group
from rlbuffer_cli.browse.pages import HELP

LONG = "-".join(["long"] * 20)


def fill(run: Run) -> None:
    """A committed step, and groups, an env and a worker with long names."""
    run.step("a.0", "b.0")
    run.push(make_group(env=LONG[:50], group_id=f"{LONG}.1", prompt_id=LONG, worker=LONG[:60]))
    run.store.heartbeat("worker", LONG[:60], {"version": 3, "rollouts_per_second": 12.5, "env": LONG[:50]})


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("key", ["", "t", "w", "v"])
def test_a_table_of_the_browser_fits_and_marks_what_it_leaves_out(
    run: Run, buffer: rlbuffer.Buffer, columns: int, key: str
) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("as of", LONG[:12])
        if key:
            await person.press(key)
            await person.sees({"t": "1 step", "w": "process", "v": "env"}[key], "as of")
        await person.pilot.pause()
        rows = person.app.screen.rows
        assert rows.virtual_size.width <= columns
        titles = [column.label.plain for column in rows.columns.values()]
        left_out = len(titles) < len(person.app.screen.view.columns)
        assert titles[-1].endswith("»") == left_out
        for line in range(rows.row_count):
            for cell in rows.get_row_at(line):
                assert len(cell.plain) <= columns

    browse(buffer, tour, size=(columns, 40))


def test_what_a_row_has_no_room_for_stands_whole_below(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("…", "as of")
        await person.until(lambda shown: f"{LONG}.1" in shown.replace("\n", ""), "the whole id")
        assert any(line.startswith(" long-") and "…" in line for line in person.lines())

    browse(buffer, tour)


def test_two_rollouts_fit_beside_each_other(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.step("a.0", "b.0")

    async def tour(person: Person) -> None:
        await person.sees("a.0/0", "as of")
        await person.press("b")
        await person.sees("a.0/1 and a.0/0", "they part at token", "/1 logprob", "/0 logprob")
        assert person.app.screen.rows.virtual_size.width <= 80

    browse(buffer, tour, identifier="a.0")


def test_the_head_shows_the_envs_and_a_step_its_bars(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.step("a.0", "b.0")
    run.store.lease("batcher", ttl_seconds=3600)
    waits.says(run.store, Waiting(kind=Wait.ENV_SHORT, step=2, env="b", groups=6))
    for env in ("a", "b"):
        run.store.heartbeat("worker", env, {"env": env, "version": 0, "rollouts_per_second": 2.5})

    async def tour(person: Person) -> None:
        await person.sees("■ a", "■ b", "◆ packed in 1")
        await person.press("t", "enter")
        await person.sees("rows of", "rank 0:", "rank 1:", "worst rollout", "reward  advantage")

    browse(buffer, tour)


def test_no_line_of_the_help_is_broken_among_the_keys() -> None:
    start, end = HELP.index("Keys\n"), HELP.index("A click")
    assert max(map(len, HELP[start:end].splitlines())) <= 78
