"""The archive's files: every byte of every rollout comes back, and a flaw in any file is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trees
from store_runs import Run
from strange_groups import strange_group

import rlbuffer
from rlbuffer.archive.check import check_archive
from rlbuffer.archive.copying import copy_history, copy_steps, copy_trained, files_of, unwritten
from rlbuffer.archive.groups import read_group_file, write_groups
from rlbuffer.archive.library import Archive
from rlbuffer.archive.schema import steps_names
from rlbuffer.archive.writer import ArchiveWriter
from rlbuffer.errors import AmbiguousId, ArchiveError, NotFound
from rlbuffer.testing import make_group
from rlbuffer.wire.payload import encode_push
from rlbuffer_cli.archived_run import detail_of, details_of

pytest_plugins = ["store_fixtures"]


def archived(run: Run, folder: Path, *, steps: int = 2) -> Archive:
    """Writes what is new of the run, in files of so many steps."""
    writer = ArchiveWriter(folder, run.store.run)
    writer.add_settings(run.store.meta())
    for file in files_of(unwritten(run.store, writer), steps=steps, size=2**20):
        assert copy_steps(run.store, writer, file) == len(file)
    copy_history(run.store, writer)
    copy_trained(run.store, writer)
    return Archive(folder)


def push_strange(run: Run, group_id: str) -> list[bytes]:
    """Pushes a group of everything. -> its payloads."""
    group = strange_group(group_id, version=0)
    run.sequence += 1
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    return list(encode_push(group).payloads)


def settled(run: Run) -> None:
    """The run has settings of revision 1."""
    run.lead()
    run.store.set_config({"max_age": 4}, "digest")


def test_every_byte_of_a_strange_rollout_comes_back_from_a_step_and_from_a_drop(run: Run, tmp_path: Path) -> None:
    settled(run)
    payloads = push_strange(run, "a.0")
    run.commit()
    run.step("a.1", "b.2")
    run.step("a.3")
    dropped = push_strange(run, "a.4")
    run.drop("stale", run.pool())
    archive = archived(run, tmp_path / "archive")
    report = check_archive(archive)
    assert report.findings == ()
    assert (report.checked["steps"], report.checked["dropped"]) == (3, 1)
    assert report.checked["dropped_rollouts"] == len(dropped)
    trained = archive.find("a.0")
    assert (trained.step, trained.dropped) == (1, None)
    assert [data for member in trained.members for data in member.payloads] == payloads
    assert trained.members[0].rollout == strange_group("a.0").rollouts[0]
    assert (trained.answer, trained.metadata) == (strange_group().answer, dict(strange_group().metadata))
    group = archive.find("a.4/2")
    assert group.dropped is not None
    assert (group.dropped.reason, group.dropped.detail) == ("stale", "because")
    assert [data for member in group.members for data in member.payloads] == dropped
    assert [step.step for step in archive.steps] == [1, 2, 3]
    assert {r.rollout_id for r in archive.rollouts(3)} == {"a.3/0", "a.3/1"}
    with pytest.raises(NotFound) as missing:
        archive.find("c.9")
    assert str(missing.value) == f"the archive {archive.folder} has no group 'c.9'"
    with pytest.raises(AmbiguousId) as several:
        archive.find("a")
    assert "a.0, a.1, a.3, a.4" in str(several.value)


def test_a_step_that_retired_long_ago_opens_and_nothing_is_written_twice(run: Run, tmp_path: Path) -> None:
    settled(run)
    folder = tmp_path / "archive"
    for i in range(5):
        run.step(f"a.{i}")
        archived(run, folder)
    run.train(5, oldest_kept=4)
    run.store.retire(4)
    run.step("a.5")
    archive = archived(run, folder)
    assert [step.step for step in archive.steps] == [1, 2, 3, 4, 5, 6]
    assert len(archive.find("a.0").members) == 2
    assert check_archive(archive).findings == ()


def test_an_archived_rollout_has_the_place_in_its_step_that_it_had_on_the_server(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0", "a.1", "b.2")
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        expected = {m.rollout_id: m.place for g in ("a.0", "a.1", "b.2") for m in buffer.group(g).members}
    archive = archived(run, tmp_path / "archive")
    details = [detail_of(archive, archive.find(group_id)) for group_id in ("a.0", "a.1", "b.2")]
    assert {m.rollout_id: m.place for detail in details for m in detail.members} == expected
    assert None not in expected.values()


def test_steps_that_were_taken_back_do_not_count(run: Run, tmp_path: Path) -> None:
    settled(run)
    folder = tmp_path / "archive"
    for i in range(3):
        run.step(f"a.{i}")
    archived(run, folder)
    run.store.void_from(2, force=True)
    run.meta = run.store.meta()
    run.token = 0
    run.step("a.7")
    archive = archived(run, folder)
    report = check_archive(archive)
    assert [(step.step, step.epoch == run.meta.epoch) for step in archive.steps] == [(1, False), (2, True)]
    assert report.findings == ()
    assert report.checked["steps_taken_back"] == 2
    assert [row.env for row in archive.dropped() if row.reason == "void"]


def test_a_dropped_group_is_in_the_archive_what_it_was_on_the_server(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    run.step("a.1")
    run.push("a.2", prompt_id="a prompt", worker="w-7")
    run.drop("stale", run.pool())
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        there = buffer.group("a.2").view
    assert (there.age, there.prompt_id, there.worker) == (2, "a prompt", "w-7")
    archive = archived(run, tmp_path / "archive")
    assert detail_of(archive, archive.find("a.2")).view == there
    (rollouts,) = archive.folder.glob("dropped-*.parquet")
    rollouts.unlink()
    archive = Archive(archive.folder)
    assert detail_of(archive, archive.find("a.2")).view == replace(there, reward=None, rewards=(), max_version=0)


def test_a_trained_group_is_in_the_archive_what_it_was_on_the_server(run: Run, tmp_path: Path) -> None:
    settled(run)
    group_ids = ("a.0", "b.1", "a.2")
    run.step("a.0", "b.1")
    run.push("a.2", prompt_id="a prompt", worker="w-7", adapter="x", size=3)
    run.commit()
    run.train(2)
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        there = [buffer.group(group_id).view for group_id in group_ids]
    assert [(view.state, view.uses, view.waited_seconds is None) for view in there] == [("trained", 1, False)] * 3
    archive = archived(run, tmp_path / "archive")
    assert [detail_of(archive, archive.find(group_id)).view for group_id in group_ids] == there


def test_every_group_comes_out_and_each_file_is_read_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per group, an export of a thousand drops would take an hour."""
    settled(run)
    trained = [f"a.{i}" for i in range(5)]
    for group_id in trained:
        run.step(group_id, f"{group_id}.more")
    dropped = [f"b.{i}" for i in range(3)]
    for group_id in dropped:
        run.push(group_id)
        run.drop("stale", run.pool())
    archive = archived(run, tmp_path / "archive")
    read: list[str] = []
    rows = Archive.rows

    def counted(self: Archive, file: str, chosen: Any = None) -> Iterator[dict[str, Any]]:
        read.append(file)
        return rows(self, file, chosen)

    monkeypatch.setattr(Archive, "rows", counted)
    groups = [*archive.all_groups()]
    assert len(read) == len(set(read)) == 4
    asked: list[int] = []
    step = Archive.step
    monkeypatch.setattr(Archive, "step", lambda self, number: asked.append(number) or step(self, number))
    assert [group for group, _ in details_of(archive, groups)] == groups
    assert asked == [1, 2, 3, 4, 5]  # once for the groups of each
    steps = {name: step for step, group_id in enumerate(trained, 1) for name in (group_id, f"{group_id}.more")}
    assert {group.group_id: group.step for group in groups} == steps | dict.fromkeys(dropped)
    for group in groups:
        found = archive.find(group.group_id)
        payloads = [member.payloads for member in group.members]
        assert (len(payloads), payloads) == (2, [member.payloads for member in found.members])
        assert (group.dropped, group.env) == (found.dropped, found.env)


def test_after_steps_were_taken_back_no_age_is_known_until_the_next_one(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    run.step("a.1")
    run.store.void_from(2, force=True)
    run.meta = run.store.meta()
    run.token = 0
    run.lead()
    run.push("a.2")
    run.drop("stale", run.pool())
    run.step("a.3")
    run.push("a.4")
    run.drop("stale", run.pool())
    archive = archived(run, tmp_path / "archive")
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        ages = [(buffer.group(g).view.age, detail_of(archive, archive.find(g)).view.age) for g in ("a.2", "a.4")]
    assert ages == [(None, None), (2, 2)]


def test_a_flaw_in_any_file_is_named(run: Run, tmp_path: Path) -> None:
    settled(run)
    folder = tmp_path / "archive"
    for i in range(4):
        run.step(f"a.{i}")
    archived(run, folder, steps=1)
    names = steps_names(folder)
    whole = {path: path.read_bytes() for path in folder.iterdir()}

    def findings() -> list[str]:
        return [f"{f.invariant} {f.message}" for f in check_archive(Archive(folder)).findings]

    def restore() -> None:
        for path, data in whole.items():
            path.write_bytes(data)

    (folder / names[1].file()).unlink()
    assert findings() == ["A1 step 2: missing"]
    restore()
    table = pq.read_table(folder / names[2].file("rollouts"))
    pq.write_table(table.slice(0, 1), folder / names[2].file("rollouts"))
    assert findings() == ["A4 step 3: rollout a.2/1 of a.2 is missing"]
    tokens = table.column("tokens").combine_chunks()
    changed = table.set_column(table.schema.get_field_index("tokens"), "tokens", tokens.take([1, 0]))
    pq.write_table(changed, folder / names[2].file("rollouts"))
    assert all(text.startswith("A4 step 3: rollout a.2/") for text in findings())
    assert len(findings()) == 2
    restore()
    (folder / "settings-00000001.parquet").unlink()
    assert findings() == ["A6 the settings of revision 1 are missing"]
    restore()
    steps = pq.read_table(folder / names[3].file())
    headers = steps.column("header").to_pylist()
    index = steps.schema.get_field_index("header")
    pq.write_table(steps.set_column(index, "header", [[headers[0] + b"x"]]), folder / names[3].file())
    assert findings()[0].startswith("A3 step 4: header and parts have the digest ")


def test_a_bit_that_turned_in_any_column_is_said_of_its_file(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    run.push("b.0")
    run.drop("stale", run.pool())
    folder = archived(run, tmp_path / "archive").folder
    assert check_archive(Archive(folder)).ok
    for path in sorted(folder.iterdir()):
        whole, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
        for column in map(group.column, range(group.num_columns)):
            start = column.dictionary_page_offset or column.data_page_offset
            data = bytearray(whole)
            data[start + column.total_compressed_size - 1] ^= 1
            path.write_bytes(data)
            try:
                said = [finding.message for finding in check_archive(Archive(folder)).findings]
            except ArchiveError as error:
                said = [str(error)]
            assert any(path.name in text for text in said), (path.name, column.path_in_schema, said)
        path.write_bytes(whole)


def test_records_that_the_server_forgot_before_they_were_archived_are_named(run: Run, tmp_path: Path) -> None:
    settled(run)
    folder = tmp_path / "archive"

    def drop(number: int) -> None:
        run.push(f"a.{number}")
        run.drop("stale", run.pool())

    for number in range(3):
        drop(number)
    archived(run, folder)
    drop(3)
    run.client.xtrim(
        run.store.keys.history, maxlen=2, approximate=False
    )  # the last one that is archived is still there
    assert check_archive(archived(run, folder)).findings == ()
    for number in range(4, 7):
        drop(number)
    run.client.xtrim(run.store.keys.history, maxlen=1, approximate=False)
    archive = archived(run, folder)
    (finding,) = check_archive(archive).findings
    last = list(archive.dropped())[-1]
    assert finding.message == (f"records of drops before {last.history_id} are lost: the server keeps the newest only")
    assert [group.group_id for group in archive.dropped()] == ["a.0", "a.1", "a.2", "a.3", "a.6"]


def test_a_folder_is_of_one_run_and_of_a_format_that_is_known(run: Run, tmp_path: Path) -> None:
    run.step("a.0")
    archived(run, tmp_path / "archive")
    with pytest.raises(ArchiveError) as refusal:
        ArchiveWriter(tmp_path / "archive", "other")
    assert run.store.run in str(refusal.value)
    with pytest.raises(ArchiveError) as empty:
        Archive(tmp_path)
    assert str(empty.value) == f"{tmp_path} holds no archive: it has no file steps-*.parquet"


def test_a_column_of_tokens_takes_at_most_ten_bytes_a_token(run: Run, tmp_path: Path) -> None:
    for i in range(2):
        run.push(f"a.{i}", size=0, lengths=[2000] * 8)
    run.lead()
    run.commit()
    archive = archived(run, tmp_path / "archive")
    (name,) = steps_names(archive.folder)
    metadata = pq.read_metadata(archive.folder / name.file("rollouts"))
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    assert size / (2 * 8 * 2000) < 10


def test_a_drop_by_anybody_keeps_the_prompt_and_the_worker_of_each_push(run: Run, tmp_path: Path) -> None:
    settled(run)
    for worker in ("w-7", "w-8"):
        part = make_group(
            env="a", size=1, planned_size=2, group_id="a.0", prompt_id="a prompt", worker=worker, adapter="ad"
        )
        run.store.push(part, producer=worker, incarnation=worker, sequence=1, epoch=run.meta.epoch)
    run.drop("stale", run.pool())
    rows = [member.row for member in archived(run, tmp_path / "archive").find("a.0").members]
    assert [row["worker"] for row in rows] == ["w-7", "w-8"]
    assert {(row["prompt_id"], row["planned_size"], row["adapter"]) for row in rows} == {("a prompt", 2, "ad")}
    assert all(row["pushed_ms"] > 0 for row in rows)


def test_the_sequences_of_a_rollout_come_back_as_it(run: Run, tmp_path: Path) -> None:
    (group,) = trees.groups(3, 1, 4)
    assert max(len(r.sequences) for r in group.rollouts) > 1
    run.store.push(group, producer="w", incarnation="u", sequence=1, epoch=run.meta.epoch)
    run.step()
    archive = archived(run, tmp_path / "archive")
    members = sorted(archive.find(group.group_id).members, key=lambda member: member.rollout_id)
    assert [member.rollout for member in members] == list(group.rollouts)
    write_groups(tmp_path / "groups.parquet", [group], run="r")
    assert list(read_group_file(tmp_path / "groups.parquet")) == [group]


def test_a_row_group_that_unpacks_to_much_is_never_in_memory_whole(tmp_path: Path) -> None:
    rows, tokens = 128, 2**14
    groups = [make_group(env="a", group_id=f"a.{n}", lengths=[tokens] * 4) for n in range(rows // 4)]
    file = tmp_path / "groups.parquet"
    write_groups(file, groups, run="r")
    pq.write_table(pq.read_table(file), file, row_group_size=rows)
    assert pq.ParquetFile(file).num_row_groups == 1
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read_group_file(file)]
    assert len(held) == len(groups)
    assert max(held) < rows * tokens * 9  # all of it is nine bytes a token
