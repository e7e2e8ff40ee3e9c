"""`dump` and `restore`: a run that nobody leads, whole or not at all."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_runs import Served
from every_role import EveryRole
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError, DumpError, RlbufferError, RunDamaged, RunGone
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store import dump as dumping
from rlbuffer.store.dump import dump, read, restore
from rlbuffer.store.session import open_store

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, lookahead=0, max_age=8)
HALF = """
import sys, time
from pathlib import Path
from rlbuffer.config.settings import ServerSettings
from rlbuffer.store import dump
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.session import open_store
def half(keys):
    if keys == 3:
        print("half", flush=True)
        time.sleep(600)
what, url, run, home, file = sys.argv[1:]
store = open_store(OperatorStore, url, run=run, home=Path(home), server=ServerSettings())
getattr(dump, what)(store, Path(file), half)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.dump"


@pytest.fixture
def left(run: Run) -> Run:
    """Nobody leads it: step 1 retired, step 2 trained, step 3 packed; a group forming, one ready, one dropped."""
    run.lead()
    run.store.set_config({"max_age": 8}, "d")
    for n in range(3):
        run.step(f"a.{n}", f"b.{n}")
    run.train(2, oldest_kept=1)
    run.store.retire(1)
    run.push("a.3", version=2)
    run.drop("stale", run.pool()[-1:])
    run.push("a.4", size=2, planned_size=4, version=2, rollout_ids=["a.4/0", "a.4/1"])
    entry = run.push("b.4", version=2)
    assert run.store.claim_scoring([run.pool()[-1].entry_id], owner="s", ttl_seconds=60), entry
    run.store.release_lease()
    return run


def content(run: Run) -> dict[str, Any]:
    return run.control_keys() | {key: run.client.hgetall(key) for key in run.payload_keys()}


def train(run: Run, served: Served, *steps: int) -> None:
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=60)
    for number, step in zip(steps, reader.steps(start=steps[0]), strict=False):
        assert (step.number, step.damaged) == (number, ())
        reader.trained(step)
    reader.close()  # nothing of it writes while the run is dumped


def kill_half_way(what: str, run: Run, file: Path) -> None:
    arguments = [sys.executable, "-c", HALF, what, run.url, run.store.run, str(run.home), str(file)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()


def test_a_run_comes_back_as_it_was(left: Run, file: Path) -> None:
    store, before = left.store, content(left)
    about = dump(store, file)
    assert (about.step, about.keys) == (3, len(before))
    store.delete_run()
    assert restore(store, file) == about
    assert content(left) == before
    claims = [key for key in before if left.client.pttl(key) >= 0]
    assert [key.split(":")[2] for key in claims] == ["scoring"]
    assert store.verify().findings == ()
    assert store.run in store.runs()


def test_a_run_that_came_back_goes_on_training(run: Run, file: Path) -> None:
    store, served = run.store, Served(run)
    trainer = store.attempt(uuid="t", world_size=1, resume_step=0).number
    store.announce(trainer, PolicyVersion(version=0))
    served.serve(CONFIG)
    for n in range(2):
        run.push(f"a.{n}")
    train(run, served, 1)
    served.stop()
    digest = store.meta().digest
    dump(store, file)
    store.delete_run()
    restore(store, file)
    assert store.meta().digest == digest
    served.serve(CONFIG)
    run.push("a.2")
    train(run, served, 2, 3)
    assert store.verify().findings == ()
    assert store.ledger().total().trained[0] == 6


def test_a_run_that_somebody_leads_or_changes_is_not_dumped(left: Run, file: Path) -> None:
    with pytest.raises(DumpError, match="changed"):
        dump(left.store, file, lambda keys: keys == 1 and left.push("a.9", version=2))
    left.lead("batcher-7")
    with pytest.raises(DumpError, match=r"^batcher-7 leads"):
        dump(left.store, file)
    assert list(file.parent.glob("*run.dump*")) == []


def test_a_dump_that_is_killed_leaves_no_file_under_its_name(left: Run, file: Path) -> None:
    kill_half_way("dump", left, file)
    assert not file.exists()
    assert dump(left.store, file).keys == len(content(left))


def test_a_restore_that_is_killed_leaves_no_run_and_is_begun_again(left: Run, file: Path) -> None:
    store, before = left.store, content(left)
    dump(store, file)
    store.delete_run()
    kill_half_way("restore", left, file)
    left.client.set(f"{store.keys.tag}:visits:gone", "of a file that lacks it not")
    for ask in (store.meta, store.open_run):
        with pytest.raises(RunDamaged):
            ask()
    restore(store, file)
    assert content(left) == before
    with pytest.raises(RlbufferError, match="exists"):
        restore(store, file)


def test_no_run_begins_beside_a_restore_that_began_after_the_look(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.store.delete_run()
    move = run.store.move

    def restored_meanwhile(*args: Any) -> list[Any]:
        run.client.set(run.store.keys.restoring, "x")
        return move(*args)

    monkeypatch.setattr(run.store, "move", restored_meanwhile)
    with pytest.raises(RunDamaged, match=run.store.keys.restoring):
        run.store.open_run()
    assert not run.client.exists(run.store.keys.meta)


def test_a_restore_whose_run_is_removed_meanwhile_leaves_no_run(left: Run, file: Path) -> None:
    about = dump(left.store, file)
    left.store.delete_run()
    with pytest.raises(RlbufferError, match="removed"):
        restore(left.store, file, lambda keys: keys == about.keys - 1 and left.again().delete_run())
    with pytest.raises(RunGone):
        left.store.meta()


def test_a_damaged_file_is_refused_before_anything_is_written(left: Run, file: Path) -> None:
    dump(left.store, file)
    left.store.delete_run()
    whole, dice = file.read_bytes(), random.Random(0)
    for _ in range(300):
        at = dice.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :]
        without = whole[:at] + whole[at + dice.choice((1, dice.randrange(1, 5000))) :]
        for damaged in (flipped, whole[:at], whole + whole[at:], without):
            file.write_bytes(damaged)
            with pytest.raises(DumpError):
                read(file)
    with pytest.raises(DumpError):
        restore(left.store, file)
    assert content(left) == {}


@pytest.mark.parametrize("at", [0, -1])
def test_what_the_server_cannot_read_is_refused_and_nothing_is_left(left: Run, file: Path, at: int) -> None:
    """A version of DUMP that no server has yet, in the first key and in `meta`."""
    about = replace(dump(left.store, file), server="Redis 99.1")
    chunks = list(dumping._chunks(file))
    name = chunks[1][0] if at == 0 else left.store.keys.meta.encode()
    checksum = 0
    with file.open("wb") as out:
        out.write(dumping.MAGIC)
        for key, ttl, data in chunks:
            foreign = data[:-10] + b"\xff\xff" + data[-8:] if key == name else data
            foreign = data.replace(b'"server": "', b'"server": "Redis 99.1 ') if key == dumping.HEADER else foreign
            checksum = dumping._put(out, key, ttl, foreign, checksum)
    left.store.delete_run()
    with pytest.raises(DumpError, match=about.server):
        restore(left.store, file)
    assert content(left) == {}
    assert left.store.run not in left.store.runs()


def test_a_run_of_another_schema_is_refused(left: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump(left.store, file)
    monkeypatch.setattr(dumping, "SCHEMA", dumping.SCHEMA + 1)
    with pytest.raises(DumpError, match="schema"):
        read(file)


def crafted(file: Path, change: Any) -> None:
    """The file with its chunks as `change` makes them of (name, time to live, data); every checksum is right."""
    chunks = list(dumping._chunks(file))
    checksum = 0
    with file.open("wb") as out:
        out.write(dumping.MAGIC)
        for key, ttl, data in change(chunks):
            checksum = dumping._put(out, key, ttl, data, checksum)


def content_names(run: Run) -> set[bytes]:
    """Whatever is on the server with the run's name in its key."""
    return set(run.client.keys(f"*{run.store.run}*"))


@pytest.mark.parametrize(
    "name",
    [
        "{rlb:victim}:meta",
        "rlb:victim:g:a.0:u.1",
        "rlb:RUNx:g:a.0:u.1",
        "rlb:RUN",
        "{rlb:RUN}",
        "{rlb:RUNx}:meta",
        "session:of-another-program",
        "\x00\x1b[31m",
        "",
        "{rlb:RUN}:restoring",
        "{rlb:RUN}:meta",
    ],
)
def test_a_file_with_other_keys_than_its_runs_is_refused_before_anything_is_written(
    left: Run, file: Path, name: str
) -> None:
    """Every other checksum and number of it is right. Of the last two the one is the restore's own, the other twice."""
    dump(left.store, file)
    left.store.delete_run()
    name = name.replace("RUN", left.store.run)
    left.client.set("a value", "of mallory")
    value = left.client.dump("a value")
    left.client.delete("a value")
    left.client.set(name, "of alice")

    def add(chunks: list[Any]) -> list[Any]:
        *kept, (end, ttl, count) = chunks
        return [*kept, (name.encode(), -1, value), (end, ttl, b"%d" % (int(count) + 1))]

    crafted(file, add)
    before = content_names(left)
    with pytest.raises(DumpError, match=r"\Wrlb:|session|x1b|''|restoring"):
        restore(left.store, file)
    assert left.client.get(name) == b"of alice"
    assert content_names(left) == before
    left.client.delete(name)


HEADERS: list[Any] = [
    b"{",
    b"",
    b"[]",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"run": 7, "schema": 7, "step": 0, "server": "x", "keys": 0}',
    b'{"run": "a", "schema": "7", "step": 0, "server": "x", "keys": 0}',
    b'{"run": "a", "schema": 7, "step": 1e400, "server": "x", "keys": 0}',
    b'{"run": "../x", "schema": 7, "step": 0, "server": "x", "keys": 0}',
    b'{"run": "-x", "schema": 7, "step": 0, "server": "x", "keys": 0}',
    b'{"run": "a", "schema": 8, "step": 0, "server": "x", "keys": 0}',
]


@pytest.mark.parametrize("head", HEADERS, ids=lambda head: repr(head[:40]))
def test_a_header_that_is_none_is_said_to_be_so(tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "run.dump"
    with file.open("wb") as out:
        out.write(dumping.MAGIC)
        checksum = dumping._put(out, dumping.HEADER, -1, head, 0)
        dumping._put(out, dumping.END, -1, b"0", checksum)
    with pytest.raises(DumpError, match=r"run\.dump"):
        read(file)


@pytest.mark.parametrize("wrong", ["no header", "two headers", "no meta", "another count", "no number", "huge number"])
def test_a_file_whose_chunks_do_not_fit_together_leaves_nothing(left: Run, file: Path, wrong: str) -> None:
    dump(left.store, file)
    left.store.delete_run()
    meta = left.store.keys.meta.encode()

    def change(chunks: list[Any]) -> list[Any]:
        head, *keys, (end, ttl, count) = chunks
        if wrong == "no header":
            return [*keys, (end, ttl, count)]
        if wrong == "two headers":
            return [head, head, *keys, (end, ttl, b"%d" % (int(count) + 1))]
        if wrong == "no meta":
            return [head, *(key for key in keys if key[0] != meta), (end, ttl, b"%d" % (int(count) - 1))]
        counts = {"another count": b"%d" % (int(count) + 1), "no number": b"x", "huge number": b"9" * 5000}
        return [head, *keys, (end, ttl, counts[wrong])]

    crafted(file, change)
    with pytest.raises(DumpError):
        restore(left.store, file)
    assert content(left) == {}
    assert left.store.run not in left.store.runs()


@pytest.mark.parametrize("name", ["-x", "--help", "-"])
def test_no_run_begins_with_a_dash_and_one_that_is_there_is_looked_at_and_removed(run: Run, name: str) -> None:
    store = open_store(EveryRole, run.url, run=name, home=run.home, server=ServerSettings())
    with pytest.raises(ConfigError, match="dash"):
        store.open_run()
    assert store.runs().keys() & {name} == set()
    run.client.hset(store.keys.meta, mapping=run.client.hgetall(run.store.keys.meta))  # from before the rule
    assert store.open_run().step == 0
    assert store.verify().findings == ()
    assert store.delete_run() == 1
    store.close()
