"""Exact texts: connections, the embedded server's files, the public face of a run and the leader's own losses."""

from __future__ import annotations

import fcntl
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import ServerSettings
from rlbuffer.daemon.watches import Envs
from rlbuffer.errors import (
    BatchTimeout,
    ConfigError,
    RlbufferError,
    ServerUnreachable,
    StepRetired,
)
from rlbuffer.process.file_locks import exclusive
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server import embedded_files
from rlbuffer.store.server.embedded import ensure

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    made = Served(run)
    yield made
    made.close()
    run.close()


@pytest.fixture
def buffer() -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect("memory://") as made:
        yield made


# -- connections -------------------------------------------------------------------------------------------------------
def test_without_the_extra_the_memory_server_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fakeredis", None)
    with pytest.raises(ConfigError) as caught:
        rlbuffer.connect("memory://")
    assert "rlbuffer[memory]" in str(caught.value)


def test_a_lock_that_another_process_holds_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "start.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ServerUnreachable) as caught, exclusive(path, time.monotonic()):
            pass
    finally:
        os.close(descriptor)
    assert str(caught.value) == f"another process has been starting or stopping the embedded server: {path}"


def test_a_socket_path_that_fits_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_files, "MAX_SOCKET_PATH_BYTES", 8)
    with pytest.raises(ServerUnreachable) as caught:
        embedded_files.socket_path(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_home_that_cannot_be_made_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        ensure(tmp_path / "file" / "home", ServerSettings())
    assert caught.value.setting == "home"


# -- the public face ---------------------------------------------------------------------------------------------------
def test_a_version_is_announced_by_a_trainer_only(buffer: rlbuffer.Buffer) -> None:
    with pytest.raises(RlbufferError) as caught:
        buffer.policy().announce(0, location="", size=0, checksum="")
    assert str(caught.value) == ("no trainer has started: call reader.start() on rank 0 before announcing a version")


def test_a_version_that_does_not_come_in_time_is_named_with_the_one_that_is_there(buffer: rlbuffer.Buffer) -> None:
    with pytest.raises(BatchTimeout) as caught:
        buffer.policy().wait(3, timeout_seconds=0.0)
    assert str(caught.value) == "policy version 3 was not announced within 0 s; the current one is -1"


@pytest.mark.parametrize(
    ("rank", "said"),
    [(-1, "reader: rank: expected an integer from 0 on, got -1"), (2, "rank 2 is outside world size 2")],
)
def test_a_rank_outside_the_world_is_refused(buffer: rlbuffer.Buffer, rank: int, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        buffer.reader(rank, 2)
    assert str(caught.value) == said


# -- the leader --------------------------------------------------------------------------------------------------------
CONFIG = BatcherConfig(64, step_groups=1)


def lost(served: Served) -> str:
    """Reason why the leader lost its lead, as soon as it says so."""
    return str(served.wait_for(lambda: served.said("leader", state="lost"), 30.0)[0]["reason"])


def leading(served: Served) -> Any:
    store = served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 30.0)
    return store


def test_a_server_that_was_away_is_read_again(served: Served) -> None:
    leading(served).connection.losses += 1
    assert lost(served) == f"the server of run {served.run.store.run!r} was away: everything is read from it again"


def test_a_leader_whose_lease_another_holds_names_it(served: Served) -> None:
    leading(served)
    run = served.run
    run.client.delete(run.store.keys.lease)
    assert run.store.lease("somebody", ttl_seconds=60.0).held
    lease = f"the lease of run {run.store.run!r}"
    assert lost(served) in (  # of whoever meets it first: the one that renews it, or the leader's first turn
        f"{lease} lapsed after 20 s without a renewal; somebody holds it now",
        f"{lease} is not this batcher's any more: somebody holds it ({run.store.keys.lease})",
    )


def test_a_leader_whose_step_is_retired_at_once_was_not_the_only_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = served.run, leading(served)

    def retired(step: int, *, block_seconds: float) -> None:
        raise StepRetired

    monkeypatch.setattr(store, "wait_step", retired)
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    run.push("a.0")
    assert lost(served) == "step 1 was trained and retired meanwhile: another leads this run"


def test_other_settings_than_the_runs_are_refused_with_each_difference(served: Served) -> None:
    leading(served)
    served.stop()
    served.serve(BatcherConfig(64, step_groups=2, max_age=3))
    served.wait_for(lambda: served.errors, 30.0, checks_errors=False)
    assert "batcher.max_age: 1 -> 3; batcher.step_groups: 1 -> 2" in str(served.errors[0])


def test_an_env_that_stops_the_run_is_named_with_the_setting(served: Served) -> None:
    config = BatcherConfig(64, on_dead_env="stop")
    watch = Envs(config, rlbuffer.Batcher(config))
    with pytest.raises(RlbufferError) as caught:
        watch.report_silent({"math": 119.4}, 7)
    said = str(caught.value)
    assert ("step 7" in said, "math" in said, "batcher.on_dead_env" in said) == (True, True, True)
