"""Every process of a run is killed once with SIGKILL; the run ends where it was planned to, exactly accounted."""

from __future__ import annotations

import os
import signal
from collections import Counter

from homes import Home


def last_step(home: Home) -> int:
    return max((record["step"] for record in home.metrics()), default=0)


def test_a_run_survives_kill_9_of_each_process(home: Home) -> None:
    """Takes a minute: sixty steps, and every kill is waited out."""
    config = home.config(steps=60, checkpoint_every=10, keep_checkpoints=50)
    supervisor = home.start("run", config, "--display", "plain", log="run")
    home.wait_until(lambda: last_step(home) >= 3, seconds=120, why="the third step")

    def kill(pattern: str) -> None:
        before = last_step(home)
        names = [name for name in home.pids() if pattern in name]
        os.kill(home.pids()[names[0]], signal.SIGKILL)
        home.wait_until(lambda: last_step(home) > before + 1, seconds=120, why=f"a step after the death of {pattern}")

    for victim in ("serve", "worker", "rank", "server"):
        kill(victim)

    assert home.ended(supervisor, 240) == 0, home.logs()
    assert last_step(home) == 60
    verified = home.call("verify", "--run", "tiny")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    with home.connect() as buffer:
        uses: Counter[str] = Counter()
        for step in range(buffer.store.meta().retired + 1, 61):
            uses.update(buffer.step(step).rollout_ids)
        account = buffer.ledger().total()
    assert uses
    assert set(uses.values()) == {1}
    dropped = sum(rollouts for rollouts, _ in account.dropped.values())
    assert account.pushed[0] == account.pending[0] + account.packed[0] + account.trained[0] + dropped
