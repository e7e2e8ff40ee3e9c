"""What processes log that run in threads of a test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlbuffer.process.logs import ROOT


class Logged(logging.Handler):
    """Keeps each line from now on as ``--display json`` would have it, until it is closed; `take` gets it at once."""

    def __init__(self, logger: str = ROOT.name, *, take: Callable[[dict[str, Any]], object] | None = None) -> None:
        super().__init__(logging.DEBUG)
        self._take = take
        self._logger = logging.getLogger(logger)
        self._level = self._logger.level
        self.lines: list[dict[str, Any]] = []
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        if found := getattr(record, "fields", None):
            self.lines.append({"level": record.levelname, "text": record.getMessage(), **found})
            if self._take is not None:
                self._take(self.lines[-1])

    def told(self, event: str) -> list[Any]:
        """Lines of this event so far."""
        return [SimpleNamespace(**line) for line in list(self.lines) if line["event"] == event]

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        super().close()
