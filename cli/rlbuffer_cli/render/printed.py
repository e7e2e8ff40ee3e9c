"""Tables printed, or as JSON lines: the twins of the browser's screens."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlbuffer_cli import look
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.plots import small_charts, trends
from rlbuffer_cli.render.group import as_json as plain_types
from rlbuffer_cli.render.steps import cost_of, rank_figures, rank_lines, step_lines
from rlbuffer_cli.run_tables import PROCESSES, READ_RECORDS
from rlbuffer_cli.table import Printed, View
from rlbuffer_cli.tables import GROUP_ORDER, GROUPS, STEPS, step_record
from rlbuffer_cli.text import columns_of

if TYPE_CHECKING:
    from rlbuffer_cli.whole_run import WholeRun

EVERYTHING = 2**31


def show_listed(view: View, run: WholeRun, where: str, limit: int, *, as_json: bool) -> int:
    """Prints the table of a view. -> exit code."""
    run.problems = []
    items = view.read(run, where, limit)
    if as_json:
        for item in items:
            echo(_dumped(view.record(item)))
    else:
        if view is GROUPS:
            _show_head(run)
        _show_items(view, run, items, where)
        if view is GROUPS and items:
            if len(items) == limit:
                say(f"the first {limit} ({GROUP_ORDER}): --limit shows more, --where chooses", err=True)
            say(f"one group: rlbuffer inspect {view.key(items[0])}", err=True)
    for problem in run.problems:
        say(f"Error: {problem}", err=True)
    return 1 if run.problems else 0


def _show_head(run: WholeRun) -> None:
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer_cli.view import run_view

    look.show(run_view(read_run_state(run.buffer.store, history=READ_RECORDS), with_processes=False), "")


def _show_items(view: View, run: WholeRun, items: Any, where: str) -> None:
    if not items:
        echo(f"no {view.name} match {where!r}" if where else view.empty)
        return
    look.show(Printed(view, items))
    if view is STEPS:
        headers = [row.header for row in items][::-1]
        drawn = small_charts(trends(run.buffer.settings.output_dir, headers), width=columns_of(sys.stdout))
        for line in drawn:
            echo(line)
    elif view is PROCESSES:
        for row in items:
            for line in [row.title, *(f"  {line}" for line in row.lines)] if row.lines else ():
                say(line, indent="    ")


def show_step(run: WholeRun, number: int, *, as_json: bool) -> int:
    """Prints a step: what it holds, why it was closed, and its rows by rank. -> exit code."""
    buffer, step = run.buffer, run.step(number)
    cost = cost_of(buffer)
    if as_json:
        echo(_dumped({**step_record(step.header), "row_tokens": step.row_tokens, "ranks": rank_figures(step, cost)}))
        return 0
    for line in step_lines(step, trained=buffer.store.trainer().trained):
        say(line, indent="    ")
    look.show(Text(), *rank_lines(step, columns_of(sys.stdout), cost))
    return 0


def _dumped(record: Any) -> str:
    return json.dumps(plain_types(record), default=str)
