"""The screen of a run at work: it fits every terminal, and what matters most is the last to leave it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.run_state import Amount, EnvState, RunState, ServerState
from rlbuffer.state.step_record import StepRecord
from rlbuffer_cli.dashboard import Dashboard
from rlbuffer_cli.look import themed
from rlbuffer_cli.view import step_line

LOG = ("worker math  started, pid 7", "run  rank 0 has pid 9", "serve  leads", "train  a checkpoint of step 30")
EXAMPLE = {"rollout_id": "a.3/0", "env": "a", "reward": 1.0, "advantage": 0.5, "token_ids": [7], "text": "4\x1b[2J"}


def lines_of(dashboard: Dashboard, width: int, height: int) -> list[str]:
    screen = Console(width=width, height=height, color_system=None, theme=themed("printed"), highlight=False)
    with screen.capture() as captured:
        screen.print(dashboard)
    return [line.rstrip() for line in captured.get().removesuffix("\n").split("\n")]


def records(count: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            reward=1.0 - math.exp(-step / 20),
            kl=0.0042,
            entropy=0.71,
            truncated=0.14,
            age=1.0,
            max_age=2,
            tokens=1000,
            seconds={"wait": 0.1, "total": 1.0},
            examples=[{**EXAMPLE, "name": "best"}, {**EXAMPLE, "name": "worst"}],
        )
        for step in range(1, count + 1)
    ]


def state(envs: Sequence[str] = ("math", "code")) -> RunState:
    each = [EnvState(name=env, pushed=Amount(90, 900), trained=Amount(80, 800), groups_ready=4) for env in envs]
    result = {"env": "math", "version": 30, "reward/mean": 0.25, "reward/error": 0.01, "rollouts": 64}
    return RunState(
        run="larger",
        at=0.0,
        server=ServerState(address="redis://a:1", name="valkey", version="9.1", memory=1, memory_limit=100),
        step=32,
        trained_step=31,
        waiting=Waiting(kind=Wait.FILLING, step=33, done=0.25, env="math"),
        envs=tuple(each),
        evaluations=(result,),
    )


def whole(**changes: object) -> Dashboard:
    given = {"title": "rlbuffer run", "run": "larger", "seconds": 67.0, "planned": 120, "state": state(), "log": LOG}
    return Dashboard(**{**given, "records": records(31), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(40, 16), (80, 24), (100, 30), (140, 40), (200, 60)])
def test_it_fits_the_screen_and_keeps_the_sentence_the_progress_and_the_log(size: tuple[int, int]) -> None:
    lines = lines_of(whole(fallen=["worker math was killed by SIGKILL, 2 s ago"]), *size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    text = " ".join(" ".join(lines).split())
    for part in ("larger rlbuffer run", "Step 33 is 25% full", "step 31 of 120", "26%", "was killed by SIGKILL"):
        assert part in text
    assert [line.strip() for line in lines[-4:]] == [line[: size[0]] for line in LOG]


def test_blocks_leave_in_their_order() -> None:
    marks = {"examples": "best a.3/0", "evaluations": "eval math", "envs": "share of tokens", "facts": "kl 0.0042"}
    shown = []
    for height in range(60, 10, -1):
        text = "\n".join(lines_of(whole(), 140, height))
        shown.append([name for name, mark in marks.items() if mark in text])
    assert shown[0] == list(marks)
    assert shown[-1] == []
    assert all(before[-len(after) :] == after for before, after in pairwise(shown) if after)


def test_the_curve_takes_the_room_that_is_left() -> None:
    def curve(height: int) -> int:
        return sum("┤" in line or "│" in line for line in lines_of(whole(), 140, height))

    assert curve(26) < curve(34)
    assert curve(60) == curve(80), "but no more than a curve needs"
    ends = [line for line in lines_of(whole(), 140, 40) if line.startswith("reward")]
    assert len(ends) == 1
    assert ends[0].startswith(f"reward {records(31)[-1].reward:.3f} ")


def test_one_env_needs_no_table_and_many_problems_leave_the_log_in_place() -> None:
    assert "share of tokens" not in "\n".join(lines_of(whole(state=state(["math"])), 140, 40))
    troubles = tuple(
        Problem(kind=Trouble.NO_WORKER, env=f"env{n}", detail="w was last seen 9 min ago") for n in range(20)
    )
    many = RunState(run="r", at=0.0, server=ServerState(address="a", name="memory"), problems=troubles)
    lines = lines_of(whole(state=many), 80, 24)
    assert len(lines) <= 24
    assert lines[-4:] == list(LOG)
    assert "step 31 of 120" in "\n".join(lines)


def test_before_the_first_step_it_says_what_is_awaited_and_controls_nothing() -> None:
    assert lines_of(Dashboard(opening="starting the processes ..."), 80, 24) == ["starting the processes ..."]
    assert "\x1b" not in "\n".join(lines_of(whole(log=("a\x1b[2J",), records=[]), 80, 24))
    assert "4\\x1b[2J" in "\n".join(lines_of(whole(), 140, 60))


def test_it_says_what_takes_the_gradient() -> None:
    (step,) = records(1)
    some = replace(
        step, masked_fraction=0.25, masked_by={"clip": 0.1, "icepop": 0.2}, correction_weight={"icepop": 0.9}
    )
    masked = {"clip": 0.0, "icepop": 1.0}
    nothing = replace(some, masked_fraction=1.0, masked_by=masked, correction_weight={"icepop": 0.0})
    sentence = "step 1 trains nothing: its tokens are masked by icepop"
    for shown, told in (
        (step, []),
        (some, ["masked 25.0% (icepop 20.0%) weight icepop 0.90"]),
        (nothing, ["masked 100.0% (icepop 100.0%)", sentence]),
    ):
        text = " ".join(" ".join(lines_of(whole(records=[shown]), 140, 40)).split())
        assert ["masked" in text, *(words in text for words in told)] == [bool(told), *[True] * len(told)]
        line = " ".join(step_line(shown, 20).split())
        assert ("masked" in line, all(words in line for words in told[:1])) == (bool(told), True)
