"""A scorer in a thread over a run in memory, and functions that give rewards."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from logged import Logged

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.details import stand_ins
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.scorer.loop import run_scorer
from rlbuffer.wire.payload import decode_group_payload, decode_whole

PATIENCE_SECONDS = 240.0


def share_of_zeros(rollout: Rollout, group: Group) -> float:
    """Plain; judges by tokens and answer."""
    return float((rollout.tokens == 0).mean()) + float(group.answer or 0)


async def three_numbers(rollout: Rollout, group: Group) -> Mapping[str, float]:
    """Async and named; the reward is their sum."""
    await asyncio.sleep(0.001)
    return {"style": 0.25, "truth": float(rollout.length), "length": 1.0}


def never_failed(rollout: Rollout, group: Group) -> float:
    """Knows no score for an attempt that failed."""
    if rollout.failure:
        raise ValueError(f"asked about {rollout.failure}")
    return 1.0


OVER = threading.Event()
"""Lets go of a function that hangs."""


def judged(rollout: Rollout, group: Group) -> Mapping[str, float]:
    """Says itself what the reward is."""
    return {"reward": 7.0, "judge": 0.5}


def broken(rollout: Rollout, group: Group) -> Any:
    """Does what the group's answer says."""
    if group.answer == "raise":
        raise KeyError("no judge")
    if group.answer == "late":
        raise TimeoutError("the judge")
    if group.answer == "exit":
        sys.exit(10)
    if group.answer == "cancel":
        raise asyncio.CancelledError
    if group.answer == "hang":
        OVER.wait()
    answers = {"nan": float("nan"), "words": "good", "endless": 10**5000, "too much": 1e39, "name": {"n" * 65: 1.0}}
    return answers.get(str(group.answer), 1.0)


TOGETHER = threading.Barrier(6)


def waits_for_others(rollout: Rollout, group: Group) -> float:
    """Answers when it has been asked about six rollouts."""
    TOGETHER.wait(20.0)
    return 1.0


async def broken_later(rollout: Rollout, group: Group) -> Any:
    return broken(rollout, group)


class Stage:
    """A run, in memory unless told otherwise, and one scorer in a thread."""

    def __init__(self, url: str = "memory://", **settings: Any) -> None:
        self.settings = RunSettings(**settings)
        self.buffer: Buffer = connect(url, config=self.settings)
        self.writer = self.buffer.writer("w")
        self.stop = threading.Event()
        self.logged = Logged("rlbuffer.scorer")
        self.told = self.logged.told
        self.raised: BaseException | None = None
        self.threads: list[threading.Thread] = []

    def start(self, name: str = "s") -> None:
        def work() -> None:
            try:
                run_scorer(self.buffer, name, "one", self.settings, stop=self.stop)
            except BaseException as error:
                self.raised = error

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()

    def finish(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        self.logged.close()

    def pool(self) -> dict[str, tuple[tuple[str, ...], list[Rollout], tuple[Any, Any]]]:
        """group id -> (what it needs, its rollouts, answer and metadata)."""
        out = {}
        for entry in self.buffer.store.read_pool():
            assert entry.info is not None
            payloads = iter(self.buffer.store.read_payloads(stand_ins([entry])))
            rollouts = [decode_whole([*islice(payloads, len(r.sequences))], r.sequences) for r in entry.info.rollouts]
            rest = self.buffer.store.read_group_payloads([entry.payload_key])[0]
            out[entry.group_id] = (entry.info.needs, rollouts, decode_group_payload(rest) if rest else (None, {}))
        return out

    def waiting_groups(self) -> list[str]:
        return [entry.group_id for entry in self.buffer.store.read_pool() if entry.info.needs]


def eventually(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
