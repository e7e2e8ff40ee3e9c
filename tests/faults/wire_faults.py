"""TCP proxies in a process of their own, between every client and its servers, which spoil what they are asked to.

One JSON object per line on stdin arms a fault; it strikes the next request that fits, and one line on stdout tells so::

    {"id": 7, "kind": "lost_reply", "client": "worker", "moves": true, "seconds": 0, "share": 0.5}
    {"id": 7, "client": "worker-vcopy"}

Kinds: ``unsent`` (the connection breaks before the request is sent), ``lost_reply`` (the server has done the work, the
reply is swallowed and the connection breaks), ``mid_value`` (the reply breaks off after a `share` of it), ``delay``
(the reply comes `seconds` late), ``half_open`` (nothing comes any more, but the connection stands for `seconds`).
Connections break with a reset, as of a host that went away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

KINDS = {"lost_reply": 34, "unsent": 20, "mid_value": 24, "delay": 18, "half_open": 4}
"""Kind -> its share of the faults, in percent."""
CLIENTS = ("worker", "rank", "serve", "")
"""Name of the connection that a fault strikes, its beginning; "" any."""
WATCHERS = "sentinel-"
"""Name of the connection of a sentinel, its beginning: they are left alone."""
NAME = re.compile(rb"SETNAME\r\n\$\d+\r\n([^\r\n]+)\r\n")


def draw_faults(seed: int, count: int) -> list[dict[str, Any]]:
    """The faults of a run, in order."""
    draw = random.Random(f"wire {seed}")
    kinds = draw.choices(list(KINDS), weights=list(KINDS.values()), k=count)
    return [
        {
            "id": i,
            "kind": kind,
            "client": draw.choice(CLIENTS),
            # Half of them strike a script: the other requests are mostly looks, of which there are many more.
            "moves": draw.random() < 0.5,
            "seconds": 25.0 if kind == "half_open" else round(draw.uniform(0.05, 3.0), 2),
            "share": draw.random(),
        }
        for i, kind in enumerate(kinds)
    ]


class FaultProxy:
    """The proxies' process, as the run that uses it sees it."""

    def __init__(self, server_ports: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__), *map(str, server_ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: list[int] = json.loads(self._line())["ports"]
        """One before each server."""
        self.url = f"redis://127.0.0.1:{self.ports[0]}/0"
        self.struck: dict[int, str] = {}
        """Fault -> the client that it struck."""
        threading.Thread(target=self._listen, daemon=True).start()

    def arm(self, fault: dict[str, Any]) -> None:
        """The next request that fits is spoiled."""
        if self._process.stdin is None:
            raise RuntimeError("the proxy was started without a pipe")
        self._process.stdin.write(json.dumps(fault) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # the pipe is closed: the proxy has ended
            while line := self._line():
                said = json.loads(line)
                self.struck[said["id"]] = said["client"]

    def _line(self) -> str:
        return "" if self._process.stdout is None else self._process.stdout.readline()


# -- the process -------------------------------------------------------------------------------------------------------
class _Proxy:
    def __init__(self, server_ports: Sequence[int]) -> None:
        self.server_ports = server_ports
        self.armed: list[dict[str, Any]] = []

    async def serve(self) -> None:
        listeners = [
            await asyncio.start_server(partial(self._connected, port), "127.0.0.1", 0) for port in self.server_ports
        ]
        _tell({"ports": [listener.sockets[0].getsockname()[1] for listener in listeners]})
        commands = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while line := await commands.readline():
            self.armed.append(json.loads(line))

    async def _connected(self, port: int, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            _reset(near_out)  # the server is away
            return
        line = _Line(self, near_out, far_out)
        with contextlib.suppress(OSError):
            await asyncio.gather(line.requests(near_in), line.replies(far_in))
        line.cut()

    def take(self, client: str, data: bytes) -> dict[str, Any] | None:
        """The first armed fault that strikes this request."""
        for fault in self.armed:
            if client.startswith(fault["client"]) and (not fault["moves"] or b"EVALSHA" in data):
                self.armed.remove(fault)
                _tell({"id": fault["id"], "client": client})
                return fault
        return None


class _Line:
    """One client's connection."""

    def __init__(self, proxy: _Proxy, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._proxy, self._near, self._far = proxy, near, far
        self._client = ""
        self._fault: dict[str, Any] | None = None
        self._is_dead = False

    async def requests(self, near_in: asyncio.StreamReader) -> None:
        while data := await near_in.read(1 << 16):
            if self._is_dead:
                continue
            if not self._client:
                found = NAME.search(data)
                self._client = found[1].decode() if found else ""
            elif self._fault is None and not self._client.startswith(WATCHERS):
                self._fault = self._proxy.take(self._client, data)
                if self._fault is not None and self._fault["kind"] == "unsent":
                    break
            self._far.write(data)
            await self._far.drain()
        self.cut()

    async def replies(self, far_in: asyncio.StreamReader) -> None:
        while data := await far_in.read(1 << 16):
            fault, self._fault = self._fault, None
            if fault is None:
                self._near.write(data)
                await self._near.drain()
            elif fault["kind"] == "delay":
                await asyncio.sleep(fault["seconds"])
                self._near.write(data)
            elif fault["kind"] == "half_open":
                self._is_dead = True
                await asyncio.sleep(fault["seconds"])
                break
            else:
                if fault["kind"] == "mid_value":
                    self._near.write(data[: int(fault["share"] * len(data))])
                    await asyncio.sleep(0.02)  # a reset at once would overtake it
                break
        self.cut()

    def cut(self) -> None:
        for end in (self._near, self._far):
            _reset(end)


def _reset(end: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()


def _tell(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Proxy(list(map(int, sys.argv[1:]))).serve())
