"""`rlbuffer train --fake-data`: what it prints, what it shows of its samples, what it records; two ranks, no server."""

from __future__ import annotations

import json

import pytest
from homes import Home


def test_two_ranks_show_a_sample_and_record_every_step(home: Home) -> None:
    config = home.config(run="fake")
    home.environment["RLBUFFER_TRAINER__REPORTS__EXAMPLE_EVERY"] = "1"
    ended = home.call(
        "train", "--config", config, "--fake-data", "--steps", "2", "--debug-samples", "1", "--display", "plain"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("rollout fake.1.")
    assert "\n  ok 0 of " in ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert first.startswith("training ")
    assert "on 2 ranks (cpu, " in first
    steps = [line for line in lines if not line.startswith(" ")]
    assert [line.partition("  ")[0] for line in steps[:2]] == ["step 1", "step 2"]
    assert all("  wait " in line for line in steps[:2])
    assert [line.split()[0] for line in lines if line.startswith(" ")] == ["best", "worst"] * 2
    assert lines[-1] == "finished at step 2"
    output = home.path / "runs" / "fake"
    assert [path.name for path in output.iterdir()] == ["fake-data"], "a real run would go on from its checkpoint"
    records = [json.loads(line) for line in (output / "fake-data" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["ratio"]["min"] <= record["ratio"]["mean"] <= record["ratio"]["max"]
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"]["total"], rel=1e-3)
        assert [sorted(rank) for rank in record["ranks"]] == [["backward", "exchange", "forward", "tokens", "wait"]] * 2
        assert sum(rank["tokens"] for rank in record["ranks"]) == record["tokens"]
        assert all(0 < rank["forward"] < record["seconds"]["total"] for rank in record["ranks"])
        best, worst = record["examples"]
        assert best["group_id"] == worst["group_id"]
        assert best["reward"] >= worst["reward"]
        assert len(best["token_ids"]) == min(best["tokens"], 200)
        assert record["memory_bytes"] > 50 * 2**20
