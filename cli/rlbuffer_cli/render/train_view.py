"""The trainer's progress as one line, and as a view that follows it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rlbuffer.config.settings import RunSettings
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer.state.trained import RECENT_STEPS, example_lines, waited_of
from rlbuffer_cli.render.foot import Foot
from rlbuffer_cli.render.metrics_tail import ASK_SECONDS, TAIL_POLL_SECONDS, MetricsTail
from rlbuffer_cli.render.ranks import rank_line
from rlbuffer_cli.render.text import bar, flow, sparkline


def train_line(record: StepRecord, planned: int) -> str:
    """A trained step as one line."""
    parts = [
        f"step {record.step}/{planned}",
        _number("reward", record.reward, ".3f"),
        _number("loss", record.loss, "+.4f"),
        _number("entropy", record.entropy, ".3f"),
        _number("grad", record.grad_norm, ".2f"),
        _age(record),
        f"{amount(record.tokens)} tok",
        f"{amount(record.tokens_per_second or 0.0)} tok/s",
        f"wait {percent(record.wait or 0.0)}",
    ]
    return "  ".join(part for part in parts if part)


def _number(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"


def _age(record: StepRecord) -> str:
    return "" if record.age is None else f"age {record.age:.1f} max {record.max_age}"


class Follower:
    """Shows new steps in a thread until it is closed: a live view with messages above it.

    Args:
        has_server: there is one to ask what the batcher waits for.
    """

    def __init__(self, settings: RunSettings, *, has_server: bool) -> None:
        first = "the first step comes once the batcher has committed it" if has_server else "the steps are made up"
        opening = f"starting the ranks; {first}"
        self._view = TrainView(settings.trainer.steps, opening)
        self._asks = settings if has_server else None
        self._tail = MetricsTail(settings.output_dir / "metrics.jsonl", from_end=True)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        self._view.__enter__()
        self._thread.start()
        if self._asks is not None:
            asked = (self._asks, self._done, self._view.wait_for)
            threading.Thread(target=_ask, args=asked, name="ask", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints a message; on the view's own terminal above it, where it stays."""
        if sys.stderr.isatty() and not self._done.is_set():
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
        self._view.close()

    def _run(self) -> None:
        while True:
            is_last = self._done.wait(TAIL_POLL_SECONDS)
            self._view.add(self._tail.new())
            if is_last:
                return


def _print_error(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)


def _ask(settings: RunSettings, done: threading.Event, tell: Callable[[str], None]) -> None:
    """Asks the server once a second what the batcher waits for; in a thread, because it may be away."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.client.refusals import for_trainer
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.errors import RlbufferError

    while not done.wait(ASK_SECONDS):
        try:
            with connect(settings.redis_url, run=settings.run, config=settings, name="train view") as buffer:
                while not done.wait(ASK_SECONDS):
                    tell(str(for_trainer(read_run_state(buffer.store).waiting) or ""))
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
        self._records: list[StepRecord] = []
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

    def add(self, records: Sequence[StepRecord]) -> None:
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


def train_lines(records: Sequence[StepRecord], planned: int, elapsed: float, width: int) -> list[str]:
    """The trainer's view: progress and where time goes, what it learns, its ranks, which side is slow, examples."""
    last, recent = records[-1], records[-RECENT_STEPS:]
    seconds = last.seconds
    if last.ranks and "forward" in last.ranks[0]:  # instead of the training's time in all
        passes = {part: sum(r.get(part, 0.0) for r in last.ranks) / len(last.ranks) for part in PASSES}
        seconds = {"wait": seconds.get("wait", 0.0), **passes, **{k: v for k, v in seconds.items() if k != "train"}}
    pace = elapsed / len(records)
    left = duration(pace * (planned - last.step))
    rewards = [r.reward for r in records if r.reward is not None]
    tokens = sum(r.tokens for r in recent) / max(sum(r.seconds.get("total", 0.0) for r in recent), 1e-9)
    progress = [
        f"step {last.step}/{planned}",
        f"{bar(last.step / planned, width=24)} {percent(last.step / planned)}",
        duration(elapsed),
        f"{left} left" if left and last.step < planned else "",
        *[f"{part} {value:.2f} s" for part, value in seconds.items() if part != "total" and value >= 0.005],
    ]
    learned = [
        f"reward {last.reward:.3f} {sparkline(rewards, width=24)}" if last.reward is not None else "",
        _number("loss", last.loss, "+.4f"),
        _number("kl", last.kl, ".4f"),
        _number("entropy", last.entropy, ".3f"),
        _number("grad", last.grad_norm, ".2f"),
        _number("ratio p99", last.ratio.get("p99"), ".2f"),
        f"clipped {percent(last.clip_fraction)}" if last.clip_fraction else "",
        f"truncated {percent(last.truncated)}" if last.truncated else "",
        _age(last),
        f"{amount(tokens)} tok/s",
        f"mfu {percent(last.mfu)}" if last.mfu else "",
        f"{last.memory_bytes / 2**30:.1f} GiB" if last.memory_bytes else "",
        plural(last.world_size, "rank") if last.world_size else "",
    ]
    examples = next((r.examples for r in reversed(records) if r.examples), ())
    return [
        *flow(progress, width),
        *flow(learned, width),
        *([rank_line(last.ranks)] if len(last.ranks) > 1 else []),
        slow_side(recent),
        *example_lines(examples),
    ]


def slow_side(records: Sequence[StepRecord]) -> str:
    """The side that holds up the other, from the time that the trainer waited."""
    return waited_of(records).text
