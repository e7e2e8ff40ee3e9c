"""What a run holds, without what differs between two runs that were prepared alike: clocks, ids that are clocks,
digests over those, and what is drawn."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from store_runs import Run

from rlbuffer.errors import PayloadError
from rlbuffer.wire.checksum import unsealed

_UNLIKE = re.compile(
    r"\b(?P<ms>1[0-9]{12})(-[0-9]+)?\b|\b1[0-9]{9}(\.[0-9]+)?\b|\b[0-9a-f]{32}\b|\b[0-9a-f]{64}\b|seconds_ago=[0-9.]+"
    "|\xcf(?P<packed>\x00\x00\x01.{5})",  # a clock in milliseconds as msgpack
    re.DOTALL | re.ASCII,
)
HOUR_MS = 3_600_000


def held(run: Run, *, clock_ms: int | None = None) -> Any:
    """Keys and values of the run on the server. `clock_ms`: where that server's clock stands still. A time within an
    hour of it is told by its distance then."""
    return shape(run.control_keys(), run, clock_ms=clock_ms), len(run.payload_keys())


def shape(value: Any, run: Run, *, clock_ms: int | None = None) -> Any:
    """The value without what differs; as :func:`held`."""
    if isinstance(value, dict):
        return {shape(key, run, clock_ms=clock_ms): shape(item, run, clock_ms=clock_ms) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape(item, run, clock_ms=clock_ms) for item in value]
    if isinstance(value, bytes):
        with suppress(PayloadError):
            value = unsealed(value, "")  # the checksum is over clocks, too
    text = value.decode("latin-1") if isinstance(value, bytes) else repr(value)

    def told(match: re.Match[str]) -> str:
        if clock_ms is not None and (match["ms"] or match["packed"]):
            time_ms = int(match["ms"] or int.from_bytes(match["packed"].encode("latin-1")))
            if abs(time_ms - clock_ms) < HOUR_MS:
                return f"T{time_ms - clock_ms:+}"
        return "T"

    return _UNLIKE.sub(told, text.replace(run.store.run, "RUN"))
