"""What the leader adds to the sentence about a step that waits, or takes from it, by the workers' heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from rlbuffer.daemon.workers import WorkerWatch
from rlbuffer.narration import waiting
from rlbuffer.store.protocol import Store

NEED = waiting.EnvNeed(env="a", missing=3, ready=0, forming=1, oldest_seconds=2.0, is_silent=False)
NORMAL = "Normal while workers generate."


class Heard:
    """A store, as far as heartbeats go."""

    def __init__(self, beats: Mapping[str, Mapping[str, Any]]) -> None:
        self.beats = beats

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        return {"worker": self.beats}[kind]


def said(beats: Mapping[str, Mapping[str, Any]], sentence: str = "") -> str:
    return WorkerWatch(cast(Store, Heard(beats))).sentence(sentence or waiting.for_share(NEED, 6))


@pytest.mark.parametrize("beats", [{}, {"w": {"env": "a", "seconds_ago": 1.0}}])
def test_a_step_that_waits_for_workers_that_are_heard_is_called_normal(beats: Mapping[str, Any]) -> None:
    assert said(beats).endswith(f"(1 forming, oldest 2 s). Policy version 6 is published. {NORMAL}")


@pytest.mark.parametrize(
    "beat",
    [
        {"env": "a", "seconds_ago": 13.0},
        {"env": "a", "seconds_ago": 1.0, "failures": {"KeyError": 3}, "failure": "KeyError: 'x'"},
        {"env": "a", "seconds_ago": 9.0, "doing": "score() (envs.py:3 in score)"},
        {"env": "a", "seconds_ago": 1.0, "busy": "score() has run for 12 s"},
        {"env": "a", "seconds_ago": 1.0, "ended": "no such file"},
        {"env": "a", "seconds_ago": 1.0, "error": "no such file"},
    ],
)
def test_it_is_not_called_normal_while_a_screen_warns_of_a_worker(beat: Mapping[str, Any]) -> None:
    for sentence in (
        waiting.for_share(NEED, 6),
        waiting.for_groups(7, done=0.5, what="1 of 2 groups ready", need=NEED, published=6),
    ):
        assert NORMAL in sentence
        assert said({"w": beat}, sentence).startswith(sentence.removesuffix(f" {NORMAL}"))
        assert NORMAL not in said({"w": beat}, sentence)
        assert NORMAL not in said({"w": beat, "other": {"env": "b", "seconds_ago": 0.5}}, sentence)
