"""The text of the views, and that it fits: lines of the live views, histograms, tables on a narrow terminal."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest
from looks import lines_of

from rlbuffer.records.waiting import Cause, Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.run_state import Amount, EnvState, RunState, ServerState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.store.history import Committed
from rlbuffer_cli import look
from rlbuffer_cli.plots import Curve, small_charts
from rlbuffer_cli.run_tables import ENVS, PROBLEMS, EnvRow, process_rows
from rlbuffer_cli.table import Printed, of_tuples
from rlbuffer_cli.view import figures, notes, rank_line, run_view, weights_line


def test_a_rank_that_takes_far_longer_is_called_slow() -> None:
    own = [0.4, 0.4, 0.8, 0.4]
    ranks = [{"forward": seconds / 2, "backward": seconds / 2, "exchange": 1.0} for seconds in own]
    assert rank_line(ranks) == "0 ▄ 0.40 s  1 ▄ 0.40 s  2 ▇ 0.80 s slow  3 ▄ 0.40 s"
    assert "slow" not in rank_line([{"forward": 0.001}, {"forward": 0.001}, {"forward": 0.002}])  # chance


@pytest.mark.parametrize("fast", [1, 2, 3])
@pytest.mark.parametrize("slow", [1, 2])
def test_the_slow_ranks_are_named_as_long_as_they_are_no_majority(fast: int, slow: int) -> None:
    said = rank_line([{"forward": 0.1}] * fast + [{"forward": 0.16}] * slow)
    assert said.count("slow") == (slow if slow <= fast else 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TABLE = of_tuples("rows", ("id", "reward", "state", "worker"), {"reward"})
ROW = ("vcopy.1", "0.5", look.state("ready"), "worker-number-0123456789")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, ["id       reward  state    worker", "vcopy.1     0.5  ● ready  worker-number-0123456789"]),
        (44, ["id       reward  state    worker", "vcopy.1     0.5  ● ready  worker-number-012…"]),
        (36, ["id       reward  worker »", "vcopy.1     0.5  worker-number-01234…"]),
    ],
)
def test_a_table_leaves_out_columns_before_it_cuts_and_says_so(width: int, lines: list[str]) -> None:
    shown = lines_of(Printed(TABLE, [ROW]), width)
    assert [line[:6] for line in shown] == [line[:6] for line in lines]
    assert max(map(len, shown)) <= width
    assert ("»" in shown[0]) == ("»" in lines[0])
    assert ("…" in shown[1]) == ("…" in lines[1])


@pytest.mark.parametrize("name", ["math", "an-env-of-a-name-that-goes-on-and-on"])
def test_envs_keep_their_reward_on_a_narrow_terminal(name: str) -> None:
    stale = {"stale": Amount(1234, 9), "flat": Amount(12, 9)}
    envs = tuple(
        EnvState(name=name, budget=0.5, groups_ready=3, groups_forming=2, batch_reward=0.25, dropped=stale)
        for name in (name, "search")
    )
    state = RunState(run="r", at=0.0, server=ServerState(address="a"), envs=envs)
    head, *rows = lines_of(Printed(ENVS, [EnvRow(state, env) for env in envs]), 80)
    assert "reward" in head
    assert all("0.250" in row for row in rows[:2])


def test_facts_take_the_room_that_there_is() -> None:
    facts = look.pairs(dict.fromkeys(("step", "done", "left", "late"), "1,234 of 9")).values()
    assert len(lines_of(look.Facts(facts), 78)) == 1
    assert len(lines_of(look.Facts(facts), 74)) == 2


def test_two_curves_stand_beside_each_other_on_a_narrow_terminal() -> None:
    curves = [Curve(name, tuple((n, n / 7) for n in range(1, 99))) for name in ("reward", "a name of some length")]
    lines = small_charts(curves, width=76)
    assert len(lines) == 7
    assert max(map(len, lines)) <= 76
    assert lines[0].startswith("reward")
    assert "a name of some" in lines[0]


@pytest.mark.parametrize("width", range(30, 120, 3))
def test_no_number_above_a_curve_is_cut(width: int) -> None:
    curves = [Curve(name, tuple((n, n / 7) for n in range(1, 99))) for name in ("reward", "entropy")]
    titles = [line for line in small_charts(curves, width=width) if line.startswith(("reward", "entropy"))]
    numbers = re.findall(r"\d[\d.…]*", " ".join(titles))
    assert {"14.000"} <= set(numbers) <= {"14.000", "0.143", "98"}


def test_a_name_that_has_no_room_is_cut_with_a_sign() -> None:
    curves = [Curve(name, tuple((n, n / 7) for n in range(1, 99))) for name in ("reward", "a name of " + "such " * 9)]
    assert small_charts(curves, width=76)[0].endswith("…")


@pytest.mark.parametrize("kind", [Wait.ENDED, Wait.STEP])
def test_only_who_should_be_heard_is_marked_as_silent(kind: Wait) -> None:
    ranks = (Process(kind="rank", name="0", seconds_ago=600.0, step=20),)
    waiting = Waiting(kind=kind, step=20)
    state = RunState(run="r", at=0.0, server=ServerState(address="a"), processes=ranks, waiting=waiting)
    (row,) = process_rows(state)
    assert row.heard.plain == f"{'✕ ' * (kind is not Wait.ENDED)}10 min ago"


@pytest.mark.parametrize("width", [80, 140])
def test_a_problem_is_printed_with_the_whole_of_its_remedy(width: int) -> None:
    problem = Problem(kind=Trouble.NO_WORKER, env="math", detail="w-0 was last seen 4 min ago")
    lines = lines_of(Printed(PROBLEMS, [problem]), width)
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines[1:]).split())
    assert str(problem) in words.replace("math ✕ no_worker ", "")


def test_colours_come_on_a_terminal_and_go_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for value in ("", "1"):
        out = Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", value)
        look.show(Printed(TABLE, [ROW]))
        shown[value] = out.getvalue()
    assert "\x1b[34m" in shown[""]
    assert "\x1b[34m" not in shown["1"]
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    look.show(Printed(TABLE, [ROW]))
    assert "\x1b" not in piped.getvalue()


def test_a_server_without_a_limit_is_said_to_have_none() -> None:
    state = RunState(run="r", at=0.0, server=ServerState(address="a", name="valkey", memory=2**20))
    assert any("maxmemory 0" in line for line in lines_of(run_view(state)))


@pytest.mark.parametrize(("rewards", "shown"), [([0.5, None, 0.897], "0.897"), ([0.5, 0.25, None], "0.250")])
def test_the_reward_of_the_head_is_that_of_the_last_step_which_is_scored(
    rewards: list[float | None], shown: str
) -> None:
    steps = [
        {"event": Committed.event, "step": n, "at": n, "tokens": 9, "rollouts": 8, "reward": r, "age": 0, "max_age": 0}
        for n, r in enumerate(rewards, 1)
    ]
    server = ServerState(address="a")
    state = RunState(run="r", at=9.0, server=server, step=3, history=tuple(reversed(steps)))
    for is_brief in (False, True):
        assert figures(state, is_brief=is_brief)["reward"].plain.split()[:2] == ["reward", shown]


@pytest.mark.parametrize(
    ("problems", "waiting", "is_slow"),
    [
        ((), None, True),
        ((), Waiting(kind=Wait.ENV_SHORT, env="a", cause=Cause.GENERATING), True),
        ((), Waiting(kind=Wait.ENV_SHORT, env="a", cause=Cause.TROUBLE), False),
        ((Problem(kind=Trouble.ENV_FAILS, env="a", count=1),), None, False),
    ],
)
def test_workers_are_called_slow_only_where_nothing_is_to_be_cured(
    problems: tuple[Problem, ...], waiting: Waiting | None, is_slow: bool
) -> None:
    state = RunState(run="r", at=0.0, server=ServerState(address="a"), problems=problems, waiting=waiting)
    (line,) = (note.plain for note in notes(state, [StepRecord(step=1, seconds={"wait": 2.0, "total": 2.0})]))
    waited = "the trainer waited 100% of the last step for data"
    assert line.endswith(f"{waited}: workers are slower than the trainer" if is_slow else waited)


def test_the_way_of_a_version_is_one_line() -> None:
    took = {"gather": 0.3, "write": 1.2, "hash": 0.4, "delta": 0.2, "flush": 0.05, "announce": 0.05}
    record = StepRecord(step=18, published=17, publish_seconds=took)

    def worker(name: str, beat: dict[str, Any]) -> Process:
        return Process.of("worker", name, {"version": 17, "weights_size": 269_000_000, **beat}, seconds_ago=1.0)

    def line(*workers: Process) -> str:
        return weights_line(RunState(run="r", at=0.0, server=ServerState(address="a"), processes=workers), record)

    far = {"weights_seconds": {"fetch": 0.1, "apply": 0.3, "load": 0.8}, "weights_bytes": {"delta": 1_200_000}}
    quick = worker("b", {"weights_seconds": {"load": 0.2}})
    assert line(worker("a", far), quick) == (
        "version 17: 1.9 s to write, 0.4 s to fetch (1.2 MB of 269), 0.8 s to load"
    )
    assert line(quick) == "version 17: 1.9 s to write, 0.2 s to load"
    assert line(worker("a", far | {"version": 16})) == "version 17: 1.9 s to write"
    assert line(worker("a", {"weights_seconds": "soon", "weights_bytes": [3]})) == "version 17: 1.9 s to write"
