"""`rlbuffer serve --archive`: killed at any moment it leaves neither a hole nor a step twice; a full disk is said."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from every_role import EveryRole
from homes import Home

import rlbuffer
from rlbuffer.archive.library import Archive
from rlbuffer.archive.schema import history_names
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group

CONFIG = """
run = "tiny"
[server]
appendfsync = "no"
maxmemory = "{maxmemory}"
[batcher]
row_tokens = 4096
step_groups = 2
max_age = 1000
order = "oldest_first"
[archive]
dir = "archive"
"""
KILLS, STEPS = 2, 30


class Loop:
    """A worker and a trainer in one: pushes what the next step needs, trains it, and lets it retire at once."""

    def __init__(self, buffer: rlbuffer.Buffer, *, tokens: int = 200) -> None:
        self.store = buffer.store.role(EveryRole)
        self.writer = buffer.writer("w")
        self.tokens = tokens
        self.trained = 0
        self.store.open_run()
        self.attempt = self.store.attempt(uuid="trainer", world_size=1, resume_step=0)
        self.store.announce(self.attempt.number, PolicyVersion(version=0))

    def push(self) -> None:
        for n in (2 * self.trained, 2 * self.trained + 1):
            self.writer.push(make_group(env="a", lengths=[self.tokens] * 4, seed=n, version=self.trained))
        if self.trained % 5 == 0:  # older than the step allows: it drops, and its rollouts are archived
            self.writer.push(make_group(env="a", size=2, group_id=f"a.x{self.trained}", version=self.trained + 7))

    def train(self, home: Home) -> None:
        """One step, whoever leads."""
        header: Any = home.wait_until(
            lambda: self.store.wait_step(self.trained + 1, block_seconds=1.0), seconds=40, why="a step"
        )
        self.trained = header.step
        self.beat(header.digest)
        self.store.add_record({"step": header.step, "digest": header.digest, "loss": 1.0 / header.step})

    def beat(self, digest: str) -> None:
        self.store.report(
            self.attempt.number,
            epoch=self.attempt.epoch,
            trained=self.trained,
            digest=digest,
            oldest_kept=self.trained,
            checkpoint=self.trained,
        )


def serve(home: Home, number: int = 0) -> Any:
    return home.start("serve", "--config", "tiny.toml", "--display", "plain", log=f"serve-{number}")


def write_config(home: Home, *, maxmemory: str = "256mb") -> Path:
    (home.path / "tiny.toml").write_text(CONFIG.format(maxmemory=maxmemory))
    return home.path / "archive"


def test_serve_killed_again_and_again_archives_every_step_once(home: Home) -> None:
    """A killed leader's lease has to expire each time."""
    folder = write_config(home)
    with home.connect() as buffer:
        loop = Loop(buffer)
        process = serve(home)
        for kill in range(KILLS):
            for _ in range(STEPS // KILLS):
                loop.push()
                loop.train(home)
            # Every other time in the middle of a file, where there is one.
            deadline = time.monotonic() + (2.0 if kill % 2 else 0.0)
            while time.monotonic() < deadline and not list(folder.glob(".*.part")):
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process = serve(home, kill + 1)
        loop.push()
        loop.train(home)
        process.send_signal(signal.SIGINT)
        assert home.ended(process, 60) == 0, home.logs()
        assert buffer.verify().ok
    done = home.call("verify", "--archive", "archive")
    assert done.returncode == 0, done.stdout + home.logs()
    assert done.stdout.endswith("ok: everything adds up\n")
    archive = Archive(folder)
    assert [step.step for step in archive.steps] == list(range(1, STEPS + 2))
    assert [record["step"] for record in archive.trained] == list(range(1, STEPS + 2))
    records = [row["step"] for _, _, name in history_names(folder, "trained") for row in archive.table(name)]
    assert records == list(range(1, STEPS + 2))
    assert not list(folder.glob(".*.part"))
    drops = [group for group in archive.dropped() if group.reason == "future"]
    assert len(drops) == len({group.group_id for group in drops}) == STEPS // 5 + 1
    for where in (("--archive", "archive"), ()):  # or where the batcher says that it writes
        shown = home.call("inspect", "a.0/1", *where, "--run", "tiny", "--json")
        assert '"step": 1' in shown.stdout, shown.stderr


def test_a_full_disk_is_said_and_the_archive_goes_on_when_there_is_room(home: Home) -> None:
    folder = write_config(home)
    with home.connect() as buffer:
        loop = Loop(buffer, tokens=2000)
        process = serve(home)
        for _ in range(16):
            loop.push()
            loop.train(home)
        home.wait_until(lambda: list(folder.glob("steps-*")), seconds=30, why="the first file")
        # Python ignores SIGXFSZ: a write above the limit is an error, as on a full disk.
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (30_000, most))
        for _ in range(16):
            loop.push()
            loop.train(home)
        home.wait_until(lambda: f"{folder}: File too large" in home.printed(), seconds=30, why="the sentence")
        assert len(list(buffer.store.headers())) >= 16  # kept for the archive
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
        again = "the archive is written again: "
        home.wait_until(lambda: again in home.printed(), seconds=30, why="writing again")
        process.send_signal(signal.SIGINT)
        assert home.ended(process, 60) == 0, home.logs()
    done = home.call("verify", "--archive", "archive")
    assert done.returncode == 0, done.stdout + home.logs()
    assert [step.step for step in Archive(folder).steps] == list(range(1, 33))
