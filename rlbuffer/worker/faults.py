"""Whose fault a failure is: the one rule of what a worker does about it, for all samplers.

The request's: its group fails, is counted, and is tried again a few times. The server's: it is waited for. The
settings': the worker ends and says what to change.
"""

from __future__ import annotations

import time
from enum import Enum, auto
from http import HTTPStatus

from rlbuffer.errors import Aborted, ConfigError, RequestFailed, RlbufferError, SamplerBusy, SamplerUnavailable

FIRST_PAUSE_SECONDS = 1.0
"""Seconds before a server is asked again, the first time."""
LONGEST_PAUSE_SECONDS = 30.0
"""Each further pause is twice as long, up to this. What a server asks for holds up to twice as long as that."""
SETTINGS_STATUS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
BUSY_STATUS = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class Fault(Enum):
    """Whose fault a failure is."""

    REQUEST = auto()
    SERVER = auto()
    SETTINGS = auto()


def fault_of(error: BaseException) -> Fault:
    """Whose fault it is that no group was made. Whatever nobody foresaw costs the request that met it."""
    if isinstance(error, ConfigError):
        return Fault.SETTINGS
    return Fault.SERVER if isinstance(error, SamplerUnavailable | Aborted) else Fault.REQUEST


def error_of_status(status: int, sentence: str, retry_after: str = "") -> RlbufferError:
    """The error for a server that answers a request with `status`.

    A 500 is SamplerUnavailable: whether the request or the server is at fault, only another request tells.
    """
    if status in BUSY_STATUS:
        return SamplerBusy(sentence, seconds=float(retry_after) if retry_after.isdecimal() else 0.0)
    if status in SETTINGS_STATUS:
        return ConfigError(sentence, setting="sampler_options.servers")
    return SamplerUnavailable(sentence) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else RequestFailed(sentence)


class Backoff:
    """The pauses before a server that is at fault is asked again; they grow until a group is made."""

    def __init__(self) -> None:
        self._pause, self._until = 0.0, 0.0

    def pause(self, error: BaseException) -> float:
        """Seconds to wait now. Requests that fail during one pause share it."""
        now = time.monotonic()
        if now >= self._until or not self._pause:  # the latter: others have worked since the last pause began
            self._pause = min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))
        asked = error.seconds if isinstance(error, SamplerBusy) else 0.0
        seconds = min(asked, 2 * LONGEST_PAUSE_SECONDS) or self._pause
        self._until = max(self._until, now + seconds)
        return seconds

    def works(self) -> None:
        """A group was made."""
        self._pause = 0.0
