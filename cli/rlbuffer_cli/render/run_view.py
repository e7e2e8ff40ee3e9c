"""Live views on a terminal: a whole run (demo, run), or the trainer alone (train)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from textwrap import wrap
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.settings import RunSettings
from rlbuffer.state.run_state import EnvState
from rlbuffer.state.text import amount, duration, percent, printable
from rlbuffer_cli.render.text import BLOCKS, bar, sparkline, table
from rlbuffer_cli.render.watch import Watch
from rlbuffer_cli.starting import clear

PLOT_HEIGHT = 8
REFRESH_PER_SECOND = 4
FRAME_LINES = 8
"""Lines that the run's view always has, beside curve, envs and sentences: border, heads, ages, ranks, cursor."""
ENV_COLUMNS = 50
"""Characters of an env's line beside its name, strip and bar."""


def plot(values: Sequence[float], *, width: int, height: int = PLOT_HEIGHT) -> list[str]:
    """Values between 0 and 1 as a filled curve, `height` lines, the axis on the left."""
    step = max(1.0, len(values) / width)
    picked: list[float] = []
    at = 0.0
    while int(at) < len(values) and len(picked) < width:
        part = values[int(at) : max(int(at) + 1, int(at + step))]
        picked.append(sum(part) / len(part))
        at += step
    lines = []
    for row in range(height, 0, -1):
        cells = []
        for value in picked:
            eighths = round(min(1.0, max(0.0, value)) * height * 8) - (row - 1) * 8
            cells.append(" " if eighths <= 0 else BLOCKS[min(eighths, 8) - 1])
        label = f"{row / height:.1f}" if row in (height, height // 2) else "   "
        lines.append(f"{label} ┤{''.join(cells)}")
    lines.append(f"0.0 └{'─' * width}")
    return lines


class RunView:
    """The live view of a run: reward curve, ages, shares against budgets, pool, ranks."""

    def __init__(self, settings: RunSettings, watch: Watch, *, title: str) -> None:
        self._settings = settings
        self._watch = watch
        self._title = title
        # The screen of its own is drawn again as a whole: a terminal that changes its size leaves nothing behind.
        self._live = Live(console=Console(), auto_refresh=False, screen=True)
        self._drawn = 0.0

    def __enter__(self) -> RunView:
        clear()
        self._live.start()
        self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Some terminals keep what stood there last among the lines that were scrolled away.
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        self._live.console.print(self._panel())

    def refresh(self) -> None:
        """Draws what the watch knows now, a few times a second at most: the cores belong to the run."""
        now = time.monotonic()
        if now - self._drawn >= 1 / REFRESH_PER_SECOND:
            self._drawn = now
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Panel:
        return Panel(self._body(), title=self._title, border_style="dim", padding=(0, 1))

    def _body(self) -> Group:
        """The tables that fit: a view that is cut at the foot hides what it waits for."""
        watch, planned = self._watch, self._settings.trainer.steps
        console = self._live.console
        width = max(40, console.width - 4)
        envs = self._envs(width)
        waiting = wrap(f"batcher: {watch.glance.waiting}", width, max_lines=2, placeholder=" …")
        room = console.height - FRAME_LINES - len(envs) - (len(waiting) if watch.glance.waiting else 0)
        height = min(PLOT_HEIGHT, max(3, room))
        gaps = min(3, max(0, room - height))
        logged = list(watch.lines)[max(0, len(watch.lines) - max(0, room - height - gaps)) :]

        done = watch.records[-1].step if watch.records else 0
        latest = watch.mean_reward(watch.records[-10:])
        caption = "waiting for the first step" if latest is None else f"reward {latest:.3f} (mean of the last 10 steps)"
        version = max(watch.glance.state.policy_version, 0) if watch.glance.state else 0
        lines = [
            _line(
                f"step {done}/{planned}  {bar(done / planned, width=24)}  {duration(watch.seconds)}   policy v{version}"
            ),
            *([Text("")] if gaps > 2 else []),
            _line(caption, "bold"),
            *[_line(row, "green") for row in plot(watch.rewards(), width=min(72, width - 5), height=height)],
            *([Text("")] if gaps > 0 else []),
            *[_line(row, "" if i else "bold") for i, row in enumerate(envs)],
            *([Text("")] if gaps > 1 else []),
            _line(self._ages()),
            _line(self._ranks(width)),
            *([_line(row, "dim") for row in waiting] if watch.glance.waiting else []),
            *[_line(row, "dim") for row in logged],
        ]
        return Group(*lines)

    def _envs(self, width: int) -> list[str]:
        step = self._watch.records[-1].step if self._watch.records else 1
        budgets = budgets_at(self._settings.batcher.budgets, step)
        shares = self._watch.shares()
        known = {env.name: env for env in self._watch.glance.state.envs} if self._watch.glance.state else {}
        names = sorted({*budgets, *shares, *known})
        spare = width - max([3, *map(len, names)]) - ENV_COLUMNS
        strip, stretch = (16, 16) if spare >= 32 else (12, 8) if spare >= 20 else (8, 6)
        rows = []
        for env in names:
            curve = [v for r in self._watch.records if (v := r.rewards.get(env)) is not None]
            share, budget = shares.get(env, 0.0), budgets.get(env)
            target = f"{percent(share)}" + (f" of {percent(budget)}" if budget is not None else "")
            account = known.get(env, EnvState(name=env))
            pending, trained = account.pending.rollouts, account.trained.rollouts
            dropped = sum(each.rollouts for each in account.dropped.values())
            rows.append(
                [
                    env,
                    f"{curve[-1]:.3f}" if curve else "",
                    sparkline(curve, width=strip),
                    f"{bar(share, width=stretch, mark=budget)} {target}",
                    f"{pending:,}",
                    f"{trained:,}",
                    f"{dropped:,}",
                ]
            )
        header = ["env", "reward", "", "share of tokens", "pending", "trained", "dropped"]
        return table(header, rows, right=frozenset({"reward", "pending", "trained", "dropped"}))

    def _ages(self) -> str:
        ages = self._watch.glance.ages
        total = sum(ages.values()) or 1
        shown = "   ".join(f"{age}: {bar(n / total, width=10)} {percent(n / total)}" for age, n in sorted(ages.items()))
        return f"age     {shown or 'no step yet'}"

    def _ranks(self, width: int) -> str:
        tokens = self._watch.glance.rank_tokens
        most = max(tokens.values(), default=1)
        bars = "   ".join(f"{r}: {bar(n / most, width=10)} {amount(n)}" for r, n in sorted(tokens.items()))
        if len(bars) + 8 > width:
            bars = "  ".join(f"{r} {sparkline([n / most])}" for r, n in sorted(tokens.items()))
        return f"ranks   {bars or 'no step yet'}"


def _line(text: str, style: str = "") -> Text:
    """One line that is cut, never wrapped."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def watch_run(loaded: Any, stop: threading.Event, *, planned: int) -> int:
    """`rlbuffer run` with a live view. -> the run's exit code."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.run.supervisor import Supervisor
    from rlbuffer_cli.options import redis_origin
    from rlbuffer_cli.session import say_ended

    settings: RunSettings = loaded.settings
    origin = redis_origin(loaded)
    with connect(settings.redis_url, run=settings.run, config=settings, name="watch", origin=origin) as buffer:
        watch = Watch(buffer, settings.output_dir / "metrics.jsonl", on_step=lambda record: None)
        supervisor = Supervisor(settings, say=watch.log, origin=origin)
        with RunView(settings, watch, title=f'rlbuffer run "{settings.run}"') as view:

            def tick() -> None:
                watch.update(look=True)
                view.refresh()

            code = supervisor.run(stop, tick)
            say_ended(buffer, settings, code)
            watch.update(look=True, now=True)
    return code
