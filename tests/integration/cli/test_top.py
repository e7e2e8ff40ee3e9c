"""`rlbuffer top`: both sides of a run on a real server, on wide and narrow terminals, in pipes and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import waits
from looks import lines_of
from rich.console import Group
from store_runs import Run
from terminals import typed

from rlbuffer.client.run_state import read_run_state
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.state.text import duration
from rlbuffer_cli.main import main
from rlbuffer_cli.view import pace_of, run_head, run_view

TRAINED = {"event": "step", "step": 1, "seconds": {"wait": 0.5, "total": 1.0}}
RANKS = {"ranks": [{"forward": 0.1, "backward": 0.1}, {"forward": 0.4, "backward": 0.1}]}


SHORT = Waiting(kind=Wait.ENV_SHORT, step=2, env="b", groups=6)
STUCK = [{"kind": "worker_stuck", "detail": "no\x1bne"}]


@pytest.fixture
def busy(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Two envs, a step that is committed and not trained, a dropped group, two workers, a rank, and metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "home"))
    made = Run(redis_url, tmp_path)
    made.step("a.0")
    made.push("a.3", version=1)
    made.push("b.0", version=0)
    made.drop("stale", [entry for entry in made.pool() if entry.env == "b"])
    store = made.store
    store.heartbeat("worker", "inf-0", {"env": "a", "version": 1, "rollouts_per_second": 12.5})
    store.heartbeat("worker", "inf-1", {"env": "b", "version": 0, "rollouts_per_second": 2.5, "problems": STUCK})
    store.heartbeat("rank", "0", {"step": 0, "world_size": 1})
    store.lease("batcher", ttl_seconds=3600)
    waits.says(store, SHORT)
    folder = tmp_path / "home" / "runs" / store.run
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps(TRAINED | RANKS) + "\n")
    yield made
    made.close()


def top(run: Run, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["top", "--once", "--redis", run.url, "--run", run.store.run, *arguments])
    return code, *capsys.readouterr()


@pytest.mark.server
def test_one_look_says_who_waits_for_whom_and_how_fast_both_sides_are(
    busy: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = top(busy, capsys)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith(f'run "{busy.store.run}" on ')
    assert f"● {SHORT}" in lines
    assert any(line.startswith("✕ ") and "no\\x1bne" in line for line in lines)
    said = " ".join(out.split())
    for fact in ("trained step 0", "pushed 15/s", "reward 0.", " MiB", "✕ dropped 2", "33% of all so far"):
        assert fact in said
    named = {line.split()[0]: line for line in lines if line}
    assert "batcher 1 step ahead of the trainer" in named["lag"]
    assert named["trainer"].endswith("waited 50% of the last step for data")  # a worker is stuck, not slow
    assert "2 stale in " in named["drops"]
    assert "1 ▇ 0.50 s slow" in named["ranks"]
    assert any(line.startswith("worker inf-1") and "no\\x1bne" in line for line in lines)
    assert any(line.startswith("rank 0") and "step 0" in line for line in lines)


@pytest.mark.parametrize(
    ("gap", "since", "window", "steps"),
    [
        (3.0, 0.0, 60.0, 21),  # the last minute
        (3.0, 61.0, 60.0, 0),  # it stopped a minute ago: at 0, not at what it was
        (30.0, 5.0, 150.0, 5),  # slow steps: of five
        (200.0, 5.0, 300.0, 2),  # never longer than that
    ],
)
def test_rates_are_of_the_last_minute_or_of_five_slow_steps(
    run: Run, gap: float, since: float, window: float, steps: int
) -> None:
    run.step("a.0")
    state = read_run_state(run.store, history=1)
    records = tuple(dict(state.history[0]) | {"at": state.at - since - gap * n} for n in range(100))
    state = replace(state, history=records)
    pace = pace_of(state)
    assert (pace.window_seconds, pace.steps, pace.tokens) == (window, steps, steps * records[0]["tokens"])
    assert f"in the last {duration(window)}" in "\n".join(lines_of(run_view(state)))


@pytest.mark.server
def test_json_is_the_state_of_the_run_as_one_object(busy: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = top(busy, capsys, "--json")
    record = json.loads(out)
    assert (code, err, record["schema"], record["run"]) == (0, "", "rlbuffer.run/2", busy.store.run)
    assert [(env["name"], env["pushed"][0]) for env in record["envs"]] == [("a", 4), ("b", 2)]
    assert [process["kind"] for process in record["processes"]] == ["batcher", "worker", "worker", "rank"]
    assert (record["step"], record["trained_step"]) == (1, 0)
    assert record["waiting"] == SHORT.record() | {"sentence": str(SHORT)}
    assert [problem["kind"] for problem in record["problems"]] == ["worker_stuck"]


@pytest.mark.server
@pytest.mark.parametrize("width", [40, 80, 140])
def test_every_line_fits_a_terminal_and_what_must_be_cured_is_whole(busy: Run, width: int) -> None:
    lines = lines_of(run_view(read_run_state(busy.store, history=9)), width)
    assert max(map(len, lines)) <= width
    assert str(SHORT) in " ".join(" ".join(lines).split())
    assert "\x1b" not in "".join(lines)


def test_many_long_problems_leave_the_envs_in_the_head_of_a_table(run: Run) -> None:
    run.push("a.3")
    for at in range(7):
        trouble = {"kind": "env_fails", "count": 2, "detail": "KeyError: 'x' (envs.py:3 in score) " * 5}
        run.store.heartbeat("worker", f"w-{at}", {"env": f"env{at}", "problems": [trouble]})
    state = read_run_state(run.store)
    head = lines_of(Group(*run_head(state, 80)), 80)
    assert len([line for line in head[:9] if line.startswith("✕ env")]) == 1
    assert [line for line in head if "6 more" in line and line.endswith("rlbuffer inspect problems")]
    assert (
        len("\n".join(lines_of(run_view(state), 80)).split("(envs.py:3 in score)")) > 30
    )  # whole, where it is asked for


@pytest.mark.server
def test_on_a_terminal_the_view_stays_in_place_until_ctrl_c(busy: Run, tmp_path: Path) -> None:
    words = ["top", "--every", "0.1", "--redis", busy.url, "--run", busy.store.run]
    says = partial(waits.says, busy.store, Waiting(kind=Wait.SERVER, detail="a new sentence"))
    first = re.compile(b"worker inf-0"), says
    drawn = typed(words, tmp_path, until=b"a new sentence", keys=b"\x03", columns=100, first=first)
    before, _, again = drawn.partition(b"worker inf-0")
    assert busy.store.run.encode() in before
    assert b"\x1b[H" in again, "the screen was not written over"
