"""The frame of every screen: a title, a body, a line for what went wrong, and the keys that matter here.

Reading happens in a thread of its own, so the screen never freezes. A server that is away is asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static
from textual.widgets._footer import FooterKey
from textual.worker import Worker

from rlbuffer.errors import RlbufferError
from rlbuffer.state.text import printable
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.table import Target
from rlbuffer_cli.text import cut, time_of

T = TypeVar("T")
STANDING_RECORDS = 100
"""Newest records of the history that are read for the line of how the run stands."""
PROBLEMS_ACTION = "show('problems')"
LEAST_OF_A_NAME, MOST_OF_A_NAME = 8, 24
NEEDS_CONTENT = frozenset(
    {"sort", "reverse", "more", "compare", "extremes", "copy", "export", "raw", "other", "lens", "near"}
)
"""Actions that do something with what is shown."""
AWAY_EXIT_CODE = 4
"""Errors with this exit code pass: the server is away, or takes nothing just now."""


@dataclass(slots=True)
class BrowsedRun:
    """The run that is looked at, for all screens."""

    run: ShownRun
    where: str = ""
    """The filter of the pool."""
    colours: str = "dark"
    """`dark` or `light`; "" for none but the terminal's."""
    is_live: bool = False
    problems: int = 0
    """What somebody must cure, when a screen was read last."""
    standing: Text = field(default_factory=Text)
    """How the run stood then."""
    live_seconds: float = 2.0


class Open(Message):
    """Asks the application for another screen."""

    def __init__(self, target: Target, record: Mapping[str, Any] | None = None) -> None:
        """`record` is what a target of the kind ``raw`` shows."""
        super().__init__()
        self.target, self.record = target, record


class KeyFooter(Footer):
    """The keys that there is room for: none is cut, and `?` shows all."""

    problems: reactive[int] = reactive(0, recompose=True)
    """What somebody must cure: its number stands at the key that shows it."""

    def compose(self) -> ComposeResult:
        room = self.app.size.width
        for key in super().compose():
            if isinstance(key, FooterKey):
                if key.action == PROBLEMS_ACTION and self.problems:
                    key.description = f"problems {self.problems:,}"
                room -= len(key.key_display) + len(key.description) + 3
            if room >= 0:
                yield key

    def on_resize(self) -> None:
        self.call_after_refresh(self.recompose)


class BrowserScreen(Screen[None]):
    """One screen. Keys with a description stand at the foot, where they can be clicked; `?` shows the others."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back"),
        Binding("l", "live", "live"),
        Binding("r", "reload", show=False),
        Binding("y", "copy", show=False),
        Binding("e", "export", show=False),
        Binding("o", "raw", show=False),
        Binding("tab", "app.focus_next", show=False),
        Binding("shift+tab", "app.focus_previous", show=False),
    ]

    def __init__(self, browsed: BrowsedRun) -> None:
        super().__init__()
        self.browsed = browsed
        self.loading_now = False
        self.is_away = False
        self.error = self.read_at = ""
        """What went wrong; when the screen was read."""
        self._framed = ""

    # -- what a screen says of itself ------------------------------------------------------------------------------
    def body(self) -> list[Widget]:
        """The widgets between title and keys."""
        raise NotImplementedError

    def heading(self) -> str:
        """The first line."""
        raise NotImplementedError

    async def fetch(self) -> None:
        """Reads, with :meth:`ask`, and shows it."""
        raise NotImplementedError

    def identifier(self) -> str:
        """The id under the cursor; "" where there is none."""
        return ""

    def record(self) -> Mapping[str, Any] | None:
        """The record that `o` shows; None where there is nothing."""
        return None

    def says_how_the_run_stands(self) -> bool:
        """False of a screen whose body says it already."""
        return True

    def at_top(self) -> bool:
        """True where a refresh moves nothing under the cursor."""
        return self.focused is None or not self.focused.scroll_y

    # -- the frame -------------------------------------------------------------------------------------------------
    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        standing = Static(self.browsed.standing, id="standing", markup=False)
        standing.display = self.says_how_the_run_stands()
        yield standing
        yield from self.body()
        yield Static(id="notice", markup=False)
        keys = KeyFooter(show_command_palette=False)
        keys.set_reactive(KeyFooter.problems, self.browsed.problems)
        yield keys

    def on_mount(self) -> None:
        self.set_interval(self.browsed.live_seconds, self.tick)
        self.say("")
        self.reload()

    def on_resize(self) -> None:
        self.call_after_refresh(self.frame)

    def frame(self) -> None:
        """Writes the title: the run, what the screen shows of it, and on the right as of when."""
        live = "" if not self.browsed.is_live else "[live] " if self.at_top() else "[live waits: not at the top] "
        at = "  reading ..." if self.loading_now else f"  as of {self.read_at} UTC" if self.read_at else ""
        heading = live + printable(self.heading())
        room = max(20, self.size.width - len(at))
        name = max(LEAST_OF_A_NAME, min(MOST_OF_A_NAME, room - cell_len(heading) - 2))
        run = f"{cut(printable(self.browsed.run.name), name)}  "
        room -= cell_len(run)
        heading = cut(heading, room)
        title = Text.assemble((run, "accent"), (heading + " " * (room - cell_len(heading)), "bold"), (at, "faint"))
        if title.plain != self._framed:  # nothing is drawn again that has not changed
            self._framed = title.plain
            self.query_one("#title", Static).update(title, layout=False)

    def say(self, text: str) -> None:
        """One line of news above the keys; "" takes it away."""
        notice = self.query_one("#notice", Static)
        notice.update(Text(printable(text)))
        notice.display = bool(text)
        self.frame()

    # -- reading ---------------------------------------------------------------------------------------------------
    async def ask(self, read: Callable[[], T]) -> T:
        """Runs `read` in a thread."""
        return await asyncio.to_thread(read)

    def reload(self) -> None:
        """Reads again; what is being read already is not waited for."""
        self.reading: Worker[None] = self.run_worker(self._load, exclusive=True, group="load")

    async def _load(self) -> None:
        self.loading_now = True
        if not self.read_at:
            self.frame()
        try:
            await self.fetch()
            is_first, self.read_at, self.loading_now = not self.read_at, time_of(time.time()), False
            if is_first:
                self.refresh_bindings()
                self.say("")
            await self.look_at_run()
        except Exception as error:  # a defect must not end the screen of who looks for another one
            if self.display:  # else it was left, and its widgets went while they were filled
                self._refused(error)
        else:
            self.is_away = False
            if self.error and self.display:
                self.error = ""
                self.say("")
            elif self.display:
                self.frame()
        finally:
            self.loading_now = False

    async def look_at_run(self) -> None:
        """How the run stands is on every screen, in a line, and the number of problems at the key that shows them."""
        standing = await self.ask(lambda: self.browsed.run.standing(STANDING_RECORDS, is_brief=True))
        self.browsed.problems = self.query_one(KeyFooter).problems = standing.problems
        self.browsed.standing = Text("  ").join(standing.facts)
        self.query_one("#standing", Static).update(self.browsed.standing)

    def is_reading(self) -> bool:
        """True while the first reading goes on: who pressed a key then is told to press it again."""
        is_first = self.loading_now and not self.read_at
        if is_first:
            self.say("still reading: press it again when the screen is there")
        return is_first

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing can be done with what is not there yet."""
        return True if self.read_at or action not in NEEDS_CONTENT else None

    def _refused(self, error: Exception) -> None:
        if isinstance(error, RlbufferError):
            self.is_away = error.exit_code == AWAY_EXIT_CODE
            self.error = f"! {str(error).splitlines()[0]}" + (" It is asked again." if self.is_away else "")
        else:
            self.error = f"! {type(error).__name__}: {error} (a defect of the browser: --plain prints instead)"
        self.say(self.error)

    def tick(self) -> None:
        """Reads again where the server was away, or the screen is live and at its top."""
        if self.is_current and not self.loading_now:
            self.frame()
            if self.is_away or (self.browsed.is_live and self.at_top()):
                self.reload()

    # -- keys ------------------------------------------------------------------------------------------------------
    def action_back(self) -> None:
        self.app.pop_screen()

    def action_reload(self) -> None:
        self.say("")
        self.reload()

    def action_live(self) -> None:
        self.browsed.is_live = not self.browsed.is_live
        self.frame()

    def action_copy(self) -> None:
        """Copies the id by OSC 52, and shows it: not every terminal takes it."""
        if name := self.identifier():
            self.app.copy_to_clipboard(printable(name))
            self.say(f"copied: {name}")

    def exported(self) -> str:
        """The id of the group, or rollout, that `e` writes; "" for none."""
        return ""

    def action_export(self) -> None:
        """Writes the group, or rollout, as a page into the current folder."""
        if name := self.exported():
            self.run_worker(self._export(name), exclusive=True, group="export")

    async def _export(self, name: str) -> None:
        from rlbuffer_cli.web.pages import file_name, one_of, write_page

        def write() -> str:
            run, file = self.browsed.run, file_name(name)
            write_page([one_of(run.group(name), name)], file, title=f"{name} of run {run.name}", run=run)
            return str(Path(file).resolve())

        try:
            self.say(f"wrote {await self.ask(write)}")
        except (RlbufferError, OSError) as error:
            self.say(f"! {str(error).splitlines()[0]}")

    def record_name(self) -> str:
        """Name of the record that `o` shows."""
        return self.identifier()

    def action_raw(self) -> None:
        if (record := self.record()) is not None:
            self.post_message(Open(Target("raw", self.record_name()), record))

    def on_key(self, event: events.Key) -> None:
        """Says of a key of another screen that it does nothing here: a key without an effect looks like a hang."""
        if event.is_printable and not self.is_reading() and event.key not in self.active_bindings:
            self.say(f"{event.character} does nothing on this screen; ? shows the keys")
