"""The server is changed while the leader leads: whoever looks at the run reads it, until it is changed back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_runs import Served, start_trainer
from own_server import OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.checks.check import CHECKS
from rlbuffer.checks.server import WhileItLasts
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import server_watch
from rlbuffer.records.waiting import Trouble

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2)


@pytest.fixture
def server(server_binary: object, tmp_path: Path) -> Iterator[OwnServer]:
    with OwnServer(tmp_path / "server", options={"appendfsync": "everysec"}) as made:
        yield made


@pytest.fixture
def served(server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(server_watch, "CHECK_SECONDS", 0.05)
    run = Run(server.url, tmp_path)
    start_trainer(run)
    served = Served(run)
    yield served
    served.close()
    run.close()


def troubles(run: Run) -> list[str]:
    """As `inspect`, `top` and `doctor` have them."""
    return [str(p) for p in read_run_state(run.store).problems if p.kind is Trouble.SERVER]


CHANGES = [
    ("maxmemory-policy", "allkeys-lru", "noeviction", "may evict keys of a run (maxmemory-policy allkeys-lru)"),
    ("maxmemory-policy", "volatile-ttl", "noeviction", "may evict keys of a run (maxmemory-policy volatile-ttl)"),
    ("appendonly", "no", "yes", "no append-only file"),
    ("appendfsync", "no", "everysec", "appendfsync no. It was: append-only file, appendfsync everysec"),
]


@pytest.mark.parametrize(("name", "value", "before", "said"), CHANGES)
def test_a_change_is_a_problem_while_it_lasts(
    server: OwnServer, served: Served, name: str, value: str, before: str, said: str
) -> None:
    run, look = served.run, WhileItLasts(RunSettings(redis_url=server.url)).faults
    assert look() == []
    served.serve(CONFIG, look=look)
    served.wait_for(lambda: [line for line in served.events if line["event"] == "ready"])
    assert troubles(run) == []
    run.client.config_set(name, value)
    (trouble,) = served.wait_for(lambda: troubles(run))
    assert trouble.startswith("The server was changed, and is not as a run needs it: ")
    assert said in trouble
    assert "config set " in trouble or "It was: " in trouble
    served.wait_for(lambda: [line for line in served.events if line["event"] == "trouble" and said in line["text"]])
    run.client.config_set(name, before)
    served.wait_for(lambda: not troubles(run))


def test_what_is_so_from_the_start_was_chosen(server: OwnServer) -> None:
    with OwnServer(server.directory / "another", options={"appendonly": "no"}) as another:
        look = WhileItLasts(RunSettings(redis_url=another.url)).faults
        assert [look(), look()] == [[], []]


def test_every_check_of_the_server_is_made_again_or_watched_by_the_leader_itself() -> None:
    once = {check.name for check in CHECKS if check.level == "server" and not check.lasts}
    assert once == {"server-memory", "run", "server-settings", "learning"}, (
        "MemoryWatch, what it leads, what a start alone sets, and what it names from the trainer's records"
    )
