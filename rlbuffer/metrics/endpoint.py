"""A process's numbers over HTTP: ``/metrics`` for Prometheus, ``/status`` as JSON. Only reading, only GET.

Everything is computed when somebody asks, in a thread of its own, from what the process knows anyway. Nothing that
happens here ends a process or makes it wait: a port that is in use, an asker who never reads, an error in a figure.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings
from rlbuffer.metrics.histogram import as_json
from rlbuffer.metrics.registry import METRICS, Values
from rlbuffer.process.logs import fields
from rlbuffer.process.web_servers import AskedRequest, AskedServer

PORTS = 32
"""Ports that are tried from the one that is set: as many processes of one host share a setting."""
LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)


class _Asked(AskedRequest):
    """One request."""

    server: MetricsServer

    def do_GET(self) -> None:  # noqa: N802
        """Answers one of the pages."""
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._answer(404, "text/plain", b"there are /metrics and /status\n")
            return
        kind, make = page
        try:
            body = make()
        except Exception as error:
            _log.warning("the metrics could not be made: %s: %s", type(error).__name__, error)
            self._answer(500, "text/plain", f"{type(error).__name__}\n".encode())
            return
        self._answer(200, kind, body)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


class MetricsServer(AskedServer):
    """Answers from threads beside whatever the process does. A context manager.

    Args:
        listen: ``HOST:PORT``; no host: this machine only; port 0: a free one.
        process: ``serve``, ``worker``, ``score`` or ``train``.
        values: what there is to say; called for every request.
        common: labels of every sample.

    Raises:
        ConfigError: `listen` is no address.
        OSError: it cannot be listened on.
    """

    def __init__(
        self, listen: str, process: str, values: Callable[[], Values], common: Mapping[str, str] | None = None
    ) -> None:
        host, port = parse_listen(listen, setting="metrics.listen")
        host = host or LOOPBACK
        self._process, self._values, self._common = process, values, dict(common or {})
        self.pages: Mapping[str, tuple[str, Callable[[], bytes]]] = {
            "/metrics": ("text/plain; version=0.0.4", self._metrics),
            "/status": ("application/json", self._status),
        }
        for last in range(PORTS, 0, -1):
            try:
                super().__init__(host, port, _Asked)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or last == 1 or not 0 < port < 65535:
                    raise
                port += 1
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address at which this host can ask it."""
        host, port = self.server_address[:2]
        shown = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(str(host), str(host))
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"

    def _metrics(self) -> bytes:
        from rlbuffer.metrics.exposition import as_text

        return as_text(METRICS[self._process], self._values(), self._common)

    def _status(self) -> bytes:
        record = {"process": self._process, **self._common, "metrics": as_json(self._values())}
        return json.dumps(record, indent=1).encode() + b"\n"

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@contextmanager
def serving(
    settings: RunSettings,
    process: str,
    values: Callable[[], Values],
    **common: str,
) -> Iterator[None]:
    """Answers at ``metrics.listen`` while the block runs; nothing where that is empty.

    Where the address cannot be listened on, the log says so, and the process works without.
    """
    listen = settings.metrics.listen
    if not listen:
        yield
        return
    try:
        server = MetricsServer(listen, process, values, {"run": settings.run, **common})
    except OSError as error:
        reason = error.strerror or str(error)
        _log.warning("%s", unavailable(listen, reason), extra=fields("metrics"))
        yield
        return
    with server:
        url = f"{server.url}/metrics"
        _log.info("metrics: %s", url, extra=fields("metrics", url=url))
        yield


def unavailable(listen: str, reason: str) -> str:
    """The sentence of a process that cannot listen."""
    return (
        f"nobody can ask this process for its metrics: metrics.listen = {listen!r} and the {PORTS - 1} ports after it "
        f"cannot be listened on ({reason}). It works on without; choose another address, or stop what has it"
    )
