"""Tickets on real processes: a worker is killed with tickets out, and no prompt of its env is skipped or doubled.

``pytest -s tests/e2e/test_tickets.py`` prints the seconds.
"""

from __future__ import annotations

import time
from pathlib import Path

from homes import Home
from paced import events, kill, start_trainer, start_worker

from rlbuffer.worker.heartbeat import WORKER_TICKET_SECONDS

STEPS = 25
CONFIG = """
run = "tickets"

[server]
appendfsync = "no"

[batcher]
row_tokens = 1024
step_groups = 6
max_age = 0
lookahead = 0
"""


def test_numbers_of_a_killed_worker_are_taken_again_and_no_prompt_is_skipped_or_doubled(home: Home) -> None:
    path = Path(home.path / "tickets.toml")
    path.write_text(CONFIG)
    home.start("serve", "--config", path, "--display", "json", log="serve")
    start_worker(home, "tickets", "math", 0.02, name="first")
    trainer = start_trainer(home, "tickets", steps=STEPS, timeout=240.0)
    home.wait_until(lambda: len(events(home, "serve", "step")) >= 3, seconds=120, why="the third step")

    # It takes three tickets at a time and holds them for much longer than this test may last.
    victim = start_worker(home, "tickets", "math", 300.0, name="victim", batch=3)
    with home.connect("tickets") as buffer:
        key = buffer.store.keys.tickets("math")
        client = buffer.store.connection.client

        def held() -> set[int]:
            """Numbers that stay out although the other worker goes on: the victim renews them."""
            before = {int(n) for n in client.zrange(key, 0, -1)}
            time.sleep(1.0)
            return before & {int(n) for n in client.zrange(key, 0, -1)}

        numbers = home.wait_until(held, seconds=120, why="the victim's tickets")
        kill(victim)
        killed = time.monotonic()
        groups = {f"math.{number}" for number in numbers}
        home.wait_until(
            lambda: groups <= {g for s in events(home, "serve", "step") for g in s["group_ids"]},
            seconds=120 + WORKER_TICKET_SECONDS,
            why="a step with the victim's numbers",
        )
        print(
            f"  {sorted(groups)} were held by a worker that was killed; they are trained "
            f"{time.monotonic() - killed:.1f} s later (a ticket lives {WORKER_TICKET_SECONDS:g} s without renewal)"
        )
        assert home.ended(trainer, 240) == 0, home.logs()
        steps = events(home, "serve", "step")
        trained = sorted(int(g.removeprefix("math.")) for s in steps for g in s["group_ids"])
        assert len(trained) == len(set(trained)) >= 6 * STEPS
        assert trained == list(range(len(trained)))  # none skipped: on policy nothing is left in the pool either
        account = buffer.ledger().total()
    assert account.dropped == {}
    assert account.pushed[0] == 8 * len(trained)
