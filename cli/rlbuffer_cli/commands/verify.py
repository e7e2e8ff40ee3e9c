"""``rlbuffer verify``."""

from __future__ import annotations

import json

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo


@click.command("verify")
@options.common
@click.option("--json", "as_json", is_flag=True, help="One object per finding, then the report.")
def command(given: options.Given, as_json: bool) -> int:
    """Recompute the ledger and check every invariant. Changes nothing.

    pushed = pending + packed + trained + dropped, in rollouts and tokens, per env; every step dense and chained;
    every payload that a step refers to present and whole. Exit code 0 when all of it holds, 1 when not.

    \b
    Example:
      rlbuffer verify --run math && echo fine
    """
    from rlbuffer_cli.session import open_existing

    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        report = buffer.verify()
        name = buffer.run
    if as_json:
        for finding in report.findings:
            record = {"schema": "rlbuffer.finding/1", "invariant": finding.invariant, "message": finding.message}
            echo(json.dumps(record))
        summary = {"schema": "rlbuffer.report/1", "run": name, "ok": report.ok, "checked": dict(report.checked)}
        echo(json.dumps(summary))
        return 0 if report.ok else 1
    checked = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in report.checked.items())
    echo(f'run "{name}": checked {checked}')
    for finding in report.findings:
        echo(f"  {finding.invariant:<4} {finding.message}")
    echo("ok: everything adds up" if report.ok else f"FAILED: {len(report.findings)} findings")
    return 0 if report.ok else 1
