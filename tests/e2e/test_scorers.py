"""Scorers as real processes: one is killed in the middle, another takes its groups over, and the trainer trains on what
they added. `pytest -s tests/e2e/test_scorers.py` prints the seconds."""

from __future__ import annotations

import os
import signal
import time

import waits
from homes import Home

from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.scorer.heartbeat import CLAIM_SECONDS
from rlbuffer.testing import make_group

SLOW_JUDGE = """
import os, time

def reward(rollout, group):
    time.sleep(float(os.environ["JUDGE_SECONDS"]))
    return float(rollout.tokens[-1] % 2)
"""
REWARDED = """
run = "judged"

[server]
appendfsync = "no"

[batcher]
row_tokens = 1024
step_groups = 4
max_age = 1000

[score.judge]
reward = "slow_judge:reward"
concurrent = 1
"""


def test_a_killed_scorers_groups_are_taken_over_and_every_group_is_scored_once(home: Home) -> None:
    path = home.path / "judged.toml"
    path.write_text(REWARDED)
    (home.path / "slow_judge.py").write_text(SLOW_JUDGE)
    home.start("serve", "--config", path, log="serve")
    with home.connect("judged") as buffer:
        store = buffer.store
        buffer.reader(timeout_seconds=60).start()
        buffer.policy.announce(0, location="", size=0, checksum="")
        writer = buffer.writer("w")
        for seed in range(12):
            writer.push(make_group(env="a", size=4, rewards=[None] * 4, seed=seed, needs=["reward"]))

        nobody = Problem(kind=Trouble.NO_SCORER, env="a", count=12, detail="reward")

        def lacks() -> Problem | None:
            return waits.problem(store, Trouble.NO_SCORER)

        home.wait_until(lambda: lacks() == nobody, seconds=60, why="the batcher's problem")
        assert str(nobody) in " ".join(home.call("inspect", "--run", "judged").stdout.split())

        home.environment["JUDGE_SECONDS"] = "3600"
        victim = home.start("score", "judge", "--config", path, log="victim")
        claims = f"{store.keys.tag}:scoring:*"
        client = store.connection.client

        def held() -> int:
            return len(set(client.scan_iter(match=claims)))

        home.wait_until(lambda: held() == 8, seconds=60, why="the victim's claims of one batch")
        home.wait_until(lambda: lacks() is None, seconds=60, why="the end of the problem")
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()

        home.environment["JUDGE_SECONDS"] = "0.01"
        home.start("score", "judge", "--replica", "1", "--config", path, log="heir")

        def account() -> tuple[int, int, int, dict[str, tuple[int, int]]]:
            total = store.ledger().total()
            return total.pushed[0], total.packed[0], total.pending[0], dict(total.dropped)

        # Two steps of four groups are committed ahead of a trainer that does not move, and four scored groups are left.
        home.wait_until(lambda: account() == (48, 32, 16, {}), seconds=60 + CLAIM_SECONDS, why="two steps")
        home.wait_until(lambda: len(buffer.groups("state:ready")) == 4, seconds=60, why="the scores of the rest")
        print(f"  8 of 12 groups were a killed scorer's; all are scored {time.monotonic() - killed:.1f} s later")
        assert account() == (48, 32, 16, {})

        def heir() -> tuple[int, int, int]:
            record = store.heartbeats("scorer")["judge-1"]
            return record["groups"], record["rollouts"], record["late"]

        home.wait_until(lambda: heir() == (12, 48, 0), seconds=60, why="the heir's account of 12 groups")
        # The entries that the scored groups replaced are swept without waiting for a checkpoint.
        payloads = store.keys.payload_prefix + "*"
        home.wait_until(
            lambda: len(set(client.scan_iter(match=payloads))) == 12, seconds=60, why="the sweep of 12 old payloads"
        )
        assert buffer.verify().findings == ()
    screen = home.call("inspect", "processes", "--run", "judged").stdout
    assert "scorer judge" in screen
