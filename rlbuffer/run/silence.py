"""Processes that are there and say nothing: halted, or stuck in a way that their own watchdog cannot end."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rlbuffer.process.identity import visible_from
from rlbuffer.process.watchdog import HELD_SECONDS
from rlbuffer.run.child import Child
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.store.viewer import Viewer

SILENT_SECONDS = HELD_SECONDS
"""Counted from the first look that found no fresh heartbeat: a little longer than a process's own watchdog waits, which
knows where it was."""
SILENCE_LOOK_SECONDS = 5.0


class Silence:
    """For how long processes have been silent while the server heard others; made anew when it did not answer."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._since: dict[int, float] = {}
        """Pid -> monotonic."""

    def of(self, children: Iterable[Child], store: Viewer) -> list[Child]:
        """The workers and scorers that have beaten once and said nothing for :data:`SILENT_SECONDS`."""
        now = time.monotonic()
        if now - self._looked < SILENCE_LOOK_SECONDS:
            return []
        self._looked = now
        beats = {f"{kind} {name}": beat for kind in KINDS for name, beat in store.heartbeats(KINDS[kind]).items()}
        heard = [*beats.values(), *store.heartbeats("rank").values(), *store.heartbeats("batcher").values()]
        if all(beat["seconds_ago"] > FRESH_SECONDS for beat in heard):
            self._since = {}  # nobody is heard: the server takes no heartbeats, as with a full disk
            return []
        silent = {}
        for child in children:
            beat, pid = beats.get(child.name, {}), child.pid
            is_its = beat.get("pid") == pid and beat.get("space") == visible_from()
            if is_its and beat["seconds_ago"] > FRESH_SECONDS and child.exit_code() is None:
                silent[pid] = child
        self._since = {pid: self._since.get(pid, now) for pid in silent}
        return [silent[pid] for pid, since in self._since.items() if now - since > SILENT_SECONDS]


KINDS = {"worker": "worker", "score": "scorer"}
"""Kind of a section -> of the heartbeats of its processes."""
