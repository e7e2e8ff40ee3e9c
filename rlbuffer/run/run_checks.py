"""Checks of a run at work for `rlbuffer doctor`: does it go on, and what keeps it from it?

They say what the header of `rlbuffer inspect` says. Reads only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.stale_pushes import LEAST_PUSHED, MOST_STALE
from rlbuffer.records.states import Reason
from rlbuffer.run.diagnosis import Diagnosis, doubtful
from rlbuffer.state.run_state import Amount, RunState
from rlbuffer.state.text import duration, plural, printable
from rlbuffer.store.history import Committed, Dropped
from rlbuffer.store.viewer import Viewer

LEAST_STALL_SECONDS = 60.0
"""Seconds without a step from which a run may have stalled."""
STALL_STEPS = 5.0
"""So many times the usual time of a step must have passed, too."""
READ_RECORDS = 1000
"""Newest records of the history that are looked at."""
FIRST_STEP_SECONDS = 300.0
"""Seconds that a run may take for its first steps, whose usual time is not known."""
LOOK = "do what it says; rlbuffer top shows who waits for whom, rlbuffer inspect --workers the last errors"


def on_run(store: Viewer, *, opened: float) -> Iterator[Diagnosis]:
    """A warning for each thing that keeps the run from going on; nothing of a run at which nobody works.

    `opened`: when it was begun, in seconds since 1970.
    """
    state = read_run_state(store, history=READ_RECORDS)
    if state.ended_step is not None:
        return
    leader = state.leader
    if leader is None or not leader.is_fresh:
        if any(process.is_fresh for process in (*state.of_kind("worker"), *state.of_kind("rank"))):
            since = f" for {duration(leader.seconds_ago)}" if leader else ""
            text = f"nothing was heard of the batcher{since}, and workers or ranks are waiting for it"
            yield doubtful("run", text, "start `rlbuffer serve`")
        return
    for problem in state.problems:
        yield doubtful("run", printable(str(problem)), LOOK)
    yield from _going_stale(state)
    if state.waiting is not None and (idle := _idle_seconds(state, opened)):
        yield doubtful("run", f"no step for {duration(idle)}. {printable(str(state.waiting))}", LOOK)


def _going_stale(state: RunState) -> Iterator[Diagnosis]:
    """A warning for each env of which too much is sampled for nothing, with the worker of most of it lately."""
    records = [r for r in state.history if r.get("event") == Dropped.event and r["reason"] == Reason.STALE]
    for env in state.envs:
        pushed, stale = env.pushed.rollouts, env.dropped.get(Reason.STALE, Amount()).rollouts
        if pushed < LEAST_PUSHED or stale <= MOST_STALE * pushed:
            continue
        workers = Counter(str(r["worker"]) for r in records if r["env"] == env.name and r.get("worker"))
        name, count = workers.most_common(1)[0] if workers else ("", 0)
        whose = f"; of the last {plural(workers.total(), 'group')} {count} came from {name}" if workers else ""
        text = f"{stale / pushed:.0%} of the rollouts that env {env.name} pushed went stale{whose}"
        fix = (
            "rlbuffer inspect --workers says who is versions behind; where nobody is, workers outrun the trainer: "
            "start fewer, or raise batcher.max_age"
        )
        yield doubtful("run", text, fix)


def _idle_seconds(state: RunState, opened: float) -> float:
    """Seconds since the last step, when they are far more than the steps before took; else 0."""
    times = [record["at"] for record in state.history if record.get("event") == Committed.event]
    gaps = [later - earlier for later, earlier in pairwise(times)]
    limit = max(LEAST_STALL_SECONDS, STALL_STEPS * median(gaps)) if gaps else FIRST_STEP_SECONDS
    idle = state.at - (times[0] if times else opened)
    return idle if idle > limit else 0.0
