"""Data that ends, on real processes: a file pushed, and data sets sampled by a run that is killed on its way."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter

import waits
from homes import TINY, Home

from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.viewer import Viewer
from rlbuffer.testing import make_group
from rlbuffer.wire.jsonl import line_of

PASSES = 2
PROMPTS = {"long": 13, "short": 3}

DATA = """
[worker.long]
env = "jsonl"
group_size = 4
groups_in_flight = 2
replicas = 2
{data}
name = "long"

[worker.short]
env = "jsonl"
group_size = 4
groups_in_flight = 2
{data2}
name = "short"
"""

OPTIONS = """
[worker.{env}.env_options]
path = "{env}.jsonl"
passes = {passes}
vocab_size = 13
eos_token_ids = [12]
max_new_tokens = 6
length = {{ form = "exact", target = 3, coefficient = 0.1 }}
"""


def write_config(home: Home) -> None:
    text = TINY.split("[worker.vcopy]")[0].format(
        run="tiny", world_size=2, steps=10_000, checkpoint_every=2, keep_checkpoints=2, micro_batches=1, dtype="float32"
    )
    text = text.replace("step_groups = 0\n", "")
    text = text.replace("budgets = { vcopy = 0.7, repeat = 0.3 }", "step_groups = 4\nmin_group_size = 2")
    data = {env: OPTIONS.format(env=env, passes=PASSES) for env in PROMPTS}
    (home.path / "tiny.toml").write_text(text + DATA.format(data=data["long"], data2=data["short"]))
    for env, prompts in PROMPTS.items():
        lines = [json.dumps({"prompt": [1 + n % 9, 11], "answer": "3 4", "id": f"{env}-{n}"}) for n in range(prompts)]
        (home.path / f"{env}.jsonl").write_text("\n".join(lines) + "\n")


def fates(store: Viewer) -> dict[str, int]:
    """Fate of every rollout that was pushed."""
    total = store.ledger().total()
    dropped = {reason: rollouts for reason, (rollouts, _) in total.dropped.items() if rollouts}
    return dropped | {"trained": total.trained[0], "pending": total.pending[0], "packed": total.packed[0]}


def test_a_run_over_data_sets_that_end_trains_the_rest_and_ends_though_it_was_killed_on_its_way(home: Home) -> None:
    """Takes a minute: a whole run starts twice and samples its data to the end."""
    write_config(home)
    first = home.start("run", "tiny.toml", "--display", "plain", log="first")
    home.wait_until(lambda: len(home.metrics()) >= 2, seconds=200, why="two trained steps")
    os.kill(home.pids()["worker long-0"], signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=30)
    again = home.start("run", "tiny.toml", "--display", "plain", log="again")
    assert home.ended(again, 240) == 0, home.logs()
    with home.connect() as buffer:
        store = buffer.store
        step = store.meta().ended
        assert step == store.meta().step == store.trainer().trained
        assert waits.said(store) == Waiting(kind=Wait.ENDED, step=step)
        assert buffer.verify().ok
        found = fates(store)
        assert (found["pending"], found["packed"]) == (0, 0)
        assert found["trained"] > 0
        # Every prompt of every pass was sampled, and nothing was trained twice: what came twice is counted as that.
        sampled = sum(PROMPTS.values()) * PASSES * 4
        assert sum(found.values()) - found.get("late", 0) - found.get("duplicate", 0) == sampled
        assert store.sources().done == set(PROMPTS)
    shown = home.call("inspect", "--run", "tiny")
    assert f"ended after step {step}" in " ".join(shown.stdout.split()), shown.stdout
    lines = (home.path / "again.log").read_text().splitlines()
    assert any(text.endswith(f"run            {Waiting(kind=Wait.ENDED, step=step)}") for text in lines), lines[-20:]


def test_separate_processes_over_a_pushed_file_end_by_themselves(home: Home) -> None:
    path = home.path / "g.jsonl"
    groups_of_file = (make_group(env="math", group_id=f"g{i}", rewards=[0.5, 1.0]) for i in range(7))
    path.write_text("".join(line_of(group) + "\n" for group in groups_of_file))
    (home.path / "rlbuffer.toml").write_text("[batcher]\nrow_tokens = 64\nstep_groups = 3\nmax_age = 9\n")
    leader = home.start("serve", "--display", "plain", log="serve")
    standby = home.start("serve", "--display", "plain", log="standby")
    steps: list[int] = []
    groups: Counter[str] = Counter()
    with home.connect("default") as buffer:

        def read() -> None:
            for step in buffer.reader().steps():
                steps.append(step.number)
                groups.update(step.header.group_ids)

        reading = threading.Thread(target=read)
        reading.start()
        pushed = home.call("push", path, "--done")
        assert pushed.returncode == 0, pushed.stderr
        assert "done: nothing more comes of math" in pushed.stdout
        reading.join(timeout=120)
        assert not reading.is_alive(), home.logs()
        assert steps == [1, 2, 3]
        assert groups == {f"g{n}": 1 for n in range(7)}
        assert [home.ended(process, 60) for process in (leader, standby)] == [0, 0]
        assert buffer.verify().ok
        assert fates(buffer.store) == {"trained": 14, "pending": 0, "packed": 0}
    for name in ("serve", "standby"):
        assert str(Waiting(kind=Wait.ENDED, step=3)) in (home.path / f"{name}.log").read_text()
