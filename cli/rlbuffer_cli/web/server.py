"""`rlbuffer inspect --web`: the views of a run for a web browser on this machine. Reads; takes nothing but GET.

The address is on loopback and holds a token, without which every page is 404. A request for another host than loopback
is refused, so that no page of the web reaches in by a name of its own (DNS rebinding). Pages have no script, and their
policy lets nothing be fetched from anywhere. The standard library serves them, since every install can do that.
"""

from __future__ import annotations

import hmac
import secrets
import socketserver
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl

from markupsafe import Markup

from rlbuffer.errors import AmbiguousId, NotFound, RlbufferError, StepRetired
from rlbuffer.process.signals import stop_on_signals
from rlbuffer.process.web_servers import is_own, say_failure
from rlbuffer.state.text import printable
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.web.pages import PageData, policy, sources_of
from rlbuffer_cli.web.routes import refusal, route

HOST = "127.0.0.1"
SECRET_BYTES = 24
PATIENCE_SECONDS_OF_A_PAGE = 2.0
"""A server that is away is said to be so after this time."""
TAKING_SECONDS = 30.0
"""Time for an asker to send something, or to take some more of the answer."""
MOST_QUERY_FIELDS = 20
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{policy('self')}; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Pages(socketserver.ThreadingTCPServer):
    """The server of one run's pages, on a port of its own choice for 0. Answers each request in a thread."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, run: ShownRun, port: int) -> None:
        super().__init__((HOST, port), Handler)
        run.wait_at_most(PATIENCE_SECONDS_OF_A_PAGE)
        self.run = run
        self.sources: PageData = sources_of(run)
        self.token = secrets.token_urlsafe(SECRET_BYTES)

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def page(self, name: str, query: dict[str, str]) -> Iterator[str] | None:
        """The pieces of a page; None where there is none of that name."""
        return route(self.run, self.sources, name, query)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of an asker that went away."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            say_failure(error)


class Handler(BaseHTTPRequestHandler):
    """One request. Methods other than GET are none that it knows."""

    server: Pages
    server_version, sys_version = "rlbuffer", ""
    timeout = TAKING_SECONDS

    def parse_request(self) -> bool:
        """-> False where there is nothing more to answer."""
        if not super().parse_request():
            return False
        if is_own(self.headers.get("Host", "")):
            return True
        self.send_response(HTTPStatus.FORBIDDEN)
        self.end_headers()
        return False

    def do_GET(self) -> None:
        """Answers with a page, in pieces; what it cannot read is a sentence."""
        path, _, query = self.path.partition("?")
        _, token, name = (*path.split("/", 2), "", "")[:3]
        status, pieces = HTTPStatus.NOT_FOUND, iter(list[str]())
        if hmac.compare_digest(token.encode(), self.server.token.encode()):
            status, pieces = self._answer(name, query)
        self.send_response(status)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece.encode())
        except RlbufferError as error:
            self.wfile.write(str(Markup("<p>✕ {}</p>").format(printable(str(error)))).encode())

    def _answer(self, name: str, query: str) -> tuple[HTTPStatus, Iterator[str]]:
        try:
            page = self.server.page(name, dict(parse_qsl(query, max_num_fields=MOST_QUERY_FIELDS)))
            if page is None:
                return HTTPStatus.NOT_FOUND, iter(())
            return HTTPStatus.OK, chain([next(page)], page)  # what cannot be read fails before the headers go
        except (AmbiguousId, NotFound, StepRetired) as error:
            return HTTPStatus.NOT_FOUND, refusal("rlbuffer inspect", str(error))
        except RlbufferError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, refusal("rlbuffer inspect", str(error))
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, refusal("rlbuffer inspect", str(error))

    def end_headers(self) -> None:
        """Adds the headers of every page, of a refusal, too."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a line would hold the path, which is secret."""


def serve_pages(run: ShownRun, port: int) -> int:
    """Serves until ctrl-C or a signal that asks to stop. -> exit code."""
    stop = threading.Event()
    with Pages(run, port) as pages, stop_on_signals(stop):
        threading.Thread(target=pages.serve_forever, name="pages", daemon=True).start()
        echo(pages.url)
        say("open it in a browser on this machine; ctrl-C ends it", err=True)
        stop.wait()
        pages.shutdown()
    return 0
