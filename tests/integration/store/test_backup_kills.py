"""`backup` and `restore` killed half-way: nothing half is left that somebody could take for a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.backup.backup import write_backup
from rlbuffer.store.backup.restore import restore_backup
from rlbuffer.store.redis_store import open_store

HALF_A_BACKUP = """
import sys, time
from pathlib import Path
from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.backup import backup
from rlbuffer.store.redis_store import open_store
def half(line):
    print("half", flush=True)
    time.sleep(600)
backup.BACKUP_PAGE = 1
url, run, home, file = sys.argv[1:]
store = open_store(url, run=run, home=Path(home), server=ServerSettings())
backup.write_backup(store, Path(file), half)
"""
HALF_A_RESTORE = """
import sys, time
from pathlib import Path
from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.backup import restore
from rlbuffer.store.redis_store import open_store
def half(line):
    if "put in place" in line:
        print("half", flush=True)
        time.sleep(600)
url, run, home, file = sys.argv[1:]
store = open_store(url, run=run, home=Path(home), server=ServerSettings())
restore.restore_backup(store, Path(file), half)
"""


@pytest.fixture
def busy(redis_url: str, tmp_path: Path) -> Run:
    run = Run(redis_url, tmp_path)
    run.step("a.0", "a.1")
    run.push("a.2")
    return run


def kill_half_way(script: str, run: Run, name: str, file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script, run.url, name, str(run.home), str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()


def test_a_backup_that_is_killed_leaves_no_file_under_its_name(busy: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.rlb"
    kill_half_way(HALF_A_BACKUP, busy, busy.store.run, file)
    assert not file.exists()
    assert [path.suffix for path in tmp_path.glob(".run.rlb.*")] == [".part"]
    assert busy.client.zcard(busy.store.keys.holds) == 1
    assert 0 < busy.client.pttl(busy.store.keys.holds) <= 120_000  # and then payloads may be swept again
    assert write_backup(busy.store, file).missing == 0
    assert file.exists()
    assert busy.store.verify().ok


def test_a_restore_that_is_killed_leaves_no_run_and_may_be_repeated(busy: Run, tmp_path: Path) -> None:
    file, name = tmp_path / "run.rlb", f"{busy.store.run}-copy"
    write_backup(busy.store, file)
    kill_half_way(HALF_A_RESTORE, busy, name, file)
    copy = open_store(busy.url, run=name, home=tmp_path, server=ServerSettings())
    assert name not in copy.runs()
    left = list(copy.client.scan_iter(match=f"{{rlb:{name}}}:*"))
    assert left
    assert all(b":restoring:" in key and copy.client.pttl(key) > 0 for key in left)
    restore_backup(copy, file)
    assert copy.verify().findings == ()
    assert copy.ledger() == busy.store.ledger()
    copy.close()
