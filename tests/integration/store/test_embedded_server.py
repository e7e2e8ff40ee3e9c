"""The embedded server with real processes, real kills and real files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError, ServerUnreachable
from rlbuffer.process.file_locks import exclusive, is_held
from rlbuffer.store.server import embedded, embedded_reaper
from rlbuffer.store.server.binary import ServerBinary
from rlbuffer.store.server.embedded import ensure

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

SETTINGS = ServerSettings(maxmemory="64mb")

USER = """
import json, sys
from pathlib import Path
from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.server import embedded
from rlbuffer.store.server.embedded import ensure
home, how = Path(sys.argv[1]), sys.argv[2]
embedded.UNUSED_SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
print("imported", flush=True)
sys.stdin.readline()
server = ensure(home, ServerSettings(maxmemory="64mb"))
print(json.dumps({"pid": server.pid}), flush=True)
sys.stdin.readline()
if how == "release":
    server.release()
"""


class User:
    """A process that uses the home's server: `join`, then `leave`."""

    def __init__(self, home: Path, how: str = "release", *, unused_seconds: float = 60.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(home), how, str(unused_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "the user's process has said nothing for 60 s"
        return self.process.stdout.readline()

    def begin(self) -> None:
        assert self.read() == "imported\n"
        self._say()

    def join(self) -> dict[str, Any]:
        self.begin()
        record: dict[str, Any] = json.loads(self.read())
        return record

    def leave(self) -> None:
        self._say()
        assert self.process.wait(30) == 0
        self.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, number)
        self.process.wait(30)
        self.close()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def client(address: str) -> redis.Redis:
    return redis.Redis.from_url(address, protocol=3)


def is_at_work(home: Path) -> bool:
    return is_held(home / "server")


def wait_until_dead(home: Path) -> None:
    deadline = time.monotonic() + 10
    while is_at_work(home):
        assert time.monotonic() < deadline, "the server did not end"
        time.sleep(0.01)


def test_the_server_is_private_durable_and_never_evicts(home: Path) -> None:
    server = ensure(home, ServerSettings(maxmemory="64mb", appendfsync="always"))
    directory = home / "server"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for private in ("server.conf", "server.json", "users.lock", "start.lock"):
        assert stat.S_IMODE((directory / private).stat().st_mode) == 0o600, private
    assert stat.S_IMODE((directory / "server.sock").stat().st_mode) == 0o700
    with client(server.address) as c:
        expected = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory": str(64 << 20),
            "maxmemory-policy": "noeviction",
        }
        assert {name: c.config_get(name)[name] for name in expected} == expected
    server.release()


def test_the_last_user_stops_the_server_and_its_data_are_there_next_time(home: Path) -> None:
    first, second = ensure(home, SETTINGS), ensure(home, SETTINGS)
    assert first.pid == second.pid
    assert second.address == first.address == f"unix://{home}/server/server.sock?db=0"
    with client(first.address) as c:
        c.set("k", "v")
    assert first.release() is False
    assert is_at_work(home)
    assert second.release() is True
    assert second.release() is False, "a second release does nothing"
    assert not is_at_work(home)
    again = ensure(home, SETTINGS)
    assert again.pid != first.pid
    with client(again.address) as c:
        assert c.get("k") == b"v"
    again.release()


def test_four_processes_at_once_start_exactly_one(home: Path) -> None:
    users = [User(home) for _ in range(4)]
    for user in users:
        user.begin()
    told = [json.loads(user.read()) for user in users]
    assert len({t["pid"] for t in told}) == 1
    for user in users[:-1]:
        user.leave()
    assert is_at_work(home), "one user is left"
    users[-1].leave()
    assert not is_at_work(home)


def test_a_server_at_work_is_joined_while_another_process_waits_to_start_or_stop_one(home: Path) -> None:
    first = ensure(home, SETTINGS)
    with exclusive(home / "server" / "start.lock", time.monotonic() + 5):
        second = ensure(home, SETTINGS, timeout_seconds=0.5)
    assert second.pid == first.pid
    assert first.release() is False
    assert second.release() is True


def test_nobody_joins_a_server_that_its_last_user_is_about_to_stop(home: Path) -> None:
    last = ensure(home, SETTINGS)
    with exclusive(home / "server" / "start.lock", time.monotonic() + 5):
        assert last._users is not None
        fcntl.flock(last._users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as its release does before it stops the server
        with pytest.raises(
            ServerUnreachable, match="another process has been starting or stopping the embedded server"
        ):
            ensure(home, SETTINGS, timeout_seconds=0.1)
    assert last.release() is True


def test_a_program_that_forgets_to_release_does_so_at_its_end(home: Path) -> None:
    user = User(home, how="forget")
    user.join()
    user.leave()
    assert not is_at_work(home)


def test_the_server_outlives_a_crashed_user_and_is_found_again(home: Path) -> None:
    user = User(home)
    pid = user.join()["pid"]
    user.kill()
    found = ensure(home, SETTINGS)
    assert found.pid == pid
    assert found.release() is True, "the crashed user is no user any more"


def test_who_looks_while_a_server_starts_is_given_one_that_answers(
    home: Path, server_binary: ServerBinary, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = home / "slow-server"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 1\nexec {server_binary.path} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("RLBUFFER_SERVER_BIN", str(slow))
    user = User(home)
    user.begin()
    while (found := embedded.find(home)) is None:
        time.sleep(0.01)
    with client(found) as asker:
        assert asker.ping()
    user.leave()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_server_whose_last_user_was_killed_ends_and_keeps_its_data(home: Path, number: int) -> None:
    first, second = User(home, unused_seconds=0.5), User(home)
    first.join()
    second.join()
    first.kill(number)
    found = embedded.find(home)
    assert found is not None
    with client(found) as asker:
        asker.set("kept", "1")
    second.kill(number)
    wait_until_dead(home)
    again = ensure(home, SETTINGS)
    with client(again.address) as asker:
        assert asker.get("kept") == b"1"
    assert again.release() is True


def test_a_client_without_a_lock_is_a_user_for_the_reaper(home: Path) -> None:
    server = ensure(home, SETTINGS)
    path = str(home / "server" / "server.sock")
    assert not embedded_reaper.has_clients(path)
    with client(server.address) as asker:
        asker.ping()
        assert embedded_reaper.has_clients(path)
    server.release()
    assert embedded_reaper.has_clients(path), "nobody answers: it is left alone"


def test_what_watches_the_server_ends_with_it(home: Path) -> None:
    server = ensure(home, SETTINGS)
    reaper = embedded._children[-1]
    assert reaper.poll() is None
    server.release()
    assert reaper.wait(30) == 0


def test_ctrl_c_in_the_starters_terminal_does_not_reach_the_server(home: Path) -> None:
    user = User(home)
    pid = user.join()["pid"]
    keeper = ensure(home, SETTINGS)
    user.kill(signal.SIGINT)
    assert (keeper.pid, is_at_work(home)) == (pid, True)
    keeper.release()


def test_a_killed_server_is_started_again_with_every_acknowledged_write(home: Path) -> None:
    server = ensure(home, ServerSettings(maxmemory="64mb", appendfsync="no"))
    with client(server.address) as c:
        for i in range(200):
            c.rpush("list", i)
    os.kill(server.pid, signal.SIGKILL)
    again = ensure(home, SETTINGS)
    assert again.pid != server.pid
    with client(again.address) as c:
        assert c.llen("list") == 200
    server.release()
    again.release()


def test_a_stale_pid_file_and_socket_do_not_mislead(home: Path) -> None:
    directory = home / "server"
    directory.mkdir()
    # The kernel has given the number to another process since: this one.
    record = {"pid": os.getpid(), "socket": str(directory / "server.sock"), "program": "valkey-server"}
    (directory / "server.json").write_text(json.dumps(record))
    (directory / "server.sock").write_text("")
    assert not is_at_work(home)
    server = ensure(home, SETTINGS)
    assert server.pid != os.getpid()
    assert server.release() is True


def test_a_server_that_hangs_is_reported_and_never_doubled(home: Path) -> None:
    server = ensure(home, SETTINGS)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerUnreachable) as caught:
            ensure(home, SETTINGS, timeout_seconds=1.0)
        expected = f"the embedded server (pid {server.pid}) listens but does not answer at {home}/server/server.sock."
        assert str(caught.value).splitlines()[0] == expected
        assert "ready to accept connections" in str(caught.value).lower()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    again = ensure(home, SETTINGS)
    assert again.pid == server.pid
    server.release()
    again.release()


@pytest.fixture
def deep_home() -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="rlb-deep-"))
    yield top / ("d" * 90)
    shutil.rmtree(top, ignore_errors=True)


def test_a_long_home_gets_its_socket_in_a_private_directory(deep_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ensure(deep_home, SETTINGS)
    socket = Path(server.address.removeprefix("unix://").removesuffix("?db=0"))
    assert deep_home not in socket.parents
    assert len(os.fsencode(socket)) < 100
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    # Another process may have another temporary directory: the record tells it where.
    monkeypatch.setattr(tempfile, "tempdir", str(deep_home))
    found = ensure(deep_home, SETTINGS)
    assert found.address == server.address
    assert (found.release(), server.release()) == (False, True)
    assert not socket.parent.exists()


def test_a_socket_directory_open_to_others_is_refused(deep_home: Path) -> None:
    server = ensure(deep_home, SETTINGS)
    directory = Path(server.address.removeprefix("unix://").removesuffix("?db=0")).parent
    server.release()
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    try:
        with pytest.raises(ServerUnreachable) as caught:
            ensure(deep_home, SETTINGS)
    finally:
        directory.rmdir()
    assert str(directory) in str(caught.value)


def test_a_forked_child_is_a_user_of_its_own(home: Path) -> None:
    server = ensure(home, SETTINGS)
    leave, told = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told[1], b"0" if server._users is None else b"1")
        os.read(leave[0], 1)
        os._exit(0)
    try:
        assert os.read(told[0], 1) == b"1"
        assert server.release() is False, "the child still uses it"
    finally:
        os.write(leave[1], b"x")
        os.waitpid(child, 0)
        for end in (*leave, *told):
            os.close(end)
    assert is_at_work(home)


def test_a_server_that_cannot_start_says_why_with_its_log(home: Path) -> None:
    ensure(home, SETTINGS).release()
    manifest = home / "server" / "appendonlydir" / "appendonly.aof.manifest"
    manifest.write_text("nonsense\n")
    with pytest.raises(ServerUnreachable) as caught:
        ensure(home, SETTINGS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the embedded server ended before it answered."
    assert lines[1] == f"  The last lines of {home}/server/server.log:"
    assert any("AOF manifest" in line for line in lines[2:]), lines


def test_a_user_of_a_home_that_was_removed_does_not_stop_the_server_of_the_new_one(home: Path) -> None:
    old = ensure(home, ServerSettings())
    os.kill(old.pid, signal.SIGKILL)
    wait_until_dead(home)  # until then it may still write files
    shutil.rmtree(home)
    new = ensure(home, ServerSettings())
    assert not old.release()
    assert is_at_work(home)
    assert new.release()


# -- a server at work is found, or left alone, whatever was done to its files ------------------------------------------


@pytest.mark.parametrize("gone", ["server.sock", "everything"])
def test_a_server_whose_files_were_removed_is_never_doubled(
    home: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(embedded, "SOCKET_SECONDS", 0.2)
    server = ensure(home, SETTINGS)
    files = ("server.sock", "server.json", "server.conf", "users.lock", "start.lock", "alive.lock")
    for name in files if gone == "everything" else [gone]:
        (home / "server" / name).unlink(missing_ok=True)
    try:
        with pytest.raises(ServerUnreachable) as caught:
            ensure(home, SETTINGS)
        assert f"{home}/server" in str(caught.value)
        assert is_at_work(home)
    finally:
        os.kill(server.pid, signal.SIGTERM)
        wait_until_dead(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace is root's to make")
def test_a_server_of_another_container_is_joined(home: Path) -> None:
    server = ensure(home, SETTINGS)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", USER, str(home), "release"]
    other = subprocess.run(command, input="\n\n", capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 0, other.stderr
    assert json.loads(other.stdout.splitlines()[1])["pid"] == server.pid
    assert is_at_work(home)
    os.kill(server.pid, signal.SIGTERM)
    wait_until_dead(home)
    server.release()


@pytest.mark.parametrize("zeros", [1, 4096, 3 << 20])
def test_zeros_behind_the_files_end_are_cut_and_said(home: Path, caplog: pytest.LogCaptureFixture, zeros: int) -> None:
    server = ensure(home, SETTINGS)
    with client(server.address) as c:
        c.set("k", 1)
    server.release()
    (part,) = (home / "server" / "appendonlydir").glob("*.incr.aof")
    with part.open("ab") as file:
        file.write(bytes(zeros))
    again = ensure(home, SETTINGS)
    with client(again.address) as c:
        assert c.get("k") == b"1"
    again.release()
    assert [record.args for record in caplog.records] == [(str(part), zeros)]


# -- homes that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_home_that_the_filesystem_refuses_is_a_setting_to_change(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    (home / "file").write_text("")
    with pytest.raises(ConfigError) as below:
        ensure(home / "file" / "home", SETTINGS)
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(ConfigError) as caught:
        ensure(home, SETTINGS)
    assert below.value.setting == caught.value.setting == "home"
    assert str(home) in str(caught.value)
