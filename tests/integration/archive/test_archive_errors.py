"""What is wrong with an archive, said of its file, step or rollout."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from store_runs import Run
from test_archive_files import archived, settled

from rlbuffer.archive.check import check_archive
from rlbuffer.archive.copying import copy_steps, unwritten
from rlbuffer.archive.library import Archive
from rlbuffer.archive.rows import Source, payload_of, rollout_table, rows_of
from rlbuffer.archive.schema import FORMAT_KEY, steps_names
from rlbuffer.archive.writer import ArchiveWriter
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.errors import ArchiveError, ConfigError, LeaseLost, NotFound, PayloadError
from rlbuffer.store.records import PartRollout
from rlbuffer.testing import make_group
from rlbuffer.wire.encoding import joined
from rlbuffer.wire.payload import decode, encode_push
from rlbuffer_cli.main import main

pytest_plugins = ["store_fixtures"]


@pytest.fixture
def archive(run: Run, tmp_path: Path) -> Archive:
    settled(run)
    run.step("a.0")
    return archived(run, tmp_path / "archive")


def test_what_is_not_there(archive: Archive) -> None:
    with pytest.raises(NotFound, match="no step 7"):
        next(archive.rollouts(7))
    with pytest.raises(NotFound, match="revision 9"):
        archive.settings(9)
    assert archive.settings(1)["config"] == '{"max_age": 4}'


@pytest.mark.parametrize(
    "arguments",
    [["verify"], ["inspect", "a.0"], ["inspect"], ["export", "-o", "all.jsonl"]],
    ids=lambda words: words[0],
)
def test_a_file_that_is_gone_is_named_once_with_what_to_do(
    archive: Archive, typed: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    (name,) = steps_names(archive.folder)
    gone = archive.folder / name.file("rollouts")
    gone.unlink()
    code, out, err = typed(*arguments, "--archive", str(archive.folder))
    assert code == 1
    flowing = " ".join((out + err).split())
    assert f"{gone} is missing: bring it back from a copy of the archive" in flowing
    assert (out + err).count(gone.name) == 1
    assert "Errno" not in out + err


def test_verify_says_how_far_it_is_where_no_terminal_is(
    archive: Archive, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer_cli.progress.LINE_SECONDS", 0.0)
    assert main(["verify", "--archive", str(archive.folder)]) == 0
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("checking steps 1 to 1 (0% after ")
    assert [line for line in others if line.startswith("checking what was dropped (50% after ")]


def test_a_file_that_is_torn_or_of_another_format_is_neither_read_nor_added_to(archive: Archive) -> None:
    (name,) = steps_names(archive.folder)
    file = archive.folder / name.file()
    table = pq.read_table(file)
    for number in (2, 9):
        other = {**table.schema.metadata, FORMAT_KEY: str(number).encode()}
        pq.write_table(table.replace_schema_metadata(other), file)
        for use in (lambda: Archive(archive.folder).steps, lambda: ArchiveWriter(archive.folder, archive.run)):
            with pytest.raises(ArchiveError, match=f"{re.escape(str(file))} is of format {number}, .* formats 4 and 5"):
                use()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArchiveError, match=f"{re.escape(str(file))} cannot be read: "):
        _ = Archive(archive.folder).steps


def test_the_folder_of_another_run_is_not_added_to_and_the_cure_is_a_folder_of_its_own(archive: Archive) -> None:
    with pytest.raises(ArchiveError, match=r"not of 'other'\. Give each run its own archive\.dir$"):
        ArchiveWriter(archive.folder, "other")


def test_doctor_says_who_keeps_the_records_that_an_archive_lacks(
    archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--archive", str(archive.folder), "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["level"], "reader.add_record" in found["fix"]) == ("warning", True)


def test_what_a_writer_that_died_has_left_is_swept_and_written_again(run: Run, archive: Archive) -> None:
    (archive.folder / ".rollouts-1-00000001-00000001-abc.parquet.0123.part").write_bytes(b"half")
    (name,) = steps_names(archive.folder)
    (archive.folder / name.file()).unlink()  # it died between the two names
    again = archived(run, archive.folder)
    assert [step.step for step in again.steps] == [1]
    assert not list(archive.folder.glob(".*.part"))


def test_steps_that_two_leaders_wrote_count_once(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    run.step("a.1")
    archived(run, tmp_path / "archive")
    archived(run, tmp_path / "other", steps=1)
    for path in (tmp_path / "other").glob("*-*-*-*.parquet"):
        path.rename(tmp_path / "archive" / path.name)
    archive = archived(run, tmp_path / "archive")
    assert [(len(steps_names(archive.folder)), step.step) for step in archive.steps] == [(3, 1), (3, 2)]
    assert len(list(archive.rollouts(1))) == 2
    assert check_archive(archive).findings == ()


def test_an_archive_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rlbuffer.archive")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[archive\]'"):
        importlib.import_module("rlbuffer.archive")


def payload() -> bytes:
    return encode_push(make_group(lengths=[8], group_id="a.0")).payloads[0]


def with_details(data: bytes, **changes: Any) -> bytes:
    """The same payload with other details, and a checksum that fits."""
    its = decode(data)
    arrays = [its.tokens, its.loss_mask, its.logprobs]
    text = b"\xff" if changes.get("text_bytes") else None
    return joined(msgspec.msgpack.encode(msgspec.structs.replace(its.details, **changes)), arrays, text, tokens=8)


def test_a_payload_that_nobody_of_ours_has_written_is_kept_as_it_came() -> None:
    whole = payload()
    its = decode(whole)
    marked = joined(bytes(its.packed), [its.tokens, its.loss_mask.view("u1") * 2, its.logprobs], None, tokens=8)
    short = joined(bytes(its.packed), [its.tokens, its.loss_mask], None, tokens=8)
    payloads = {
        "invalid rollout payload: 'utf-8' codec": with_details(whole, text_bytes=1),
        "invalid rollout payload: a mark of the loss mask is neither 0 nor 1": marked,
        "payload is too short": short,
        "payload is damaged: checksum": whole[:-1] + b"\x00",
        "invalid rollout payload: Expected `array`": with_details(whole, spans=5),
    }
    info = make_group(lengths=[8]).info().rollouts[0].changed(size=0, checksum=0)
    for text, data in payloads.items():
        ref = PartRollout(
            payload_key="k", index=0, info=info, group_id="a.0", env="a", adapter="", advantage=0.0, pushed_ms=5
        )
        (row,) = rows_of(rollout_table([Source(ref=ref, data=data)]).to_batches()[0])
        assert row["problem"].startswith(text)
        assert payload_of(row) == data
    announced = info.changed(size=len(whole), checksum=7)
    (row,) = rows_of(rollout_table([Source(ref=replace(ref, info=announced), data=whole)]).to_batches()[0])
    assert "do not agree with the metadata: 160 bytes with checksum 00000007" in row["problem"]


def test_a_payload_that_is_gone_is_a_row_that_says_so(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    for key in run.payload_keys():
        run.client.delete(key)
    archive = archived(run, tmp_path / "archive")
    member = archive.find("a.0").members[0]
    assert (member.payloads, member.row["problem"]) == ([None], "its payload is missing")
    with pytest.raises(PayloadError, match=r"rollout a\.0/0: its payload is missing"):
        _ = member.rollout


def test_a_leader_that_has_lost_the_lead_writes_nothing_more(run: Run, tmp_path: Path) -> None:
    settled(run)
    run.step("a.0")
    folder = tmp_path / "archive"
    archiving = Archiving(run.again, tmp_path / "of the thread")
    with pytest.raises(ValueError, match="lost"), archiving:
        raise ValueError("the lead is lost")
    writer = ArchiveWriter(folder, run.store.run, archiving._check)
    with pytest.raises(LeaseLost, match="another batcher leads this run"):
        copy_steps(run.store, writer, unwritten(run.store, writer))
    assert list(folder.iterdir()) == []
