"""`export`, then `push` into another run: the same rollouts, byte for byte, of every state and both formats."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_runs import Run
from strange_groups import strange_group
from test_archive_files import archived, push_strange, settled

import rlbuffer
from rlbuffer.archive.schema import ADDED_COLUMNS, ROLLOUTS
from rlbuffer.errors import InvalidRollout
from rlbuffer.testing import make_group
from rlbuffer.wire.jsonl import group_from_line, line_of
from rlbuffer.wire.payload import encode_push

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a pending group, a trained one and a dropped one, all of them strange."""
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    settled(made)
    push_strange(made, "a.0")
    made.commit()
    push_strange(made, "b.1")
    made.drop("stale", made.pool())
    push_strange(made, "c.2")
    return made


@pytest.fixture
def call(run: Run, typed: Call) -> Call:
    return lambda *arguments: typed(*arguments, "--redis", run.url)


def stored(url: str, name: str) -> dict[str, list[tuple[int, int]]]:
    """Group id -> size and checksum of each of its pending rollouts, in their order."""
    with rlbuffer.connect(url, run=name) as buffer:
        entries = buffer.store.read_pool()
        return {e.group_id: [(r.size, r.checksum) for r in e.info.rollouts] for e in entries if e.info}


def announced(*group_ids: str) -> dict[str, list[tuple[int, int]]]:
    infos = {group_id: encode_push(strange_group(group_id)).info for group_id in group_ids}
    return {group_id: [(r.size, r.checksum) for r in info.rollouts] for group_id, info in infos.items()}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_exported_and_pushed_is_the_same_rollouts(run: Run, call: Call, kind: str) -> None:
    name, file = run.store.run, f"out.{kind}"
    code, out, err = call("export", "-o", file, "--run", name)
    assert (code, out) == (0, "")
    assert "3 groups with 21 rollouts" in err
    code, out, err = call("push", file, "--run", "another", "--json")
    assert (code, json.loads(out)["stored"]) == (0, 3), err
    assert stored(run.url, "another") == announced("a.0", "b.1", "c.2")
    code, out, _ = call("export", "--where", "state:dropped", "-o", file, "--run", name, "--json")
    assert (code, json.loads(out)["groups"], json.loads(out)["gone"]) == (0, 1, 0)
    run.close()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_archive_is_exported_without_a_server(run: Run, call: Call, tmp_path: Path, kind: str) -> None:
    archived(run, tmp_path / "archive")
    code, out, err = call("export", "--archive", "archive", "--where", "env:a,b", "-o", f"out.{kind}")
    assert (code, out) == (0, ""), err
    assert "2 groups with 14 rollouts" in err
    assert call("push", f"out.{kind}", "--run", "third")[0] == 0
    assert stored(run.url, "third") == announced("a.0", "b.1")
    run.close()


@pytest.mark.parametrize("source", ["server", "archive"])
def test_a_page_of_any_filter_is_harmless_and_fetches_nothing(
    run: Run, call: Call, tmp_path: Path, source: str
) -> None:
    evil = "</pre><script>alert(1)</script><img src=http://x/> \x1b[31m\u202e"
    rollouts = make_group(env="e", size=2, group_id="e.1").rollouts
    group = make_group(env="e", size=2, group_id="e.1", answer=evil)
    told = [replace(r, text=evil, finish_reason="length", is_truncated=True) for r in rollouts]
    group = replace(group, rollouts=tuple(told))
    run.sequence += 1
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    run.commit(entries=[entry for entry in run.pool() if entry.group_id == "e.1"])
    archived(run, tmp_path / "archive")
    where = ["--archive", "archive"] if source == "archive" else ["--run", run.store.run]
    code, out, err = call("export", *where, "--where", "env:e stop:length", "-o", "out.html")
    assert (code, out) == (0, ""), err
    assert "1 group with 2 rollouts" in err
    html = (tmp_path / "out.html").read_text()
    assert "e.1" in html
    assert "&lt;script&gt;alert(1)" in html
    assert not any(wrong in html for wrong in ("<script", "<img", "\x1b", "\u202e", "a.0"))
    assert "default-src 'none'" in html
    run.close()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "html"])
def test_a_file_that_cannot_be_written_is_an_error(run: Run, call: Call, kind: str) -> None:
    code, out, err = call("export", "-o", f"no/x.{kind}", "--run", run.store.run)
    assert (code, out, f"cannot write no/x.{kind}: No such file" in err) == (1, "", True)
    run.close()


def test_lines_go_to_stdout_and_nothing_else_does(run: Run, call: Call) -> None:
    name = run.store.run
    code, out, err = call("export", "-o", "-", "--run", name, "--where", "id:c.2")
    assert (code, [group_from_line(line.encode()).group_id for line in out.split("\n")[:-1]]) == (0, ["c.2"])
    assert "1 group with 7 rollouts" in err
    code, out, err = call("export", "-o", "-", "--json", "--run", name)
    assert (code, out, "both for stdout" in err) == (2, "", True)
    run.close()


COLUMNS = {
    "expected lists, or an object with dtype, shape and values": {"dtype": "<f4", "values": [1.0]},
    "dtype, shape and values do not go together: cannot reshape array": {"dtype": "<f4", "shape": [2], "values": [1]},
}


@pytest.mark.parametrize("text", COLUMNS)
def test_an_array_that_says_its_dtype_is_checked(text: str) -> None:
    record = json.loads(line_of(strange_group()))
    record["rollouts"][0]["columns"] = {"x": COLUMNS[text]}
    with pytest.raises(InvalidRollout) as refusal:
        group_from_line(json.dumps(record))
    assert str(refusal.value).startswith(f"rollouts[0].columns.x: {text}")


def test_a_file_that_is_no_parquet_of_rollouts_is_refused(run: Run, call: Call, tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    code, _, err = call("push", "torn.parquet", "--run", "another")
    assert (code, err.startswith("Error: torn.parquet  it cannot be read as Parquet: ")) == (1, True)
    archived(run, tmp_path / "archive")
    code, _, err = call("push", "archive/settings-00000001.parquet", "--run", "another")
    assert code == 1
    lacking = ", ".join(name for name in ROLLOUTS.names if name not in {"left_out", *ADDED_COLUMNS})
    assert f"it lacks the columns {lacking}:" in err
    code, _, err = call("export", "-o", "out.csv", "--run", run.store.run)
    assert (code, "got 'out.csv'" in err) == (2, True)
    run.close()
