"""What looks sends a real server no command that writes. The browser in a real terminal: it draws, and leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from browsing import Person, browse
from hostile_pages import served
from own_server import OwnServer
from store_runs import Run
from terminals import typed
from test_web import Visitor

import rlbuffer
from rlbuffer_cli.main import main


def written(client: redis.Redis) -> dict[str, int]:
    """Command that writes, also inside a script -> its calls so far."""
    stats = client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): figures["calls"] for name, figures in stats.items()}
    flags = {str(name): command["flags"] for name, command in client.command().items()}
    return {name: n for name, n in calls.items() if "write" in flags[name.split("|")[0]]}


async def tour(person: Person) -> None:
    """Every screen, every key."""
    await person.sees("a.2", "as of")
    await person.press("s", "S", "slash", *"env:a,b", "enter")
    await person.sees("where env:a,b")
    await person.press("l", "r", "o")
    await person.sees(": raw")
    await person.press("escape", "y", "t")
    await person.sees("1 step")
    await person.press("enter")
    await person.sees("rank 1:")
    await person.press("N", "P", "escape", "escape", "w")
    await person.sees("worker w-0")
    await person.press("escape", "question_mark")
    await person.sees("What each screen answers")
    await person.press("escape", "enter")
    await person.sees("group b.0", "b.0/1")
    await person.press("c", "j", "c")
    await person.sees("b.0/1 and b.0/0")
    await person.press("escape", "enter")
    await person.sees("rollout b.0/0")
    await person.press("2", "3", "4", "5", "6", "7", "8", "1", "p", "n", "G", "g", "tab", "o")
    await person.sees(": raw")


def test_a_tour_of_every_screen_and_page_sends_no_command_that_writes(tmp_path: Path) -> None:
    with OwnServer(tmp_path / "server") as server, redis.Redis(port=server.port, decode_responses=True) as client:
        run = Run(server.url, tmp_path)
        try:
            run.step("a.0", "b.0")
            run.push("a.1")
            run.drop("stale", run.pool())
            run.push("a.2")
            run.store.heartbeat("worker", "w-0", {"version": 3})
            before = written(client)
            assert {"hset", "xadd"} <= before.keys(), "the watch sees what is written, scripts included"
            content = run.control_keys()
            looks = ["inspect", "inspect a.2", "inspect a.2/0", "inspect a.1", "inspect processes", "inspect step:1"]
            for words in (*looks, "inspect b.0/0 b.0/1", "top --once --json", "alive worker w-0"):
                assert main([*words.split(), "--redis", server.url, "--run", run.store.run]) == 0
            with rlbuffer.connect(server.url, run=run.store.run) as buffer:
                browse(buffer, tour, size=(100, 30))
                with served(buffer) as pages:
                    assert len(Visitor(pages).walk()) > 10
            assert written(client) == before
            assert run.control_keys() == content
        finally:
            run.close()


@pytest.mark.server
def test_in_a_terminal_it_draws_takes_q_and_gives_the_terminal_back(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    with rlbuffer.connect(redis_url, run=run_name) as buffer:
        buffer.writer("w").push(rlbuffer.testing.make_group(env="math", group_id="math.4711"))
    words = ["inspect", "--redis", redis_url, "--run", run_name]
    drawn = typed(words, tmp_path, until=b"math.4711", keys=b"q")
    assert b"\x1b[?1049h" in drawn, "the browser has a screen of its own"
    assert b"\x1b[?1049l" in drawn.partition(b"\x1b[?1049h")[2]
    drawn = typed(["inspect", "envs", *words[1:]], tmp_path, until=b"1 env", keys=b"q")
    assert b"\x1b[?1049h" in drawn
    for further in (["--plain"], ["--limit", "1"]):
        drawn = typed([*words, *further], tmp_path, until=b"one group: rlbuffer inspect math.4711", keys=b"")
        assert b"\x1b[?1049h" not in drawn
