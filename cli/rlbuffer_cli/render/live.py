"""Live views on a terminal: a whole run (demo, run), or the trainer alone (train)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlbuffer.lines import amount, duration, percent
from rlbuffer.settings import RunSettings
from rlbuffer_cli.render.metrics import train_line
from rlbuffer_cli.render.text import BLOCKS, bar, printable, sparkline
from rlbuffer_cli.render.watch import Watch

PLOT_HEIGHT = 8
REFRESH_PER_SECOND = 4


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
        self._live = Live(console=Console(), auto_refresh=False)
        self._drawn = 0.0

    def __enter__(self) -> RunView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawn = 0.0
        self.refresh()
        self._live.stop()

    def refresh(self) -> None:
        """Draws what the watch knows now, a few times a second at most: the cores belong to the run."""
        now = time.monotonic()
        if now - self._drawn >= 1 / REFRESH_PER_SECOND:
            self._drawn = now
            panel = Panel(self._body(), title=self._title, border_style="dim", padding=(0, 1))
            self._live.update(panel, refresh=True)

    def _body(self) -> Group:
        watch, planned = self._watch, self._settings.trainer.steps
        done = len(watch.records)
        head = Text(
            f"step {watch.records[-1]['step'] if done else 0}/{planned}  {bar(done / planned, width=24)}  "
            f"{duration(watch.seconds)}   policy v{max(watch.glance.policy_version, 0)}"
        )
        rewards = watch.rewards()
        width = min(72, max(20, self._live.console.width - 12))
        latest = watch.mean_reward(watch.records[-10:])
        caption = "waiting for the first step" if latest is None else f"reward {latest:.3f} (mean of the last 10 steps)"
        parts: list[Any] = [head, Text(""), Text(caption, style="bold")]
        parts += [Text(line, style="green") for line in plot(rewards, width=width)]
        parts += [Text(""), self._envs(), Text(""), Text(self._ages()), Text(self._ranks())]
        if watch.glance.waiting:
            parts.append(Text(f"batcher: {watch.glance.waiting}", style="dim"))
        parts += [Text(printable(line)[: self._live.console.width - 6], style="dim") for line in watch.lines]
        return Group(*parts)

    def _envs(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("env", "reward", "", "share of tokens", "pending", "trained", "dropped"):
            table.add_column(name, justify="right" if name in ("pending", "trained", "dropped", "reward") else "left")
        budgets: Mapping[str, float] = self._settings.batcher.budgets
        shares = self._watch.shares()
        for env in sorted({*budgets, *shares, *self._watch.glance.pool}):
            curve = [v for r in self._watch.records if (v := r.get("rewards", {}).get(env)) is not None]
            share, budget = shares.get(env, 0.0), budgets.get(env)
            target = f"{percent(share)}" + (f" of {percent(budget)}" if budget is not None else "")
            pending, trained, dropped = self._watch.glance.pool.get(env, (0, 0, 0))
            table.add_row(
                env,
                f"{curve[-1]:.3f}" if curve else "",
                sparkline(curve),
                f"{bar(share, width=16, mark=budget)} {target}",
                f"{pending:,}",
                f"{trained:,}",
                f"{dropped:,}",
            )
        return table

    def _ages(self) -> str:
        ages = self._watch.glance.ages
        total = sum(ages.values()) or 1
        shown = "   ".join(f"{age}: {bar(n / total, width=10)} {percent(n / total)}" for age, n in sorted(ages.items()))
        return f"age     {shown or 'no step yet'}"

    def _ranks(self) -> str:
        tokens = self._watch.glance.rank_tokens
        most = max(tokens.values(), default=1)
        return "ranks   " + "   ".join(f"{r}: {bar(n / most, width=10)} {amount(n)}" for r, n in sorted(tokens.items()))


class TrainView:
    """The trainer alone: progress, reward, where the time goes."""

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._records: list[dict[str, Any]] = []
        self._live = Live(console=Console(), refresh_per_second=REFRESH_PER_SECOND)

    def __enter__(self) -> TrainView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Takes in new steps and draws."""
        if not records:
            return
        self._records += records
        last = self._records[-1]
        seconds = last.get("seconds", {})
        parts = "  ".join(f"{part} {value:.2f}s" for part, value in seconds.items() if part != "total")
        rewards = [r["reward"] for r in self._records if r.get("reward") is not None]
        progress = bar(last["step"] / self._planned, width=24)
        self._live.update(
            Group(
                Text(f"step {last['step']}/{self._planned}  {progress}  {parts}"),
                Text(f"reward {sparkline(rewards, width=32)}"),
                Text(train_line(last, self._planned), style="dim"),
            )
        )


def watch_run(loaded: Any, stop: threading.Event, *, planned: int) -> int:
    """`rlbuffer run` with a live view. -> the run's exit code."""
    from rlbuffer.client import connect
    from rlbuffer.supervise import Supervisor
    from rlbuffer_cli.options import redis_origin

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
            watch.update(look=True)
    return code
