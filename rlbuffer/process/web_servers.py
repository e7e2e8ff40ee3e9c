"""The common ways of the small web servers of a run, which aiohttp serves: how they treat whoever connects.

On loopback a request must name this machine as its host, so that no page of the web reaches in by a name of its own
(DNS rebinding). An asker that neither sends nor takes is hung up on. What strangers send is never worth a traceback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import web

REQUEST_SECONDS = 20.0
"""Time for a whole request to arrive on the running loop."""
CLOSE_SECONDS = 2.0
"""Time that answers under way have when a server closes."""
_log = logging.getLogger(__name__)
_strangers = logging.getLogger(f"{__name__}.strangers")
"""Takes what aiohttp says of requests that are none, and says nothing."""
_strangers.disabled = True


def is_own(host: str) -> bool:
    """A host, with a port or without, is this machine by a name that nobody else can give to it."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def may_ask(host: str, listens: str) -> bool:
    """A request for `host` may be answered by a server that listens at the address `listens`."""
    return not is_own(f"[{listens}]" if ":" in listens else listens) or is_own(host)


def say_failure(error: BaseException | None) -> None:
    """Says in a line that a request could not be answered; with its traceback where logs are of the level DEBUG."""
    text = "a request could not be answered: %s: %s"
    _log.warning(text, type(error).__name__, error, exc_info=_log.isEnabledFor(logging.DEBUG))


async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    refuse: Callable[[web.Request, HTTPStatus, str], web.StreamResponse] | None = None,
    admit: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None,
    is_shared: bool = False,
) -> web.AppRunner:
    """Serves an application of aiohttp, which was not served before, on the running loop.

    Args:
        refuse: writes the answer to what is refused before a handler has it, in the application's own form.
        admit: looks at a request whose body is not read yet; what it answers is all that its sender hears.
        is_shared: other processes listen at the same address; and a handler whose asker hangs up is cancelled.
    """
    from aiohttp import web

    def refused(request: web.Request, status: HTTPStatus, text: str) -> web.StreamResponse:
        return refuse(request, status, text) if refuse else web.Response(status=status, text=f"{text}\n")

    @web.middleware
    async def guarded(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not may_ask(request.headers.get("Host", ""), host):
            return refused(request, HTTPStatus.FORBIDDEN, "this machine is asked by the name of another one")
        if admit is not None and (answer := await admit(request)) is not None:
            return answer
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await request.read()
        except web.HTTPRequestEntityTooLarge:
            return refused(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large")
        except TimeoutError:
            return refused(request, HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time")
        except web.RequestPayloadError:
            return refused(request, HTTPStatus.BAD_REQUEST, "the body is not what its headers say")
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            if refuse is None:
                raise
            return refuse(request, HTTPStatus(error.status), "there is no such page here")
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            say_failure(error)
            return web.Response(status=HTTPStatus.INTERNAL_SERVER_ERROR, text=f"{type(error).__name__}\n")

    app.middlewares.insert(0, guarded)
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=_strangers,
        shutdown_timeout=CLOSE_SECONDS,
        keepalive_timeout=REQUEST_SECONDS,
        handler_cancellation=is_shared,
    )
    await runner.setup()
    await web.TCPSite(runner, host or None, port, reuse_port=is_shared or None).start()
    return runner
