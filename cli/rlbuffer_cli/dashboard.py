"""One screen of a run at work, from top to bottom: what must be cured and what is waited for, how far it is, the
reward's curve, the run in numbers, and the end of the log.

A screen that has too few lines leaves blocks out, in the order of :data:`LEAVES`; the curve takes what is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import amount, duration, percent, printable
from rlbuffer.state.trained import RECENT_STEPS, example_lines, masked_words, nothing_left, waited_of
from rlbuffer_cli import look
from rlbuffer_cli.plots import chart, curves_of
from rlbuffer_cli.run_tables import ENVS, env_rows
from rlbuffer_cli.table import Printed
from rlbuffer_cli.view import alerts, bad, evaluations, progress, states

SECTIONS = (("head", "alerts", "progress"), ("curve",), ("facts", "envs", "evaluations"), ("examples", "fallen", "log"))
"""Blocks by name, an empty line between two sections."""
LEAVES = ("examples", "evaluations", "envs", "facts", "curve")
"""Blocks in the order in which they leave a screen that has too few lines."""
LEAST_CURVE, MOST_CURVE = 5, 14
"""Lines of the curve, with its axis and its legend."""
LEAST_ALERTS = 3
"""Lines of what must be cured and what is waited for that stay on the smallest screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """What is known of a run, as one screen."""

    title: str = ""
    opening: str = ""
    """Stands where nothing is known yet."""
    seconds: float = 0.0
    """Since the processes were started."""
    planned: int = 0
    """Steps that the trainer shall make."""
    state: RunState | None = None
    records: Sequence[StepRecord] = ()
    """Of the trainer."""
    trouble: str = ""
    """Why the last look at the server failed."""
    fallen: Sequence[str] = ()
    """Processes that ended lately, a sentence each."""
    log: Sequence[str] = ()
    """The last lines of the processes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = options.height or console.height, options.max_width
        free = options.update(height=None)

        def lines_of(view: RenderableType) -> list[list[Segment]]:
            return console.render_lines(view, free, pad=False)

        lines = {name: lines_of(Group(*views)) for name, views in self._blocks(width).items() if views}
        rewards = [{"step": r.step, "reward": r.reward} for r in self.records if r.reward is not None]
        heights = {name: len(block) for name, block in lines.items()} | {"curve": LEAST_CURVE * (len(rewards) > 1)}
        for name in LEAVES:
            if _height(heights) > height:
                heights.pop(name, None)
        spare = height - _height(heights)
        if spare < 0 and "alerts" in heights:
            heights["alerts"] = max(LEAST_ALERTS, heights["alerts"] + spare)
        if heights.get("curve"):
            heights["curve"] = min(MOST_CURVE, LEAST_CURVE + max(0, spare))
            drawn = chart(curves_of(rewards, "reward"), width=width, height=heights["curve"] - 1)
            lines["curve"] = lines_of(Text("\n".join(drawn), "accent", no_wrap=True))
        is_first = True
        for section in SECTIONS:
            shown = [line for name in section if heights.get(name) for line in lines[name][: heights[name]]]
            if shown and not is_first:
                yield Text()
            for line in shown:
                is_first = False
                yield from line
                yield Segment.line()

    def _blocks(self, width: int) -> dict[str, list[RenderableType]]:
        """The views of each block but the curve."""
        state = self.state
        return {
            "head": list(self._head()),
            "alerts": list(self._alerts()),
            "progress": [progress(self.records, self.planned, self.seconds)] if self.records else [],
            "facts": list(self._facts(width)),
            "envs": [Printed(ENVS, env_rows(state))] if state is not None and len(state.envs) > 1 else [],
            "evaluations": [] if state is None else list(evaluations(state)),
            "examples": [_line(line) for line in self._examples()],
            "fallen": [bad(line) for line in self.fallen],
            "log": [_line(printable(line), "faint") for line in self.log],
        }

    def _head(self) -> Iterator[Text]:
        if self.title:
            title = Text.assemble((printable(self.title), "accent"), (f"   {duration(self.seconds)}", "faint"))
            if self.state is not None:
                server = self.state.server
                title.append(f"   {server.address} ({' '.join(filter(None, [server.name, server.version]))})", "faint")
            title.no_wrap, title.overflow = True, "ellipsis"
            yield title

    def _alerts(self) -> Iterator[Text]:
        if self.trouble:
            yield bad(self.trouble)
        if self.records and (nothing := nothing_left(self.records[-1])):
            yield bad(nothing)
        if self.state is not None:
            yield from alerts(self.state)
        elif not self.records:
            yield Text(self.opening)

    def _facts(self, width: int) -> Iterator[RenderableType]:
        """What the trainer measured, the more important first; what left tokens without a gradient; where the rollouts
        are: a line each."""
        if self.records:
            last, recent = self.records[-1], self.records[-RECENT_STEPS:]
            seconds = sum(record.seconds.get("total", 0.0) for record in recent)
            speed = sum(record.tokens for record in recent) / max(seconds, 1e-9)
            facts = look.pairs(
                ("trained", f"{amount(speed)} tok/s"),
                ("waits", f"{percent(waited_of(recent).share)} for data"),
                ("age", None if last.age is None else f"{last.age:.1f} max {last.max_age}"),
                ("kl", None if last.kl is None else f"{last.kl:.4f}"),
                ("entropy", None if last.entropy is None else f"{last.entropy:.3f}"),
                ("truncated", None if last.truncated is None else percent(last.truncated)),
                ("grad", None if last.grad_norm is None else f"{last.grad_norm:.2f}"),
            )
            yield look.Facts(facts[: max(1, width // look.FACT_WIDTH)])
            if masked := masked_words(last):
                yield _line(masked, "faint")
        if self.state is not None:
            yield look.Facts(states(self.state))

    def _examples(self) -> list[str]:
        return example_lines(next((record.examples for record in reversed(self.records) if record.examples), ()))


def _height(heights: Mapping[str, int]) -> int:
    """Lines of the blocks that are shown, and of the empty ones between their sections."""
    sections = [sum(heights.get(name, 0) for name in section) for section in SECTIONS]
    return sum(sections) + max(0, sum(lines > 0 for lines in sections) - 1)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
