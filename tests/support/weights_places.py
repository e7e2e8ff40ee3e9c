"""Versions made of plain bytes, and a web server that serves them as badly as a test asks for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.layout import listed, write_list

SIZE = 3_000_000


def content(seed: int, size: int = SIZE) -> bytes:
    """`size` bytes that no other seed gives."""
    return hashlib.shake_128(str(seed).encode()).digest(size)


def make_version(folder: Path, version: int, data: bytes | None = None) -> PolicyVersion:
    """A complete version under `folder`, announced by its path."""
    data = content(version) if data is None else data
    checksum = hashlib.sha256(data).hexdigest()
    directory = folder / f"v{version:08d}-{checksum[:12]}"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text('{"model_type": "qwen3"}\n')
    write_list(directory, listed(directory, {}))
    return PolicyVersion(version=version, location=str(directory), size=len(data), checksum=checksum)


class Place:
    """A web server over a folder, with every fault a link or a server may have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.cut_after: int | None = None
        """The connection ends after this many bytes of each weights file."""
        self.knows_ranges = True
        self.total_told: int | None = None
        """In Content-Range, instead of the true size."""
        self.gate: threading.Event | None = None
        """Weights are sent once it is set."""
        self.asked: list[tuple[str, int]] = []
        """(file name, first byte) of every request."""

    def starts(self, name: str = "model.safetensors") -> list[int]:
        """First bytes of the requests for a file, in order."""
        return [start for asked, start in self.asked if asked == name]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = self.folder / handler.path.lstrip("/")
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.asked.append((path.name, start))
        if not path.is_file():
            handler.send_error(404)
            return
        is_weights = path.name == "model.safetensors"
        if is_weights and self.gate is not None:
            self.gate.wait(60)
        data = path.read_bytes()
        if start >= len(data):
            handler.send_error(416)
            return
        if start and self.knows_ranges:
            handler.send_response(206)
            total = self.total_told or len(data)
            handler.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            data = data[start:]
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: self.cut_after] if is_weights else data)
        handler.close_connection = True


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """Serves `folder`; the faults may be changed while it does."""
    found = Place(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
