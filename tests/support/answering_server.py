"""A server that answers every request as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECONDS = 60.0


@contextmanager
def answering(answer: Callable[[str], tuple[int, str] | None]) -> Iterator[str]:
    """Its URL. `answer`: path -> status and text; None is no answer."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            if (given := answer(self.path)) is None:
                is_over.wait(SECONDS)
                return
            status, text = given
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
