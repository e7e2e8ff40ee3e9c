"""`backup` and `restore`: a run as of one moment, whole or not at all."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.errors import BackupError, RlbufferError, RunGone
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.backup import backup as backup_module
from rlbuffer.store.backup.backup import write_backup
from rlbuffer.store.backup.restore import check_backup, restore_backup
from rlbuffer.store.keys import HEARTBEATS
from rlbuffer.store.redis_store import RedisStore, open_store

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.rlb"


@pytest.fixture
def busy(run: Run) -> Run:
    """Step 1 retired, step 2 trained, step 3 packed; a group forming, one ready, one dropped, a ticket out."""
    run.lead()
    run.store.set_config(run.token, {"max_age": 8}, "d")
    for n in range(3):
        run.step(f"a.{n}", f"b.{n}")
    run.train(2, oldest_kept=1)
    run.store.retire(run.token, 1)
    run.push("a.3", version=2)
    run.drop("stale", run.pool()[-1:])
    run.push("a.4", size=2, planned_size=4, version=2, rollout_ids=["a.4/0", "a.4/1"])
    run.push("b.4", version=2)
    run.store.set_allowances(run.token, {"a": 3})
    run.store.take_tickets("a", 2, ttl_seconds=60)
    run.store.set_waiting("batcher", "something")
    return run


def sibling(run: Run, name: str) -> RedisStore:
    return open_store(run.url, run=name, home=run.home, server=ServerSettings())


def steps_of(store: RedisStore) -> list[Any]:
    return [(header, store.read_parts(header.step)) for header in store.headers()]


def test_a_restored_run_is_the_run_under_its_own_name_or_another(busy: Run, file: Path) -> None:
    store = busy.store
    report = write_backup(store, file)
    assert (report.step, report.missing, report.bytes) == (3, 0, file.stat().st_size)
    assert store.verify().ok
    copy = sibling(busy, f"{store.run}-copy")
    restored = restore_backup(copy, file)
    assert (restored.run, restored.payload_keys) == (copy.run, report.payload_keys)
    assert copy.verify().findings == ()
    assert copy.verify().checked == store.verify().checked
    assert copy.ledger() == store.ledger()
    assert copy.history() == store.history()
    assert [h for h, _ in steps_of(copy)] == [h for h, _ in steps_of(store)]
    before = {
        r.payload_key.replace(store.run, copy.run): r.info for _, ps in steps_of(store) for p in ps for r in p.rollouts
    }
    assert {r.payload_key: r.info for _, parts in steps_of(copy) for p in parts for r in p.rollouts} == before
    refs = [r for _, parts in steps_of(copy) for part in parts for r in part.rollouts]
    old = [r for _, parts in steps_of(store) for part in parts for r in part.rollouts]
    assert copy.read_payloads(refs) == store.read_payloads(old)
    assert None not in copy.read_payloads(refs)
    assert copy.run in copy.runs()
    copy.close()


def test_nothing_of_a_process_comes_back_alive(busy: Run, file: Path) -> None:
    token = busy.token
    for kind in HEARTBEATS:
        busy.store.heartbeat(kind, "one", {})
    busy.store.set_waiting("one", "It waits.")
    write_backup(busy.store, file)
    copy = sibling(busy, f"{busy.store.run}-copy")
    restore_backup(copy, file)
    assert copy.tickets_out() == {}
    assert copy.waiting() == {}
    assert [dict(copy.heartbeats(kind)) for kind in HEARTBEATS] == [{}] * len(HEARTBEATS)
    assert copy.trainer().trained == 2
    assert copy.trainer().seen_ms == 0
    lease = copy.lease("another", ttl_seconds=5)
    assert lease.held
    assert lease.token > token
    copy.set_allowances(lease.token, {"a": 9})
    assert copy.take_tickets("a", 2, ttl_seconds=5) == [0, 1]  # what was out is taken up again
    copy.close()


def test_nothing_that_comes_back_has_a_time_to_live_but_claims(busy: Run, file: Path) -> None:
    # As in a backup that was written when pending payloads and producers still had one.
    busy.store.claim_scoring(["1-1"], owner="s", ttl_seconds=60)
    for key in [*busy.payload_keys(), busy.store.keys.producer("w", "u")]:
        busy.client.pexpire(key, 60_000)
    write_backup(busy.store, file)
    copy = sibling(busy, f"{busy.store.run}-copy")
    restore_backup(copy, file)
    client: Any = copy.client
    keys = [key.decode() for key in client.scan_iter(match=f"*{copy.run}*")]
    assert copy.keys.producer("w", "u") in keys
    assert [key for key in keys if client.pttl(key) > 0 and "scoring" not in key] == []
    copy.close()


def test_an_existing_run_is_refused_and_stays_as_it_is(busy: Run, file: Path) -> None:
    write_backup(busy.store, file)
    before = busy.control_keys(), busy.payload_keys()
    with pytest.raises(RlbufferError, match=r"exists on .*: `rlbuffer reset .* --yes` removes it, --run gives"):
        restore_backup(busy.store, file)
    assert (busy.control_keys(), busy.payload_keys()) == before


def test_every_flipped_byte_is_found_before_anything_is_written(busy: Run, file: Path, tmp_path: Path) -> None:
    write_backup(busy.store, file)
    data = file.read_bytes()
    damaged = tmp_path / "damaged.rlb"
    copy = sibling(busy, f"{busy.store.run}-copy")
    for at in range(0, len(data), max(1, len(data) // 60)):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(BackupError):
            restore_backup(copy, damaged)
    assert not list(copy.client.scan_iter(match=f"*{copy.run}*"))
    copy.close()


def test_a_file_that_is_cut_off_anywhere_is_refused_with_the_place(busy: Run, file: Path, tmp_path: Path) -> None:
    write_backup(busy.store, file)
    data = file.read_bytes()
    cut = tmp_path / "cut.rlb"
    for length in [0, 5, 18, 20, 31, len(data) // 2, len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(BackupError) as caught:
            check_backup(cut)
        told = str(caught.value)
        assert told.startswith(f"{cut} is ")
        assert "cut off at byte" in told or (length < 18 and "is not a backup of rlbuffer" in told)
    first = struct.unpack_from("<Q", data, 18)[0]
    cut.write_bytes(data[: 18 + 12 + first])
    with pytest.raises(BackupError, match=f"is cut off at byte {18 + 12 + first}: it has 1 frames and no end"):
        check_backup(cut)
    cut.write_bytes(data + b"x")
    with pytest.raises(BackupError, match="goes on after its end"):
        check_backup(cut)
    with pytest.raises(BackupError, match=r"cannot read .*: No such file or directory"):
        check_backup(tmp_path / "none.rlb")


def test_payloads_that_retire_while_they_are_copied_stay_until_the_backup_is_done(
    busy: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retire(line: str) -> None:
        if line.startswith("1 of"):
            busy.train(3, oldest_kept=3)
            assert busy.store.retire(busy.token, 3) == 0  # the steps go, their payloads wait
            assert busy.store.meta().retired == 3

    monkeypatch.setattr(backup_module, "BACKUP_PAGE", 1)
    report = write_backup(busy.store, file, retire)
    assert report.missing == 0
    copy = sibling(busy, f"{busy.store.run}-copy")
    restore_backup(copy, file)
    assert copy.verify().ok
    assert busy.store.retire(busy.token, 3) > 0
    assert busy.store.verify().ok
    copy.close()


def test_a_hold_runs_out_by_itself_and_a_backup_that_slept_that_long_begins_again(
    busy: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(line: str) -> None:
        busy.client.zadd(busy.store.keys.holds, {busy.client.zrange(busy.store.keys.holds, 0, -1)[0]: 1})

    monkeypatch.setattr(backup_module, "BACKUP_PAGE", 1)
    with pytest.raises(BackupError, match=r"stood still for over 60 s, and its payloads were released meanwhile"):
        write_backup(busy.store, file, sleep)
    assert list(file.parent.glob("*.rlb*")) == []
    busy.train(3, oldest_kept=2)
    assert busy.store.retire(busy.token, 2) > 0


def test_a_run_that_is_deleted_meanwhile_leaves_no_file(busy: Run, file: Path) -> None:
    with pytest.raises(RunGone, match="was deleted while it was backed up"):
        write_backup(busy.store, file, lambda line: busy.client.unlink(busy.store.keys.meta))
    assert [path.name for path in file.parent.iterdir() if "rlb" in path.name] == []


def test_a_run_that_begins_while_it_is_restored_stays_as_it_is(busy: Run, file: Path) -> None:
    write_backup(busy.store, file)
    copy = sibling(busy, f"{busy.store.run}-copy")

    def begin(line: str) -> None:
        if "is whole" in line:
            copy.open_run()

    with pytest.raises(RlbufferError, match="began while it was being restored: nothing of it was changed"):
        restore_backup(copy, file, begin)
    assert copy.meta().step == 0
    copy.close()


def test_a_run_at_work_is_backed_up_whole_again_and_again(run: Run, file: Path) -> None:
    served = Served(run)
    attempt = run.store.attempt(uuid="t", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0))
    served.serve(rlbuffer.BatcherConfig(64, step_groups=2, max_age=500, lookahead=4))
    served.wait_for(lambda: served.said("ready"), 20)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            n = 0
            while not stop.is_set():
                run.push(f"a.{n}")
                n += 1
                step = run.store.meta().step
                oldest = max(0, step - 3)
                run.store.report(attempt.number, epoch=run.meta.epoch, trained=step, digest="", oldest_kept=oldest)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    other = run.again()
    try:
        served.wait_for(lambda: run.store.meta().retired > 3, 60)
        for n in range(3):
            write_backup(other, file)
            copy = sibling(run, f"{run.store.run}-{n}")
            report = restore_backup(copy, file)
            assert report.missing == 0
            assert copy.verify().findings == ()
            copy.close()
    finally:
        stop.set()
        thread.join(timeout=30)
        served.close()
        other.close()
    assert not failures
    assert not served.errors
    assert run.store.verify().ok


def test_a_trainer_ahead_of_a_restored_run_hands_back_what_it_trained_since(run: Run, file: Path) -> None:
    """The loss of acknowledged writes, by an operator's hand: nothing that was trained trains again."""
    served = Served(run)
    buffer = Buffer(run.store, settings=RunSettings())
    reader = run.closes(buffer.reader(timeout_seconds=60))
    reader.start()
    buffer.policy().announce(0, location="", size=0, checksum="")
    config = rlbuffer.BatcherConfig(64, step_groups=2, max_age=50)
    served.serve(config)
    for n in range(4):
        run.push(f"a.{n}")
    steps = reader.steps()
    trained = [next(steps), next(steps)]
    reader.trained(trained[-1])
    served.stop()
    for n in range(4, 8):
        run.push(f"a.{n}", version=2)
    write_backup(run.store, file)  # step 3 is still to be made
    served.serve(config)
    trained.append(next(steps))
    reader.trained(trained[-1])
    state = reader.state_dict()
    ids = {sample.rollout_id for step in trained for mb in step for sample in mb.samples}
    reader.close()
    served.close()
    run.store.delete_run()
    restore_backup(run.store, file)
    assert run.store.trainer().trained == 2
    again = run.closes(Buffer(run.again(), settings=RunSettings()).reader(timeout_seconds=60))
    again.load_state_dict(state)
    second = Served(run, word_seconds=3600)
    second.serve(config)
    for n in range(20, 24):
        run.push(f"a.{n}", version=3)
    step = next(again.steps())
    assert step.number == 4
    # Said when the recovery is done, which the trainer may hear of first.
    assert second.wait_for(lambda: second.said("recovery"))[0]["step"] == 3
    assert not ids & {sample.rollout_id for mb in step for sample in mb.samples}
    again.close()
    second.close()
    assert run.store.verify().ok
