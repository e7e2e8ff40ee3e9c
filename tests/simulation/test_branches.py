"""The branches of the Lua files: found in the text, marked on their lines, told apart when a seed enters them."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from itertools import count, islice

import pytest

from simulation import __main__ as command
from simulation import branches
from simulation.__main__ import Tally, run_seed
from simulation.branches import sources
from simulation.draws import draw
from simulation.lua import Engine

TEXT = """-- if then else: a comment
local function twice(x) return 2 * x end
if ARGV[1] == 'then' then return 1 elseif twice(1) then
  for i = 1, 2 do local _ = "else" end
end
do while false do break end end
if true then return 2 else return 3 end
"""


def test_every_arm_loop_and_function_is_a_branch() -> None:
    found = [(branch.line, branch.what) for branch, _, _ in branches._places("x", TEXT)]
    assert found == [
        (2, "function"),
        (3, "then"),
        (3, "then #2"),
        (4, "loop"),
        (3, "no else"),
        (6, "loop"),
        (7, "then"),
        (7, "else"),
    ]


def test_marked_files_keep_their_lines_and_compile() -> None:
    engine = Engine()
    for name, text in sources().items():
        assert branches.marked(text).count("\n") == text.count("\n"), name
        engine.compiled(text)
    assert all(count == 1 for count in Counter(branches.branches()).values())


def test_a_seed_says_which_branches_it_entered() -> None:
    tally = Tally()
    assert f"0/{len(branches.branches())} branches" in tally.branches()
    result = run_seed(0)
    tally.add(result)
    names = {str(branches.branches()[number]) for number in result.branches}
    assert any(name.startswith("commit.lua:") for name in names)
    assert len(result.branches) < len(branches.branches())
    assert f"{len(result.branches)}/{len(branches.branches())} branches" in tally.branches()
    assert tally.branches().count("not entered: ") == len(branches.branches()) - len(result.branches)


def test_runs_that_left_something_behind_enter_every_branch_of_open() -> None:
    """All other branches are held by the exit code of two thousand seeds, which take minutes."""
    results = [run_seed(seed) for seed in islice((s for s in count() if draw(s).left), 5)]
    assert [result.violation for result in results] == [""] * 5
    entered = frozenset().union(*(result.branches for result in results))
    assert [str(b) for i, b in enumerate(branches.branches()) if b.script == "open" and i not in entered] == []


def test_a_run_of_all_the_seeds_fails_when_a_branch_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ENTER_ALL", 1)
    monkeypatch.setattr(command, "_ready", lambda: None)
    args = Namespace(first=0, seeds=1, only="", mutation="", rollback=False, jobs=1, keep_going=False)
    assert command._many(args) == 1
    assert "0 violations" in capsys.readouterr().out
    args.first = 1
    assert command._many(args) == 0, "other seeds need not enter all"
