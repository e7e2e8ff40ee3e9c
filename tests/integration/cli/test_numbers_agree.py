"""A number is drawn at the same scale in every view."""

from __future__ import annotations

import re
import uuid

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.render.group import MEMBER_HEADER, largest_reward, member_row
from rlbuffer_cli.render.html_views import curve


def test_bars_of_a_group_are_full_at_a_reward_of_one_or_more() -> None:
    with rlbuffer.connect(f"memory://{uuid.uuid4().hex}") as buffer:
        writer = buffer.writer("w")
        for name, rewards in (("poor", [0.1] * 8), ("rich", [1.0, 0.5]), ("large", [4.0, 1.0])):
            writer.push(make_group(group_id=name, size=len(rewards), rewards=rewards))
        full = {}
        for name in ("poor", "rich", "large"):
            detail = buffer.group(name)
            rows = [member_row(member, largest_reward(detail), "") for member in detail.members]
            full[name] = [max(row, key=lambda cell: cell.count("█") + cell.count("·")).count("█") for row in rows]
            assert all(len(row) == len(MEMBER_HEADER) for row in rows)
    assert full == {"poor": [1] * 8, "rich": [8, 4], "large": [8, 2]}


def test_curves_of_a_page_have_one_axis_of_steps() -> None:
    def ends(points: list[tuple[int, float]]) -> tuple[float, float]:
        found = re.findall(r"([\d.]+),[\d.]+", curve("reward", points, (1, 751)).partition("points=")[2])
        return float(found[0]), float(found[-1])

    assert ends([(n, n / 751) for n in range(1, 752)]) == (0.0, 600.0)
    first, last = ends([(n, n / 751) for n in range(740, 752)])
    assert first > 580
    assert last == 600.0
