"""One version's files over HTTP, verified before they count. A cut connection goes on where it ended (Range).

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
IDLE_TRIES = 3
"""Times in a row that a place may be asked and bring nothing new, before the next place is tried."""
DOWNLOAD_PAUSE_SECONDS = 0.3

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)\Z")


def make_client(token: str = "") -> httpx.Client:
    """A client for :func:`fetch_list` and :func:`fetch_file`. It follows no redirects: a token goes where it was sent.

    Args:
        token: sent as bearer token unless empty.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return httpx.Client(headers=headers, mounts=NO_PROXY, timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS))


def fetch_list(client: httpx.Client, url: str, *, name: str) -> tuple[ListedFile, ...]:
    """The files of the version at `url`. Raises WeightsError: why this place does not have it."""
    try:
        with client.stream("GET", f"{url}/{LIST_FILE}") as response:
            _check_status(response, 200)
            return parse_list(_read_bounded(response), name=name)
    except httpx.HTTPError as error:
        raise WeightsError(_told(error)) from error


def fetch_file(
    client: httpx.Client, url: str, file: ListedFile, directory: Path, *, stopped: Callable[[], bool]
) -> None:
    """Downloads ``url/<file.name>`` into `directory`.

    Raises:
        WeightsError: why this place cannot give it.
        OSError: the filesystem refused.
    """
    digest, have, idle = hashlib.sha256(), 0, 0
    (directory / file.name).parent.mkdir(exist_ok=True)
    with (directory / file.name).open("wb") as out:
        while have < file.size:
            before, why = have, "the connection was closed early"
            try:
                headers = {"Range": f"bytes={have}-"} if have else {}
                with client.stream("GET", f"{url}/{file.name}", headers=headers) as response:
                    if _begins_at(response, have, file) < have:  # it knows no ranges: from the start
                        out.seek(0)
                        out.truncate()
                        digest, have = hashlib.sha256(), 0
                    for chunk in response.iter_raw():  # with a chunk size, a cut would lose what waits to fill a chunk
                        if stopped():
                            raise WeightsError("stopped while downloading")
                        have += len(chunk)
                        if have > file.size:
                            raise WeightsError(f"{file.name} is longer there than the {file.size} bytes of its list")
                        digest.update(chunk)
                        out.write(chunk)
            except httpx.HTTPError as error:
                why = _told(error)
                idle = IDLE_TRIES if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else idle
            idle = 0 if have > before else idle + 1
            if have < file.size and idle >= IDLE_TRIES:
                raise WeightsError(f"{file.name} ended after {have} of {file.size} bytes ({why})")
            if have < file.size:
                time.sleep(DOWNLOAD_PAUSE_SECONDS)
    if digest.hexdigest() != file.sha256:
        raise WeightsError(f"{file.name} has sha256 {digest.hexdigest()}, the list says {file.sha256}")
    flush(directory / file.name)


def _begins_at(response: httpx.Response, have: int, file: ListedFile) -> int:
    """The place in the file at which the answer begins."""
    if response.status_code == 416:
        raise WeightsError(f"{file.name} is shorter there than the {file.size} bytes of its list")
    _check_status(response, 200, 206)
    if response.status_code == 200:
        return 0
    told = response.headers.get("content-range", "no Content-Range")
    match = _RANGE.match(told)
    if match is None or (int(match[1]), int(match[2])) != (have, file.size):
        raise WeightsError(f"{file.name} is another file there: asked for bytes from {have} of {file.size}, got {told}")
    return have


def _check_status(response: httpx.Response, *expected: int) -> None:
    status = response.status_code
    if status in expected:
        return
    text = _read_bounded(response, limit=500).decode("utf-8", "replace").strip()
    if status == 401:
        raise WeightsError("it wants another token: set RLBUFFER_WEIGHTS_TOKEN as at the trainer")
    more = "" if "<" in text else text
    if status == 404:
        raise WeightsError(f"it does not have it{f' ({more})' if more else ''}")
    raise WeightsError(f"HTTP {status}{f': {more}' if more else ''}")


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
