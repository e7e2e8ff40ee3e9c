"""One screen of a run at work, from top to bottom: what must be cured and what is waited for, how far it is, the
reward's curve, the run in numbers, its processes, the end of the log, and the keys.

A screen that has too few lines leaves blocks out, in the order of :data:`LEAVES`; the curve takes what is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import amount, duration, percent, printable
from rlbuffer.state.trained import RECENT_STEPS, example_lines, masked_words, nothing_left, waited_of
from rlbuffer_cli import look
from rlbuffer_cli.plots import chart, curves_of
from rlbuffer_cli.run_tables import ENVS, PROCESSES, ProcessRow, env_rows, process_rows
from rlbuffer_cli.table import Printed
from rlbuffer_cli.text import time_of
from rlbuffer_cli.view import (
    SHOWN_PROBLEMS,
    agents,
    alerts,
    bad,
    evaluations,
    more_processes,
    pace_of,
    progress,
    states,
)

SECTIONS = (
    ("title",),
    ("alerts", "fallen", "progress"),
    ("curve",),
    ("facts", "masked", "envs", "evaluations"),
    ("processes",),
    ("examples",),
    ("log", "keys"),
)
"""Blocks by name, an empty line between two sections."""
LEAVES = ("examples", "masked", "evaluations", "envs", "gaps", "facts", "processes", "curve")
"""Blocks in the order in which they leave a screen that has too few lines; `gaps`: the empty lines."""
LEAST_CURVE, MOST_CURVE = 5, 14
"""Lines of the curve, with its heading and its axis."""
LEAST_ALERTS = 3
"""Lines of what must be cured and what is waited for that stay on the smallest screen."""
SHOWN_FACTS = 6
FEW_PROCESSES, MOST_PROCESSES, MANY_LINES = 5, 12, 36
"""Processes on a screen, and on one of so many lines, which says what must be cured whole, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """What is known of a run, as one screen."""

    title: str = ""
    """The command that draws it."""
    run: str = ""
    opening: str = ""
    """Stands where nothing is known yet."""
    now: float = 0.0
    """Unix seconds."""
    seconds: float | None = None
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
    keys: Mapping[str, str] = field(default_factory=dict)
    """Key -> what it does."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # On a screen of its own, which has a height, it fills that, and has a clock and keys; printed it has neither.
        height, width, is_screen = options.height or console.height, options.max_width, options.height is not None
        free = options.update(height=None)

        def lines_of(view: RenderableType) -> list[list[Segment]]:
            return console.render_lines(view, free, pad=False)

        lines = {
            name: lines_of(Group(*views)) for name, views in self._blocks(width, height, is_screen).items() if views
        }
        rewards = [{"step": r.step, "reward": r.reward} for r in self.records if r.reward is not None]
        heights = {name: len(block) for name, block in lines.items()}
        heights |= {"curve": LEAST_CURVE * (len(rewards) > 1), "gaps": 1}
        for name in LEAVES:
            if _height(heights) > height:
                heights.pop(name, None)
        spare = height - _height(heights)
        if spare < 0 and "alerts" in heights:
            heights["alerts"] = max(LEAST_ALERTS, heights["alerts"] + spare)
        if heights.get("curve"):
            heights["curve"] = min(MOST_CURVE, LEAST_CURVE + max(0, spare))
            lines["curve"] = lines_of(Group(*_curve(rewards, width, heights["curve"])))
        filling = max(0, height - _height(heights)) if is_screen else 0
        is_first = True
        for section in SECTIONS:
            shown = [line for name in section if heights.get(name) for line in lines[name][: heights[name]]]
            if shown and not is_first and "gaps" in heights:
                yield Segment.line()
            if "keys" in section:
                yield from [Segment.line()] * filling
            for line in shown:
                is_first = False
                yield from line
                yield Segment.line()

    def _blocks(self, width: int, height: int, is_screen: bool) -> dict[str, list[RenderableType]]:
        """The views of each block but the curve."""
        state, last = self.state, self.records[-1] if self.records else None
        return {
            "title": list(self._title(width, is_screen)),
            "alerts": list(self._alerts(is_brief=height < MANY_LINES)),
            "fallen": [bad(line) for line in self.fallen],
            "progress": [progress(self.records, self.planned)] if last else [],
            "facts": list(self._facts(width)),
            "masked": [_line(words, "faint")] if last and (words := masked_words(last)) else [],
            "envs": [Printed(ENVS, env_rows(state))] if state is not None and _has_envs(state) else [],
            "evaluations": [] if state is None else list(evaluations(state)),
            "processes": list(self._processes(MOST_PROCESSES if height >= MANY_LINES else FEW_PROCESSES)),
            "examples": [_line(line) for line in self._examples()],
            "log": [_line(printable(line), "faint") for line in self.log],
            "keys": [_keys(self.keys)] if is_screen and self.keys else [],
        }

    def _title(self, width: int, has_clock: bool) -> Iterator[Text]:
        """The run, the command, how long it runs and where; on the right the time."""
        if not self.title:
            return
        clock = f"{time_of(self.now)} UTC" if has_clock else ""
        line = Text.assemble((printable(self.run), "accent"), (f"  {printable(self.title)}", "bold"))
        if self.seconds is not None:
            line.append(f"  {duration(self.seconds)}", "faint")
        if self.state is not None:
            server = self.state.server
            line.append(f"  {server.address} ({' '.join(filter(None, [server.name, server.version]))})", "faint")
        line.truncate(max(1, width - len(clock) - 2), overflow="ellipsis", pad=bool(clock))
        yield line.append(f"  {clock}", "faint") if clock else line

    def _alerts(self, *, is_brief: bool) -> Iterator[Text]:
        if self.trouble:
            yield bad(self.trouble)
        if self.records and (nothing := nothing_left(self.records[-1])):
            yield bad(nothing)
        if self.state is not None:
            yield from alerts(self.state, most=SHOWN_PROBLEMS if is_brief else None)
        elif not self.records:
            yield Text(self.opening)

    def _facts(self, width: int) -> Iterator[RenderableType]:
        """The run in six numbers, where its rollouts are, and what its agents do: a line each."""
        state, facts_by_name = self.state, dict[str, Any]()
        if state is not None:
            facts_by_name["policy"] = f"v{state.policy_version}" if state.policy_version >= 0 else None
            facts_by_name["pushed"] = f"{amount(state.rollouts_per_second)}/s" if state.rollouts_per_second else None
        if self.records:
            last, recent = self.records[-1], self.records[-RECENT_STEPS:]
            seconds = sum(record.seconds.get("total", 0.0) for record in recent)
            facts_by_name["trained"] = f"{amount(sum(record.tokens for record in recent) / max(seconds, 1e-9))} tok/s"
            facts_by_name["waits"] = percent(waited_of(recent).share)
            facts_by_name["age"] = None if last.age is None else f"{last.age:.1f} max {last.max_age}"
            facts_by_name["kl"] = None if last.kl is None else f"{last.kl:.4f}"
        elif state is not None and state.history:
            pace = pace_of(state)
            facts_by_name["steps"] = f"{60 * pace.steps / pace.window_seconds:.1f}/min"
            facts_by_name["packed"] = f"{amount(pace.tokens / pace.window_seconds)} tok/s"
            facts_by_name["age"] = f"{pace.newest['age']:.1f} max {pace.newest['max_age']}" if pace.newest else None
        if facts := list(look.pairs(facts_by_name).values())[:SHOWN_FACTS]:
            yield look.across(facts, width)
        if state is not None:
            yield look.across(list(states(state, is_brief=True).values()), width)
            if agent_facts := agents(state):
                yield look.across(list(agent_facts.values()), width)

    def _processes(self, most: int) -> Iterator[RenderableType]:
        """The first `most`: silent ones come first. What the run waits for stands above already, and a supervisor that
        is heard has nothing to say."""
        rows = [] if self.state is None else process_rows(self.state)
        rows = [row for row in rows if not (row.process.is_supervisor and row.process.is_fresh)]
        if rows:
            yield Printed(PROCESSES, [_without_the_sentence(row) for row in rows[:most]])
        if len(rows) > most:
            yield more_processes(len(rows) - most)

    def _examples(self) -> list[str]:
        return example_lines(next((record.examples for record in reversed(self.records) if record.examples), ()))


def _curve(rewards: Sequence[Mapping[str, Any]], width: int, height: int) -> Iterator[Text]:
    """The reward over the steps, below its last value."""
    (curve,) = curves_of(rewards, "reward")
    values = [value for _, value in curve.points]
    between = f"   {min(values):.3f} to {max(values):.3f} in {len(values):,} steps"
    yield Text.assemble(("reward ", "faint"), (f"{values[-1]:.3f}", "bold"), (between, "faint"))
    *drawn, _ = chart([curve], width=width, height=height - 1, form=".3f")
    yield Text("\n".join(drawn), "accent", no_wrap=True)


def _has_envs(state: RunState) -> bool:
    """There are several to compare, and one has sent something."""
    return len(state.envs) > 1 and any(env.pushed.rollouts for env in state.envs)


def _without_the_sentence(row: ProcessRow) -> ProcessRow:
    if row.title != "batcher":
        return row
    return row._replace(process=replace(row.process, waiting=None, problems=()))


def _keys(keys: Mapping[str, str]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, what in keys.items():
        line.append(f"{key} ", "accent").append(f"{what}   ", "label")
    return line


def _height(heights: Mapping[str, int]) -> int:
    """Lines of the blocks that are shown, and of the empty ones between their sections."""
    sections = [sum(heights.get(name, 0) for name in section) for section in SECTIONS]
    gaps = max(0, sum(lines > 0 for lines in sections) - 1) if "gaps" in heights else 0
    return sum(sections) + gaps


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
