"""What nobody can be served with: no such server, no such home, no such version or rank, a step that is not its own."""

from __future__ import annotations

import sys
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
from rlbuffer.errors import (
    BatchTimeout,
    ConfigError,
    RlbufferError,
    ServerUnreachable,
    StepRetired,
)
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


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(buffer: rlbuffer.Buffer, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        buffer.reader(rank, 2)


# -- the leader --------------------------------------------------------------------------------------------------------
CONFIG = BatcherConfig(64, step_groups=1)


def lost(served: Served) -> str:
    """Reason why the leader lost its lead, as soon as it says so."""
    return str(served.wait_for(lambda: served.said("leader", state="lost"), 30.0)[0]["reason"])


def leading(served: Served) -> Any:
    store = served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 30.0)
    return store


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
