"""Small defects made by a tool: what is changed where, which are drawn, which are known to change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation import mutate
from simulation.entered import Entered

ROOT = Path(__file__).parents[2]


def test_mutants_of_the_shipped_files_change_a_line_that_is_there() -> None:
    nothing = Entered({}, {})
    lua = [mutant for name in ("commit", "push", "lease") for mutant in mutate.candidates(f"/{name}.lua", nothing)]
    assert {mutant.path.rpartition("/")[2] for mutant in lua} == {"commit.lua", "push.lua", "lease.lua"}
    for mutant in lua:
        assert mutant.old != mutant.new
        assert mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8"))


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
