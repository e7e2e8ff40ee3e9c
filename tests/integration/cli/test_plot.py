"""`rlbuffer plot`: figures from metrics files and from a server's history, in terminals, pages and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from store_runs import Run

from rlbuffer_cli.plots import Curve, chart, curves_of, small_charts

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(typed: Call) -> Call:
    return lambda *arguments: typed("plot", *arguments)


def record(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "step", "step": step, "reward": step / 10, "rewards": {"a": step / 10, "b": None}} | fields


def write(run: str, *records: dict[str, Any]) -> Path:
    file = Path("home") / "runs" / run / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


def points(out: str) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in out.splitlines()]
    assert {each["schema"] for each in records} <= {"rlbuffer.point/1"}
    return [(each["curve"], each["step"], each["value"]) for each in records]


def test_a_number_of_the_metrics_is_drawn_and_a_table_has_a_line_for_each_entry(call: Call) -> None:
    write("math", record(1), record(2, loss=float(3)), record(3), record(2, reward=0.9))  # step 2 was trained again
    code, out, err = call("reward", "--run", "math")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "reward  0.3 at step 3, 0.1 to 0.9"
    assert points(call("reward", "math", "--json")[1]) == [("reward", 1, 0.1), ("reward", 2, 0.9), ("reward", 3, 0.3)]
    assert [name for name, _, _ in points(call("rewards", "math", "--json")[1])] == ["a", "a", "a"]
    assert [name for name, _, _ in points(call("rewards.a", "math", "--json")[1])] == ["rewards.a"] * 3


@pytest.mark.parametrize(
    "damage", [b"\x00" * 1000, b"\xff\xfe{" * 1000, b"[" * 200_000, b"1" * 5000, b'{"step": 3, "rew']
)
def test_a_damaged_line_of_the_metrics_is_passed_over(call: Call, damage: bytes) -> None:
    file = write("math", record(1), record(2))
    file.write_bytes(file.read_bytes() + damage + b"\n" + json.dumps(record(4)).encode())
    assert [step for _, step, _ in points(call("reward", "math", "--json")[1])] == [1, 2, 4]


def test_runs_and_files_are_laid_over_each_other(call: Call) -> None:
    write("one", record(1), record(2))
    file = write("two", record(1, reward=2.0))
    code, out, _ = call("reward", "one", str(file.parent))
    assert code == 0
    assert out.splitlines()[-2:] == [
        "• one reward  0.2 at step 2, 0.1 to 0.2",
        f"o {file.parent} reward  2 at step 1, 2 to 2",
    ]


def test_a_name_that_nothing_has_is_refused_with_the_nearest_one(call: Call) -> None:
    write("math", record(1))
    code, out, err = call("rewrd", "math")
    assert (code, out) == (1, "")
    assert err == ("Error: no step has a number called 'rewrd'. Did you mean reward? There are: reward, rewards.\n")
    assert (
        call("reward", "no/such.jsonl")[2]
        == "Error: cannot read the metrics no/such.jsonl: No such file or directory\n"
    )
    code, _, err = call("reward", "math", "-o", "x.pdf")
    assert (code, "Error: -o x.pdf" in err) == (2, True)
    assert "Error: cannot write no/x.svg: No such file or directory" in call("reward", "math", "-o", "no/x.svg")[2]


@pytest.mark.server
def test_fill_and_drops_come_from_the_server(call: Call, redis_url: str, tmp_path: Path) -> None:
    run = Run(redis_url, tmp_path)
    run.step("a.0")
    run.push("b.0")
    run.drop("stale", run.pool())
    run.step("a.1")
    named = ("--redis", redis_url, "--run", run.store.run, "--json")
    before = points(call("drops", *named)[1])
    run.push("b.1", size=3)
    run.drop("stale", run.pool())
    fill, drops, reward = (points(call(field, *named)[1]) for field in ("fill", "drops", "reward"))
    run.close()
    assert [(name, step) for name, step, _ in fill] == [("fill", 1), ("fill", 2)]
    assert before == [("stale", 1, 0.0), ("stale", 2, 2.0)]
    assert drops == [*before, ("stale", 3, 3.0)]  # since the last step
    assert [step for _, step, _ in reward] == [1, 2]  # no metrics file is here


@pytest.mark.parametrize("name", ["x.svg", "x.png"])
def test_a_figure_takes_the_place_of_a_planted_link(call: Call, name: str) -> None:
    pytest.importorskip("matplotlib")
    write("math", record(1), record(2))
    precious, figure = Path("precious"), Path(name)
    precious.write_text("precious")
    figure.symlink_to(precious)
    assert call("reward", "math", "-o", name) == (0, "", f"wrote {name}\n")
    assert (precious.read_text(), figure.is_symlink()) == ("precious", False)
    assert figure.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_a_picture_is_whole_by_itself_and_its_texts_are_harmless(call: Call) -> None:
    hostile = "_<script>alert(1)</script>\x1b[2J $x^{$"
    write("math", *(record(n, parts={hostile: n, "other": 1 - n}) for n in range(1, 5)))
    assert call("parts", "math", "-o", "x.svg") == (0, "", "wrote x.svg\n")
    text = Path("x.svg").read_text()
    assert not re.search(r"<script|<image|@import|\x1b", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
    shown = "".join(ElementTree.fromstring(text).itertext())
    assert "<script>alert(1)</script>\\x1b[2J $x^{$  4 at step 4, 1 to 4" in shown
    assert "\x1b" not in call("parts", "math")[1]
    assert call("parts", "math", "-o", "x.png") == (0, "", "wrote x.png\n")
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_way_to_it_is_said(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    write("math", record(1))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, out, err = call("reward", "math", "-o", "x.png")
    assert (code, out) == (1, "")
    assert "pip install '.[plot]'" in err


@pytest.mark.parametrize("width", [40, 80])
def test_a_chart_fits_and_tells_its_curves_apart_without_colours(width: int) -> None:
    curves = [Curve(f"run-{n}", tuple((step, step * n) for step in range(1, 200))) for n in range(1, 4)]
    lines = chart(curves, width=width)
    assert max(map(len, lines)) <= width
    assert all(any(mark in line for line in lines[:12]) for mark in "•o+")
    assert all(line.isascii() for line in chart(curves, width=width, is_ascii=True))


def test_curves_of_other_ranges_have_axes_of_their_own_and_one_of_steps() -> None:
    curves = [Curve("reward", ((1, 0.1), (9, 0.9))), Curve("entropy", ((5, 2.0), (9, 1.5)))]
    lines = small_charts(curves, width=60)
    text = "\n".join(lines)
    assert all(label in text for label in ("0.100┤", "0.900┤", "1.500┤", "2.000┤"))
    assert [line.split() for line in lines if line.strip().startswith("step")] == [["step", "1", "9"]] * 2


def test_a_curve_that_never_changes_and_one_of_a_single_step_can_be_drawn() -> None:
    assert chart([Curve("a", ((7, 0.0),))], width=40)[-1] == "a  0 at step 7, 0 to 0"
    flat = chart(curves_of([{"step": 1, "x": -2}, {"step": 2, "x": -2}], "x"), width=40)
    assert [line.split("┤")[0].strip() for line in flat if "┤" in line] == ["-1", "-3"]
