"""`rlbuffer push FILE.jsonl`: what is damaged is left out, and the same file twice is the same pushes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import threading
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

import rlbuffer

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def push(run: Run, typed: Call) -> Call:
    return lambda *arguments: typed("push", *map(str, arguments), "--redis", run.url, "--run", run.store.run)


def line(index: int, **changes: Any) -> dict[str, Any]:
    rollout = {
        "tokens": [1, 2, 3, 4],
        "loss_mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "reward": 0.5,
        "version_spans": [[0, 2, 4]],
    }
    group = {"group_id": f"g{index}", "env": "math", "prompt_id": f"p{index}", "planned_size": 2}
    return group | {"rollouts": [rollout | changes, rollout | {"reward": 1.0}]}


def written(*lines: dict[str, Any]) -> Path:
    path = Path("groups.jsonl")
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_pushing_a_file_twice_stores_it_once(run: Run, push: Call) -> None:
    path = written(*(line(i) for i in range(3)))
    code, out, _ = push(path)
    assert (code, "3 stored" in out) == (0, True)
    before = run.store.ledger()
    assert before.envs["math"].pushed == (6, 24)
    code, out, _ = push(path)
    assert (code, "3 duplicate" in out) == (0, True)
    assert run.store.ledger() == before
    assert run.store.verify().ok


def test_a_damaged_line_is_left_out_and_said_and_the_others_are_stored(run: Run, push: Call) -> None:
    path = written(line(0), line(1, reward=float("nan")), line(2))
    code, out, err = push(path)
    assert (code, "2 stored" in out, "1 damaged record left out" in out) == (1, True, True)
    (message,) = err.strip().splitlines()
    assert f"{path.name}:2  " in message
    assert "reward" in message
    assert run.store.ledger().envs["math"].pushed == (4, 16)
    code, out, _ = push(path, "--json")
    assert (code, json.loads(out)) == (
        1,
        {"schema": "rlbuffer.push/1", "run": run.store.run, "stored": 0, "duplicate": 2, "left_out": 1},
    )
    assert run.store.verify().ok


def test_a_line_that_is_torn_is_left_out(run: Run, push: Call) -> None:
    path = written(line(0), line(1), line(2))
    path.write_text(path.read_text()[:-40])
    code, out, err = push(path)
    assert (code, "2 stored" in out) == (1, True)
    assert f"{path.name}:3  not JSON" in err


def test_a_group_of_which_one_part_is_damaged_is_left_out_whole(run: Run, push: Call) -> None:
    """Parts share the group's id; the order in which they stand does not matter."""
    half = line(1)
    first, second = half["rollouts"]
    parts = [half | {"rollouts": [first | {"rollout_id": "a"}]}, half | {"rollouts": [second | {"reward": "x"}]}]
    for lines in ([line(0), *parts], [line(2), *reversed(parts)]):
        code, out, err = push(written(*lines))
        assert (code, "1 stored" in out, "2 damaged records left out" in out) == (1, True, True)
        assert "group g1: another record of it is damaged" in err
    assert {entry.group_id for entry in run.pool()} == {"g0", "g2"}


def test_of_many_damaged_lines_the_first_are_told_about_and_the_others_counted(run: Run, push: Call) -> None:
    code, _, err = push(written(line(0), *(line(i, reward="x") for i in range(1, 10))))
    assert code == 1
    assert [said.partition(":")[0] for said in err.strip().splitlines()] == ["left out"] * 6
    assert "4 more" in err.strip().splitlines()[-1]


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("g.jsonl", "{}")
    return made.getvalue()


LINES = "".join(json.dumps(line(i)) + "\n" for i in range(2)).encode()
READ = {
    "plain.jsonl": LINES,
    "compressed.jsonl.gz": gzip.compress(LINES),
    "compressed.jsonl.bz2": bz2.compress(LINES),
    "compressed.jsonl.xz": lzma.compress(LINES),
    "in two pieces.gz": gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]),
    "compressed under a plain name.jsonl": gzip.compress(LINES),
    "plain under a compressed name.jsonl.gz": LINES,
    "a list.json": json.dumps([line(0), line(1)], indent=2).encode(),
    "a list on one line.json.gz": gzip.compress(json.dumps([line(0), line(1)]).encode()),
    "with a mark.jsonl": BOM_UTF8 + LINES,
    "of Windows.jsonl": LINES.replace(b"\n", b"\r\n"),
    "without an end.jsonl": b"\n \n" + LINES.strip(),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("door", ["file", "pipe", "stdin"])
def test_a_file_is_read_whatever_packed_it_and_whatever_brings_it(run: Run, push: Call, name: str, door: str) -> None:
    path = Path(name)
    path.write_bytes(READ[name])
    with through(door, path) as given:
        code, out, err = push(given)
    assert (code, err) == (0, ""), err
    assert "2 stored" in out
    assert {entry.group_id for entry in run.pool()} == {"g0", "g1"}


@contextmanager
def through(door: str, path: Path) -> Iterator[str]:
    """What is typed for a file that comes as itself, through a named pipe, or as standard input."""
    if door == "file":
        yield str(path)
        return
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "wb") as sink:
        writer = threading.Thread(target=lambda: (sink.write(path.read_bytes()), sink.close()))
        writer.start()
        if door == "pipe":
            yield f"/dev/fd/{ours}"
        else:
            kept = os.dup(0)
            os.dup2(ours, 0)
            try:
                yield "-"
            finally:
                os.dup2(kept, 0)
                os.close(kept)
        writer.join()
    os.close(ours)


REFUSED = {
    "empty.jsonl": (b"", "holds no group"),
    "blank.jsonl": (b"\n\n", "holds no group"),
    "empty.jsonl.gz": (gzip.compress(b""), "holds no group"),
    "cut off.gz": (gzip.compress(LINES * 50)[:200], "gzip, and is cut off"),
    "cut off.xz": (lzma.compress(LINES)[:100], "xz, and is cut off"),
    "damaged.gz": (gzip.compress(LINES)[:40] + b"\0" * 60, "gzip, and is damaged"),
    "twice.gz": (gzip.compress(gzip.compress(LINES)), "compressed twice"),
    "of zstd.jsonl.zst": (b"\x28\xb5\x2f\xfd" + b"\0" * 20, "zstd"),
    "utf-16.jsonl": (LINES.decode().encode("utf-16"), "UTF-16"),
    "utf-16 without a mark.jsonl": (LINES.decode().encode("utf-16-le"), "UTF-16"),
    "archive.zip": (zipped(), "zip archive"),
    "archive.tar": (b"g.jsonl".ljust(257, b"\0") + b"ustar\x0000" + b"\0" * 255, "tar archive"),
    "an image.jsonl": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not JSON"),
    "a Parquet file.jsonl": (b"PAR1" + b"\0" * 40 + b"PAR1", "Parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("door", ["file", "pipe"])
def test_what_is_no_file_of_groups_is_one_sentence(run: Run, push: Call, name: str, door: str) -> None:
    data, words = REFUSED[name]
    Path(name).write_bytes(data)
    with through(door, Path(name)) as given:
        code, out, err = push(given)
    assert (code, out) == (1, "")
    assert err.strip().splitlines()[-1].startswith("Error: ")
    assert words in err
    assert "defect" not in err
    assert run.pool() == []


def test_a_folder_and_a_file_that_is_not_there_are_usage_and_nothing_comes_of_dev_null(push: Call) -> None:
    assert push(".")[0] == push("nowhere.jsonl")[0] == 2
    code, _, err = push("/dev/null")
    assert (code, "holds no group" in err) == (1, True)


def test_a_line_without_an_end_is_left_out_and_the_next_ones_are_read(
    push: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer_cli.commands.push.MAX_LINE_BYTES", 2000)
    path = written(line(0), line(1, text="x" * 9000), line(2))
    code, out, err = push(path)
    assert (code, "2 stored" in out) == (1, True)
    assert f"{path.name}:2  the line is longer than" in err


def test_a_pipe_that_brings_too_much_is_refused(push: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.process.inputs.MAX_COPIED_BYTES", 100)
    path = written(line(0))
    with through("pipe", path) as given:
        code, _, err = push(given)
    assert (code, "come of it" in err) == (1, True)


def test_a_pipe_that_does_not_end_is_said(push: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer_cli.commands.push.SAY_SECONDS", 0.01)
    told = threading.Event()
    monkeypatch.setattr("rlbuffer_cli.commands.push.say", lambda *_, **__: told.set())
    ours, theirs = os.pipe()

    def write() -> None:
        told.wait(60)
        os.write(theirs, LINES)
        os.close(theirs)

    writer = threading.Thread(target=write)
    writer.start()
    code, out, _ = push(f"/dev/fd/{ours}")
    writer.join()
    os.close(ours)
    assert (code, told.is_set(), "2 stored" in out) == (0, True, True)


def recorded(*versions: int) -> Path:
    """A file of groups as another run recorded them, one of each version."""
    lines = [line(i) for i in range(len(versions))]
    for one, version in zip(lines, versions, strict=True):
        spans = {"version_spans": [[version, 2, 3], [version + 1, 3, 4]]}
        one["rollouts"] = [rollout | spans for rollout in one["rollouts"]]
    return written(*lines)


def versions_of(buffer: rlbuffer.Buffer, count: int) -> list[set[int]]:
    groups = [buffer.group(f"g{i}") for i in range(count)]
    return [{version for m in group.members for version in (m.min_version, m.max_version)} for group in groups]


def at_version(buffer: rlbuffer.Buffer, version: int) -> None:
    buffer.reader().start()
    buffer.policy.announce(version, location="", size=0, checksum="")


def test_versions_that_the_run_has_not_made_or_left_behind_are_said_at_push(
    buffer: rlbuffer.Buffer, push: Call
) -> None:
    at_version(buffer, 6)
    code, _, err = push(recorded(0, 1, 5, 8, 9))
    assert code == 0
    (said,) = err.strip().splitlines()
    assert all(part in said for part in ("2 groups", "9 to 10", "future", "0 to 1", "stale", "version 6"))
    assert versions_of(buffer, 5)[4] == {9, 10}
    assert push(recorded(5))[2] == "", "it is the run's own"


@pytest.mark.parametrize(("given", "becomes"), [("current", 3), ("2", 2)])
def test_recorded_groups_may_be_pushed_as_of_a_version_of_this_run(
    buffer: rlbuffer.Buffer, push: Call, given: str, becomes: int
) -> None:
    at_version(buffer, 3)
    code, _, err = push(recorded(4, 40), "--version", given)
    assert code == 0
    assert versions_of(buffer, 2) == [{becomes}, {becomes}]
    assert ("stale" in err, "future" in err) == (True, False)
