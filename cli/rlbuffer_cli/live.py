"""Live views on a terminal: one thread of rich's draws, one of ours asks. Neither holds up the run, whether the server
is away or the terminal is halted."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import RlbufferError
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
KEPT_FALLS, FALLEN_SECONDS = 3, 60.0
"""Processes that ended and should not have: how many of the last are shown, and for how long."""


class MetricsTail:
    """New steps of a ``metrics.jsonl`` since the last look; one that was trained again after a restart is given
    once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._last = path, 0
        self._at = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[StepRecord]:
        """Records of whole lines that appeared since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        *lines, rest = data.split(b"\n")
        self._at += len(data) - len(rest)  # half a line is read again: a writer that has no room takes it back
        records = []
        for values in map(step_of, lines):
            if values is not None and values["step"] > self._last:
                self._last = values["step"]
                records.append(StepRecord.read(values))
        return records


class Watch:
    """How a run goes, in a thread from ``with`` to ``close``: the trainer's records as they come, and the run's state
    once a second.

    Args:
        title: the first line; "" for none.
        opening: stands where nothing is known yet.
        asks: there is a server. None: there is one once :attr:`may_ask` is set.
        from_end: steps that were trained before are left out.
        on_step: gets each new record.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        title: str = "",
        opening: str = "",
        asks: bool | None = True,
        from_end: bool = False,
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.settings, self.title, self.opening = settings, title, opening
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

    def __enter__(self) -> Watch:
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

    def log(self, name: str, line: str) -> None:
        """A line of a process, for the foot of the view; steps are in the view already."""
        if not (name in ("serve", "train") and line.startswith("step ")):
            self.lines.append(f"{name}  {line}")

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._done.wait(TAIL_SECONDS)
            for record in self._tail.new():
                self.first_step_seconds = self.seconds if self.first_step_seconds is None else self.first_step_seconds
                self.records.append(record)
                self._on_step(record)

    def _ask(self) -> None:
        from rlbuffer.client.buffer import connect
        from rlbuffer.client.run_state import read_run_state

        self.may_ask.wait()
        settings, is_last = self.settings, False
        while not is_last:
            try:
                with connect(settings.redis_url, run=settings.run, config=settings, name="view") as buffer:
                    while not is_last:
                        is_last = self._done.wait(ASK_SECONDS if self.state else 0.0)
                        self.state, self.trouble = read_run_state(buffer.store, history=READ_RECORDS), ""
            except RlbufferError as error:
                self.trouble = str(error).splitlines()[0]
                is_last = self._done.wait(ASK_SECONDS)

    def fell(self, name: str, how: str) -> None:
        """A process ended that should not have; the view shows it for a while."""
        self._fallen.append((time.monotonic(), f"{name} {how}"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = time.monotonic()
        fallen = [f"{how}, {duration(now - at)} ago" for at, how in self._fallen if now - at <= FALLEN_SECONDS]
        yield Dashboard(
            title=self.title,
            opening=self.opening,
            seconds=self.seconds,
            planned=self.settings.trainer.steps,
            state=self.state,
            records=self.records,
            trouble=self.trouble,
            fallen=fallen,
            log=tuple(self.lines),
        )


class _Cut:
    """A view in the lines that a screen has: the last one counts those for which it has none."""

    def __init__(self, view: RenderableType) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, height = console.render_lines(self._view, options, pad=False), options.size.height
        room = len(lines) if len(lines) <= height else height - 1
        for line in lines[:room]:
            yield from line
            yield Segment.line()
        if hidden := len(lines) - room:
            yield Text(f"… {plural(hidden, 'line')} more than this terminal has", "faint", no_wrap=True)


class _Live(Live):
    """A live view; on a screen of its own nothing of it is cut without a sign."""

    has_screen = False

    def get_renderable(self) -> RenderableType:
        view = super().get_renderable()
        return _Cut(view) if self.has_screen else view


@contextmanager
def shown(view: RenderableType, *, is_whole: bool = False, keep: bool = True) -> Iterator[Live]:
    """Draws `view` a few times a second while the block runs: at the foot of the terminal, or on a screen of its own,
    which a terminal that changes its size leaves whole. `keep`: it stays when the block ends."""
    clear()
    live = _Live(view, console=look.console(), screen=is_whole, transient=not keep, vertical_overflow="ellipsis")
    live.has_screen = is_whole
    try:
        with live:
            yield live
    finally:
        live.has_screen = False
        if is_whole and keep:
            live.console.print(live.get_renderable())


class Ended(NamedTuple):
    """A run whose processes have ended."""

    code: int
    """Exit code of the run."""
    buffer: Buffer
    watch: Watch
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
    tick: Callable[[Watch], None] = lambda watch: None,
) -> Iterator[Ended]:
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
        watch = Watch(settings, title=title, opening="starting the processes ...", asks=is_drawn, on_step=follow)
        say = watch.log if is_drawn else relay
        supervisor = Supervisor(settings, say=say, on_fall=watch.fell, origin=redis_origin(loaded))
        with shown(watch, is_whole=True) if is_drawn else nullcontext(), watch:
            code = supervisor.run(stop, lambda: tick(watch))
            say_ended(buffer, settings, code)
        if is_drawn and supervisor.reason:  # the view has cut its lines
            say_wrapped(supervisor.reason, err=True)
        yield Ended(code, buffer, watch, supervisor)


def say(live: Live, text: str) -> None:
    """Prints above the view, where it stays."""
    live.console.print(Text(printable(text, lines=True)))
