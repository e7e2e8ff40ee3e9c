"""Writes the pages of this folder that come from the code: settings, errors, metrics.

    python docs/reference/generate.py

A test compares what stands here with what this makes, so a page cannot drift from the code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from rlbuffer import errors
from rlbuffer.config.explain import known, prose, tables
from rlbuffer.state.prometheus import METRIC_PREFIX, all_metrics
from rlbuffer.state.run_state import EnvState

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/reference/generate.py from the code: change it there. -->\n"
SETTINGS = f"""{NOTE}
# Settings

Values come from `rlbuffer.toml`, then from `RLBUFFER_*` variables, then from flags; the last wins. A variable has two
underscores between table and name: `RLBUFFER_BATCHER__MAX_AGE=2`. A setting that does not exist is an error with a
suggestion.

- `rlbuffer config example` prints a file with every setting and a comment.
- `rlbuffer config show --sources` prints every value and where it came from.
- `rlbuffer config check` says everything that cannot work, models, modules and packages on this host included. `run`,
  `serve`, `train`, `worker` and `score` begin with the same checks.
- `rlbuffer config apply` changes `[batcher]` of a run at work; [operate](../guide/operate.md#change-settings) says
  what a change does to what is there.
- Modules of yours may lie beside the file.

Ten settings matter first:

| setting | default | meaning |
|---|---|---|"""
ERRORS = f"""{NOTE}
# Errors

Every exception of rlbuffer is an `RlbufferError` (`from rlbuffer import errors`). Its message says what happened with
its values, where, and what to do; the table has what each kind means. A command that ends with one prints the message
in one line, the traceback with `--debug`, and has its exit code.

| exit code | meaning |
|---|---|
| 0 | everything was done |
| 1 | failure |
| 2 | usage: an argument or an option that cannot be |
| 3 | settings |
| 4 | the server cannot be reached, or refuses |
| 5 | timed out |
| 130 | interrupted by ctrl-C |
| 141 | the reader left, as `head -1` does behind a pipe: the command ended there, quietly |

| exception | means | is also | exit code |
|---|---|---|---|"""
METRICS_HEAD = f"""{NOTE}
# Prometheus

`[metrics] listen = "127.0.0.1:9464"` lets `rlbuffer serve`, leader or standby, answer for the whole run:

```text
curl -s http://127.0.0.1:9464/metrics
```

An address without a host is this machine only; there is no password, so let others in through what you trust. A `serve`
that cannot listen says so and works on. It looks at the run every two seconds, on a connection of its own.
`rlbuffer top --once --json` has the same numbers as JSON.

Every sample has the label `run`. Ratios are 0-1. Ids of groups, rollouts and prompts are nowhere a label; the 64 envs
that have trained most and 16 named rewards of each have samples. Numbers of a worker, scorer or rank are those of its
heartbeat, and end when it is silent. What the leader says of an env counts from its takeover and changes with each
step. The ledger counts from the run's begin. A metric without a value yet is left out.

[Operate](../guide/operate.md#prometheus-and-grafana) has a configuration of Prometheus with alert rules and a
dashboard for Grafana. [Metrics](metrics.md) has what `metrics.jsonl`, TensorBoard and W&B get."""
TITLES = {
    "run": "The run",
    "server": "Its server",
    "env": "Envs",
    "process": "Workers, scorers and ranks",
    "trained step": "The newest trained step",
}
SAID = {part.name for part in fields(EnvState) if part.metadata.get("is_said")}
"""Fields of an env that the leader says, and the trainer puts into its record."""
FIRST = (
    *("batcher.row_tokens", "batcher.micro_batches_per_rank", "batcher.max_age", "batcher.lookahead"),
    *("batcher.budgets", "batcher.advantage", "trainer.world_size", "trainer.loss.name"),
    *("trainer.optimizer.learning_rate", "trainer.checkpoint.every"),
)
"""Settings to look at before the others."""


# -- settings ------------------------------------------------------------------------------------------------------
def settings() -> str:
    """The page of all settings."""
    page = [SETTINGS]
    page += [f"| `{name}` | {known()[name].default} | {_cell(known()[name].meaning)} |" for name in FIRST]
    for table in tables():
        page += [f"\n## `[{table.name}]`\n" if table.name else "\n## At the top of the file\n"]
        if table.name:
            page += [f"{table.meaning}\n"]
        page += ["| setting | values | default | meaning |", "|---|---|---|---|"]
        for setting in table.settings:
            name = setting.name.rpartition(".")[2]
            page += [f"| `{name}` | {_cell(setting.values)} | {setting.default} | {_cell(setting.meaning)} |"]
    return "\n".join(page) + "\n"


# -- errors --------------------------------------------------------------------------------------------------------
def error_page() -> str:
    """The page of all exceptions."""
    page = [ERRORS]
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.RlbufferError) and cls.__module__ == errors.__name__:
            bases = [f"`{base.__name__}`" for base in cls.__bases__ if base not in (errors.RlbufferError, Exception)]
            meaning = _cell(prose(inspect.getdoc(cls) or ""))
            page.append(f"| `{name}` | {meaning} | {', '.join(bases)} | {cls.exit_code} |")
    return "\n".join(page) + "\n"


# -- text ----------------------------------------------------------------------------------------------------------
def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


# -- metrics -------------------------------------------------------------------------------------------------------
def metrics_page() -> str:
    """The page of all that the endpoint answers."""
    page, rows = [METRICS_HEAD], dict[str, list[list[str]]]()
    for title, field, m in all_metrics():
        names = ", ".join(f"`{name}`" for name in m.labels)
        recorded = f"`buffer/{field}`" if title == "env" and field in SAID else f"`{field}`" if "step" in title else ""
        rows.setdefault(title, []).append([f"`{METRIC_PREFIX}{m.name}`", m.kind, names, m.meaning, recorded])
    for title, its in rows.items():
        page.append(f"\n## {TITLES[title]}\n")
        heads, has = ["metric", "kind", "labels", "meaning"], any(row[4] for row in its)
        page += _table(heads + ["in metrics.jsonl"] * has, [row[: 4 + has] for row in its])
    return "\n".join(page) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "errors.md": error_page,
    "prometheus.md": metrics_page,
}
"""File -> what makes its text."""

if __name__ == "__main__":
    for file, make in PAGES.items():
        (HERE / file).write_text(make(), encoding="utf-8")
        print(HERE / file)
