"""What the batcher of a run says: why it waits, and what somebody must cure."""

from __future__ import annotations

from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import Process
from rlbuffer.store.member import Member
from rlbuffer.store.viewer import Viewer


def says(store: Member, waiting: Waiting | None) -> None:
    """The batcher says it."""
    store.heartbeat("batcher", "leader", {} if waiting is None else {"waiting": waiting.record()})


def said(store: Viewer) -> Waiting | None:
    """Why the batcher waits, by its last heartbeat."""
    return _leader(store).waiting


def kind(store: Viewer) -> Wait | None:
    """The kind of it."""
    waiting = said(store)
    return None if waiting is None else waiting.kind


def problem(store: Viewer, kind: Trouble) -> Problem | None:
    """The problem of this kind in the batcher's last heartbeat."""
    return next((p for p in _leader(store).problems if p.kind is kind), None)


def _leader(store: Viewer) -> Process:
    return Process.of("batcher", "leader", store.heartbeats("batcher").get("leader", {"seconds_ago": 0.0}))
