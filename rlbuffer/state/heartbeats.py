"""What heartbeats say: what a process does, why it waits, and what somebody must cure.

Any process may write a heartbeat, so nothing in it is certain to be there, nor of a type:
:mod:`rlbuffer.records.readable` takes what is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rlbuffer.records.readable import readable
from rlbuffer.records.waiting import (
    AT_REST,
    FINAL,
    FOR_GROUPS,
    STARTING_SECONDS,
    Cause,
    Problem,
    Trouble,
    Wait,
    Waiting,
)
from rlbuffer.state.metric import Kind, Metric, metrics
from rlbuffer.state.text import counted, duration

FRESH_SECONDS = 8.0
"""A heartbeat comes every two seconds, that of a worker without tickets at least every seven; whoever is silent for
longer may be gone."""
SHOWN_SILENT_SECONDS = 12.0
"""An env whose workers are silent for so long has none: their tickets expire."""
DEAD_SECONDS = 15.0
"""A batcher without a lease that was last seen later than this may be taking over."""
KINDS = ("batcher", "worker", "scorer", "gateway", "rank")
LEADER, SUPERVISOR = "leader", "run"
"""Names of the batcher that leads, and of `rlbuffer run`, which has a heartbeat of this kind, too."""

GATEWAY = "gateway"
"""The kind of a gateway, and what the name of each begins with."""

Beat = Mapping[str, Any]


def _of(name: str, meaning: str, kind: Kind = "counter", *, labels: str = "") -> Metric:
    """A number of each worker."""
    return Metric(name, kind, meaning, ("worker", "env", *labels.split()))


def _of_scorer(name: str, meaning: str) -> Metric:
    return Metric(name, "counter", meaning, ("scorer",))


def _of_gateway(name: str, meaning: str, kind: Kind = "counter") -> Metric:
    return Metric(f"gateway_{name}", kind, meaning, ("gateway",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process by its last heartbeat."""

    kind: str
    """``batcher``, ``worker``, ``scorer``, ``gateway`` or ``rank``."""
    name: str
    seconds_ago: float
    """Since the heartbeat, on the server's clock."""
    env: str = ""
    version: int = metrics(-1, _of("worker_policy_version", "Version that samples; -1 before the first.", "gauge"))
    weights_seconds: Mapping[str, float] = metrics(
        dict,
        _of(
            "worker_weights_seconds",
            "What bringing the version that samples took: fetch, apply (making it of a delta), load.",
            "gauge",
            labels="stage",
        ),
    )
    weights_bytes: Mapping[str, int] = metrics(
        dict,
        _of(
            "worker_weights_bytes",
            "What came over the network for it: delta, whole (weights), other (a tokenizer).",
            "gauge",
            labels="kind",
        ),
    )
    weights_size: int = 0
    """Bytes of its weights."""
    step: int = metrics(
        0, Metric("trainer_step", "gauge", "Last step that each rank has trained, by its heartbeat.", ("rank",))
    )
    """Of the batcher: the last that is committed."""
    groups: int = metrics(
        0,
        _of("worker_groups_total", "Pushed."),
        _of_scorer("score_groups_total", "Scored, and pushed."),
        _of_gateway("groups_total", "Pushed."),
    )
    """Done and stored since it started; so are the next three."""
    rollouts: int = metrics(
        0,
        _of("worker_rollouts_total", "Pushed."),
        _of_scorer("score_rollouts_total", "Of the same."),
        _of_gateway("rollouts_total", "Pushed."),
    )
    tokens: int = metrics(
        0,
        _of("worker_tokens_total", "Pushed."),
        _of_scorer("score_tokens_total", "Of the same."),
        _of_gateway("tokens_total", "Pushed."),
    )
    failed_groups: int = 0
    failures: Mapping[str, int] = metrics(
        dict, _of("worker_failed_groups_total", "Groups abandoned, by the name of the exception.", labels="kind")
    )
    late: int = metrics(
        0, _of_scorer("score_late_groups_total", "Another scorer was faster, or the group had been dropped.")
    )
    rollouts_per_second: float = 0.0
    tokens_per_second: float = 0.0
    gives: tuple[str, ...] = ()
    """What a scorer adds."""
    envs: tuple[str, ...] = ()
    """Envs that it adds that to; (): all."""
    sampling: int = 0
    """Groups that a worker makes now."""
    # -- a gateway's own
    listens: str = ""
    """Where agents ask it."""
    open_rollouts: Mapping[str, int] = field(default_factory=dict)
    """Env -> its open rollouts, of all gateways."""
    calls: int = metrics(0, _of_gateway("calls_total", "Calls of agents that it has recorded."))
    open_calls: int = metrics(0, _of_gateway("calls_open", "Calls of agents that it has not answered yet.", "gauge"))
    ticket_waits: int = metrics(0, _of_gateway("ticket_waits", "Openings that wait for a ticket.", "gauge"))
    sampled_tokens: int = metrics(0, _of_gateway("sampled_tokens_total", "Sampled in the calls."))
    engine_seconds: float = metrics(
        0.0, _of_gateway("engine_seconds_total", "Time of the calls that engines took: rendering, waiting, sampling.")
    )
    own_seconds: float = metrics(0.0, _of_gateway("own_seconds_total", "Time of the calls that it took itself."))
    told_again: int = metrics(0, _of_gateway("told_again_total", "Retries that were told what had been recorded."))
    new_sequences: int = metrics(
        0, _of_gateway("new_sequences_total", "Calls with a history that begins a sequence all the same.")
    )
    refused: int = metrics(0, _of_gateway("refused_total", "Requests that were refused."))
    other_ends: int = metrics(
        0, _of_gateway("other_ends_total", "Ends that were refused, since the rollout had ended otherwise.")
    )
    abandoned: int = metrics(0, _of_gateway("abandoned_total", "Open rollouts that it has ended as abandoned."))
    stuck_groups: int = metrics(0, _of_gateway("stuck_groups", "Groups that could not be pushed yet.", "gauge"))
    engine_troubles: int = metrics(0, _of_gateway("engine_troubles", "Engines that failed last.", "gauge"))
    calls_per_second: float = 0.0
    """By its last heartbeats; so are the next two."""
    call_engine_seconds: float = 0.0
    """What engines took for a call."""
    call_own_seconds: float = 0.0
    """What it took itself for a call."""
    traceback: str = ""
    """Of the last error of an env."""
    archive: str = ""
    """Folder that the batcher archives to."""
    idle: bool = False
    """The batcher can make no further step of what is here."""
    pid: int = 0
    host: str = ""
    has_stopped: bool = False
    """It said goodbye."""
    waiting: Waiting | None = None
    """What it waits for, or how the run ended; None while it works, of one that has left, and of one that does not
    say."""
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, kind: str, name: str, beat: Beat, *, seconds_ago: float | None = None) -> Self:
        """The process of a heartbeat; `seconds_ago`: where the record does not have it."""
        problems, waiting = beat.get("problems"), Waiting.of(beat.get("waiting"))
        has_stopped = bool(beat.get("left") or beat.get("stopped"))
        if has_stopped and waiting is not None and waiting.kind not in FINAL:
            waiting = None  # of before it left
        return cls(
            **readable(cls, beat)
            | {
                "kind": kind,
                "name": name,
                "seconds_ago": beat["seconds_ago"] if seconds_ago is None else seconds_ago,
                "has_stopped": has_stopped,
                "waiting": waiting,
                "problems": tuple(filter(None, map(Problem.of, problems))) if isinstance(problems, list) else (),
            }
        )

    @property
    def title(self) -> str:
        """``worker NAME``, ``rank N``; ``batcher`` for the one that leads, ``supervisor`` for `rlbuffer run`, and a
        gateway's name alone: ``gateway``, ``gateway-1``."""
        if self.kind == GATEWAY and self.name.startswith(GATEWAY):
            return self.name
        names = {LEADER: "batcher", SUPERVISOR: "supervisor"} if self.kind == "batcher" else {}
        return names.get(self.name, f"{self.kind} {self.name}")

    @property
    def is_supervisor(self) -> bool:
        """It is `rlbuffer run`, or `demo`."""
        return self.kind == "batcher" and self.name == SUPERVISOR

    @property
    def is_starting(self) -> bool:
        """It was started a moment ago, and what it loads may keep it from saying more."""
        starts = self.waiting is not None and self.waiting.kind is Wait.STARTING
        return starts and not self.has_stopped and self.seconds_ago <= STARTING_SECONDS

    @property
    def is_fresh(self) -> bool:
        """It was last seen a moment ago, or is starting."""
        return self.seconds_ago <= FRESH_SECONDS or self.is_starting

    @property
    def is_alive(self) -> bool:
        """It was last seen a moment ago, and that was no goodbye."""
        return self.is_fresh and not self.has_stopped


def processes(kind: str, beats: Mapping[str, Beat]) -> tuple[Process, ...]:
    """The processes of one kind, by name."""
    return tuple(Process.of(kind, name, beat) for name, beat in sorted(beats.items()))


def archive_folder(batchers: Mapping[str, Beat]) -> str:
    """The folder that a batcher says it archives to, of their heartbeats; "" where none says one."""
    folders = (beat.get("archive") for beat in batchers.values())
    return next((folder for folder in folders if folder and isinstance(folder, str)), "")


def batcher_waiting(
    leader: Process | None, *, is_led: bool, error: str = "", is_starting: bool = False
) -> Waiting | None:
    """Why no step comes, by the leader's last heartbeat; None while it works. What a leader said that was killed since
    holds no more.

    Args:
        error: the batcher's fatal one.
        is_starting: as of :func:`is_starting`.
    """
    waiting = None if leader is None else leader.waiting
    if is_starting and not is_led and not error and (leader is None or not leader.is_fresh):
        return Waiting(kind=Wait.STARTING, detail="the batcher")
    if is_led or (waiting is not None and waiting.kind in FINAL):
        return waiting
    if error:
        return Waiting(kind=Wait.NO_BATCHER, detail=error)
    silence = math.inf if leader is None else leader.seconds_ago
    if silence > DEAD_SECONDS:
        return Waiting(kind=Wait.NO_BATCHER, seconds=silence if math.isfinite(silence) else 0.0)
    return waiting


def is_starting(processes: Iterable[Process]) -> bool:
    """`rlbuffer run` has started all processes of the run a moment ago."""
    return any(process.is_supervisor and process.is_starting for process in processes)


def while_starting(waiting: Waiting | None, processes: Collection[Process]) -> Waiting | None:
    """`waiting` as long as those who are missing may have been started a moment ago."""
    if waiting is None:
        return None
    rank = next((p.waiting for p in processes if p.kind == "rank" and p.is_starting), None)
    run = next((p.waiting for p in processes if p.is_supervisor and p.is_starting), None)
    if waiting.kind in (Wait.NO_TRAINER, Wait.TRAINER_GONE) and (starting := rank or run) is not None:
        loads = ", ".join(filter(None, ["the trainer", starting.detail]))
        return replace(starting, step=waiting.step, detail=loads)
    if run is not None and waiting.kind in FOR_GROUPS and waiting.cause == Cause.NO_WORKER:
        return replace(waiting, cause=Cause.LOADING, detail="they were started a moment ago")
    return waiting


def worker_problems(
    workers: Iterable[Process], waiting: Waiting | None = None, *, is_starting: bool = False
) -> tuple[Problem, ...]:
    """What the workers say that somebody must cure, and what their silence says: one of a kind for each env.

    The last words of a worker that has ended count until another one samples its env. Workers of one's own need not
    send heartbeats: that there is none at all counts only where the batcher has `waiting`, and nothing has come. Nobody
    is missing while the run `is_starting`.
    """
    workers = tuple(workers)
    is_at_rest = is_starting or (waiting is not None and waiting.kind in AT_REST)
    served = {worker.env for worker in workers if worker.is_alive}
    found: list[Problem] = []
    envs: dict[str, list[Process]] = {}
    for worker in workers:
        envs.setdefault(worker.env, []).append(worker)
        if not worker.is_alive and worker.env in served:
            continue
        found += [replace(problem, env=worker.env, worker=worker.name) for problem in worker.problems]
    for env, members in sorted(envs.items()):
        is_silent = min(worker.seconds_ago for worker in members) > SHOWN_SILENT_SECONDS
        if is_silent and env and not is_at_rest and not any(worker.is_starting for worker in members):
            heard = ", ".join(f"{worker.name} was last seen {duration(worker.seconds_ago)} ago" for worker in members)
            found.append(Problem(kind=Trouble.NO_WORKER, env=env, detail=heard))
    has_come = waiting is None or waiting.kind is not Wait.FILLING or waiting.env or waiting.cause == Cause.AGENTS
    if not is_at_rest and not workers and not has_come:
        found.append(Problem(kind=Trouble.NO_WORKER))
    return merged(found)


def rank_problems(processes: Iterable[Process]) -> tuple[Problem, ...]:
    """What the ranks say that somebody must cure: each says what its own part of a step lacks."""
    problems = [p for each in processes if each.kind == "rank" and each.is_alive for p in each.problems]
    newest = max((problem.step for problem in problems), default=0)
    by_count = sorted((problem for problem in problems if problem.step == newest), key=lambda problem: problem.count)
    return merged(by_count)  # the last detail stays: that of the rank which lacks the most


def run_problems(processes: Iterable[Process], waiting: Waiting | None) -> tuple[Problem, ...]:
    """What somebody must cure, as every process of a run says it while the batcher has `waiting`."""
    processes = tuple(processes)
    leading = [p for each in processes if each.title == "batcher" and each.is_alive for p in each.problems]
    others = [
        replace(p, worker=each.name)
        for each in processes
        if each.kind in ("scorer", GATEWAY) and each.is_alive
        for p in each.problems
    ]
    workers = [each for each in processes if each.kind == "worker"]
    of_workers = worker_problems(workers, waiting, is_starting=is_starting(processes))
    return (*leading, *of_workers, *others, *rank_problems(processes))


def merged(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """One problem for each kind and env: counts are added up, the last detail stays, workers are named together."""
    out: dict[tuple[str, str], Problem] = {}
    workers: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        names = workers.setdefault(problem.key, [])
        if problem.worker and problem.worker not in names:
            names.append(problem.worker)
        before = out.get(problem.key)
        out[problem.key] = replace(problem, count=problem.count + (before.count if before else 0))
    return tuple(replace(problem, worker=_several(workers[key])) for key, problem in out.items())


def _several(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def failing(kinds: Mapping[str, int], last: str) -> Problem | None:
    """What a worker has abandoned; None while that is nothing. `last`: the last error, with file and line."""
    if not kinds:
        return None
    return Problem(kind=Trouble.ENV_FAILS, count=Counter(kinds).total(), detail=f"{counted(kinds)}, the last: {last}")
