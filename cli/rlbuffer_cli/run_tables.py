"""The tables of who makes a run: envs, processes, and what somebody must cure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rich.text import Text

from rlbuffer.client.run_state import read_run_state
from rlbuffer.records.waiting import Problem
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.run_state import EnvState, RunState
from rlbuffer.state.text import amount, duration, plural, printable
from rlbuffer.store.history import Dropped
from rlbuffer_cli import look
from rlbuffer_cli.table import Column, Target, View, figure
from rlbuffer_cli.text import WIDE

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

    @property
    def dropped(self) -> str:
        """Rollouts by reason."""
        counts = {reason: each.rollouts for reason, each in self.env.dropped.items()}
        return _counted(counts) or "0"


def env_rows(state: RunState) -> list[EnvRow]:
    """The envs of a run."""
    return [EnvRow(state, env) for env in state.envs]


def _read_envs(run: Any, where: str, most: int) -> Sequence[EnvRow]:
    return [row for row in env_rows(read_run_state(run.buffer.store)) if where in row.name][:most]


ENVS = View(
    name="envs",
    read=_read_envs,
    key=lambda row: row.env.name,
    record=lambda row: {"schema": "rlbuffer.env/1", **asdict(row.env)},
    opens=lambda row: Target("table", "groups", where=f'env:"{row.env.name}"'),
    filter_help="a part of its name",
    empty="no env has sent anything yet",
    legend=lambda rows: ENVS_LEGEND,
    columns=(
        Column("env", lambda row: Text.assemble(("■ ", row.shade), printable(row.name)), lambda row: row.name),
        Column(
            "share of tokens",
            lambda row: look.budget(row.run.share(row.env), row.env.budget, row.shade),
            lambda row: row.run.share(row.env),
        ),
        figure("share", lambda row: row.run.share(row.env), ".0%"),
        figure("target", lambda row: row.env.budget, ".0%"),
        figure("ready", lambda row: row.env.groups_ready, ",", unknown=lambda row: NOT_SAID),
        figure("forming", lambda row: row.env.groups_forming, ",", unknown=lambda row: NOT_SAID),
        Column("age", lambda row: row.ages),
        figure("reward", lambda row: row.env.batch_reward),
        figure("packed", lambda row: row.env.packed.rollouts, ",", WIDE),
        figure("trained", lambda row: row.env.trained.rollouts, ",", WIDE),
        Column("dropped", lambda row: row.dropped),
    ),
)


# -- processes ---------------------------------------------------------------------------------------------------------
class ProcessRow(NamedTuple):
    """A process, or a worker of which only drops are known."""

    title: str
    process: Process | None
    behind: int = 0
    """Policy versions."""
    drops: Sequence[Mapping[str, Any]] = ()
    """Records of its rollouts that were dropped lately; anybody may have written them."""

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> rollouts that were dropped."""
        return _rollouts_by("reason", self.drops)

    @property
    def envs(self) -> tuple[str, ...]:
        """Its own, else those of its drops."""
        if self.process is not None:
            return (self.process.env,)
        return tuple(dict.fromkeys(str(record.get("env")) for record in self.drops))

    @property
    def heard(self) -> Text:
        """When, marked where it was silent for long."""
        if self.process is None:
            return Text("no heartbeat", "faint")
        said = f"{duration(self.process.seconds_ago)} ago"
        if self.process.has_stopped:
            return Text(f"{said}, stopped", "faint")
        return Text(said) if self.process.is_fresh else Text(f"✕ {said}", "dropped")

    @property
    def version(self) -> str:
        """What it samples with, or how far it is."""
        process = self.process
        if process is None:
            return ""
        if process.kind == "rank":
            return f"step {process.step}"
        behind = f", {self.behind} behind" if self.behind > 0 else ""
        return f"v{process.version}{behind}" if process.version >= 0 else ""

    @property
    def rate(self) -> str:
        """Rollouts a second."""
        process = self.process
        is_known = process is not None and process.is_fresh and process.rollouts_per_second
        return f"{amount(process.rollouts_per_second)}/s" if process is not None and is_known else ""

    @property
    def says(self) -> Text:
        """What must be cured, else what it waits for."""
        process = self.process
        if process is None:
            return Text()
        if process.problems:
            return Text(f"✕ {printable('; '.join(map(str, self.problems)))}", "dropped")
        return Text(printable(str(process.waiting or "")), "label")

    @property
    def problems(self) -> list[Problem]:
        """Its own."""
        p = self.process
        return [] if p is None else [replace(each, env=each.env or p.env, worker=p.name) for each in p.problems]

    @property
    def lines(self) -> list[str]:
        """All that is known of it: what failed, with its traceback, and which of its prompts went stale."""
        lines = [f"✕ {problem}" for problem in self.problems]
        if self.process is not None:
            lines += [f"waits: {self.process.waiting}"] if self.process.waiting is not None else []
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
            drops.setdefault(f"worker {record['worker']}", []).append(record)
    rows = []
    for process in sorted(state.processes, key=lambda p: p.is_fresh or p.has_stopped):
        behind = state.policy_version - process.version if process.kind == "worker" else 0
        rows.append(ProcessRow(process.title, process, behind, drops.pop(process.title, ())))
    return rows + [ProcessRow(title, None, drops=records) for title, records in drops.items()]


def _read_processes(run: Any, where: str, most: int) -> Sequence[ProcessRow]:
    rows = process_rows(read_run_state(run.buffer.store, history=READ_RECORDS))
    return [row for row in rows if where in row.title or where in row.envs][:most]


def _groups_of(row: ProcessRow) -> Target | None:
    kind, _, name = row.title.partition(" ")
    return Target("table", "groups", where=f'worker:"{name}"') if kind == "worker" else None


PROCESSES = View(
    name="processes",
    read=_read_processes,
    key=lambda row: row.title,
    record=lambda row: {
        "schema": "rlbuffer.process/1",
        **(asdict(row.process) if row.process else {"name": row.title}),
    },
    opens=_groups_of,
    more=lambda row: row.lines,
    filter_help="a part of its name, or its env",
    empty="no process has been heard",
    columns=(
        Column("process", lambda row: row.title),
        Column("heard", lambda row: row.heard, lambda row: row.process.seconds_ago if row.process else 1e9, True),
        Column("version", lambda row: row.version, lambda row: row.process.version if row.process else -1, True),
        Column(
            "rollouts",
            lambda row: row.rate,
            lambda row: row.process.rollouts_per_second if row.process else 0.0,
            True,
        ),
        Column("env", lambda row: ", ".join(row.envs)),
        Column("dropped", lambda row: _counted(row.reasons), lambda row: row.reasons.total()),
        Column("waits for", lambda row: row.says),
    ),
)


# -- problems ----------------------------------------------------------------------------------------------------------
def _problem_record(problem: Problem) -> Mapping[str, Any]:
    return {"schema": "rlbuffer.problem/1", **problem.record(), "sentence": str(problem)}


def _read_problems(run: Any, where: str, most: int) -> Sequence[Problem]:
    return [p for p in read_run_state(run.buffer.store).problems if where in str(p) or where in p.kind][:most]


PROBLEMS = View(
    name="problems",
    read=_read_problems,
    key=lambda problem: " ".join(filter(None, problem.key)),
    record=_problem_record,
    filter_help="a word of it",
    empty="No problems. What somebody must cure stands here.",
    columns=(
        Column("env", lambda problem: problem.env),
        Column("kind", lambda problem: Text(f"✕ {problem.kind}", "dropped")),
        Column("what, and what to do", str),
    ),
)
