"""The tables of who makes a run: envs, processes, and what somebody must cure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

from rich.text import Text

from rlbuffer.records.waiting import AT_REST, FINAL, Problem, Waiting
from rlbuffer.state.heartbeats import Process, is_starting
from rlbuffer.state.run_state import EnvState, RunState
from rlbuffer.state.text import amount, duration, plural, printable
from rlbuffer.store.history import Dropped
from rlbuffer_cli import look
from rlbuffer_cli.table import Column, Target, View, bar, figure
from rlbuffer_cli.text import WIDE

T = TypeVar("T")
READ_RECORDS = 1000
"""Newest records of the history that are read; a run that makes more of them has a shorter window."""
SHOWN_PROMPTS = 5
ENVS_LEGEND = "share: of tokens so far, ┃ target   ready, forming, age: groups   others: rollouts"
NOT_SAID = "-"
"""Stands for what no leader has said yet."""


# -- envs --------------------------------------------------------------------------------------------------------------
class EnvRow(NamedTuple):
    """An env of a run."""

    run: RunState
    env: EnvState

    @property
    def name(self) -> str:
        """With what an operator said of it."""
        return self.env.name + " (paused)" * self.env.is_paused + " (done)" * self.env.is_done

    @property
    def shade(self) -> str:
        """Its style: the largest three have one each."""
        by_size = sorted(self.run.envs, key=lambda env: -self.run.share(env))
        return f"e{min(4, 1 + by_size.index(self.env))}"

    @property
    def ages(self) -> Text:
        """Its groups by age, at the scale of all envs."""
        top = max((n for env in self.run.envs for n in env.ages.values()), default=1)
        return look.ages({int(age): n for age, n in self.env.ages.items()}, top)


def env_rows(state: RunState) -> list[EnvRow]:
    """The envs of a run."""
    return [EnvRow(state, env) for env in state.envs]


def _of_state(rows: Callable[[RunState], Sequence[T]]) -> Callable[[Any, str, int], Sequence[T]]:
    """Reads a table of a run's state."""
    return lambda run, where, most: rows(run.state())[:most]


ENVS = View(
    name="envs",
    press="v",
    of_server=True,
    answers="Who gets which share of the tokens, against its target?",
    read=_of_state(env_rows),
    key=lambda row: row.env.name,
    record=lambda row: {"schema": "rlbuffer.env/1", **asdict(row.env)},
    opens=lambda row: Target("table", "groups", where=f'env:"{row.env.name}"'),
    fields={"env": lambda row: row.env.name, "reward": lambda row: row.env.batch_reward},
    words=lambda row: row.name,
    filter_help="a part of its name, or env:math",
    empty="no env has sent anything yet",
    legend=lambda rows: ENVS_LEGEND,
    columns=(
        Column("env", lambda row: Text.assemble(("■ ", row.shade), printable(row.name)), lambda row: row.name),
        bar(
            "share of tokens",
            lambda row: row.run.share(row.env),
            lambda row: look.budget(row.run.share(row.env), row.env.budget, row.shade),
            1,
        ),
        figure("share", lambda row: row.run.share(row.env), ".0%"),
        figure("target", lambda row: row.env.budget, ".0%", 3),
        figure("ready", lambda row: row.env.groups_ready, ",", 1, unknown=lambda row: NOT_SAID),
        figure("forming", lambda row: row.env.groups_forming, ",", 2, unknown=lambda row: NOT_SAID),
        Column("age", lambda row: row.ages, at=1),
        figure("reward", lambda row: row.env.batch_reward),
        figure("length distance", lambda row: row.env.length_distance, ".3f", WIDE),
        figure("packed", lambda row: row.env.packed.rollouts, ",", WIDE),
        figure("trained", lambda row: row.env.trained.rollouts, ",", WIDE),
        Column("dropped", lambda row: _counted({why: each.rollouts for why, each in row.env.dropped.items()}) or "0"),
    ),
)


# -- processes ---------------------------------------------------------------------------------------------------------
class ProcessRow(NamedTuple):
    """A process, or a worker of which only drops are known."""

    process: Process
    behind: int = 0
    """Policy versions."""
    drops: Sequence[Mapping[str, Any]] = ()
    """Records of its rollouts that were dropped lately; anybody may have written them."""
    is_at_rest: bool = False
    """The run is over: nobody need be seen."""

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> rollouts that were dropped."""
        return _rollouts_by("reason", self.drops)

    @property
    def title(self) -> str:
        return self.process.title

    @property
    def is_heard(self) -> bool:
        """It has sent a heartbeat."""
        return self.process.seconds_ago < math.inf

    @property
    def heard(self) -> Text:
        """When, marked where it is silent and should not be."""
        if not self.is_heard:
            return Text("no heartbeat", "faint")
        when = f"{duration(self.process.seconds_ago)} ago"
        if self.process.has_stopped:
            return Text(f"{when}, stopped", "faint")
        if self.is_at_rest and not self.process.is_fresh:
            return Text(when, "faint")
        return Text(when) if self.process.is_fresh else Text(f"✕ {when}", "dropped")

    @property
    def version(self) -> str:
        """What it samples with, or how far it is."""
        process = self.process
        if process.kind == "rank":
            return f"step {process.step}"
        behind = f", {self.behind} behind" if self.behind > 0 else ""
        return f"v{process.version}{behind}" if process.version >= 0 else ""

    @property
    def rate(self) -> str:
        """Rollouts a second."""
        rate = self.process.rollouts_per_second
        return f"{amount(rate)}/s" if rate and self.process.is_fresh else ""

    @property
    def says(self) -> Text:
        """What must be cured, else what it waits for."""
        if self.problems:
            return Text(f"✕ {printable('; '.join(map(str, self.problems)))}", "dropped")
        return Text(printable(str(self.waits or "")), "label")

    @property
    def waits(self) -> Waiting | None:
        """What it waits for, or how the run ended; None of what a silent one said before the run came to rest."""
        waiting, is_past = self.process.waiting, self.is_at_rest and not self.process.is_fresh
        return None if is_past and waiting is not None and waiting.kind not in FINAL else waiting

    @property
    def problems(self) -> list[Problem]:
        """Its own."""
        p = self.process
        return [replace(each, env=each.env or p.env, worker=p.name) for each in p.problems]

    @property
    def lines(self) -> list[str]:
        """All that is known of it: what failed, with its traceback, and which of its prompts went stale."""
        lines = [f"✕ {problem}" for problem in self.problems]
        lines += [f"waits: {self.waits}"] if self.waits is not None else []
        lines += self.process.traceback.splitlines()
        if self.reasons:
            lines.append(f"dropped rollouts in the last {READ_RECORDS:,} records: {_counted(self.reasons)}")
        stale = [record for record in self.drops if record.get("reason") == "stale" and record.get("prompt_id")]
        if prompts := _rollouts_by("prompt_id", stale):
            most = prompts.most_common(SHOWN_PROMPTS)
            more = f" and {len(prompts) - SHOWN_PROMPTS} more" if len(prompts) > SHOWN_PROMPTS else ""
            named = ", ".join(f"{name} ({plural(count, 'rollout')})" for name, count in most)
            lines.append(f"stale prompts: {named}{more}")
        return [printable(line) for line in lines]


def _counted(reasons: Mapping[str, int]) -> str:
    return " ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


def _rollouts_by(field: str, records: Iterable[Mapping[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for record in records:
        rollouts = record.get("rollouts")
        counts[str(record.get(field))] += rollouts if isinstance(rollouts, int) else 0
    return counts


def process_rows(state: RunState) -> list[ProcessRow]:
    """Every process: the silent ones first. Behind them workers that send no heartbeat, and whose rollouts were
    dropped."""
    drops: dict[str, list[Mapping[str, Any]]] = {}
    for record in state.history:
        if record.get("event") == Dropped.event and record.get("worker"):
            drops.setdefault(str(record["worker"]), []).append(record)
    is_over = state.waiting is not None and state.waiting.kind in AT_REST
    rows, is_at_rest = [], is_over or is_starting(state.processes)
    for process in sorted(state.processes, key=lambda p: p.is_fresh or p.has_stopped):
        is_worker = process.kind == "worker"
        behind = state.policy_version - process.version if is_worker else 0
        rows.append(ProcessRow(process, behind, drops.pop(process.name, ()) if is_worker else (), is_at_rest))
    for name, records in drops.items():
        envs = ", ".join(dict.fromkeys(str(record.get("env")) for record in records))
        rows.append(ProcessRow(Process(kind="worker", name=name, seconds_ago=math.inf, env=envs), drops=records))
    return rows


def _groups_of(row: ProcessRow) -> Target | None:
    process = row.process
    return Target("table", "groups", where=f'worker:"{process.name}"') if process.kind == "worker" else None


PROCESSES = View(
    name="processes",
    one="process",
    press="w",
    of_server=True,
    answers="Who lives, at which version, and what failed last?",
    read=_of_state(process_rows),
    key=lambda row: row.title,
    record=lambda row: {
        "schema": "rlbuffer.process/1",
        **(asdict(row.process) if row.is_heard else {"name": row.title}),
    },
    opens=_groups_of,
    more=lambda row: row.lines,
    fields={
        "env": lambda row: row.process.env,
        "worker": lambda row: row.process.name if row.process.kind == "worker" else None,
    },
    words=lambda row: f"{row.title} {row.process.env}",
    filter_help="a part of its name, or env:math",
    empty="no process has been seen",
    columns=(
        Column("process", lambda row: row.title),
        Column("seen", lambda row: row.heard, lambda row: row.process.seconds_ago, True),
        Column("version", lambda row: row.version, lambda row: row.process.version, True),
        Column("rollouts", lambda row: row.rate, lambda row: row.process.rollouts_per_second, True, 2),
        Column("env", lambda row: row.process.env, at=1),
        Column("dropped", lambda row: _counted(row.reasons), lambda row: row.reasons.total(), at=3),
        Column("waits for", lambda row: row.says),
    ),
)


# -- problems ----------------------------------------------------------------------------------------------------------
PROBLEMS = View(
    name="problems",
    press="!",
    of_server=True,
    answers="What must somebody cure, and how?",
    read=_of_state(lambda state: state.problems),
    key=lambda problem: " ".join(filter(None, problem.key)),
    record=lambda problem: {"schema": "rlbuffer.problem/1", **problem.record(), "sentence": str(problem)},
    fields={"env": lambda problem: problem.env, "worker": lambda problem: problem.worker},
    words=lambda problem: f"{problem.kind} {problem}",
    filter_help="a word of it, or env:math",
    empty="No problems. What somebody must cure stands here.",
    is_prose=True,
    columns=(
        Column("env", lambda problem: problem.env),
        Column("kind", lambda problem: Text(f"✕ {problem.kind}", "dropped")),
        Column("what, and what to do", str),
    ),
)
