"""A server of the test's own, with the settings that the test needs: on TCP, with limits, with another clock."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlbuffer.store.server.binary import find_binary

START_SECONDS = 30.0
Ask = Callable[..., Any]
"""Sends a command to the server and gives its answer."""


class OwnServer:
    """A server on a TCP port of this machine with its data under `directory`; ended by leaving the context."""

    def __init__(
        self,
        directory: Path,
        *,
        program: str | None = None,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._program = program or find_binary().path
        self._options = {"appendonly": "yes", "appendfsync": "no", "save": '""'} | dict(options or {})
        self._environment = os.environ | dict(environment or {})
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.log = directory / "server.log"
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_up(self) -> bool:
        """The process runs."""
        return self._process.poll() is None

    def start(self) -> None:
        """Starts it, again on the same port and data; waits until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = {"port": str(self.port), "bind": "127.0.0.1", "dir": f'"{self.directory}"'} | self._options
        config = self.directory / "server.conf"
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # Python ignores SIGXFSZ, and so shall the server: a write above its file limit is an error, no death.
                restore_signals=False,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with redis.Redis(port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return  # users of its own: it answers
            except redis.RedisError as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"no server: {error}\n{self.log.read_text()}") from error
                time.sleep(0.02)

    def ask(self, *command: str | int) -> Any:
        """Its answer to a command, by a connection that is closed again."""
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            return client.execute_command(*command)

    def wait_for(self, fact: Callable[[Ask], object]) -> None:
        """Waits until `fact` of its :meth:`ask` is true."""
        deadline = time.monotonic() + START_SECONDS
        while not fact(self.ask):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server at {self.url} never came to it\n{self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=30)

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.kill()


class Disk:
    """The room that a server has left: a limit on the size of its files."""

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        _, self._most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)

    def fill(self, *, room_bytes: int) -> None:
        (file,) = (self._server.directory / "appendonlydir").glob("*.incr.aof")
        limit = file.stat().st_size + room_bytes
        resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (limit, self._most))

    def clear(self) -> None:
        resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (self._most, self._most))
        with redis.Redis(port=self._server.port) as client:
            deadline = time.monotonic() + 60
            while client.info("persistence")["aof_last_write_status"] != "ok":
                assert time.monotonic() < deadline
                time.sleep(0.05)


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
