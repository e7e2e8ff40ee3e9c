"""A number is drawn at the same scale in every row."""

from __future__ import annotations

import uuid

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.plots import Curve
from rlbuffer_cli.tables import MEMBERS, group_rows, member_rows
from rlbuffer_cli.web.pages import PLOT_WIDTH, drawn


def test_bars_of_a_group_are_full_at_a_reward_of_one_or_more() -> None:
    meter = next(column for column in MEMBERS.columns if column.title == "0 to full")
    with rlbuffer.connect(f"memory://{uuid.uuid4().hex}") as buffer:
        writer = buffer.writer("w")
        for name, rewards in (("poor", [0.1] * 8), ("rich", [1.0, 0.5]), ("large", [4.0, 1.0])):
            writer.push(make_group(group_id=name, size=len(rewards), rewards=rewards))
        full = {
            name: [str(meter.cell(row)).count("━") for row in member_rows(buffer.group(name))]
            for name in ("poor", "rich", "large")
        }
        spreads = {(row.low, row.high) for row in group_rows(buffer.groups())}
    assert full == {"poor": [1] * 8, "rich": [8, 4], "large": [8, 2]}
    assert spreads == {(0.0, 4.0)}, "one axis for all groups of a table"


def test_curves_of_a_page_have_one_axis_of_steps_and_their_own_of_values() -> None:
    curves = [Curve("reward", ((1, 0.25), (751, 0.5))), Curve("entropy", ((740, 2.0), (751, 1.0)))]
    shown = drawn({curve.name: curve for curve in curves})
    ends = [[float(point.split(",")[0]) for point in each["points"].split()] for each in shown]
    assert ends[0] == [0.0, PLOT_WIDTH]
    assert ends[1][0] > 0.98 * PLOT_WIDTH
    assert [(each["low"], each["high"], each["first"], each["last"]) for each in shown] == [
        ("0.250", "0.500", 1, 751),
        ("1.00", "2.00", 1, 751),
    ]
