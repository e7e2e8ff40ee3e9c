"""Writes the tables of metrics below the mark on their page, from the code.

    python docs/reference/generate.py

A test compares what stands there with what this makes, so a table cannot drift from the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from rlbuffer.state.prometheus import METRIC_PREFIX, all_metrics
from rlbuffer.state.run_state import EnvState

HERE = Path(__file__).parent
MARK = "<!-- Made by docs/reference/generate.py from the code: change it there. -->\n"
TITLES = {
    "run": "The run and its server",
    "server": "The run and its server",
    "env": "Envs",
    "process": "Workers, scorers and ranks",
}
SAID = {part.name for part in fields(EnvState) if part.metadata.get("is_said")}
"""Fields of an env that the leader says, and the trainer puts into its record."""


def metrics() -> Iterator[str]:
    """A table for each part of the run; metrics that differ in what they count share a row."""
    rows: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for title, field, m in all_metrics():
        if title not in TITLES:
            continue  # the record of a step says them itself
        recorded = f"`buffer/{field}`" if title == "env" and field in SAID else ""
        labels = ", ".join(f"`{name}`" for name in m.labels)
        names, fields_of = rows.setdefault((title, m.kind, labels, m.meaning), ([], []))
        names.append(f"`{METRIC_PREFIX}{m.name}`")
        fields_of += [recorded] if recorded and recorded not in fields_of else []
    for heading in dict.fromkeys(TITLES.values()):
        its = [[", ".join(a), *key[1:], ", ".join(b)] for key, (a, b) in rows.items() if TITLES[key[0]] == heading]
        heads, has = ["metric", "kind", "labels", "meaning"], any(row[4] for row in its)
        yield f"\n### {heading}\n"
        yield from table(heads + ["in metrics.jsonl"] * has, [row[: 4 + has] for row in its])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def page(file: str, tables: Callable[[], Iterator[str]]) -> str:
    """A page with its tables made anew; what stands above the mark stays."""
    above = (HERE / file).read_text(encoding="utf-8").partition(MARK)[0]
    return above + MARK + "\n".join(tables()) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "metrics.md": lambda: page("metrics.md", metrics),
}
"""File -> what makes its text."""

if __name__ == "__main__":
    for file, make in PAGES.items():
        (HERE / file).write_text(make(), encoding="utf-8")
        print(HERE / file)
