"""A worker of one's own is told that what it pushes goes stale, with numbers, and not more often than once a minute."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from own_server import OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.client import stale_pushes
from rlbuffer.client.writer import Writer
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)
GROUPS = 10


@pytest.fixture(autouse=True)
def _at_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_pushes, "STALE_SECONDS", 0.0)
    monkeypatch.setattr(stale_pushes, "LEAST_PUSHED", 2 * GROUPS)


def push(writer: Writer, first: int, count: int) -> None:
    for n in range(first, first + count):
        writer.push(make_group(env="a", group_id=f"a.{n}", size=2, seed=n, worker=writer.worker))


def drop(run: Run, of: str, count: int) -> None:
    """The leader drops groups of a worker as stale."""
    run.lead()
    its = [entry for entry in run.pool() if entry.info is not None and entry.info.worker == of]
    for entry in its[:count]:
        run.drop("stale", [entry])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "stale" in r.getMessage()]


@pytest.mark.parametrize(("whose", "dropped", "is_said"), [("own", 8, True), ("own", 2, False), ("other", 8, False)])
def test_a_writer_hears_that_a_share_of_its_own_pushes_goes_stale(
    run: Run, caplog: pytest.LogCaptureFixture, whose: str, dropped: int, is_said: bool
) -> None:
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        writers = {name: buffer.writer(name) for name in ("own", "other")}
        push(writers["own"], 0, 1)  # it counts from here
        push(writers[whose], 1, GROUPS)
        drop(run, whose, dropped)
        push(writers["own"], 100, 1)
        push(writers["own"], 101, 1)
    found = warnings(caplog)
    assert len(found) == is_said
    for number in (f"{2 * dropped} of the", "max_age", "8 of the last 8 groups") if is_said else ():
        assert number in found[0]


@pytest.mark.usefixtures("server_binary")
def test_a_writer_whose_user_may_not_read_the_history_pushes_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with OwnServer(tmp_path / "server") as server:
        server.ask("ACL", "SETUSER", "worker", "on", ">x", "~*", "+@all", "-xrevrange")
        run = Run(server.url, tmp_path)
        with rlbuffer.connect(server.url.replace("redis://", "redis://worker:x@"), run=run.store.run) as buffer:
            writer = buffer.writer("own")
            push(writer, 0, 1 + GROUPS)
            drop(run, "own", GROUPS)
            push(writer, 100, 2)
            assert len(run.pool()) == 3
        run.close()
    assert not warnings(caplog)
