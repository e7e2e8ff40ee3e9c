"""Every process of a run in a row: when it was heard, how far behind it samples, what was dropped, what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlbuffer.state.heartbeats import problems_of, waiting_of
from rlbuffer.state.text import plural, printable
from rlbuffer.store.history import Dropped
from rlbuffer_cli.render.workers import BEAT_HEADER, PROCESS_KINDS, beat_row, problem_lines

if TYPE_CHECKING:
    from rlbuffer.store.viewer import Viewer

PROCESS_HEADER = (*BEAT_HEADER[:-1], "dropped", BEAT_HEADER[-1])
PROCESS_OPTIONAL = ("env", "rate", "dropped")
READ_RECORDS = 1000
"""Newest records of the history in which drops are counted."""
SHOWN_PROMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Rollouts of one worker that were dropped lately."""

    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> rollouts."""
    prompts: Counter[str] = field(default_factory=Counter)
    """Prompt id -> its stale rollouts."""
    envs: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of a run."""

    beats: Mapping[str, Mapping[str, Any]]
    """``worker NAME``, ``rank N`` ... -> its last heartbeat."""
    policy_version: int
    writers: Mapping[str, Writer]
    """``worker NAME`` -> what was dropped of it; also of those that send no heartbeat."""

    def rows(self) -> dict[str, list[str]]:
        """``worker NAME`` ... -> cells under :data:`PROCESS_HEADER`."""
        rows = {who: self._row(who, beat) for who, beat in self.beats.items()}
        for who, writer in self.writers.items():
            if who not in rows:
                rows[who] = [who, "no heartbeat", "", "", ", ".join(writer.envs), _counted(writer.reasons), ""]
        return rows

    def _row(self, who: str, beat: Mapping[str, Any]) -> list[str]:
        *cells, trouble = beat_row(who, beat)
        version, at = beat.get("version"), BEAT_HEADER.index("version")
        if cells[at] and isinstance(version, int) and version < self.policy_version:
            cells[at] += f", {self.policy_version - version} behind"
        return [*cells, _counted(self.writers[who].reasons) if who in self.writers else "", trouble]

    def lines(self, who: str) -> list[str]:
        """All that is known of one: what failed, with its traceback, and which of its prompts went stale."""
        beat, writer = self.beats.get(who, {}), self.writers.get(who)
        name, env = who.partition(" ")[2], str(beat.get("env") or "")
        lines = problem_lines(replace(problem, env=problem.env or env, worker=name) for problem in problems_of(beat))
        if waiting := waiting_of(beat):
            lines.append(f"  waits: {printable(str(waiting))}")
        if beat.get("traceback"):
            lines += [f"    {printable(line)}" for line in str(beat["traceback"]).splitlines()]
        if writer is not None:
            lines.append(f"  dropped rollouts in the last {READ_RECORDS:,} records: {_counted(writer.reasons)}")
            most = writer.prompts.most_common(SHOWN_PROMPTS)
            prompts = [f"{printable(name)} ({plural(count, 'rollout')})" for name, count in most]
            more = f" and {len(writer.prompts) - SHOWN_PROMPTS} more" if len(writer.prompts) > SHOWN_PROMPTS else ""
            lines += [f"  stale prompts: {', '.join(prompts)}{more}"] if prompts else []
        return lines


def processes_of(store: Viewer) -> Processes:
    """Reads heartbeats and the newest drops; changes nothing."""
    writers: dict[str, Writer] = {}
    for record in store.history(READ_RECORDS):
        if record.get("event") == Dropped.event and record.get("worker"):
            writer = writers.setdefault(f"worker {record['worker']}", Writer())
            count = record.get("rollouts")
            rollouts = count if isinstance(count, int) else 0  # anybody may have written it
            writer.reasons[str(record.get("reason"))] += rollouts
            writer.envs[str(record.get("env"))] = None
            if record.get("reason") == "stale" and record.get("prompt_id"):
                writer.prompts[str(record["prompt_id"])] += rollouts
    beats = {f"{kind} {name}": beat for kind in PROCESS_KINDS for name, beat in sorted(store.heartbeats(kind).items())}
    return Processes(beats=beats, policy_version=store.policy().version, writers=writers)


def _counted(reasons: Mapping[str, int]) -> str:
    return " ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
