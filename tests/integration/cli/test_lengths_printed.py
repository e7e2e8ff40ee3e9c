"""`inspect --lengths`: the drop table by env and length, printed and as JSON, adds up to the ledger."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer_cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    made.lead()
    made.push("a.0", lengths=[2, 5, 100])
    made.push("b.0", lengths=[70])
    made.push("a.1", lengths=[5000, 6, 7])
    first, second, third = made.pool()
    made.commit(entries=[first])
    made.train(1)
    made.commit(entries=[second])
    made.drop("stale", [third])
    yield made
    made.close()


def test_lengths_are_printed_with_what_the_ledger_has_in_all(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--lengths", "--redis", run.url, "--run", run.store.run]) == 0
    out = capsys.readouterr().out
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "env length packed trained trained tokens dropped dropped tokens dropped by",
        "a 2 0 1 2 0 0",
        "a 5-8 0 1 5 2 13 2 stale",
        "a 65-128 0 1 100 0 0",
        "a 4097-8192 0 0 0 1 5k 1 stale",
        "a all 0 3 107 3 5k 3 stale",
        "b 65-128 1 0 0 0 0",
        "b all 1 0 0 0 0",
        "length: tokens of a rollout; the last line of an env is what the ledger has in all",
    ]


def test_lengths_as_json_add_up_to_the_ledger(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--lengths", "--json", "--redis", run.url, "--run", run.store.run]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {
        "schema": "rlbuffer.length/1",
        "env": "a",
        "fate": "dropped",
        "reason": "stale",
        "shortest": 4097,
        "longest": 8192,
        "rollouts": 1,
        "tokens": 5000,
    } in records
    assert main(["inspect", "--json", "--totals", "--redis", run.url, "--run", run.store.run]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[0])["ledger"]
    for fate, expected in {"packed": total["packed"], "trained": total["trained"], **total["dropped"]}.items():
        its = [record for record in records if (record["reason"] or record["fate"]) == fate]
        assert [sum(record[unit] for record in its) for unit in ("rollouts", "tokens")] == expected
    assert total["lengths"]["stale"] == {"8": [2, 13], "8192": [1, 5000]}


def test_a_run_without_any_step_or_drop_has_no_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    assert main(["inspect", "--lengths", "--redis", made.url, "--run", made.store.run]) == 0
    assert capsys.readouterr().out == "nothing was packed, trained or dropped yet\n"
    made.close()
