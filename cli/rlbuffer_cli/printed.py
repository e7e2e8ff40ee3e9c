"""What the browser shows, printed or as JSON lines."""

from __future__ import annotations

import sys

from rlbuffer_cli import look, sheets
from rlbuffer_cli.options import is_json, say, show_json
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.table import EVERYTHING, Printed, Target
from rlbuffer_cli.tables import GROUPS
from rlbuffer_cli.text import columns_of

LISTED_GROUPS, PRINTED_TOKENS = 30, 200
"""Rows that are printed unless `--limit` says otherwise: of groups, and of what a thing consists of."""


def show(run: ShownRun, target: Target, limit: int | None) -> int:
    """Prints a target, at most `limit` rows of a table. -> exit code."""
    most = PRINTED_TOKENS
    if target.kind == "table":
        most = limit or (LISTED_GROUPS if target.name == GROUPS.name else EVERYTHING)
    sheet = sheets.read(run, target, most)
    if is_json():
        for record in map(sheet.view.record, sheet.items) if sheet.record is None else [sheet.record()]:
            show_json(record)
    else:
        if target == Target("table", GROUPS.name):
            look.show(run.title())
        _show(sheet)
    for problem in sheet.problems:
        say(f"Error: {problem}", err=True)
    return 1 if sheet.problems else 0


def _show(sheet: sheets.Sheet) -> None:
    view, items = sheet.view, sheet.items
    for line in sheet.all_lines():
        say(line if isinstance(line, str) else line.plain, indent="    ")
    blocks = [sheet.above(columns_of(sys.stdout))]
    if sheet.target.kind != "step":  # its rollouts are many, and a filter of groups finds them
        blocks.append([Printed(view, items) if items else look.plain(sheet.nothing)])
    for number, block in enumerate(filter(None, blocks)):
        look.show(*([""] if number or sheet.lines else []), *block)
    for item in items:
        if lines := view.more(item):
            say("\n".join([view.key(item), *(f"  {line}" for line in lines)]), indent="    ")
    for hint in sheet.hints:
        say(hint, err=True)
