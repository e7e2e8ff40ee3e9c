"""What the archive says of decisions, so that they can be made again: when tickets were taken, what the leader knew,
what was pending when it left, and what the trainer trained with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from daemon_runs import Served
from store_runs import Run
from test_archive_files import archived, settled

import rlbuffer
from rlbuffer.archive.check import check_archive
from rlbuffer.archive.copying import copy_pending
from rlbuffer.archive.decisions import recorded_pushes
from rlbuffer.archive.groups import pushes_of, read_group_file, write_groups
from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout
from rlbuffer.archive.rows import PENDING
from rlbuffer.archive.schema import ADDED_COLUMNS, FORMAT_KEY, LACKS_OF_FORMAT_4, PENDING_FILE, TICKETS_FILE
from rlbuffer.archive.writer import ArchiveWriter
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.recorded import recorded, settings_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group
from rlbuffer_cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    yield made
    made.close()


def left(group: ArchivedGroup) -> ArchivedGroup:
    """A group as a leader leaves it that has not trained it."""
    members = tuple(ArchivedRollout(rows=tuple({**row, "seconds": 99.0} for row in m.rows)) for m in group.members)
    return replace(group, step=None, dropped=None, members=members)


def test_an_archive_says_when_tickets_were_taken_and_what_its_leader_knew(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive"
    settings = RunSettings(redis_url=run.url, archive={"dir": str(folder)})
    served = Served(run)
    buffer = Buffer(run.again(), settings=RunSettings())
    reader = buffer.reader(timeout_seconds=60)
    reader.start(settings={"loss": "mine", "rate": 0.5})
    reader.announce(PolicyVersion(version=0))
    served.serve(rlbuffer.BatcherConfig(64, step_groups=2, max_age=4), settings=settings)
    writer = buffer.writer("w")
    (ticket,) = writer.take("a", timeout_seconds=100)
    parts = [
        make_group(size=1, rewards=[reward], rollout_ids=[name]).rollouts for reward, name in ((0.0, "x"), (1.0, "y"))
    ]
    entries = [writer.push(ticket, part, planned_size=2).entry_id for part in parts]
    entries.append(writer.push(make_group(env="a", group_id="a.hand")).entry_id)
    step = reader.pull(1)
    reader.trained(step)
    writer.push(make_group(env="b", group_id="b.hand", size=3))
    (left_out,) = writer.take("c", timeout_seconds=100)
    served.stop()
    archive = Archive(folder)

    rows = {row["entry_id"]: row for rollout in archive.rollouts(1) for row in rollout.rows}
    assert sorted(rows) == sorted(entries)
    first, second, hand = (rows[entry]["seconds"] for entry in entries)
    assert 0 < first <= second
    assert hand is None
    assert [group.seconds for group in pushes_of(archive.rollouts(1), [])] == [None] * 3  # it belongs to a push
    ((at_ms, commit),) = archive.commits()
    assert commit["step"] == 1
    assert commit["read"] == entries[-1]
    assert commit["since"] <= commit["decided"] <= at_ms / 1000 + 1
    assert commit["published"] == {"": 0}
    (attempt,) = archive.attempts
    assert (attempt["step"], attempt["world_size"], attempt["settings"]) == (0, 1, {"loss": "mine", "rate": 0.5})
    (pending,) = archive.pending()
    assert (pending.group_id, pending.step, pending.dropped) == ("b.hand", None, None)
    assert [row["problem"] for rollout in pending.members for row in rollout.rows] == [PENDING] * 3
    assert [rollout.row["reward"] for rollout in pending.members] == [0.0, 1.0, 0.0]
    (out,) = archive.tickets_out()
    assert (out.env, out.number, out.version) == ("c", left_out.number, 0)
    assert 0 <= out.seconds < 100
    assert archive.lacks == ()
    assert check_archive(archive).findings == ()

    # A leader that took over trains what the one before has left: that is how the push is known.
    known = recorded_pushes(archive)
    with monkeypatch.context() as patched:
        patched.setattr(Archive, "pending", lambda archive: [left(group) for group in archive.all_groups()])
        assert recorded_pushes(archive) == [push for push in known if push.info.group_id != "b.hand"]

    run.lead()
    run.drop("stale", run.pool())
    copy_pending(run.store, ArchiveWriter(folder, run.store.run))
    assert list(Archive(folder).pending()) == []  # the last leader's word counts
    reader.close()
    served.close()


def test_a_dropped_push_keeps_its_entry_and_its_seconds(run: Run, tmp_path: Path) -> None:
    settled(run)
    for group_id in ("a.0", "a.0", "b.1"):
        run.sequence += 1
        ids = [f"{group_id}/{run.sequence}"]
        group = make_group(env=group_id[0], group_id=group_id, size=1, planned_size=2, rollout_ids=ids)
        timed = group.__class__(
            **{name: getattr(group, name) for name in group.__slots__} | {"seconds": run.sequence / 4}
        )
        run.store.push(timed, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    entries = [entry.entry_id for entry in run.pool()]
    for group_id in ("a.0", "b.1"):
        run.drop("stale", [entry for entry in run.pool() if entry.group_id == group_id])
    archive = archived(run, tmp_path / "archive")
    rows = [row for name in sorted((tmp_path / "archive").glob("dropped-*")) for row in archive.rows(name.name)]
    assert [(row["entry_id"], row["seconds"]) for row in rows] == list(zip(entries, (0.25, 0.5, 0.75), strict=True))


def test_a_pending_push_has_all_sequences_of_its_rollouts(run: Run, tmp_path: Path) -> None:
    names = ("tokens", "loss_mask", "logprobs", "version_spans")
    pieces = make_group(env="a", group_id="a.0", size=3, lengths=[8, 12, 9]).rollouts
    first, second = (
        rlbuffer.Rollout.from_sequences(
            [rlbuffer.TokenSequence(**{name: getattr(piece, name) for name in names}) for piece in its], reward=reward
        )
        for its, reward in ((pieces[:2], 1.0), (pieces[2:], 0.0))
    )
    group = rlbuffer.Group("a.0", env="a", prompt_id="p", rollouts=(first, second), planned_size=2)
    settled(run)
    run.step("b.0")
    run.sequence += 1
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    (pushed,) = [entry.info for entry in run.pool()]
    assert pushed is not None
    archived(run, tmp_path / "archive")
    copy_pending(run.store, ArchiveWriter(tmp_path / "archive", run.store.run))
    (known,) = [push for push in recorded_pushes(Archive(tmp_path / "archive")) if push.info.env == "a"]
    assert known.info.tokens == 8 + 12 + 9
    assert known.info.totals == pushed.totals
    assert [rollout.reward for rollout in known.info.rollouts] == [1.0, 0.0]


def as_format_4(folder: Path) -> None:
    """The files as the version before wrote them."""
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        table = table.drop_columns([name for name in ADDED_COLUMNS if name in table.column_names])
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, FORMAT_KEY: b"4"}), path)
    (folder / PENDING_FILE).unlink(missing_ok=True)
    (folder / TICKETS_FILE).unlink(missing_ok=True)


def test_an_archive_of_the_format_before_is_read_and_added_to_and_says_what_it_lacks(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settled(run)
    run.step("a.0", "a.1")
    run.step("a.2")
    folder = tmp_path / "archive"
    archived(run, folder)
    as_format_4(folder)
    archive = Archive(folder)
    assert archive.lacks == LACKS_OF_FORMAT_4
    assert (archive.attempts, list(archive.pending()), archive.tickets_out()) == ((), [], [])
    assert main(["verify", "--archive", str(folder)]) == 0
    assert "do not say: the pool entry of each push (entry_id); " in capsys.readouterr().out
    assert [step.step for step in archive.steps] == [1, 2]
    assert {row["entry_id"] for rollout in archive.rollouts(1) for row in rollout.rows} == {None}
    assert check_archive(archive).findings == ()
    groups = [group for step in (1, 2) for group in pushes_of(archive.rollouts(step), [])]
    write_groups(tmp_path / "groups.parquet", groups, run="x")
    as_format_4_file = tmp_path / "old" / "groups.parquet"
    as_format_4_file.parent.mkdir()
    as_format_4_file.write_bytes((tmp_path / "groups.parquet").read_bytes())
    as_format_4(as_format_4_file.parent)
    assert list(read_group_file(as_format_4_file)) == groups
    run.step("a.3")
    archive = archived(run, folder)
    assert [step.step for step in archive.steps] == [1, 2, 3]
    assert {row["entry_id"] for rollout in archive.rollouts(3) for row in rollout.rows} != {None}
    assert archive.lacks == LACKS_OF_FORMAT_4
    assert check_archive(archive).findings == ()


def test_recorded_settings_make_the_same_trainer_again() -> None:
    settings = RunSettings(run="math", seed=3, model={"config": {"model_type": "qwen3"}}, trainer={"steps": 7})
    again = settings_of(recorded(settings))
    assert again.model_copy(update={"trainer": settings.trainer}) == settings
    assert again.trainer.model_copy(update={"output": None}) == settings.trainer
    assert again.output_dir == settings.output_dir
