"""The trainer's progress as one line, and as a view that follows it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import RECENT_STEPS, example_lines, waited
from rlbuffer_cli.options import echo
from rlbuffer_cli.render.foot import Foot
from rlbuffer_cli.render.metrics_tail import ASK_SECONDS, TAIL_POLL_SECONDS, MetricsTail
from rlbuffer_cli.render.ranks import rank_line
from rlbuffer_cli.render.text import bar, flow, sparkline


def train_line(record: Mapping[str, Any], planned: int) -> str:
    """A trained step as one line."""
    seconds = record.get("seconds", {})
    total = seconds.get("total") or 1e-9
    reward = record.get("reward")
    parts = [
        f"step {record['step']}/{planned}",
        f"reward {reward:.3f}" if reward is not None else "",
        f"loss {record['loss']:+.4f}" if record.get("loss") is not None else "",
        f"entropy {record['entropy']:.3f}" if record.get("entropy") is not None else "",
        f"grad {record['grad_norm']:.2f}" if record.get("grad_norm") is not None else "",
        f"age {record['age']:.1f} max {record['max_age']}" if record.get("age") is not None else "",
        f"{amount(record['tokens'])} tok",
        f"{amount(record['tokens'] / total)} tok/s",
        f"wait {percent(seconds.get('wait', 0.0) / total)}",
    ]
    return "  ".join(part for part in parts if part)


class Follower:
    """Shows new steps in a thread until it is closed: one object per line, or a live view with messages above it.

    Args:
        shown: ``json`` or ``rich``.
        has_server: there is one to ask what the batcher waits for.
    """

    def __init__(self, settings: RunSettings, shown: str, *, has_server: bool) -> None:
        first = "the first step comes once the batcher has committed it" if has_server else "the steps are made up"
        opening = f"starting the ranks; {first}"
        self._view = TrainView(settings.trainer.steps, opening) if shown == "rich" else None
        self._asks = settings if has_server and self._view is not None else None
        self._tail = MetricsTail(settings.output_dir / "metrics.jsonl", from_end=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        if self._view is not None:
            self._view.__enter__()
        self._thread.start()
        if self._asks is not None and self._view is not None:
            asked = (self._asks, self._done, self._view.wait_for)
            threading.Thread(target=_ask, args=asked, name="ask", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints a message; on the view's own terminal above it, where it stays."""
        if self._view is not None and sys.stderr.isatty() and not self._done.is_set():
            self._view.say(text)
        else:
            _print_error(text)

    def say_last(self, text: str) -> None:
        """Ends the view, and prints a message behind it."""
        self.close()
        _print_error(text)

    def close(self) -> None:
        """Shows the last steps; the view stays as it is then."""
        self._done.set()
        self._thread.join(timeout=2.0)
        if self._view is not None:  # a terminal that takes nothing (ctrl-S) does not keep an ended run
            ending = threading.Thread(target=self._view.close, name="end", daemon=True)
            ending.start()
            ending.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            is_last = self._done.wait(TAIL_POLL_SECONDS)
            records = self._tail.new()
            if self._view is not None:
                self._view.add(records)
            else:
                for record in records:
                    echo(json.dumps(record))
            if is_last:
                return


def _print_error(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def _ask(settings: RunSettings, done: threading.Event, tell: Callable[[str], None]) -> None:
    """Asks the server once a second what the batcher waits for; in a thread, because it may be away."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.client.refusals import batcher_waits, for_trainer
    from rlbuffer.errors import RlbufferError

    while not done.wait(ASK_SECONDS):
        try:
            with connect(settings.redis_url, run=settings.run, config=settings, name="train view") as buffer:
                while not done.wait(ASK_SECONDS):
                    tell(str(for_trainer(batcher_waits(buffer.store)) or ""))
        except RlbufferError as error:
            tell(str(error).splitlines()[0])


PASSES = ("forward", "backward", "exchange")
QUIET_VIEW_SECONDS = 3.0
"""Without a step for longer, the trainer's view says what is waited for."""


class TrainView:
    """The trainer alone: progress, reward, where the time goes."""

    def __init__(self, planned: int, opening: str) -> None:
        self._planned, self._opening = planned, opening
        self._started = time.monotonic()
        self._records: list[dict[str, Any]] = []
        self._changed = self._started
        self._waiting = ""
        self._foot = Foot(self._body)

    def __enter__(self) -> TrainView:
        self._foot.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the view: its last lines stay."""
        self._foot.close(keep=True)

    def say(self, text: str) -> None:
        """Prints a message above the view."""
        self._foot.say(text)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Takes in new steps."""
        if records:
            self._records += records
            self._changed = time.monotonic()

    def wait_for(self, sentence: str) -> None:
        """The sentence of what the batcher waits for; shown while no step comes."""
        self._waiting = sentence

    def _body(self, width: int) -> list[str]:
        now = time.monotonic()
        lines = [self._opening]
        if self._records:
            lines = train_lines(self._records, self._planned, self._changed - self._started, width)
        if self._waiting and now - self._changed > QUIET_VIEW_SECONDS:
            quiet = f"no step for {duration(now - self._changed)}. batcher: {self._waiting}"
            lines.append(quiet)
        return lines


def train_lines(records: Sequence[Mapping[str, Any]], planned: int, elapsed: float, width: int) -> list[str]:
    """The trainer's view: progress and where time goes, what it learns, its ranks, which side is slow, examples."""
    last, recent = records[-1], records[-RECENT_STEPS:]
    ranks = last.get("ranks", ())
    seconds = last.get("seconds", {})
    if ranks and "forward" in ranks[0]:  # instead of the training's time in all
        passes = {part: sum(r.get(part, 0.0) for r in ranks) / len(ranks) for part in PASSES}
        seconds = {"wait": seconds.get("wait", 0.0), **passes, **{k: v for k, v in seconds.items() if k != "train"}}
    step, pace = last["step"], elapsed / len(records)
    left = duration(pace * (planned - step))
    rewards = [r["reward"] for r in records if r.get("reward") is not None]

    def number(name: str, form: str) -> str:
        return f"{name.partition('_')[0]} {last[name]:{form}}" if last.get(name) is not None else ""

    tokens = sum(r["tokens"] for r in recent) / max(sum(r.get("seconds", {}).get("total", 0.0) for r in recent), 1e-9)
    progress = [
        f"step {step}/{planned}",
        f"{bar(step / planned, width=24)} {percent(step / planned)}",
        duration(elapsed),
        f"{left} left" if left and step < planned else "",
        *[f"{part} {value:.2f} s" for part, value in seconds.items() if part != "total" and value >= 0.005],
    ]
    learned = [
        f"reward {last['reward']:.3f} {sparkline(rewards, width=24)}" if last.get("reward") is not None else "",
        number("loss", "+.4f"),
        number("kl", ".4f"),
        number("entropy", ".3f"),
        number("grad_norm", ".2f"),
        f"ratio p99 {last['ratio']['p99']:.2f}" if last.get("ratio") else "",
        f"clipped {percent(last['clip_fraction'])}" if last.get("clip_fraction") else "",
        f"truncated {percent(last['truncated'])}" if last.get("truncated") else "",
        f"age {last['age']:.1f} max {last['max_age']}" if last.get("age") is not None else "",
        f"{amount(tokens)} tok/s",
        f"mfu {percent(last['mfu'])}" if last.get("mfu") else "",
        f"{last['memory_bytes'] / 2**30:.1f} GiB" if last.get("memory_bytes") else "",
        plural(last["world_size"], "rank") if last.get("world_size") else "",
    ]
    examples = next((r["examples"] for r in reversed(records) if r.get("examples")), ())
    return [
        *flow(progress, width),
        *flow(learned, width),
        *([rank_line(ranks)] if len(ranks) > 1 else []),
        slow_side(recent),
        *example_lines(examples),
    ]


def slow_side(records: Sequence[Mapping[str, Any]]) -> str:
    """The side that holds up the other, from the time that the trainer waited."""
    seconds = [r.get("seconds", {}) for r in records]
    return waited([s.get("wait", 0.0) for s in seconds], [s.get("total", 0.0) for s in seconds]).text
