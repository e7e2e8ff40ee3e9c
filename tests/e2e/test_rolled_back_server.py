"""The server is killed and comes back with an append-only file of steps ago, while the trainer is ahead."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest
from homes import Home

from rlbuffer.process.file_locks import exclusive

pytestmark = pytest.mark.timeout(900)
"""A machine may be four times as slow as this one."""

LOST, PLANNED = 3, 20


def test_a_run_goes_on_after_the_trainers_step_though_the_server_forgot_three(home: Home) -> None:
    config = home.config(steps=PLANNED, world_size=2, checkpoint_every=100, keep_checkpoints=50)
    home.start_sources(config)
    trainer = home.start("train", "--config", config, log="train")
    step = lambda: max((record["step"] for record in home.metrics()), default=0)  # noqa: E731
    home.wait_until(lambda: step() >= 4, seconds=180, why="step 4")
    server = home.path / "server"
    with home.connect() as buffer:
        epoch = buffer.store.meta().epoch
        copied = buffer.store.meta().step
        shutil.copytree(server / "appendonlydir", home.path / "copy")
        # The copy may hold a step more than was there when it was begun.
        home.wait_until(lambda: step() >= copied + 1 + LOST, seconds=180, why=f"{LOST} steps more")
        ranks = json.loads((home.path / "runs" / "tiny" / "ranks.json").read_text())
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        trained = step()
        committed = buffer.store.meta().step
        before = {s: set(buffer.step(s).rollout_ids) for s in range(1, committed + 1)}
        # Processes that need the server start it again within milliseconds: they wait for this lock.
        with exclusive(server / "start.lock", time.monotonic() + 60):
            os.kill(json.loads((server / "server.json").read_text())["pid"], signal.SIGKILL)
            shutil.rmtree(server / "appendonlydir")
            shutil.copytree(home.path / "copy", server / "appendonlydir")
        for pid in ranks.values():
            os.kill(pid, signal.SIGCONT)
    assert home.ended(trainer, 240) == 0, home.logs()

    records = home.metrics()
    assert [r["step"] for r in records] == list(range(1, PLANNED + 1))  # none twice: nobody resumed
    epochs = {r["step"]: r["epoch"] for r in records}
    # The ranks may have had the next step, or two, when they were halted.
    went_on = max(s for s, e in epochs.items() if e == epoch)
    assert went_on >= trained
    assert set(epochs.values()) == {epoch, epoch + 1}
    assert [epochs[s] for s in sorted(epochs)] == [epoch] * went_on + [epoch + 1] * (PLANNED - went_on)
    said = [line for line in (home.path / "serve.log").read_text().splitlines() if "the server had lost" in line]
    assert f"the run goes on after step {went_on} in epoch {epoch + 1}" in said[-1]
    assert int(said[0].split("the server had lost ")[1].split(" ")[0]) >= LOST
    checkpoint = home.path / "runs" / "tiny" / "checkpoints" / f"step-{went_on + 1:08d}"
    assert checkpoint.is_dir()  # asked for by the first step after the recovery
    with home.connect() as buffer:
        assert buffer.store.meta().retired >= went_on
        later = set().union(*(buffer.step(s).rollout_ids for s in range(went_on + 1, PLANNED + 1)))
    forgotten = set().union(*(before[s] for s in range(1, min(went_on, committed) + 1)))
    assert later & forgotten == set()
    assert later
    assert home.call("verify", "--run", "tiny").returncode == 0
