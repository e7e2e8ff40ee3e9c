"""A person at the browser of `rlbuffer inspect`: presses keys, and reads the lines of the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from rlbuffer.client.buffer import Buffer
from rlbuffer_cli.browse.app import Browser
from rlbuffer_cli.table import Target
from rlbuffer_cli.whole_run import WholeRun

PATIENCE_SECONDS = 60.0
LIVE_SECONDS = 0.2


class Person:
    """Somebody in front of an open browser."""

    def __init__(self, app: Browser, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    def lines(self) -> list[str]:
        """The screen, line by line."""
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    def text(self) -> str:
        return "\n".join(self.lines())

    async def sees(self, *words: str) -> str:
        """Waits until all words are on the screen, also where a line of it ends between them. -> the screen."""

        def shows(shown: str) -> bool:
            flowing = " ".join(shown.split())
            return all(word in shown or word in flowing for word in words)

        return await self.until(shows, f"{words} on the screen")

    async def until(self, holds: Callable[[str], bool], what: str) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(self.text()):
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.text()}"
            await self.pilot.pause(0.05)
        return self.text()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)


def browse(
    buffer: Buffer,
    tour: Callable[[Person], Awaitable[None]],
    *,
    size: tuple[int, int] = (80, 24),
    identifier: str | None = None,
    where: str = "",
    archive: str | None = None,
) -> None:
    """Opens the browser on a screen of this size for the time of `tour`."""

    async def run() -> None:
        group, slash, _ = (identifier or "").rpartition("/")
        kind = "rollout" if slash else "group"
        opens = Target(kind, identifier, group=group) if identifier else None
        app = Browser(WholeRun(buffer, archive), opens=opens, where=where)
        app.browsed.live_seconds = LIVE_SECONDS
        async with app.run_test(size=size) as pilot:
            await tour(Person(app, pilot))

    asyncio.run(run())
