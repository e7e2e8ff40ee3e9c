"""A web server over a folder of policy versions: beside the trainer, or as a relay that fetches what it lacks.

    GET /                          {"versions": [...], "relay": false}
    GET /v00000012-.../files.json  what the version consists of; a relay that is still fetching answers 503
    GET /v00000012-.../NAME        one file, with ranges

Read-only, complete versions only. Files go from the page cache to the socket without passing through Python
(sendfile), so serving costs the trainer's host little: why this is aiohttp. TLS is a reverse proxy's business; any
web server over the same folder does as well.

Imports aiohttp.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.process.web_servers import listen
from rlbuffer.weights.cache import TOKEN_VARIABLE, VersionCache
from rlbuffer.weights.download import HAVE_HEADER
from rlbuffer.weights.layout import FILE, SERVED_NAME, versions

MAX_FETCHES = 4
"""Versions that a relay fetches, or waits to fetch, at once; more are answered 503."""
MOST_CONNECTIONS = 512
MOST_OF_A_HOST = 64
"""Connections at once, all together and of one address (a proxy counts as one). Further ones are hung up on; a client
asks again, and goes on from where it was."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(directory: Path, *, token: str = "", upstream: str = "", cache: VersionCache | None = None) -> Any:
    """The web application (an ``aiohttp.web.Application``).

    Args:
        directory: folder of versions, as :func:`rlbuffer.weights.files.publish` and `VersionCache` make them.
        token: asked for as bearer token; empty: whoever reaches the server may read.
        upstream: where a relay fetches from; it needs `cache`, whose folder is `directory`.
    """
    app = web.Application(middlewares=[_authorization(token)])
    server = _Server(directory, upstream, cache)
    app.router.add_get("/", server.index)
    app.router.add_get("/{version}/{file}", server.file)
    app.on_cleanup.append(server.close)
    return app


class _Server:
    def __init__(self, directory: Path, upstream: str, cache: VersionCache | None) -> None:
        self._directory = directory
        self._upstream = upstream
        self._cache = cache
        self._fetches: dict[str, asyncio.Task[Path]] = {}

    async def close(self, app: web.Application) -> None:
        if self._cache is not None:
            self._cache.close()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    async def index(self, request: web.Request) -> web.StreamResponse:
        directories = await asyncio.to_thread(versions, self._directory)
        names = [path.name for paths in directories.values() for path in paths]
        return web.json_response({"versions": names, "relay": self._cache is not None})

    async def file(self, request: web.Request) -> web.StreamResponse:
        version, name = request.match_info["version"], request.match_info["file"]
        if not SERVED_NAME.match(version) or not FILE.match(name):
            raise web.HTTPNotFound(text="no such file\n")
        directory = self._directory / version
        if self._cache is not None and not directory.is_dir():
            self._fetch(self._cache, version)
        path = directory / name
        own = self._directory.resolve() / version / name  # neither the folder nor the file is a link to elsewhere
        if path.resolve() != own or not path.is_file():
            raise web.HTTPNotFound(text="no such file\n")
        return web.FileResponse(path, chunk_size=1 << 20)

    def _fetch(self, cache: VersionCache, version: str) -> None:
        """Begins to fetch `version`, or says how far that is. Raises the answer."""
        task = self._fetches.get(version)
        if task is not None and task.done():
            del self._fetches[version]
            error = None if task.cancelled() else task.exception()
            if isinstance(error, WeightsError):
                raise web.HTTPBadGateway(text=f"the relay has not got it: {error}\n")
            if error is not None:
                raise error
            task = None  # it was fetched, and is gone again: once more
        if task is None:
            if sum(not task.done() for task in self._fetches.values()) >= MAX_FETCHES:
                raise web.HTTPServiceUnavailable(text="the relay is fetching other versions\n")
            self._fetches = {name: task for name, task in self._fetches.items() if not task.done()}
            self._fetches[version] = asyncio.create_task(asyncio.to_thread(cache.fetch, version, [self._upstream]))
        raise web.HTTPServiceUnavailable(
            text="the relay is fetching it\n",
            headers={"Retry-After": "1", HAVE_HEADER: str(cache.progress(version))},
        )


def _authorization(token: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


class FileServer:
    """Serves an application from a thread of its own, beside whatever the process does. A context manager.

    Args:
        app: from :func:`make_app`.
        listen: ``HOST:PORT``; port 0: a free one.

    Raises:
        ConfigError: `listen` is no address, or cannot be listened on.
    """

    def __init__(self, app: Any, listen: str) -> None:
        self._app = app
        self._host, self._port = parse_listen(listen)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        try:
            self._wait(self._start())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"weights.listen = {listen!r} cannot be listened on ({error.strerror or error}): choose another port, "
                "or stop what has it",
                setting="weights.listen",
            ) from error

    @property
    def url(self) -> str:
        """The address at which this host can ask it."""
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def close(self) -> None:
        """Stops serving. Safe to repeat."""
        if self._loop.is_closed():
            return
        if self._runner is not None:
            self._wait(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> FileServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        self._runner = await listen(
            self._app, self._host, self._port, most=MOST_CONNECTIONS, most_of_a_host=MOST_OF_A_HOST
        )
        self._port = self._runner.addresses[0][1]


def serve_beside(settings: RunSettings) -> FileServer:
    """Starts the server of the folder into which this run's trainer publishes.

    Raises:
        ConfigError: `weights.listen` is no address, or cannot be listened on.
    """
    app = make_app(settings.output_dir / "weights", token=os.environ.get(TOKEN_VARIABLE, ""))
    return FileServer(app, settings.weights.listen)
