"""Terminals that obey no escapes, or are narrow, and runs whose state is damaged: everything stays readable."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import msgpack
import pytest
from store_runs import Run
from terminals import ANSI, typed

import rlbuffer
from rlbuffer_cli.main import main


@pytest.mark.server
@pytest.mark.parametrize("words", [[], ["step:1"]])
def test_a_dumb_terminal_is_sent_no_escape(redis_url: str, tmp_path: Path, words: list[str]) -> None:
    run = Run(redis_url, tmp_path)
    try:
        run.step("a.0", "b.0")
        run.store.heartbeat("worker", "w", {"env": "a"})
        given = ["inspect", *words, "--redis", redis_url, "--run", run.store.run]
        drawn = typed(given, tmp_path, until=b"", keys=b"", TERM="dumb")
    finally:
        run.close()
    assert b"\x1b" not in drawn
    assert len(drawn) > 40
    assert max(len(line.rstrip()) for line in drawn.decode().splitlines()) <= 80


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "value", "is_coloured"), [([], "1", False), ([], "", True), (["--plain"], "1", False)]
)
def test_no_color_leaves_a_terminal_its_own_colours(
    redis_url: str, tmp_path: Path, words: list[str], value: str, is_coloured: bool
) -> None:
    run = Run(redis_url, tmp_path)
    try:
        run.push("a.0")
        given = ["inspect", *words, "--redis", redis_url, "--run", run.store.run]
        drawn = typed(given, tmp_path, until=b"a.0", keys=b"" if words else b"q", NO_COLOR=value)
    finally:
        run.close()
    styles = {code for codes in re.findall(rb"\x1b\[([0-9;]*)m", drawn) for code in codes.split(b";")}
    assert (styles - {b"", b"0", b"1", b"2", b"7", b"39", b"49"} != set()) == is_coloured


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "code", "ends"),
    [
        (["inspect", "nosuch.1"], 1, "it was retired with its step, or never pushed."),
        (["inspect", "a.0/9"], 1, "Its rollouts: a.0/0, a.0/1."),
        (["verify"], 0, "ok: everything adds up"),
        (
            ["config", "init", "mine-with-a-long-name.toml"],
            0,
            "rlbuffer config check mine-with-a-long-name.toml",
        ),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_is_said_on_a_narrow_terminal_breaks_between_words(
    redis_url: str, tmp_path: Path, words: list[str], code: int, ends: str
) -> None:
    run = Run(redis_url, tmp_path)
    try:
        run.push("a.0")
        run.push("a.1")
        where = [] if words[0] == "config" else ["--redis", redis_url, "--run", run.store.run]
        drawn = typed([*words, *where], tmp_path, until=b"", keys=b"", columns=50, code=code)
    finally:
        run.close()
    text = ANSI.sub(b"", re.sub(rb"\r\x1b\[K[^\r]*(?=\r\x1b\[K)", b"", drawn)).decode()  # without the line at its start
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 50, lines
    assert b"\x1b[?1049h" not in drawn  # no screen was opened
    assert ends.format(run=f'"{run.store.run}"') in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("state", [{"adapters": {"a": 1}}, [1]])
def test_a_run_whose_saved_state_is_damaged_is_shown(
    state: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    try:
        run.push("a.0")
        run.client.set(run.store.keys.state, msgpack.packb(state))
        assert main(["inspect", "--redis", run.url, "--run", run.store.run]) == 0
        assert "a.0" in capsys.readouterr().out
        with rlbuffer.connect(run.url, run=run.store.run) as buffer:
            assert buffer.groups() != []
    finally:
        run.close()
