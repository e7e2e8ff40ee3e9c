"""One version's files over HTTP: resumable, verified before they count.

A file grows as ``<name>.part``; a cut connection goes on where it ended (Range), in the same process or in a later one.
It gets its name when size and sha256 are those of the version's list. Versions never change and carry their hash in
their name, so a part may come from one place and the rest from another.

Imports httpx.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rlbuffer.errors import WeightsError
from rlbuffer.process.environment import NO_PROXY
from rlbuffer.process.files import flush
from rlbuffer.weights.layout import LIST_FILE, MAX_LIST_BYTES, ListedFile, parse_list

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
"""Longest silence of a place that is sending."""
CHUNK_BYTES = 1 << 20
IDLE_TRIES = 3
"""Times in a row that a place may be asked and bring nothing new, before the next place is tried."""
DOWNLOAD_PAUSE_SECONDS = 0.3
STALL_SECONDS = 60.0
"""Longest that a relay may say that it is still fetching without having got any further."""
PART = ".part"
HAVE_HEADER = "x-have-bytes"
"""Header of a relay's answer 503: the bytes of the version that it has by now."""

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)\Z")

Stopped = Callable[[], bool]


class _Cut(Exception):
    """The connection ended before the file did: what came stays, and may be continued."""


def make_client(token: str = "") -> httpx.Client:
    """A client for :func:`fetch_list` and :func:`fetch_file`. It follows no redirects: a token goes where it was sent.

    Args:
        token: sent as bearer token unless empty.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return httpx.Client(headers=headers, mounts=NO_PROXY, timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS))


def fetch_list(client: httpx.Client, url: str, *, name: str, stopped: Stopped) -> tuple[ListedFile, ...]:
    """The files of the version at `url`. Waits for a relay that is still fetching, as long as it gets further.

    Raises:
        WeightsError: why this place does not have it.
    """
    furthest, since = -1, time.monotonic()
    failures = 0
    while True:
        _refuse_stopped(stopped)
        try:
            with client.stream("GET", f"{url}/{LIST_FILE}") as response:
                if response.status_code == 503 and "retry-after" in response.headers:
                    header = response.headers.get(HAVE_HEADER, "0")
                    have = int(header) if header.isdecimal() else 0
                    if have > furthest:
                        furthest, since = have, time.monotonic()
                    if time.monotonic() - since > STALL_SECONDS:
                        raise WeightsError(
                            f"it has been fetching for {STALL_SECONDS:.0f} s without getting any further"
                        )
                else:
                    _check_status(response, expected=(200,))
                    return parse_list(_read_bounded(response), name=name)
        except httpx.HTTPError as error:
            failures += 1
            if failures >= IDLE_TRIES or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise WeightsError(_told(error)) from error
        time.sleep(DOWNLOAD_PAUSE_SECONDS)


def fetch_file(client: httpx.Client, url: str, file: ListedFile, directory: Path, *, stopped: Stopped) -> None:
    """Downloads ``url/<file.name>`` into `directory`, continuing what an earlier attempt left there.

    Raises:
        WeightsError: why this place cannot give it; a part that is good so far stays.
        OSError: the filesystem refused.
    """
    final, part = directory / file.name, directory / f"{file.name}{PART}"
    if final.is_file() and final.stat().st_size == file.size:
        return  # it got its name when it was verified
    idle = 0
    is_foreign_part = part.exists()
    """What is there came from elsewhere: when the whole is wrong, this place is not to blame yet."""
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            digest = _continue(client, f"{url}/{file.name}", file, part, stopped)
        except (_Cut, httpx.HTTPError) as error:
            got_further = part.exists() and part.stat().st_size > before
            idle = 0 if got_further else idle + 1
            if idle >= IDLE_TRIES or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                have = part.stat().st_size if part.exists() else 0
                reason = _told(error)
                raise WeightsError(f"{file.name} ended after {have} of {file.size} bytes ({reason})") from error
            time.sleep(DOWNLOAD_PAUSE_SECONDS)
            continue
        if digest != file.sha256:
            part.unlink()
            if is_foreign_part:
                is_foreign_part = False
                continue
            raise WeightsError(f"{file.name} has sha256 {digest}, the list says {file.sha256}")
        flush(part)
        part.rename(final)
        return


def _continue(client: httpx.Client, url: str, file: ListedFile, part: Path, stopped: Stopped) -> str:
    """Appends what is missing. -> sha256 of the whole. Raises _Cut when it ends early."""
    digest = hashlib.sha256()
    have = 0
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    with part.open("ab+") as out:
        out.seek(0)
        while chunk := out.read(CHUNK_BYTES):
            digest.update(chunk)
            have += len(chunk)
        if have == file.size:
            return digest.hexdigest()
        with client.stream("GET", url, headers={"Range": f"bytes={have}-"} if have else {}) as response:
            if response.status_code == 416:
                raise WeightsError(f"{file.name} is shorter there than the {file.size} bytes of its list")
            _check_status(response, expected=(200, 206))
            if response.status_code == 200 and have:  # it knows no ranges: from the start
                out.truncate(0)
                digest, have = hashlib.sha256(), 0
            if response.status_code == 206:
                match = _RANGE.match(response.headers.get("content-range", ""))
                if match is None or (int(match[1]), int(match[2])) != (have, file.size):
                    raise WeightsError(
                        f"{file.name} is another file there: asked for bytes from {have} of {file.size}, "
                        f"got {response.headers.get('content-range', 'no Content-Range')}"
                    )
            for chunk in response.iter_raw():  # with a chunk size, a cut would lose what was waiting to fill a chunk
                _refuse_stopped(stopped)
                have += len(chunk)
                if have > file.size:
                    out.truncate(0)
                    raise WeightsError(f"{file.name} is longer there than the {file.size} bytes of its list")
                digest.update(chunk)
                out.write(chunk)
    if have < file.size:
        raise _Cut("the connection was closed early")
    return digest.hexdigest()


def _check_status(response: httpx.Response, *, expected: tuple[int, ...]) -> None:
    status = response.status_code
    if status in expected:
        return
    text = _read_bounded(response, limit=500).decode("utf-8", "replace").strip()
    if status == 401:
        raise WeightsError("it wants another token: set RLBUFFER_WEIGHTS_TOKEN as at the trainer")
    if status == 404:
        raise WeightsError(f"it does not have it{f' ({text})' if text and '<' not in text else ''}")
    raise WeightsError(f"HTTP {status}{f': {text}' if text and '<' not in text else ''}")


def _read_bounded(response: httpx.Response, limit: int = MAX_LIST_BYTES) -> bytes:
    out = b""
    for chunk in response.iter_raw():
        out += chunk
        if len(out) > limit:
            if response.status_code == 200:
                raise WeightsError(f"{LIST_FILE} is longer than {limit} bytes")
            break
    return out[:limit]


def _told(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _refuse_stopped(stopped: Stopped) -> None:
    if stopped():
        raise WeightsError("stopped while downloading")
