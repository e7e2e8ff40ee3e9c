"""The last events of a seed, for whoever looks at a violation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from simulation.scheduler import BEGINNING, Scheduler
from simulation.server import Command


class Log:
    """Keeps as many lines as asked for; they become text when somebody reads them.

    Args:
        scheduler: tells the time.
        script_of: names the script of an EVALSHA.
        keep: lines.
    """

    def __init__(self, scheduler: Scheduler, script_of: Callable[[Command], str], keep: int) -> None:
        self._scheduler = scheduler
        self._script_of = script_of
        self._items: deque[Any] = deque(maxlen=keep)

    def add(self, who: str, commands: Sequence[Command] = (), *, number: int = 0, reply: object = None) -> None:
        """An event of the server by its `number`; without one, something else that happened."""
        self._items.append((self._scheduler.now, number, who, commands, reply))

    def lines(self) -> tuple[str, ...]:
        """Lines that are kept, the oldest first."""
        return tuple(self._line(item) for item in self._items)

    def _line(self, item: Any) -> str:
        now, number, who, commands, reply = item
        time, words = f"{now - BEGINNING:9.4f} s", self._words(commands)
        if not number:
            return f"{time}         {who} {words}"
        answer = repr(reply)
        return f"{time} #{number:<6} {who}: {words} -> {answer[:80]}{'...' if len(answer) > 80 else ''}"

    def _words(self, commands: Sequence[Command]) -> str:
        shown = []
        for command in commands[:3]:
            name = command[0].decode()
            if name == "EVALSHA":
                args = command[3 + int(command[2]) :]
                shown.append(f"{self._script_of(command)} {' '.join(_short(a) for a in args[:8])}")
            else:
                shown.append(f"{name} {' '.join(_short(a) for a in command[1:6])}")
        return "; ".join(shown) + (f" and {len(commands) - 3} more" if len(commands) > 3 else "")


def _short(value: bytes) -> str:
    text = value.decode(errors="replace") if value.isascii() else f"<{len(value)} bytes>"
    return text if len(text) <= 36 else f"{text[:33]}..."
