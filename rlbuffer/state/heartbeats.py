"""What heartbeats say: why a process waits, and what somebody must cure.

Any process may write a heartbeat, so nothing in it is certain to be there, nor of a type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rlbuffer.records.waiting import FINAL, Problem, Trouble, Wait, Waiting
from rlbuffer.state.text import counted, duration

FRESH_SECONDS = 8.0
"""A heartbeat comes every two seconds, that of a worker without tickets at least every seven; whoever is silent for
longer may be gone."""
SHOWN_SILENT_SECONDS = 12.0
"""An env whose workers are silent for so long has none: their tickets lapse."""
DEAD_SECONDS = 15.0
"""A batcher without a lease that was heard later than this may be taking over."""

Beat = Mapping[str, Any]


def failures_of(beat: Beat) -> dict[str, int]:
    """Kind of error -> groups that could not be made."""
    kinds = beat.get("failures")
    return {str(k): n for k, n in kinds.items() if isinstance(n, int)} if isinstance(kinds, Mapping) else {}


def waiting_of(beat: Beat) -> Waiting | None:
    """Why the process waits; None while it works, and of one that does not say."""
    return Waiting.of(beat.get("waiting"))


def problems_of(beat: Beat) -> tuple[Problem, ...]:
    """What the process says that somebody must cure."""
    said = beat.get("problems")
    return tuple(filter(None, map(Problem.of, said))) if isinstance(said, list) else ()


def batcher_waiting(beat: Beat | None, *, is_led: bool, error: str = "") -> Waiting | None:
    """Why no step comes, by the leader's last heartbeat; None while it works. What a leader said that was killed since
    holds no more.

    `error`: the batcher's fatal one.
    """
    waiting = None if beat is None else waiting_of(beat)
    if is_led or (waiting is not None and waiting.kind in FINAL):
        return waiting
    if error:
        return Waiting(kind=Wait.NO_BATCHER, detail=error)
    silence = math.inf if beat is None else beat["seconds_ago"]
    if silence > DEAD_SECONDS:
        return Waiting(kind=Wait.NO_BATCHER, seconds=silence if math.isfinite(silence) else 0.0)
    return waiting


def worker_problems(workers: Mapping[str, Beat], waiting: Waiting | None = None) -> tuple[Problem, ...]:
    """What the workers say that somebody must cure, and what their silence says: one of a kind for each env.

    The last words of a worker that has ended count until another one samples its env. Workers of one's own need not
    send heartbeats: that there is none at all counts only where the batcher has `waiting`, and nothing has come.
    """
    alive = {name for name, beat in workers.items() if _is_fresh(beat)}
    served = {str(workers[name].get("env")) for name in alive}
    found: list[Problem] = []
    envs: dict[str, dict[str, float]] = {}
    for name, beat in sorted(workers.items()):
        env = str(beat.get("env") or "")
        envs.setdefault(env, {})[name] = beat["seconds_ago"]
        if name not in alive and env in served:
            continue
        found += [replace(problem, env=env, worker=name) for problem in problems_of(beat)]
        if beat.get("doing") and name not in alive:
            found.append(Problem(kind=Trouble.WORKER_GONE, env=env, worker=name, detail=str(beat["doing"])))
    for env, ages in sorted(envs.items()):
        if env and min(ages.values()) > SHOWN_SILENT_SECONDS:
            heard = ", ".join(f"{name} was heard {duration(ago)} ago" for name, ago in ages.items())
            found.append(Problem(kind=Trouble.NO_WORKER, env=env, detail=heard))
    if not workers and waiting is not None and waiting.kind is Wait.FILLING and not waiting.env:
        found.append(Problem(kind=Trouble.NO_WORKER))
    return merged(found)


def run_problems(
    *, leader: Beat | None, workers: Mapping[str, Beat], scorers: Mapping[str, Beat], waiting: Waiting | None
) -> tuple[Problem, ...]:
    """What somebody must cure, as every process of a run says it while the batcher has `waiting`."""
    own = [replace(p, worker=name) for name, beat in scorers.items() if _is_fresh(beat) for p in problems_of(beat)]
    leading = problems_of(leader) if leader is not None and _is_fresh(leader) else ()
    return (*leading, *worker_problems(workers, waiting), *own)


def _is_fresh(beat: Beat) -> bool:
    return bool(beat["seconds_ago"] <= FRESH_SECONDS)


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
    """The groups that a worker gave up; None while it has given up none. `last`: the last error, with file and line."""
    if not kinds:
        return None
    return Problem(kind=Trouble.ENV_FAILS, count=Counter(kinds).total(), detail=f"{counted(kinds)}, the last: {last}")
