"""A web server over a folder of policy versions, beside the trainer.

    GET /                          {"versions": [...]}
    GET /v00000012-.../files.json  what the version consists of
    GET /v00000012-.../NAME        one file, with ranges

Read-only, complete versions only. Files go from the page cache to the socket without passing through Python
(sendfile), so serving costs the trainer's host little: why this is aiohttp. TLS is a reverse proxy's business; any
web server over the same folder does as well.

Imports aiohttp.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.process.web_servers import listen
from rlbuffer.weights.cache import weights_token
from rlbuffer.weights.layout import FILE, SERVED_NAME, versions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(directory: Path, *, token: str = "") -> Any:
    """The web application (an ``aiohttp.web.Application``).

    Args:
        directory: folder of versions, as :func:`rlbuffer.weights.files.publish` makes them.
        token: asked for as bearer token; empty: whoever reaches the server may read.
    """

    async def index(request: web.Request) -> web.StreamResponse:
        directories = await asyncio.to_thread(versions, directory)
        return web.json_response({"versions": [path.name for paths in directories.values() for path in paths]})

    async def file(request: web.Request) -> web.StreamResponse:
        version, name = request.match_info["version"], request.match_info["file"]
        path = directory / version / name
        plain_path = directory.resolve() / version / name  # neither a folder nor the file is a link to elsewhere
        if not SERVED_NAME.match(version) or not FILE.match(name) or path.resolve() != plain_path or not path.is_file():
            raise web.HTTPNotFound(text="no such file\n")
        return web.FileResponse(path, chunk_size=1 << 20)

    app = web.Application(middlewares=[_authorization(token)])
    app.router.add_get("/", index)
    app.router.add_get("/{version}/{file:.+}", file)
    return app


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
        ConfigError: `listen` cannot be listened on.
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
        self._runner = await listen(self._app, self._host, self._port)
        self._port = self._runner.addresses[0][1]


def serve_beside(settings: RunSettings) -> FileServer:
    """Starts the server of the folder into which this run's trainer publishes.

    Raises:
        ConfigError: `weights.listen` is no address, or cannot be listened on.
    """
    app = make_app(settings.output_dir / "weights", token=weights_token())
    return FileServer(app, settings.weights.listen)
