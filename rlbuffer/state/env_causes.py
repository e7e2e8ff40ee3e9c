"""Why no further group of an env comes, where it is a matter of who samples it: what its workers and gateways
say, or their silence.

With the causes of the pool (:mod:`rlbuffer.batcher.situation`) this is the one list of what may be true of an env; what
the leader finds in it is said by `serve`, `inspect`, `top` and the reader's timeout alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlbuffer.records.waiting import FOR_GROUPS, Cause, Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import SHOWN_SILENT_SECONDS, Process
from rlbuffer.state.text import duration, plural

SHOWN_WORKERS = 2
"""Workers that are quoted."""


def explained(
    waiting: Waiting | None,
    workers: Collection[Process],
    heard: Mapping[str, float],
    gateways: Collection[Process] = (),
) -> Waiting | None:
    """`waiting` with the cause for which no further group of its env is there, where it is for groups and has none.

    Args:
        workers: of the run, by their last heartbeats; so are `gateways`.
        heard: env -> seconds since something of it came.
    """
    if waiting is None or waiting.kind not in FOR_GROUPS or waiting.cause:
        return waiting
    cause, detail = _cause(waiting.env, workers, heard, [gateway for gateway in gateways if gateway.is_alive])
    return replace(waiting, cause=cause, detail=detail)


def _cause(
    env: str, workers: Collection[Process], heard: Mapping[str, float], gateways: Collection[Process]
) -> tuple[Cause, str]:
    """`env` "": any. `gateways` are those that live."""
    of_env = [worker for worker in workers if env in ("", worker.env)]
    alive = [w for w in of_env if not w.has_stopped and (w.seconds_ago <= SHOWN_SILENT_SECONDS or w.is_starting)]
    if any(map(_samples, alive)):
        return Cause.GENERATING, ""
    if alive:
        troubled = [replace(_troubles(w)[0], env=w.env, worker=w.name) for w in alive if _troubles(w)]
        loading = [f"{w.name}: {w.waiting}" for w in alive if _loads(w)]
        waiting = [f"{w.name}: {w.waiting}" for w in alive if w.waiting is not None]
        for cause, words in ((Cause.LOADING, loading), (Cause.TROUBLE, troubled), (Cause.WAITING, waiting)):
            if words:
                return cause, " ".join(map(str, words[:SHOWN_WORKERS]))
        return Cause.WAITING, " ".join(f"{w.name} has no policy version yet." for w in alive[:SHOWN_WORKERS])
    # Each gateway says what is open in the whole run; the one that has looked last counts.
    counts = min(gateways, key=lambda gateway: gateway.seconds_ago).open_rollouts if gateways else {}
    if is_open := sum(count for name, count in counts.items() if env in ("", name)):
        return Cause.AGENTS, plural(is_open, "open rollout")
    silence = min((seconds for name, seconds in heard.items() if env in ("", name)), default=None)
    if silence is not None and silence <= SHOWN_SILENT_SECONDS:
        return Cause.WRITERS, f"the last push came {duration(silence)} ago"
    if gateways and not of_env:
        return Cause.AGENTS, ""
    last = [f"{w.name} {'ended' if w.has_stopped else 'was last seen'} {duration(w.seconds_ago)} ago" for w in of_env]
    came = [] if silence is None else [f"the last push came {duration(silence)} ago"]
    return Cause.NO_WORKER, ", ".join([*last[:SHOWN_WORKERS], *came])


def _loads(worker: Process) -> bool:
    return worker.waiting is not None and worker.waiting.kind in (Wait.LOADING, Wait.STARTING)


def _troubles(worker: Process) -> list[Problem]:
    """What keeps it from sampling. Groups that it has abandoned do not, while it makes others."""
    keeping = (Trouble.WORKER_STUCK, Trouble.WORKER_ENDED)
    return [problem for problem in worker.problems if not worker.groups or problem.kind in keeping]


def _samples(worker: Process) -> bool:
    is_at_it = worker.sampling > 0 or worker.waiting is None
    return worker.version >= 0 and is_at_it and not _loads(worker) and not _troubles(worker)
