"""Steps and processes printed: the twins of two screens of the browser."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlbuffer_cli.options import echo, say
from rlbuffer_cli.plots import small_charts, trends
from rlbuffer_cli.render.group import as_json as plain_types
from rlbuffer_cli.render.run import (
    PROCESS_HEADER,
    PROCESS_NUMBERS,
    PROCESS_OPTIONAL,
    process_lines,
    process_rows,
)
from rlbuffer_cli.render.steps import (
    STEP_HEADER,
    STEP_NUMBERS,
    STEP_OPTIONAL,
    cost_of,
    facts_of,
    rank_figures,
    rank_lines,
    step_lines,
    step_row,
)
from rlbuffer_cli.run_tables import READ_RECORDS
from rlbuffer_cli.text import columns_of, show_table

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.errors import RlbufferError
    from rlbuffer_cli.whole_run import WholeRun


def show_steps(run: WholeRun, *, as_json: bool) -> int:
    """Prints a line per committed step that can still be read, the newest first. -> exit code."""
    problems: list[RlbufferError] = []
    buffer, headers = run.buffer, run.headers(problems)[::-1]
    if as_json:
        for header in headers:
            echo(_dumped(facts_of(header)))
    elif headers:
        trained = buffer.store.trainer().trained
        rows = [step_row(header, trained=trained) for header in headers]
        show_table(STEP_HEADER, rows, right=STEP_NUMBERS, optional=STEP_OPTIONAL)
        for line in small_charts(trends(buffer.settings.output_dir, headers[::-1]), width=columns_of(sys.stdout)):
            echo(line)
    else:
        echo("no committed step can still be read")
    for problem in problems:
        say(f"Error: {problem}", err=True)
    return 1 if problems else 0


def show_step(run: WholeRun, number: int, *, as_json: bool) -> int:
    """Prints a step: what it holds, why it was closed, and its rows by rank. -> exit code."""
    buffer, step = run.buffer, run.step(number)
    cost = cost_of(buffer)
    if as_json:
        echo(_dumped({**facts_of(step.header), "row_tokens": step.row_tokens, "ranks": rank_figures(step, cost)}))
        return 0
    width = columns_of(sys.stdout)
    for line in [*step_lines(step, trained=buffer.store.trainer().trained), "", *rank_lines(step, width, cost)]:
        say(line, indent="    ")
    return 0


def show_processes(buffer: Buffer, *, as_json: bool) -> int:
    """Prints when each worker, scorer, rank and batcher was heard, and what failed last. -> exit code."""
    from rlbuffer.client.run_state import read_run_state

    state = read_run_state(buffer.store, history=READ_RECORDS)
    if as_json:
        for process in state.processes:
            echo(_dumped({"schema": "rlbuffer.process/1", **asdict(process)}))
        return 0
    rows = process_rows(state)
    if not rows:
        echo("no process has been heard")
        return 0
    show_table(PROCESS_HEADER, list(rows.values()), right=PROCESS_NUMBERS, optional=PROCESS_OPTIONAL)
    for who in rows:
        lines = process_lines(state, who)
        for line in [who, *lines] if lines else []:
            say(line, indent="    ")
    return 0


def _dumped(record: dict[str, Any]) -> str:
    return json.dumps(plain_types(record), default=str)
