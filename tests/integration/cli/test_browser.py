"""The browser of `rlbuffer inspect`, screen by screen, by its keys, read from the lines of the screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import waits
from browsing import Person, browse
from own_server import OwnServer
from store_runs import Run
from textual import events

import rlbuffer
from rlbuffer.errors import ServerUnreachable
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group
from rlbuffer_cli.browse.listing import EntryLine, Listing
from rlbuffer_cli.run_tables import PROCESSES

EVIL = "[bold red]\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\x9b31m\r\u200b[/] 漢字"


def talk(index: int) -> Rollout:
    """A rollout whose text has a character for each token, with a further column."""
    text = f"2+2=\n{'ab'[index % 2]}{index}!"
    length = len(text)
    mask = np.arange(length) >= 5
    return Rollout(
        tokens=np.array([ord(c) for c in text], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, [-0.05 - t for t in range(length)], 0.0).astype(np.float32),
        reward=index / 4,
        rewards={"digits": 0.75, "format": 0.25},
        version_spans=(VersionSpan(0, 5, 6), VersionSpan(1, 6, length)),
        turns=(Turn("user", 0, 5), Turn("assistant", 5, length)),
        finish_reason="stop",
        columns={"entropy": np.linspace(0, 2, length, dtype=np.float32)},
        text=text,
    )


def fill(run: Run) -> None:
    """Two groups in a committed step, one of them dropped beside it, two that are ready."""
    run.step("a.0", "b.0")
    run.push("a.1")
    run.drop("stale", run.pool())
    run.push("a.2", rewards=[0.25, 0.75, 0.5])
    group = make_group(env="talk", group_id="talk.7", answer="[bold]4", metadata={"level": 3}, worker="w-0")
    talks = tuple(replace(talk(i), rollout_id=f"talk.7/{i}") for i in range(3))
    run.push(replace(group, rollouts=talks, planned_size=3))
    run.store.heartbeat(
        "worker",
        "w-0",
        {
            "version": 3,
            "rollouts_per_second": 12.5,
            "env": "talk",
            "failures": {"KeyError": 2},
            "problems": [{"kind": "env_fails", "count": 2, "detail": "KeyError: 'x' (envs.py:3 in score)"}],
        },
    )
    run.store.lease("batcher", ttl_seconds=3600)
    waits.says(run.store, Waiting(kind=Wait.ENV_SHORT, step=2, env="talk", groups=6))


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_the_pool_shows_who_waits_envs_and_groups(run: Run, buffer: rlbuffer.Buffer, size: tuple[int, int]) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("talk.7", "a.2", "as of", "● talk is 6 groups short of its share", "? help")
        assert max(len(line) for line in person.lines()) <= size[0]
        await person.press("j", "o")
        assert '"group_id": "a.2"' in await person.sees("a.2: raw", '"schema": "rlbuffer.group/1"')
        await person.press("escape", "y")
        await person.sees("copied: a.2")
        assert person.app.clipboard == "a.2"

    browse(buffer, tour, size=size)


def test_sorting_takes_one_column_after_the_other_and_keeps_the_cursor_on_its_group(
    run: Run, buffer: rlbuffer.Buffer
) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("newest first", "talk.7")
        await person.press("j")
        for keys, words, ordered in (
            ("s", "by group", ["a.0", "a.1", "a.2", "b.0", "talk.7"]),
            ("S", "by group, reversed", ["talk.7", "b.0", "a.2", "a.1", "a.0"]),
        ):
            await person.press(keys)
            await person.sees(words)
            screen = person.app.screen
            assert isinstance(screen, Listing)
            assert [row.view.group_id for row in screen.shown] == ordered
            assert screen.identifier() == "a.2"
        screen.sort_by("reward")  # a click on the head
        screen.sort_by("reward")
        assert [row.view.reward for row in screen.shown][:1] == [0.5]
        assert "by reward, reversed" in await person.sees("by reward")

    browse(buffer, tour, size=(100, 30))


def test_a_wrong_filter_is_said_in_place_and_a_right_one_chooses(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("talk.7")
        await person.press("slash", *"evn:talk", "enter")
        await person.sees("'evn' is not a field to filter by. Did you mean env?")
        await person.press("home", "delete", "delete", "delete", *"env", "enter")
        shown = await person.until(lambda text: "1 group where env:talk" in text, "the filter")
        assert not any(line.startswith(("  a.", "a.")) for line in shown.splitlines())
        await person.press("slash", "escape")
        await person.sees("where env:talk")

    browse(buffer, tour)


def test_a_key_that_was_typed_ahead_of_the_filters_line_is_written_there(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("talk.7")
        screen = person.app.screen
        assert isinstance(screen, Listing)
        await person.press("slash")
        screen.rows._forward_event(events.Key("e", "e"))  # on its way to the rows when the line opened
        await person.until(lambda shown: screen.query_one(EntryLine).value == "e", "the key in the line")

    browse(buffer, tour)


def test_a_group_has_its_prompt_once_and_a_row_for_each_rollout(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        shown = await person.sees("group talk.7", "talk.7/0", "talk.7/2", "answer", '"[bold]4"', '"level": 3')
        assert "0.500" in shown
        assert shown.count("2+2=") == 1, "the prompt stands there once"
        await person.press("j", "c", "j", "c")
        shown = await person.sees("talk.7/1 and talk.7/0", "they part at token 5")
        assert "≠ first" in shown
        assert "['" not in shown

        def tokens(shown: str) -> list[int]:
            return [int(line.split()[0]) for line in shown.splitlines() if "trained" in line]

        assert tokens(shown) == [5, 6, 7]
        await person.press("s", "S")
        await person.until(lambda shown: tokens(shown) == [7, 6, 5], "the other order")
        await person.press("o")
        await person.sees("rlbuffer.pair/1", '"part_at_token": 5')
        await person.press("escape", "escape", "enter")
        await person.sees("rollout talk.7/0 (1 of 3 of its group)")

    browse(buffer, tour, identifier="talk.7", size=(140, 40))


def test_a_rollout_is_seen_through_its_lenses(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        shown = await person.sees(
            "rollout talk.7/1 (2 of 3 of its group)", "── user · 5 tokens ──", "── assistant ·", "digits 0.750"
        )
        assert "1 plain: text as it was pushed" in shown
        legends = {
            "2": "≥ 0.9",
            "3": "advantages are known once",
            "4": "trained (3)",
            "5": "nats, pushed as column `entropy`; mean 1.7143, most 2.0000",
            "6": "6 mismatch: not kept per token: a worker pushes it as a column",
            "7": "Aa v0 Aa v1",
            "8": "8 column entropy",
        }
        for key, legend in legends.items():
            await person.press(key)
            await person.sees(legend)
        await person.press("G")
        await person.sees(
            "TOKEN 7 of 8", "id 33", "text '!'", "trained yes", "logprob \u22127.05", "version v1", "entropy 2"
        )
        await person.press("g")
        await person.sees("TOKEN 0 of 8", "trained no", "version none", "role user")
        await person.press("p")
        await person.sees("rollout talk.7/0 (1 of 3 of its group)", "8 column entropy")
        await person.press("p", "n", "n")
        await person.sees("rollout talk.7/2 (3 of 3 of its group)")

    browse(buffer, tour, identifier="talk.7/1")


def test_a_packed_rollout_shows_its_advantage_its_step_and_its_rank(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("rollout b.0/1", "sampled by v0 [", "packed into step 1", "token ids: no text was pushed")
        await person.press("3")
        await person.sees("above 0")
        await person.press("2", "right", "down")
        await person.sees("logprob mean")

    browse(buffer, tour, identifier="b.0/1", size=(140, 30))


def test_a_dropped_group_says_by_which_rule_and_one_that_is_not_there_says_so(
    run: Run, buffer: rlbuffer.Buffer
) -> None:
    fill(run)

    async def dropped(person: Person) -> None:
        shown = await person.sees("dropped (stale: because)", "reward 0.500 ", "a.1/0", "a.1/1")
        assert "no longer kept" not in shown

    async def swept(person: Person) -> None:
        await person.sees("dropped (stale: because)", "its rollouts are no longer kept")

    async def rollout(person: Person) -> None:
        await person.sees("group 'a.1' was dropped (stale: because): its rollouts are no longer kept")

    async def nothing(person: Person) -> None:
        await person.sees("has no group 'nosuch': it was retired with its step, or never pushed.")
        await person.press("escape")
        await person.sees("talk.7")

    browse(buffer, dropped, identifier="a.1", size=(100, 24))
    run.client.delete(*buffer.store.dropped_payloads(["a.1"])["a.1"])
    browse(buffer, swept, identifier="a.1")
    browse(buffer, rollout, identifier="a.1/0", size=(140, 30))
    browse(buffer, nothing, identifier="nosuch", size=(140, 30))


def test_a_group_that_goes_while_it_is_shown_stays_with_a_word(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)

    async def tour(person: Person) -> None:
        await person.sees("group a.2", "a.2/0")
        run.client.flushall()
        run.store.open_run()
        await person.press("r")
        await person.sees("has no group 'a.2'", "or never pushed. Shown is what it was before, ready.", "a.2/0")

    browse(buffer, tour, identifier="a.2", size=(140, 30))


def test_steps_are_rows_and_one_step_is_bars_of_its_ranks(run: Run, buffer: rlbuffer.Buffer) -> None:
    fill(run)
    run.step("c.0")

    async def tour(person: Person) -> None:
        await person.sees("talk.7")
        await person.press("t")
        await person.sees("2 steps", "packed")
        await person.press("j", "enter")
        shown = await person.sees("step 1   packed", "closed by capacity", "rank 0:", "rank 1:", "█ a", "▓ b", "empty")
        assert "rows of 64 tokens" in shown
        await person.press("N")
        await person.sees("step 2   packed")
        await person.press("N")
        await person.sees("has no step 3: the last committed one is 2")
        await person.press("P", "P")
        await person.sees("step 1   packed")
        await person.press("o")
        await person.sees('"closed_by": "capacity"')

    browse(buffer, tour, size=(100, 40))


def test_an_empty_pool_says_so_and_live_reading_sees_the_first_group(run: Run, buffer: rlbuffer.Buffer) -> None:
    async def tour(person: Person) -> None:
        await person.sees("0 groups", "no groups yet")
        await person.press("enter", "o", "y", "G", "l")
        await person.sees("[live]")
        run.push("a.0")
        run.push("a.1")
        await person.sees("2 groups", "a.1")
        await person.press("j")
        await person.sees("[live waits: not at the top]", "a.0")
        run.push("a.2")
        await person.pilot.pause(0.5)
        assert "a.2" not in person.text()
        await person.press("k")
        await person.sees("a.2")

    browse(buffer, tour)


def test_what_a_worker_wrote_is_shown_and_obeyed_nowhere(run: Run, buffer: rlbuffer.Buffer) -> None:
    rollout = replace(
        talk(0),
        text=EVIL + "x" * 1_000_000,
        rewards={EVIL[:40]: 1.0},
        finish_reason=EVIL,
        rollout_id=f"a.0/0{EVIL}",
        turns=(Turn(EVIL, 0, 8),),
        metadata={EVIL: EVIL},
    )
    group = rlbuffer.Group(
        "a.0", "a", EVIL, (rollout,), 1, adapter=EVIL, answer=EVIL, metadata={EVIL: EVIL}, worker="w"
    )
    buffer.writer("w").push(group)
    beat = {"env": EVIL, "problems": [{"kind": "worker_ended", "detail": EVIL}, EVIL], "waiting": {"kind": EVIL}}
    for kind in ("worker", "scorer", "rank", "batcher"):
        run.store.heartbeat(kind, EVIL, beat)
    run.store.heartbeat("batcher", "leader", {"waiting": {"kind": "server", "detail": EVIL}})

    async def tour(person: Person) -> None:
        await person.sees("a.0", "\\x1b]0;owned")
        for keys, words in (
            ("enter", "1 of 1 rollout"),  # it has been read: there is a record to show
            ("o", "rlbuffer.group/1"),
            ("escape", "group a.0"),
            ("enter", "rollout a.0/0"),
            ("2", "≥ 0.9"),
            ("5", "entropy"),
            ("6", "not kept per token"),
            ("8", "column entropy"),
            ("1", "[bold red]\\x1b"),
            ("y", "copied: "),
            ("w", "[bold red]"),
            ("escape", "rollout"),
        ):
            await person.press(keys)
            await person.sees(words)
            for line in person.lines():
                assert line.isprintable(), repr(line)

    browse(buffer, tour)


def test_a_defect_in_reading_is_a_line_and_no_traceback(
    buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(buffer.store, "trainer", fail)

    async def tour(person: Person) -> None:
        await person.sees("! KeyError: 'odd' (a defect of the browser: --plain prints instead)")
        monkeypatch.undo()
        await person.press("r")
        await person.until(lambda text: "KeyError" not in text, "the run")

    browse(buffer, tour)


@pytest.mark.parametrize("fails", [False, True])
def test_a_screen_that_is_left_while_it_is_read_ends_nothing(
    run: Run, buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run.push("a.0")

    def fail(*_: object) -> None:
        raise ServerUnreachable("gone")

    async def tour(person: Person) -> None:
        await person.sees("a.0", "as of")
        await person.press("w")
        await person.sees("0 processes")
        screen = person.app.screen
        assert isinstance(screen, Listing)
        assert screen.view is PROCESSES
        await person.press("escape")
        await person.until(lambda _: not screen.children, "its widgets to go")
        if fails:
            monkeypatch.setattr(buffer.store, "replies", fail)
        await screen._load()
        await person.press("question_mark")
        await person.sees("What each screen answers")

    browse(buffer, tour)


def test_a_server_that_is_away_is_a_line_and_it_comes_back_by_itself(tmp_path: Path) -> None:
    with OwnServer(tmp_path / "server", options={"appendfsync": "always"}) as server:
        real = Run(server.url, tmp_path)
        real.push("a.0")
        with rlbuffer.connect(server.url, run=real.store.run) as buffer:

            async def tour(person: Person) -> None:
                await person.sees("a.0", "as of")
                server.kill()
                await person.press("r")
                await person.sees("It is asked again.", "a.0")
                server.start()
                await person.until(lambda text: "asked" not in text, "the server")

            browse(buffer, tour)
        real.close()
