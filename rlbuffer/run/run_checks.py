"""Checks of a run at work for `rlbuffer doctor`: does it go on, and what keeps it from it?

They say what the header of `rlbuffer inspect` says. Reads only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from rlbuffer.client.refusals import batcher_waits, problems_now
from rlbuffer.client.stale_pushes import LEAST_PUSHED, MOST_STALE
from rlbuffer.records.states import Reason
from rlbuffer.run.diagnosis import Diagnosis, doubtful
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.state.text import duration, plural, printable
from rlbuffer.store.history import Committed, Dropped
from rlbuffer.store.viewer import Viewer

LEAST_STALL_SECONDS = 60.0
"""Seconds without a step from which a run may have stalled."""
STALL_STEPS = 5.0
"""So many times the usual time of a step must have passed, too."""
FIRST_STEP_SECONDS = 300.0
"""Seconds that a run may take for its first steps, whose usual time is not known."""
LOOK = "do what it says; rlbuffer top shows who waits for whom, rlbuffer inspect --workers the last errors"


def on_run(store: Viewer, *, opened: float) -> Iterator[Diagnosis]:
    """A warning for each thing that keeps the run from going on; nothing of a run at which nobody works.

    `opened`: when it was begun, in seconds since 1970.
    """
    if store.has_ended():
        return
    leader = store.heartbeats("batcher").get("leader", {}).get("seconds_ago", math.inf)
    if leader > FRESH_SECONDS:
        others = [*store.heartbeats("worker").values(), *store.heartbeats("rank").values()]
        if any(beat["seconds_ago"] <= FRESH_SECONDS for beat in others):
            since = f" for {duration(leader)}" if math.isfinite(leader) else ""
            text = f"nothing was heard of the batcher{since}, and workers or ranks are waiting for it"
            yield doubtful("run", text, "start `rlbuffer serve`")
        return
    waiting = batcher_waits(store)
    for problem in problems_now(store, waiting):
        yield doubtful("run", printable(str(problem)), LOOK)
    yield from _going_stale(store)
    if waiting is not None and (idle := _idle_seconds(store, opened)):
        yield doubtful("run", f"no step for {duration(idle)}. {printable(str(waiting))}", LOOK)


def _going_stale(store: Viewer) -> Iterator[Diagnosis]:
    """A warning for each env of which too much is sampled for nothing, with the worker of most of it lately."""
    records = [r for r in store.history() if r.get("event") == Dropped.event and r["reason"] == Reason.STALE]
    for env, account in store.ledger().envs.items():
        pushed, stale = account.pushed[0], account.dropped.get(Reason.STALE, (0, 0))[0]
        if pushed < LEAST_PUSHED or stale <= MOST_STALE * pushed:
            continue
        workers = Counter(str(r["worker"]) for r in records if r["env"] == env and r.get("worker"))
        name, count = workers.most_common(1)[0] if workers else ("", 0)
        whose = f"; of the last {plural(workers.total(), 'group')} {count} came from {name}" if workers else ""
        text = f"{stale / pushed:.0%} of the rollouts that env {env} pushed went stale{whose}"
        fix = (
            "rlbuffer inspect --workers says who is versions behind; where nobody is, workers outrun the trainer: "
            "start fewer, or raise batcher.max_age"
        )
        yield doubtful("run", text, fix)


def _idle_seconds(store: Viewer, opened: float) -> float:
    """Seconds since the last step, when they are far more than the steps before took; else 0."""
    times = [record["at"] for record in store.history() if record.get("event") == Committed.event]
    gaps = [later - earlier for later, earlier in pairwise(times)]
    limit = max(LEAST_STALL_SECONDS, STALL_STEPS * median(gaps)) if gaps else FIRST_STEP_SECONDS
    idle = store.now() - (times[0] if times else opened)
    return idle if idle > limit else 0.0
