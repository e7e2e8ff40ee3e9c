"""A whole run of real processes, operated: settings, a killed batcher, drops, a drain, and on it goes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from homes import Home
from looks import tickets_out


def test_a_run_at_work_is_operated_and_its_account_holds(home: Home) -> None:
    """Takes a minute: a dozen commands, each of which waits until the run has obeyed."""
    config = home.config(world_size=1, steps=100_000, checkpoint_every=5)
    home.start("run", config, "--display", "plain", log="run")
    with home.connect() as buffer:
        store = buffer.store
        trained = lambda n: lambda: len(home.metrics()) >= n  # noqa: E731
        home.wait_until(trained(3), seconds=200, why="three trained steps")

        config.write_text(config.read_text().replace("max_age = 4", "max_age = 3"))
        done = home.call("config", "apply", "--config", config)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == 'run "tiny" has these settings from the next step on (revision 2)'

        before = home.pids()["serve"]
        os.kill(before, signal.SIGKILL)
        home.wait_until(lambda: home.pids().get("serve", before) != before, seconds=60, why="another batcher")
        step = store.meta().step
        home.wait_until(lambda: store.meta().step > step + 2, seconds=120, why="steps of the new batcher")
        meta = store.meta()
        assert (meta.revision, meta.config["max_age"]) == (2, 3)  # it was started with the old file's

        done = home.call("drop", "--where", "state:forming,ready", "--run", "tiny", "--yes", "--json")
        assert done.returncode == 0, done.stderr

        done = home.call("drain", "--run", "tiny", "--timeout", "200", "--json")
        assert done.returncode == 0, done.stderr
        drained: dict[str, Any] = json.loads(done.stdout)
        assert tickets_out(store) == {}
        assert store.meta().step == drained["step"]
        assert home.call("drain", "--undo", "--run", "tiny").returncode == 0
        home.wait_until(lambda: store.meta().step > drained["step"] + 1, seconds=120, why="steps after the drain")
        done = home.call("verify", "--run", "tiny")
        assert done.returncode == 0, done.stdout
