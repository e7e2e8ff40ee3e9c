"""Exact texts of backups that cannot be made, of files that cannot be read, and of runs that cannot be restored.

In memory: the texts are the same on a server. {file}, {run} and {url} are filled in.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import BackupError, RlbufferError, RunGone
from rlbuffer.store.backup import backup as backup_module
from rlbuffer.store.backup.backup import write_backup
from rlbuffer.store.backup.format import FrameWriter, read_frames
from rlbuffer.store.backup.restore import check_backup, restore_backup
from rlbuffer.store.redis_store import open_store
from rlbuffer.wire import payload

HEADER = {"format": 1, "run": "math", "schema": 3, "epoch": 1, "step": 0}
META = {"key": "meta", "type": "hash", "ttl": -1, "first": True, "items": []}
PAYLOAD = {"payload": "a.0:w.1", "ttl": -1, "first": True, "items": []}
END = {"end": True, "control_keys": 1, "payload_keys": 1, "missing": 0}
FRAMES = (HEADER, META, PAYLOAD, END)
AFTER_HEADER = 69
"""Offset at which frame 2 begins."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.rlb"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Run]:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    run.step("a.0", "a.1")
    run.push("a.2")
    yield run
    run.close()


def write(file: Path, *frames: Any) -> bytes:
    """A backup of these frames. -> its bytes."""
    with file.open("wb") as out:
        writer = FrameWriter(out)
        for frame in frames:
            writer.write(frame)
    return file.read_bytes()


def raw(body: bytes) -> bytes:
    """A frame around anything, its checksum right."""
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", zlib.crc32(body, zlib.crc32(length))) + body


def test_a_whole_file_of_a_few_frames_is_read(file: Path) -> None:
    write(file, *FRAMES)
    assert check_backup(file) == HEADER | {"control_keys": 1, "payload_keys": 1, "missing": 0}


# -- bytes that are damaged --------------------------------------------------------------------------------------------
def longer(data: bytes) -> bytes:
    return data[:AFTER_HEADER] + struct.pack("<Q", 600 * 2**20 + 1) + data[AFTER_HEADER + 8 :]


def flipped(data: bytes) -> bytes:
    return data[: AFTER_HEADER + 20] + bytes([data[AFTER_HEADER + 20] ^ 1]) + data[AFTER_HEADER + 21 :]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda data: b"PK" + data,
            "{file} is not a backup of rlbuffer: it does not begin with 'rlbuffer-backup 1'",
        ),
        (
            lambda data: data[:AFTER_HEADER],
            (
                "{file} is cut off at byte 69: it has 1 frames and no end. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            lambda data: data[: AFTER_HEADER + 11],
            (
                "{file} is cut off at byte 80: it has 1 frames and no end. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            lambda data: data[: AFTER_HEADER + 12],
            "{file} is cut off at byte 81, inside of frame 2. Take another copy of the file, or an older backup",
        ),
        (
            lambda data: data[: AFTER_HEADER + 20],
            "{file} is cut off at byte 89, inside of frame 2. Take another copy of the file, or an older backup",
        ),
        (
            longer,
            (
                "{file} is damaged at byte 69 (frame 2): a frame of 629145601 bytes, the most is 629145600. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            flipped,
            (
                "{file} is damaged at byte 69 (frame 2): its checksum does not fit. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            lambda data: data[:AFTER_HEADER] + raw(b"\xc1"),
            (
                "{file} is damaged at byte 69 (frame 2): malformed msgpack: FormatError. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            lambda data: data[:AFTER_HEADER] + raw(payload.dumps([1, 2])),
            (
                "{file} is damaged at byte 69 (frame 2): it holds no map. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            lambda data: data + b"\0",
            "{file} goes on after its end, from byte {size}. Take another copy of the file, or an older backup",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(file: Path, damage: Callable[[bytes], bytes], text: str) -> None:
    data = write(file, *FRAMES)
    file.write_bytes(damage(data))
    with pytest.raises(BackupError) as caught:
        check_backup(file)
    assert str(caught.value) == text.format(file=file, size=len(data))


def test_the_second_frame_of_these_tests_begins_where_they_say(file: Path) -> None:
    assert len(write(file, HEADER)) == AFTER_HEADER


# -- whole frames that say what cannot be ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (
            [HEADER | {"format": 2}],
            (
                "{file} is a backup of format 2, this version of rlbuffer reads format 1: restore it with the version "
                "that wrote it"
            ),
        ),
        (
            [END],
            (
                "{file} is a backup of format None, this version of rlbuffer reads format 1: restore it with the "
                "version that wrote it"
            ),
        ),
        (
            [HEADER | {"schema": 4}],
            (
                "{file} is of a run of schema 4, this version of rlbuffer reads schema 3: restore it with the version "
                "that wrote it"
            ),
        ),
        (
            [HEADER | {"run": 7}],
            (
                "{file} is damaged in frame 1: it does not say the run, epoch, step of a backup. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, {"first": True, "items": [], "ttl": -1}],
            (
                "{file} is damaged in frame 2: it is neither a control key nor a payload. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, META, PAYLOAD | {"items": 3}],
            (
                "{file} is damaged in frame 3: it is neither a control key nor a payload. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, META | {"ttl": None}],
            (
                "{file} is damaged in frame 2: it is neither a control key nor a payload. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, META | {"type": "list"}],
            (
                "{file} is damaged in frame 2: a control key of type 'list'. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, META, END],
            (
                "{file} holds 1 control keys and 0 payload keys, its end says 1 and 1. "
                "Take another copy of the file, or an older backup"
            ),
        ),
        (
            [HEADER, META, META, PAYLOAD, END],
            (
                "{file} holds 2 control keys and 1 payload keys, its end says 1 and 1. "
                "Take another copy of the file, or an older backup"
            ),
        ),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(file: Path, frames: list[Any], text: str) -> None:
    write(file, *frames)
    with pytest.raises(BackupError) as caught:
        check_backup(file)
    assert str(caught.value) == text.format(file=file)


@pytest.mark.parametrize(("name", "why"), [("none.rlb", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(BackupError) as caught:
        check_backup(tmp_path / name)
    assert str(caught.value) == f"cannot read {tmp_path / name}: {why}"


# -- backups that cannot be made ---------------------------------------------------------------------------------------
def during(monkeypatch: pytest.MonkeyPatch, name: str, what: Callable[[], Any]) -> None:
    """`what` happens just after the function `name` of the backup, each time."""
    real = getattr(backup_module, name)

    def then(*arguments: Any) -> Any:
        value = real(*arguments)
        what()
        return value

    monkeypatch.setattr(backup_module, name, then)


def refused(made: Run, file: Path) -> str:
    """Message of a backup that cannot be made; it leaves nothing."""
    with pytest.raises(RlbufferError) as caught:
        write_backup(made.store, file)
    assert type(caught.value) in (BackupError, RunGone)
    assert [path.name for path in file.parent.iterdir() if ".rlb" in path.name] == []
    return str(caught.value)


def test_a_backup_whose_hold_ran_out_says_so(made: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during(monkeypatch, "_payload_names", lambda: made.client.delete(made.store.keys.holds))
    assert refused(made, file) == (
        f"the backup of run {made.store.run!r} stood still for over 60 s, and its payloads were released meanwhile "
        f"({made.store.keys.holds}): no file was written, begin again"
    )


def test_a_backup_of_a_run_that_is_deleted_meanwhile_says_so(
    made: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    during(monkeypatch, "_write_payloads", made.store.delete_run)
    assert refused(made, file) == (
        f"run {made.store.run!r} was deleted while it was backed up ({made.store.keys.meta}): no file was written"
    )


def test_a_backup_of_a_run_that_is_not_there_says_so(made: Run, file: Path) -> None:
    made.store.delete_run()
    assert refused(made, file) == f"run {made.store.run!r} is not on the server ({made.store.keys.meta})"


def test_a_backup_during_which_processes_begin_all_the_time_names_the_last(
    made: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin() -> None:
        begun.append(f"w{len(begun)}")
        made.client.hset(made.store.keys.producer(begun[-1], "i"), "last", 1)

    during(monkeypatch, "_read_at_once", begin)
    assert refused(made, file) == (
        f"the control keys of run {made.store.run!r} do not stand still: new ones came during each of 10 reads, the "
        "last was producer:w9:i. A process begins again and again: stop it, then back up again"
    )


def test_a_process_that_begins_while_the_keys_are_read_is_in_the_backup(
    made: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin_once() -> None:
        if not begun:
            begun.append("w")
            made.client.hset(made.store.keys.producer("late", "i"), "last", 1)

    during(monkeypatch, "_read_at_once", begin_once)
    write_backup(made.store, file)
    assert "producer:late:i" in {frame.get("key") for frame in read_frames(file)}


# -- runs that cannot be restored --------------------------------------------------------------------------------------
def test_a_run_that_exists_is_not_restored_over(made: Run, file: Path) -> None:
    write_backup(made.store, file)
    with pytest.raises(RlbufferError) as caught:
        restore_backup(made.store, file)
    run = made.store.run
    assert str(caught.value) == (
        f"run {run!r} exists on {made.url}: `rlbuffer reset {run} --yes` removes it, --run gives the restored one "
        "another name"
    )


def test_a_run_that_begins_meanwhile_is_not_restored_over(made: Run, file: Path) -> None:
    write_backup(made.store, file)
    copy = open_store(made.url, run=f"{made.store.run}-copy", home=made.home, server=ServerSettings())

    def begin(line: str) -> None:
        if "put in place" in line:
            copy.open_run()

    with pytest.raises(RlbufferError) as caught:
        restore_backup(copy, file, begin)
    assert str(caught.value) == (
        f"run {copy.run!r} began while it was being restored: nothing of it was changed. `rlbuffer reset {copy.run} "
        "--yes` removes it, --run gives the restored one another name"
    )
    assert copy.meta().step == 0
    copy.delete_run()
    assert list(copy.client.scan_iter(match=f"*{copy.run}*")) == []  # payloads that it had put there go with the run
    copy.close()
