"""Workers killed at random during an epoch: every prompt trains at most once, and what is missing was counted.

``pytest -s tests/e2e/test_killed_workers.py`` prints the numbers.
"""

from __future__ import annotations

import random
import time
from collections import Counter

from homes import Home
from paced import events, kill, start_trainer, start_worker

PROMPTS = 200
KILLS = 20
STEP_GROUPS = 4
CONFIG = f"""
run = "epoch"

[server]
appendfsync = "no"

[batcher]
row_tokens = 1024
step_groups = {STEP_GROUPS}
max_age = 1000
order = "oldest_first"
"""


def test_an_epoch_survives_twenty_kills_of_its_workers_with_no_prompt_twice_and_none_lost(home: Home) -> None:
    path = home.path / "epoch.toml"
    path.write_text(CONFIG)
    home.start("serve", "--config", path, "--display", "json", log="serve")
    start_trainer(home, "epoch", steps=PROMPTS, timeout=240.0)

    def begin(name: str) -> None:
        workers[name] = start_worker(home, "epoch", "math", 0.1, name=name, batch=3, prompts=PROMPTS)
        begun[name] = len(events(home, f"worker-{name}", "version"))

    workers, begun = {}, {}
    names = ["one", "two", "three"]
    for name in names:
        begin(name)
    rng = random.Random(20)
    with home.connect("epoch") as buffer:
        store = buffer.store

        def pushed() -> int:
            return store.ledger().total().pushed[0] // 8

        for number in range(KILLS):
            victim = names[number % len(names)]
            home.wait_until(
                lambda name=victim: len(events(home, f"worker-{name}", "version")) > begun[name],  # type: ignore[misc]
                seconds=60,
                why=f"worker {victim} at work",
            )
            time.sleep(rng.uniform(0.0, 0.5))  # anywhere between two tickets, or in the middle of a push
            kill(workers[victim])
            begin(victim)
        at_the_last_kill = pushed()
        assert at_the_last_kill < PROMPTS, "the epoch was over before the last kill: slower workers are needed"

        def closed() -> tuple[set[str], set[str], set[str]]:
            """Groups that were trained or packed, that were dropped, and that are pending."""
            steps = [group_id for event in events(home, "serve", "step") for group_id in event["group_ids"]]
            assert len(steps) == len(set(steps)), "a group is in two steps"
            dropped = {str(record["group_id"]) for record in store.history() if record["event"] == "drop"}
            return set(steps), dropped, {entry.group_id for entry in store.read_pool()}

        everything = {f"math.{number}" for number in range(PROMPTS)}

        def is_over() -> bool:
            in_steps, dropped, pending = closed()
            return everything <= in_steps | dropped | pending and len(pending) < STEP_GROUPS

        home.wait_until(is_over, seconds=120, why="the end of the epoch")
        in_steps, dropped, pending = closed()
        uses: Counter[str] = Counter()
        for number in range(1, store.meta().step + 1):
            uses.update({member.prompt_id for _, member in buffer.step(number).rollouts})
        assert set(uses.values()) == {1}
        assert in_steps <= everything
        missing = everything - in_steps - pending
        assert missing <= dropped
        assert len(uses) == PROMPTS - len(missing) - len(pending - in_steps)
        account = store.ledger().total()
        lost = sum(rollouts for rollouts, _ in account.dropped.values())
        assert account.pushed[0] == account.pending[0] + account.packed[0] + account.trained[0] + lost
        assert buffer.verify().findings == ()
        print(
            f"  {KILLS} kills, the last one at {at_the_last_kill} groups: {len(uses)} of {PROMPTS} prompts trained "
            f"once, {len(missing)} dropped, {len(pending)} pending; {account.pushed[0] // 8} groups pushed, dropped "
            f"{account.dropped}"
        )
