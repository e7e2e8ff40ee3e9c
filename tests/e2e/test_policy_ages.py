"""The age of the trained rollouts, in every header of a real run that is strictly on policy."""

from __future__ import annotations

import json
from collections import Counter

from homes import Home
from looks import evaluations

STEPS = 5
EVAL = """
[eval.held_out]
env = "vcopy"
env_options = { seed = 1000 }
every = 1
prompts = 8
"""


def test_every_header_keeps_the_age_and_evaluations_stand_beside_the_account(home: Home) -> None:
    path = home.config(steps=STEPS, world_size=1, keep_checkpoints=50)
    text = path.read_text().replace("max_age = 4\n", "max_age = 0\nlookahead = 0\n")
    path.write_text(text + EVAL)
    finished = home.call("run", path, "--display", "plain")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    with home.connect() as buffer:
        headers = {header.step: header for header in buffer.store.headers() if header.step <= STEPS}
        assert sorted(headers) == list(range(1, STEPS + 1))
        ages: Counter[int] = Counter()
        for step, header in headers.items():
            mine = [step - 1 - member.info.min_version for _, member in buffer.step(step).rollouts]
            assert len(mine) == header.rollouts > 0
            assert header.max_age == max(mine)
            assert all(envs["max_age"] == 0 for envs in header.envs.values())
            ages.update(mine)
        assert set(ages) == {0}
        # Every version that was evaluated has one result, and none of it is in the account.
        results = evaluations(buffer.store)
        versions = [result["version"] for result in results]
        assert {result["env"] for result in results} == {"held_out"}
        assert len(versions) == len(set(versions)) >= 2
        assert versions[0] == 0, versions
        assert {result["rollouts"] + result["failed"] for result in results} == {8}
        assert set(buffer.ledger().envs) == {"vcopy", "repeat"}
        assert not any(group.group_id.startswith("eval") for group in buffer.groups(limit=10**6))
    newest = max(versions)
    assert f"eval held_out {results[-1]['reward/mean']:.3f}" in home.call("inspect", "--run", "tiny").stdout
    told = json.loads(home.call("top", "--once", "--run", "tiny", "--json").stdout)["evaluations"]
    assert [r["version"] for r in told] == sorted(versions)
    assert told[-1]["version"] == newest
    verified = home.call("verify", "--run", "tiny")
    assert verified.returncode == 0, verified.stdout + verified.stderr
