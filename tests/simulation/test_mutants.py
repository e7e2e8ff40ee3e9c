"""Small defects made by a tool: what is changed where, which are drawn, which are known to change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation import mutate
from simulation.branches import branches, sources
from simulation.entered import Entered
from simulation.mutants import Mutant, lua_mutants, python_mutants

ROOT = Path(__file__).parents[2]
LUA = """-- if a == b then 1
if redis.call('GET', KEYS[1], 5) == now and not x then return math.min(a, b) end
redis.call('DEL', KEYS[1])
"""
PYTHON = '''def f(a, b=3):
    """Not a < b."""
    if a < b and not g(a, b):
        a.x = 1
        h(a)
    raise ValueError(f"{a + 1} is not {b - 1}")
'''


def changes(mutants: list[Mutant]) -> set[tuple[int, str, str]]:
    return {(mutant.line, mutant.operator, mutant.new.strip()) for mutant in mutants}


def test_lua_lines_are_changed_in_every_way_and_comments_in_none() -> None:
    found = changes(lua_mutants("x.lua", LUA))
    condition = "redis.call('GET', KEYS[1], 5) == now and not x"
    returned = "return math.min(a, b) end"
    assert {line for line, _, _ in found} == {2, 3}
    assert found >= {
        (2, "compare", f"if redis.call('GET', KEYS[1], 5) ~= now and not x then {returned}"),
        (2, "one", f"if redis.call('GET', KEYS[2], 5) == now and not x then {returned}"),
        (2, "one", f"if redis.call('GET', KEYS[1], 4) == now and not x then {returned}"),
        (2, "join", f"if redis.call('GET', KEYS[1], 5) == now or not x then {returned}"),
        (2, "swap", f"if redis.call('GET', 5, KEYS[1]) == now and not x then {returned}"),
        (2, "add", f"if {condition} then return math.max(a, b) end"),
        (2, "negate", f"if not ({condition}) then {returned}"),
        (3, "drop", "do end"),
    }


def test_python_lines_are_changed_in_every_way_and_messages_in_none() -> None:
    found = changes(python_mutants("x.py", PYTHON, range(1, 99)))
    assert found >= {
        (3, "compare", "if a <= b and not g(a, b):"),
        (3, "join", "if a < b or not g(a, b):"),
        (3, "join", "if a < b and g(a, b):"),
        (3, "swap", "if a < b and not g(b, a):"),
        (3, "negate", "if not (a < b and not g(a, b)):"),
        (4, "one", "a.x = 2"),
        (4, "drop", "pass"),
        (5, "drop", "pass"),
    }
    assert {line for line, _, _ in found} == {3, 4, 5}


def test_lines_that_are_not_run_are_left_alone() -> None:
    assert {mutant.line for mutant in python_mutants("x.py", PYTHON, {4})} == {4}


def test_mutant_changes_its_line_alone_and_says_when_that_is_another() -> None:
    mutant = Mutant("x", 2, "drop", "b", "c")
    assert mutant.applied("a\nb\n") == "a\nc\n"
    with pytest.raises(ValueError, match="x:2 is another line by now"):
        mutant.applied("b\na\n")


def test_mutants_of_the_shipped_files_change_a_line_that_is_there() -> None:
    nothing = Entered({}, {})
    lua = [mutant for name in ("commit", "push", "lease") for mutant in mutate.candidates(f"/{name}.lua", nothing)]
    assert {mutant.path.rpartition("/")[2] for mutant in lua} == {"commit.lua", "push.lua", "lease.lua"}
    for mutant in lua:
        assert mutant.old != mutant.new
        assert mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8"))


def test_the_same_seed_draws_the_same_half_of_them_in_lua() -> None:
    mutants = [Mutant(f"{kind}{i}.{kind}", 1, "one", "a", "b") for i in range(50) for kind in ("lua", "py")]
    first = mutate.drawn(mutants, 20, 7)
    assert first == mutate.drawn(mutants, 20, 7) != mutate.drawn(mutants, 20, 8)
    assert sum(mutant.path.endswith(".lua") for mutant in first) == 10


def test_a_changed_file_changes_few_of_those_that_are_drawn() -> None:
    mutants = [Mutant(f"{kind}{i}.{kind}", 1, "one", "a", "b") for i in range(50) for kind in ("lua", "py")]
    more = [Mutant("new.lua", line, "one", f"a{line}", "b") for line in range(10)]
    assert len(set(mutate.drawn(mutants, 20, 7)) & set(mutate.drawn(mutants + more, 20, 7))) >= 15


def test_seeds_that_run_a_line_of_lua_are_those_that_enter_its_branch() -> None:
    line = next(
        number for number, text in enumerate(sources()["push"].splitlines(), 1) if "'LATE'" in text and "return" in text
    )
    late = next(i for i, b in enumerate(branches()) if b.script == "push" and b.line == line - 4 and b.what == "then")
    elsewhere = next(i for i, b in enumerate(branches()) if b.script == "void")
    seen = Entered({5: [elsewhere], 7: [late], 9: [late + 1]}, {})
    assert seen.seeds("rlbuffer/store/scripts/push.lua", line) == [7]
    assert seen.seeds("rlbuffer/store/scripts/void.lua", 1) == [5], "outside of its branches: all that run the script"


def test_seeds_that_run_a_line_of_python_come_first() -> None:
    seen = Entered({1: [], 2: [], 3: []}, {1: {"a.py": [4]}, 2: {"a.py": [5]}})
    assert seen.seeds("a.py", 5) == [2, 3]
    assert seen.lines("a.py") == {4, 5}


def test_every_file_that_is_changed_is_there_and_has_quick_tests_that_are_there() -> None:
    changed = mutate.files()
    assert all((ROOT / path).is_file() and mutate.tests_of(path) for path in changed)
    folders = {path.removeprefix("rlbuffer/").split("/")[0] for path in changed}
    assert folders == {"store", "daemon", "batcher", "client", "process"}
    for begin, patterns in mutate.TESTS.items():
        assert any(path.startswith(begin) for path in changed), begin
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), begin


@pytest.mark.parametrize(("path", "old", "new"), mutate.equivalents())
def test_what_nothing_can_find_is_a_change_of_a_line_that_is_there(path: str, old: str, new: str) -> None:
    lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").split("\n")]
    assert old in lines
    assert old != new
