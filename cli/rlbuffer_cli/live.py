"""The dashboard of a run on a terminal: one thread draws, one reads the trainer's metrics, one asks the server, one
hears keys. None holds up the run, whether the server is away or the terminal is halted."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import RlbufferError, RunGone
from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import duration, plural, printable
from rlbuffer_cli import look
from rlbuffer_cli.dashboard import Dashboard
from rlbuffer_cli.options import redis_origin, writing
from rlbuffer_cli.options import say as say_wrapped
from rlbuffer_cli.plots import METRICS_FILE, step_of
from rlbuffer_cli.run_tables import READ_RECORDS
from rlbuffer_cli.session import connected, say_ended
from rlbuffer_cli.starting import clear

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.config.loading import Loaded
    from rlbuffer.run.supervisor import Supervisor

TAIL_SECONDS, ASK_SECONDS = 0.2, 1.0
"""Between two looks at the metrics, at the server."""
CLOSE_SECONDS = 2.0
KEPT_LINES = 4
"""Of the log, at the foot of the view."""
KEPT_SAID = 1000
"""Lines that a command says, and prints when its screen is gone."""
KEPT_FALLS, FALLEN_SECONDS = 3, 60.0
"""Processes that ended and should not have: how many of the last are shown, and for how long."""
LAST_BYTES, WHOLE_BYTES = 20_000, 2**62
"""Of a log that is shown from its end; of a file that is read from its beginning."""
SHOWN_ALREADY = re.compile(r"(step|best|worst) ")
"""The beginning of what serve and train say, and the view has already."""
LOG_LINE = re.compile(r"\S+ (serve|train) +(?P<text>.*)")
OPENING_SECONDS = 60.0
"""A run that is started is not on the server at once."""
KEYS: Mapping[str, str] = {
    "T": "light, dark",
    "ctrl-C": "stop",
    "rlbuffer inspect": "browse, in another terminal",
}
"""Of a command that works for a run."""


class LinesTail:
    """New lines of a file since the last look; at first those of its last `most` bytes."""

    def __init__(self, path: Path, most: int = LAST_BYTES) -> None:
        self._path = path
        self._at = max(0, path.stat().st_size - most) if path.exists() else 0
        self._is_cut = most > 0 and self._at > 0
        """It begins within a line, which is left out."""

    def new(self) -> list[str]:
        """Whole lines that appeared since the last call."""
        lines = self.raw()
        if lines and self._is_cut:
            self._is_cut = False
            del lines[0]
        return [line.decode(errors="replace") for line in lines if line.strip()]

    def raw(self) -> list[bytes]:
        """The same as they are."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        *lines, rest = data.split(b"\n")
        self._at += len(data) - len(rest)  # half a line is read again: a writer that has no room takes it back
        return lines


class MetricsTail:
    """New steps of a ``metrics.jsonl`` since the last look; one that was trained again after a restart is given
    once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._tail, self._last = LinesTail(path, 0 if from_end else WHOLE_BYTES), 0

    def new(self) -> list[StepRecord]:
        """Records of whole lines that appeared since the last call."""
        records = []
        for values in map(step_of, self._tail.raw()):
            if values is not None and values["step"] > self._last:
                self._last = values["step"]
                records.append(StepRecord.read(values))
        return records


class LiveRun:
    """How a run goes, in threads from ``with`` to ``close``: the trainer's records as they come, the run's state, and
    what is said.

    Args:
        title: the command that shows it.
        opening: stands where nothing is known yet.
        asks: there is a server. None: there is one once :attr:`may_ask` is set.
        every: seconds between two looks at the server.
        planned: steps of the trainer; None: those of the settings, 0: nobody knows.
        from_end: steps that were trained before are left out.
        on_step: gets each new record.
        keys: key -> what it does.
        log_file: lines that others append to it are said here.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        title: str = "",
        opening: str = "",
        asks: bool | None = True,
        every: float = ASK_SECONDS,
        planned: int | None = None,
        from_end: bool = False,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        keys: Mapping[str, str] = KEYS,
        log_file: Path | None = None,
    ) -> None:
        self.settings, self.title, self.opening = settings, title, opening
        self._keys = keys
        self._planned = settings.trainer.steps if planned is None else planned
        self._is_onlooker = log_file is not None
        """The processes began long before."""
        self.messages: deque[str] = deque(maxlen=KEPT_SAID)
        """What the command itself has said: it is printed when the screen is gone."""
        self._every = every
        self._log = None if log_file is None else LinesTail(log_file)
        self.started = time.monotonic()
        self.records: list[StepRecord] = []
        self.first_step_seconds: float | None = None
        self.state: RunState | None = None
        self.trouble = ""
        """The reason why the last look failed."""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        """What the processes said last."""
        self._fallen: deque[tuple[float, str]] = deque(maxlen=KEPT_FALLS)
        self.may_ask = threading.Event()
        if asks:
            self.may_ask.set()
        self._on_step = on_step
        self._tail = MetricsTail(settings.output_dir / METRICS_FILE, from_end=from_end)
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._follow, name="follow", daemon=True)]
        if asks is not False:
            self._threads.append(threading.Thread(target=self._ask, name="ask", daemon=True))

    def __enter__(self) -> LiveRun:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes in the last steps."""
        self._done.set()
        self.may_ask.set()
        for thread in self._threads:
            thread.join(timeout=CLOSE_SECONDS)

    @property
    def seconds(self) -> float:
        """Since the processes were started."""
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """Lines of the command itself."""
        for line in text.splitlines():
            self.messages.append(line)
            self.lines.append(line)

    def log(self, name: str, line: str) -> None:
        """A line of a process, for the foot of the view; steps are in the view already."""
        if not (name in ("serve", "train") and SHOWN_ALREADY.match(line.lstrip())):
            self.lines.append(f"{name}  {line}")

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._done.wait(TAIL_SECONDS)
            for record in self._tail.new():
                self.first_step_seconds = self.seconds if self.first_step_seconds is None else self.first_step_seconds
                self.records.append(record)
                self._on_step(record)
            for line in [] if self._log is None else self._log.new():
                log_line = LOG_LINE.match(line)
                if log_line is None or not SHOWN_ALREADY.match(log_line["text"]):
                    self.lines.append(line)

    def _ask(self) -> None:
        from rlbuffer.client.buffer import connect
        from rlbuffer.client.run_state import read_run_state

        self.may_ask.wait()
        settings, is_last = self.settings, False
        while not is_last:
            try:
                with connect(settings.redis_url, run=settings.run, config=settings, name="view") as buffer:
                    while not is_last:
                        is_last = self._done.wait(self._every if self.state else 0.0)
                        self.state, self.trouble = read_run_state(buffer.store, history=READ_RECORDS), ""
            except RlbufferError as error:
                is_opening = isinstance(error, RunGone) and self.state is None and self.seconds < OPENING_SECONDS
                self.trouble = "" if is_opening else str(error).splitlines()[0]
                is_last = self._done.wait(ASK_SECONDS)

    def fell(self, name: str, how: str) -> None:
        """A process ended that should not have; the view shows it for a while."""
        self._fallen.append((time.monotonic(), f"{name} {how}"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        fallen = [f"{how}, {duration(now - at)} ago" for at, how in self._fallen if now - at <= FALLEN_SECONDS]
        dashboard = Dashboard(
            title=self.title,
            run=self.settings.run,
            now=time.time(),
            keys=self._keys,
            opening=self.opening,
            seconds=None if self._is_onlooker else self.seconds,
            planned=self._planned,
            state=self.state,
            records=self.records,
            trouble=self.trouble,
            fallen=fallen,
            log=tuple(self.lines),
        )
        yield from dashboard.__rich_console__(console, options)  # what is yielded whole loses the screen's height


class _Filled:
    """A view in the lines that a screen has, on the background of the palette; the last line counts those for which
    there is no room."""

    def __init__(self, view: RenderableType, style: Style) -> None:
        self._view, self._style = view, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        fitting = options.update(width=width, height=height)
        drawn = Segment.apply_style(console.render(self._view, fitting), self._style)
        lines = list(Segment.split_and_crop_lines(drawn, width, style=self._style, include_new_lines=False))
        if len(lines) > height:
            hidden = len(lines) - height + 1
            more = Text(f"… {plural(hidden, 'line')} more than this terminal has", "faint", no_wrap=True)
            lines[height - 1 :] = console.render_lines(more, fitting, style=self._style)
        for at, line in enumerate(Segment.set_shape(lines, width, height, self._style)):
            yield from [Segment.line()] if at else []
            yield from line


class Screen(Live):
    """A live view on a screen of its own, which a terminal that changes its size leaves whole."""

    def __init__(self, view: RenderableType) -> None:
        console, self._is_ours = look.screen()
        self.kind = look.background()
        super().__init__(view, console=console, screen=True, redirect_stdout=False, redirect_stderr=False)

    def get_renderable(self) -> RenderableType:
        ink, behind = (look.PALETTE[name][self.kind == "dark"] for name in ("ink", "bg"))
        return _Filled(super().get_renderable(), Style.parse(f"{ink} on {behind}") if self._is_ours else Style.null())

    def press(self, key: str) -> None:
        """`T` changes between light and dark."""
        if key == "T" and self._is_ours:
            self.kind = "light" if self.kind == "dark" else "dark"
            self.console.push_theme(look.themed(self.kind))
            self.refresh()


class _Lines(io.TextIOBase):
    """A stream that hands over its whole lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take, self._rest = take, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)


@contextmanager
def shown(watch: LiveRun, *, take: Callable[[str], None] = lambda key: None) -> Iterator[None]:
    """Draws how a run goes on a screen of its own while the block runs. What is printed meanwhile goes into its log; at
    the end it stays on the terminal, behind what the command has said.

    `take` gets each key that is pressed.
    """
    clear()
    screen = Screen(watch)

    def press(key: str) -> None:
        screen.press(key)
        take(key)

    try:
        with screen, redirect_stdout(_Lines(watch.say)), redirect_stderr(_Lines(watch.say)), pressed(press):
            yield
    finally:
        if watch.messages:
            watch.lines.clear()  # they are among what was said
        look.show(*(Text(printable(line)) for line in watch.messages), watch)


@contextmanager
def pressed(take: Callable[[str], None]) -> Iterator[None]:
    """Hands over each key that is pressed on the terminal while the block runs; ctrl-C stays a signal."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # stdin is no terminal
        yield
        return

    def is_ours() -> bool:
        """In the background a process that reads from its terminal, or changes it, is stopped."""
        return os.tcgetpgrp(terminal) == os.getpgrp()

    over, end = os.pipe()

    def read() -> None:
        while not select.select([over], [], [], 0.0 if is_ours() else TAIL_SECONDS)[0]:
            if is_ours() and terminal in select.select([terminal, over], [], [])[0] and is_ours():
                take(os.read(terminal, 1).decode(errors="replace"))

    thread = threading.Thread(target=read, name="keys", daemon=True)
    try:
        if is_ours():
            tty.setcbreak(terminal, termios.TCSANOW)
            thread.start()
        yield
    finally:
        os.write(end, b".")
        if thread.ident is not None:
            thread.join(CLOSE_SECONDS)
            if is_ours():
                termios.tcsetattr(terminal, termios.TCSANOW, before)
        os.close(end)
        os.close(over)


class EndedRun(NamedTuple):
    """A run whose processes have ended."""

    code: int
    """Exit code of the run."""
    buffer: Buffer
    watch: LiveRun
    supervisor: Supervisor


@contextmanager
def supervised(
    loaded: Loaded,
    display: str,
    stop: threading.Event,
    relay: Callable[[str, str], None],
    *,
    title: str,
    clock: bool = True,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    tick: Callable[[LiveRun], None] = lambda watch: None,
) -> Iterator[EndedRun]:
    """Runs every process of a run until it ends or `stop` is set, in a view or by lines; then the block.

    Args:
        relay: gets a process and each of its lines, where no view shows them.
        on_step: gets each new record, where no view shows it.
        tick: is called now and then.
    """
    from rlbuffer.run.supervisor import Supervisor

    settings, is_drawn = loaded.settings, display == "rich"
    with connected(loaded, "run") as buffer, writing(display, clock=clock):
        follow = (lambda record: None) if is_drawn else on_step
        watch = LiveRun(settings, title=title, opening="starting the processes ...", asks=is_drawn, on_step=follow)
        say = watch.log if is_drawn else relay
        supervisor = Supervisor(settings, say=say, on_fall=watch.fell, origin=redis_origin(loaded))
        with shown(watch) if is_drawn else nullcontext(), watch:
            code = supervisor.run(stop, lambda: tick(watch))
            say_ended(buffer, settings, code)
        if is_drawn and supervisor.reason:  # the view has cut its lines
            say_wrapped(supervisor.reason, err=True)
        yield EndedRun(code, buffer, watch, supervisor)
