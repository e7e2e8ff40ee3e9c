"""Proxies before what a gateway asks, its server and its engine, which kill it in a chosen window of a call.

    renders -> [RENDERED] -> engine answers -> [ANSWERED] -> records -> [RECORDED] -> the agent hears
    ends    -> [ENDED]    -> pushes

A window is armed, and the first gateway that is in it is killed with SIGKILL: before its request goes on, or its
server's reply comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

RENDERED, ANSWERED, RECORDED, ENDED = "engine at work", "not recorded yet", "not told yet", "not pushed yet"
WINDOWS = (RENDERED, ANSWERED, RECORDED, ENDED)
GENERATE = re.compile(rb"POST /inference/v1/generate\b.*?content-length: (\d+)", re.I | re.S)
LEAST_BODY = 500
"""Bytes of a request for an answer; a gateway that starts asks for one token with fewer."""
AT_WORK_SECONDS = 0.1
"""From the request to the engine until the kill, in the first window; shorter than its answer takes."""


@dataclass
class Place:
    """One gateway's, whichever process it is now."""

    store_port: int = 0
    engine_port: int = 0
    pid: int = 0


class Windows:
    """The proxies of some gateways, on a thread of their own; used as a context.

    Args:
        places: how many gateways.
        store_port, engine_port: what they ask.
        scripts: name -> digest, of ``call`` and ``push``.
    """

    def __init__(self, places: int, *, store_port: int, engine_port: int, scripts: Mapping[str, str]) -> None:
        self.places = [Place() for _ in range(places)]
        self.struck: queue.SimpleQueue[Place] = queue.SimpleQueue()
        """Gateways that were killed."""
        self._ports = store_port, engine_port
        self._call, self._push = scripts["call"].encode(), scripts["push"].encode()
        self._armed = ""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def arm(self, window: str) -> None:
        """The first gateway in this window is killed."""
        with self._lock:
            self._armed = window

    def __enter__(self) -> Windows:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._servers = []
        for place in self.places:
            for port, name in zip(self._ports, ("store_port", "engine_port"), strict=True):

                async def connected(
                    near_in: asyncio.StreamReader,
                    near_out: asyncio.StreamWriter,
                    place: Place = place,
                    port: int = port,
                ) -> None:
                    await _Line(self, place, port == self._ports[0]).run(near_in, near_out, port)

                server = await asyncio.start_server(connected, "127.0.0.1", 0)
                setattr(place, name, server.sockets[0].getsockname()[1])
                self._servers.append(server)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        lines = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    def takes(self, window: str) -> bool:
        """This window is armed, and is not from now on."""
        with self._lock:
            is_armed = self._armed == window
            if is_armed:
                self._armed = ""
            return is_armed

    def kill(self, place: Place) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGKILL)
        self.struck.put(place)

    def of_a_request(self, data: bytes, *, to_store: bool) -> str:
        """The window in which a gateway is that sends this; "" in none. One that records may be in two: before it, and
        once it has its reply."""
        if not to_store:
            found = GENERATE.search(data)
            return RENDERED if found and int(found[1]) >= LEAST_BODY else ""
        if self._call in data and b"\r\nrecord\r\n" in data:
            return ANSWERED
        return ENDED if self._push in data else ""


class _Line:
    """One connection of a gateway."""

    def __init__(self, windows: Windows, place: Place, to_store: bool) -> None:
        self._windows, self._place, self._to_store = windows, place, to_store
        self._records = False
        """What it waits for is the reply to a record."""

    async def run(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter, port: int) -> None:
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # it is away
            near_out.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests(near_in, far_out, near_out))
                both.create_task(self._replies(far_in, near_out, far_out))
        except* OSError:
            pass
        finally:
            near_out.transport.abort()
            far_out.transport.abort()

    async def _requests(
        self, near_in: asyncio.StreamReader, far: asyncio.StreamWriter, near: asyncio.StreamWriter
    ) -> None:
        while data := await near_in.read(1 << 18):
            window = self._windows.of_a_request(data, to_store=self._to_store)
            self._records = window == ANSWERED
            if window in (ANSWERED, ENDED) and self._windows.takes(window):
                self._windows.kill(self._place)
                break
            far.write(data)
            await far.drain()
            if window == RENDERED and self._windows.takes(window):
                asyncio.get_running_loop().call_later(AT_WORK_SECONDS, self._windows.kill, self._place)
        far.transport.abort()
        near.transport.abort()

    async def _replies(
        self, far_in: asyncio.StreamReader, near: asyncio.StreamWriter, far: asyncio.StreamWriter
    ) -> None:
        while data := await far_in.read(1 << 18):
            if self._records and data.startswith(b"*2\r\n$2\r\nOK") and self._windows.takes(RECORDED):
                self._windows.kill(self._place)
                break
            near.write(data)
            await near.drain()
        near.transport.abort()
        far.transport.abort()
