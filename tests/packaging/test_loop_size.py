"""The training loop is one function that can be read in one sitting; each loss is shorter still (test_own_losses)."""

from __future__ import annotations

import ast
from pathlib import Path

LOOP = Path(__file__).parents[2] / "rlbuffer" / "trainer" / "loop.py"
MOST_LINES = 150


def test_the_training_loop_is_one_function_under_150_lines() -> None:
    tree = ast.parse(LOOP.read_text())
    (loop,) = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
    assert isinstance(loop, ast.FunctionDef)
    assert loop.name == "train"
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 < MOST_LINES


def test_the_whole_file_is_under_150_lines_too() -> None:
    assert len(LOOP.read_text().splitlines()) < MOST_LINES
