"""The trainer's records in the archive: one per step that counts, whatever was trained again or taken back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from store_runs import Run
from test_archive_files import archived, settled

from rlbuffer.archive.check import check_archive
from rlbuffer.archive.library import Archive
from rlbuffer.state.step_record import DRIFT_NUMBERS
from rlbuffer.store.keys import Keys
from rlbuffer_cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    settled(made)
    yield made
    made.close()


def record(run: Run, step: int, loss: float, **more: object) -> None:
    """The trainer has trained `step`."""
    header = run.store.wait_step(step, block_seconds=0)
    assert header is not None
    run.store.add_record({"step": step, "epoch": header.epoch, "digest": header.digest, "loss": loss, **more})


def test_a_step_that_was_trained_again_has_one_record_and_nothing_is_written_twice(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    for i in range(3):
        run.step(f"a.{i}")
    record(run, 1, 0.5, entropy=1.25, rewards={"a": 0.5})
    record(run, 2, 0.4)
    archived(run, folder)
    record(run, 2, 0.3)  # the trainer was killed, and began again from step 1
    record(run, 3, 0.2)
    for _ in range(2):  # the second writer finds nothing to do
        archive = archived(run, folder)
    assert [(r["step"], r["loss"]) for r in archive.trained] == [(1, 0.5), (2, 0.3), (3, 0.2)]
    assert archive.trained[0]["rewards"] == {"a": 0.5}
    rows = [row for path in sorted(folder.glob("trained-*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["step"] for row in rows] == [1, 2, 2, 3]
    report = check_archive(archive)
    assert (report.findings, report.checked["trained"]) == ((), 3)


def test_records_of_steps_that_were_taken_back_do_not_count_and_a_lost_one_is_named(run: Run, tmp_path: Path) -> None:
    for i in range(4):
        run.step(f"a.{i}")
        record(run, i + 1, 0.5)
    archived(run, tmp_path / "archive")
    run.store.void_from(2, force=True)
    run.meta, run.token = run.store.meta(), 0
    for i in range(2, 5):
        run.step(f"b.{i}")
        if i != 3:
            record(run, i, 0.25)
    archive = archived(run, tmp_path / "archive")
    assert [(r["step"], r["loss"]) for r in archive.trained] == [(1, 0.5), (2, 0.25), (4, 0.25)]
    assert [finding.message for finding in check_archive(archive).findings] == ["step 3: no record of the trainer"]


def test_what_somebody_wrote_by_hand_stops_nothing(run: Run, tmp_path: Path) -> None:
    run.step("a.0")
    keys = Keys(run.store.run)
    run.client.xadd(keys.records, {"record": b"\xc1"})
    run.store.add_record({"step": "one", "loss": "much", "digest": [1], "epoch": {}})
    record(run, 1, 0.5)
    archive = archived(run, tmp_path / "archive")
    assert [r["loss"] for r in archive.trained] == [0.5]
    assert check_archive(archive).findings == ()


def test_an_archive_is_drawn_without_a_server(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        run.step(f"a.{i}")
        record(run, i + 1, 1.0 / (i + 1), rewards={"a": float(i)})
        run.push(f"a.{i}9", lengths=[4, 4])
        run.drop("stale", run.pool())
    archived(run, tmp_path / "archive")
    run.close()

    def points(what: str) -> list[tuple[str, int, float]]:
        assert main(["plot", what, f"{tmp_path}/archive", "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(line["curve"], line["step"], line["value"]) for line in lines]

    assert points("loss") == [("loss", 1, 1.0), ("loss", 2, 0.5), ("loss", 3, 1 / 3)]
    assert points("rewards") == [("a", 1, 0.0), ("a", 2, 1.0), ("a", 3, 2.0)]
    assert sum(value for _, _, value in points("drops")) in (4, 6)  # the last drop comes after the last step
    assert len(points("fill")) == 3
    assert Archive(tmp_path / "archive").steps[0].fill > 0


def test_doctor_names_a_cause_once_with_the_steps_of_each_spell(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still, lively, age_0 = 0.005, 0.3, dict.fromkeys(DRIFT_NUMBERS, 0.0) | {"tokens": 1000}
    for step, entropy in enumerate([lively, still, still, still, lively, lively, still, still, lively], 1):
        run.step(f"a.{step}")
        record(run, step, 0.5, entropy=entropy, drift={"0": age_0})
    archived(run, tmp_path / "archive")
    capsys.readouterr()
    assert main(["doctor", "--archive", str(tmp_path / "archive"), "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["text"].startswith("named in steps 3 to 4 and 8. ")
    assert "the mean entropy is 0.0050 nats" in found["text"]
