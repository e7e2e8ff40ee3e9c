"""What nobody can be served with: no such server, no such home, no such version or rank, a step that is not its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlbuffer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import (
    BatchTimeout,
    ConfigError,
    RlbufferError,
)
from rlbuffer.store.server.embedded import ensure

pytest_plugins = ("store_fixtures",)


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
