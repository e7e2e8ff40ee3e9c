"""`rlbuffer demo --deterministic` twice: the same rollouts, the same steps, the same parameters, bit for bit."""

from __future__ import annotations

import json

from homes import Home

STEPS = 3
COMPARED = ("step", "reward", "loss", "grad_norm", "tokens", "parameters_sha256")


def test_the_demo_in_its_deterministic_mode_trains_the_same_bits_twice(home: Home) -> None:
    records, digests = [], []
    for run in ("one", "two"):
        ended = home.call("demo", "--deterministic", "--steps", str(STEPS), "--run", run, "--display", "json")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        digests.append(json.loads(ended.stdout.splitlines()[-1])["parameters_sha256"])
        records.append([{name: record[name] for name in COMPARED} for record in home.metrics(run)])
    assert records[0] == records[1]
    assert digests[0] == digests[1] == records[0][-1]["parameters_sha256"][0]
    every = [digest for record in records[0] for digest in record["parameters_sha256"]]
    assert (len(every), len(set(every))) == (2 * STEPS, STEPS), "each step moves them, on both ranks alike"
