"""A worker's heartbeat: beats, renewals, and a goodbye that does not wait for a server that is away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

from rlbuffer.errors import ServerUnreachable
from rlbuffer.records.group import Ticket
from rlbuffer.worker.heartbeat import WorkerHeartbeat

TICKET = Ticket(env="a", number=3, group_id="a.3")


class Server:
    """Takes heartbeats and renewals while it `is_there`."""

    def __init__(self) -> None:
        self.is_there = True
        self.breaks: list[Exception] = []
        """What the next heartbeats raise."""
        self.heard: list[Mapping[str, Any]] = []
        self.refused = 0
        self.renewed: list[tuple[Ticket, ...]] = []

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any], /) -> None:
        if not self.is_there:
            self.refused += 1
            raise ServerUnreachable("the server is away")
        if self.breaks:
            raise self.breaks.pop(0)
        self.heard.append({"kind": kind, "name": name} | dict(record))

    def renew(self, tickets: Iterable[Ticket], /) -> None:
        self.renewed.append(tuple(tickets))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("rlbuffer.process.heartbeat.BEAT_SECONDS", 0.01)
    return Server()


@pytest.fixture
def heartbeat(server: Server) -> Iterator[WorkerHeartbeat]:
    made = WorkerHeartbeat(server, "w0", "a")
    made.start()
    yield made
    made.close()


def eventually(fact: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_the_last_heartbeat_says_how_it_ended(server: Server, heartbeat: WorkerHeartbeat) -> None:
    eventually(lambda: server.heard)
    heartbeat.close()
    before = len(server.heard)
    heartbeat.groups = 7
    heartbeat.close()
    assert [record["groups"] for record in server.heard[before:]] == [7]
    assert {(record["kind"], record["name"], record["env"]) for record in server.heard} == {("worker", "w0", "a")}


def test_leaving_does_not_ask_a_server_that_was_away_at_the_last_beat(
    server: Server, heartbeat: WorkerHeartbeat
) -> None:
    server.is_there = False
    eventually(lambda: server.refused)
    heartbeat.close()
    before = server.refused
    heartbeat.close()
    assert server.refused == before
    assert heartbeat.error == "the server is away"


def test_tickets_are_renewed_while_they_are_held_and_not_after(server: Server, heartbeat: WorkerHeartbeat) -> None:
    other = Ticket(env=TICKET.env, number=99, group_id=f"{TICKET.env}.99")
    heartbeat.hold(server)
    heartbeat.add([TICKET, other])
    heartbeat.remove([other])
    eventually(lambda: server.renewed)
    assert heartbeat.drop_tickets() == [TICKET]
    before, beats = len(server.renewed), len(server.heard)
    eventually(lambda: len(server.heard) > beats + 2)
    assert len(server.renewed) == before
    assert set(server.renewed) <= {(TICKET,), (TICKET, other)}
    assert server.renewed[-1] == (TICKET,)


def test_an_event_loop_takes_and_lets_go_of_tickets_while_a_renewal_waits_for_the_server(
    server: Server, heartbeat: WorkerHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_back = threading.Event(), threading.Event()

    def renew(tickets: Iterable[Ticket], /) -> None:
        asked.set()
        assert is_back.wait(30)

    monkeypatch.setattr(server, "renew", renew)
    heartbeat.hold(server)
    heartbeat.add([TICKET])
    assert asked.wait(10)
    heartbeat.remove([TICKET])
    heartbeat.add([TICKET])
    assert heartbeat.drop_tickets() == [TICKET]
    settling = threading.Thread(target=heartbeat.wait_for_renewal)
    settling.start()
    assert settling.is_alive(), "a ticket is given back behind the renewal"
    is_back.set()
    settling.join(10)
    assert not settling.is_alive()


def test_a_beat_that_fails_in_any_way_is_told_and_the_next_one_tries_again(
    server: Server, heartbeat: WorkerHeartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    server.breaks = [ZeroDivisionError("not of ours"), ZeroDivisionError("not of ours"), KeyError("nor this")]
    eventually(lambda: not server.breaks)
    eventually(lambda: server.heard and "nor this" in str(server.heard[-1]["problems"]))
    told = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert told == [ZeroDivisionError, KeyError], "each once"


def test_a_group_that_has_failed_once_hides_no_later_trouble(server: Server) -> None:
    heartbeat = WorkerHeartbeat(server, "w0", "a")
    heartbeat.failure("KeyError", "KeyError: 'x'")
    assert [problem["kind"] for problem in heartbeat.record()["problems"]] == ["env_fails"]
    heartbeat.trouble("version 3: its files are gone; version 2 goes on sampling")
    told = {problem["kind"]: problem["detail"] for problem in heartbeat.record()["problems"]}
    assert told.keys() == {"env_fails", "worker_stuck"}
    assert "version 3" in told["worker_stuck"]


class Hours:
    """The clock of a heartbeat's thread, which waits by it until `until`."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 0.0, until
        self.at: dict[float, Callable[[], object]] = {}
        """What happens in the pauses that begin then."""

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.at.pop(self.now, lambda: None)()
        return self.now >= self.until


@pytest.mark.parametrize(
    ("events", "beats"),
    [
        ({}, [0, 2, 4, 6, 8, 10, 12]),
        ({2: lambda heartbeat: heartbeat.carried(5.0)}, [0, 8, 10, 12]),  # 2 + 5 + 1: the next request is late
        ({2: lambda heartbeat: heartbeat.carried(5.0), 6: lambda heartbeat: heartbeat.carried(5.0)}, [0, 12]),
        (
            {
                2: lambda heartbeat: (heartbeat.to_carry(), heartbeat.carried(5.0)),
                4: lambda heartbeat: trouble(heartbeat),
            },
            [0, 4, 6, 8, 10, 12],
        ),
        ({2: lambda heartbeat: (trouble(heartbeat), heartbeat.to_carry(), heartbeat.carried(5.0))}, [0, 8, 10, 12]),
        (
            {2: lambda heartbeat: heartbeat.carried(5.0), 4: lambda heartbeat: heartbeat.add([TICKET])},
            [0, 4, 6, 8, 10, 12],
        ),
    ],
    ids=["never told", "late", "told again", "a new trouble", "a trouble that was told", "a ticket"],
)
def test_the_thread_is_silent_while_requests_tell_of_the_worker(
    events: Mapping[int, Callable[[WorkerHeartbeat], object]], beats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, heard = Hours(until=14), list[float]()
    monkeypatch.setattr("rlbuffer.process.heartbeat.time.monotonic", lambda: clock.now)
    server = Server()
    monkeypatch.setattr(server, "heartbeat", lambda *args: heard.append(clock.now))
    heartbeat = WorkerHeartbeat(server, "w0", "a")
    clock.at = {at: lambda event=event: event(heartbeat) for at, event in events.items()}  # type: ignore[misc]
    heartbeat._closed = clock  # type: ignore[assignment]
    heartbeat._run()
    assert heard == beats


def trouble(heartbeat: WorkerHeartbeat) -> None:
    heartbeat.error = "something is wrong"


def test_a_record_that_cannot_be_made_goes_with_no_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> str:
        raise FileNotFoundError("the working directory is gone")

    heartbeat = WorkerHeartbeat(server, "w0", "a")
    assert heartbeat.to_carry() == heartbeat.record()
    monkeypatch.setattr(heartbeat._calls, "sentence", lost)
    assert heartbeat.to_carry() is None


def test_rates_are_per_second_since_the_oldest_beat(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 100.0, 104.0))
    monkeypatch.setattr("rlbuffer.process.heartbeat.time.monotonic", lambda: next(clock))
    heartbeat = WorkerHeartbeat(server, "w0", "a")
    heartbeat.rollouts, heartbeat.tokens = 8, 2000
    record = heartbeat.record()
    assert (record["rollouts_per_second"], record["tokens_per_second"]) == (2.0, 500.0)


class Hash(Server):
    """A server on which the last heartbeat of a name stands, as on a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Mapping[str, Any] | None = None

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any], /) -> Mapping[str, Any] | None:
        super().heartbeat(kind, name, record)
        before, self.last = self.last, dict(record)
        return before


OTHER = {"pid": 7, "host": "elsewhere", "space": "of its own", "started": 1.0}


def test_two_workers_of_one_name_say_that_they_are_two_until_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.process.heartbeat.BEAT_SECONDS", 0.01)
    monkeypatch.setattr("rlbuffer.process.heartbeat.TWIN_SECONDS", 0.3)
    server = Hash()
    server.last = OTHER  # the process before this one: nobody knows whether it lives
    heartbeat = WorkerHeartbeat(server, "w0", "a")
    heartbeat.start()
    try:
        eventually(lambda: len(server.heard) > 2)
        assert heartbeat.twin() is None
        assert [record for record in server.heard if record["problems"]] == []
        server.last = OTHER  # it has beaten again
        eventually(lambda: "pid 7 on elsewhere" in str(server.heard[-1]["problems"]))
        assert f"pid {os.getpid()} on {server.heard[-1]['host']}" in str(server.heard[-1]["problems"])
        assert heartbeat.to_carry() is None, "the thread looks who else is there"
        eventually(lambda: server.heard[-1]["problems"] == [])
        server.last = {**OTHER, "left": True}
        beats = len(server.heard)
        eventually(lambda: len(server.heard) > beats + 2)
        assert heartbeat.twin() is None
    finally:
        heartbeat.close()
    assert server.heard[-1]["left"]
