"""The leader's archive: what retires waits for it, and what gives way when it cannot be written is a setting."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.archive.check import check_archive
from rlbuffer.archive.groups import pushes_of
from rlbuffer.archive.library import Archive
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import archiving
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server import embedded
from rlbuffer.testing import make_group
from rlbuffer_cli.archived_run import detail_of

pytestmark = pytest.mark.server

CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, max_age=100_000, order="oldest_first")


@pytest.fixture
def served(server_binary: object) -> Iterator[Served]:
    """Daemons over a run on a small server of its own."""
    home = Path(tempfile.mkdtemp(prefix="rlb-"))
    running = embedded.ensure(home, ServerSettings(appendfsync="no", maxmemory="16mb"))
    run = Run(running.address, home)
    made = Served(run)
    yield made
    made.close()
    run.close()
    running.release()
    shutil.rmtree(home, ignore_errors=True)


def file_of(monkeypatch: pytest.MonkeyPatch, *, steps: int = 16, seconds: float) -> None:
    monkeypatch.setattr(archiving, "FILE_STEPS", steps)
    monkeypatch.setattr(archiving, "FILE_SECONDS", seconds)


class Training:
    """A trainer that keeps only its newest checkpoint, and the worker that feeds it."""

    def __init__(self, served: Served) -> None:
        self.run, self.served = served.run, served
        self.folder = served.run.home / "archive"
        self.settings = RunSettings(redis_url=self.run.url, archive={"dir": str(self.folder)})
        self.attempt = self.run.store.attempt(uuid="trainer", world_size=1, resume_step=0)
        self.run.store.announce(self.attempt.number, PolicyVersion(version=0))
        served.serve(CONFIG, settings=self.settings)
        self.writer = Writer(self.run.again(), "w", epoch=self.run.meta.epoch)
        self.step = 0

    def train(self, *, tokens: int = 8, kilobytes: int = 0) -> None:
        self.step += 1
        column = [{"x": np.zeros((tokens, 128 * kilobytes // tokens), np.float32)}] * 2 if kilobytes else None
        group = make_group(env="a", lengths=[tokens] * 2, columns=column, group_id=f"a.{self.step}")
        self.writer.push(group)  # waits while the server is full
        store = self.run.store
        header = self.served.wait_for(lambda: store.wait_step(self.step, block_seconds=0.1), seconds=30)
        self.report(header.digest)

    def report(self, digest: str = "") -> None:
        self.run.store.report(
            self.attempt.number,
            epoch=self.run.meta.epoch,
            trained=self.step,
            digest=digest,
            oldest_kept=self.step,
            checkpoint=self.step,
        )


def test_what_the_checkpoint_frees_stays_until_it_is_archived(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    file_of(monkeypatch, steps=5, seconds=10_000.0)
    training = Training(served)
    for _ in range(3):
        training.train()
    served.wait_for(lambda: not served.said("archive"), seconds=1)
    first = served.run.store.meta().retired  # the archive of what was there at the start, which may be nothing
    for _ in range(first + 5 - 3):
        training.train()
    served.wait_for(lambda: served.run.store.meta().retired >= 5, seconds=30)
    training.train()
    served.stop()  # what is left is written when it leaves
    archive = Archive(training.folder)
    assert [step.step for step in archive.steps] == list(range(1, training.step + 1))
    assert check_archive(archive).findings == ()


def test_a_rollout_that_its_group_is_trained_without_is_archived_with_the_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(monkeypatch, seconds=0.2)
    training = Training(served)
    group = make_group(env="a", lengths=[8, 100, 8, 9], group_id="a.long", prompt_id="a prompt", worker="w-7")
    failed = replace(group.rollouts[3], failure=rlbuffer.Failure("tool", "away"))
    group = replace(group, rollouts=(*group.rollouts[:3], failed))
    training.writer.push(group)
    training.step = 1
    training.report(served.wait_for(lambda: served.run.store.wait_step(1, block_seconds=0.1), seconds=30).digest)
    training.train()
    served.stop()
    archive = Archive(training.folder)
    left, left_too = archive.rollouts(1, left_out=True)
    row = left.row
    assert (row["left_out"], row["rollout_id"], row["worker"], row["rank"]) == ("oversized", "a.long/1", "w-7", None)
    assert (left.rollout, left_too.rollout, left_too.row["left_out"]) == (group.rollouts[1], failed, "failed")
    assert [member.rollout_id for member in archive.rollouts(1)] == ["a.long/0", "a.long/2"]
    (group_of_step,) = archive.groups(1)
    assert [member.rollout_id for member in group_of_step.members] == ["a.long/0", "a.long/2", "a.long/1", "a.long/3"]
    detail = detail_of(archive, archive.find("a.long"))
    assert (detail.view.rollouts, len(detail.members)) == (2, 4)
    assert detail.view.detail == "left out: 1 oversized, 1 failed (tool 1)"
    assert [member.step for member in detail.members] == [1, 1, None, None]
    assert [its.failure for its in detail.members] == [None, None, None, failed.failure]
    (exported,) = pushes_of(next(archive.all_groups()).members, [])
    assert (exported.rollouts, exported.planned_size) == (group.rollouts, 4)
    report = check_archive(archive)
    assert (report.findings, report.checked["left_out"], report.checked["rollouts"]) == ((), 2, 4)


def test_a_push_of_which_nothing_is_trained_is_archived_with_its_group(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(monkeypatch, seconds=0.2)
    training = Training(served)
    whole = make_group(env="a", lengths=[8, 8, 9], group_id="a.0", prompt_id="a prompt", metadata={"topic": "sums"})
    failed = replace(whole.rollouts[2], failure=rlbuffer.Failure("tool", "away"))
    whole = replace(whole, rollouts=(*whole.rollouts[:2], failed), planned_size=3)
    for rollouts in (whole.rollouts[:2], whole.rollouts[2:]):
        training.writer.push(replace(whole, rollouts=rollouts))
    training.step = 1
    training.report(served.wait_for(lambda: served.run.store.wait_step(1, block_seconds=0.1), seconds=30).digest)
    training.train()
    served.stop()
    archive = Archive(training.folder)
    (left,) = archive.rollouts(1, left_out=True)
    row = left.row
    assert (row["left_out"], row["rollout_id"], row["group_id"], row["env"]) == ("failed", "a.0/2", "a.0", "a")
    assert (left.rollout, row["prompt_id"]) == (failed, "a prompt")
    pushes = pushes_of(next(archive.all_groups()).members, [])
    assert [(push.rollouts, push.metadata) for push in pushes] == [
        (whole.rollouts[:2], whole.metadata),
        (whole.rollouts[2:], whole.metadata),
    ]
    report = check_archive(archive)
    assert (report.findings, report.checked["left_out"], report.checked["rollouts"]) == ((), 1, 4)


def blocked(folder: Path) -> None:
    """The folder cannot be made: a file is in its place."""
    folder.write_text("not a folder")


def test_an_archive_that_cannot_be_written_gives_way_when_memory_is_short(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked(served.run.home / "archive")
    file_of(monkeypatch, steps=2, seconds=0.5)
    training = Training(served)
    (stuck,) = served.wait_for(lambda: served.said("archive", state="stuck"), seconds=30)
    assert stuck["text"].endswith(f": {training.folder}: File exists.")  # more room would not help
    for _ in range(40):
        training.train(kilobytes=512)
    retired = served.run.store.meta().retired
    assert retired > 0
    training.folder.unlink()
    served.wait_for(lambda: served.said("archive", state="written"), seconds=30)
    gone = served.run.store.meta().retired  # until then a step may leave while one beside it is written
    training.train()
    served.stop()
    archive = Archive(training.folder)
    kept = {step.step for step in archive.steps}
    assert 1 not in kept
    assert kept >= set(range(gone + 1, training.step + 1))
    findings = [f"{f.invariant} {f.message}" for f in check_archive(archive).findings]
    assert findings
    assert [text for text in findings if not re.fullmatch(r"A1 step.* missing", text)] == []
