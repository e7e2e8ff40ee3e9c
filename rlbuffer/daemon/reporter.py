"""The leader's messages while it runs: what it logs, and its heartbeat for everybody."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlbuffer.client.lessons import LAST_STEPS, last_steps, lessons
from rlbuffer.daemon.env_stats import EnvStats
from rlbuffer.process.identity import identity
from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Problem, Wait, Waiting
from rlbuffer.state.heartbeats import LEADER
from rlbuffer.state.text import amount, percent
from rlbuffer.store.member import Member

TELEMETRY_SECONDS = 1.0
"""Seconds between heartbeats while the reason why there is no step is the same."""

READ_RECORDS = 1000
"""Records of the history in which a new leader looks for the last steps."""
WAITING_SECONDS = 5.0
"""What is waited for is said at most this often."""
QUIET_SECONDS = 1.0
"""Waiting shorter than this is normal and not worth a line."""
_log = logging.getLogger(__name__)


class Reporter:
    """Tells the same from one place: `inspect`, `train` and this process's own output say one reason.

    Args:
        store: where the heartbeat is written.
    """

    def __init__(self, store: Member) -> None:
        self._store = store
        self.stats = EnvStats()
        """What metrics are made of."""
        self._waiting: Waiting | None = None
        self._waits_since = self._said_at = float("-inf")
        """Monotonic: when the waiting began, and when it was last said."""
        self._lasts: tuple[tuple[str, ...] | None, float] = None, float("-inf")
        """What is waited for, and since when (monotonic)."""
        self._lasting = RateLimited()
        self._beat_at = float("-inf")
        """Monotonic. Heartbeats have a pace of their own: numbers in them change with every push."""
        self._key: tuple[str, ...] | None = None
        """Of what the last one waited for."""
        self._state: dict[str, Any] = {}
        """The rest of the heartbeat, but for what is waited for."""
        self._drops: dict[str, list[int]] = {}
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=LAST_STEPS)
        """Records of the newest steps, the newest first."""
        self._lessons: tuple[Problem, ...] = ()
        """What keeps the run from learning, by them."""
        self._is_unread, self._read_at = False, float("-inf")
        """A step was committed since the lessons were read; and when (monotonic) that was."""

    def forget(self) -> None:
        """A new leadership: says again why there is no step, and counts from 0."""
        self.stats.lead(None)
        self._waiting, self._beat_at = None, float("-inf")
        self._drops = {}
        self._steps.clear()
        self._steps.extend(last_steps(self._store.history(READ_RECORDS)))
        self._read_lessons(time.monotonic())

    def _read_lessons(self, now: float) -> None:
        trained = self._store.history(LAST_STEPS, of="records")  # a step or two behind
        self._lessons = lessons(self._steps, trained)
        self._is_unread, self._read_at = False, now

    def report(
        self,
        waiting: Waiting | None,
        beat: Callable[[], Mapping[str, Any]],
        problems: Sequence[Problem] = (),
        others: Sequence[Problem] = (),
    ) -> None:
        """Why there is no step, None when nothing is waited for; and when it is due the leader's heartbeat, which is
        `beat`, made then, the numbers of its envs, and what somebody must cure: `problems`. What `others` say of
        themselves is told here only.
        """
        now = time.monotonic()
        if self._is_unread and now - self._read_at > TELEMETRY_SECONDS:
            self._read_lessons(now)
        problems = [*problems, *self.stats.problems, *self._lessons]
        if waiting is None or waiting.key != self._lasts[0]:
            self._lasts = None if waiting is None else waiting.key, now
        elif waiting.kind is Wait.VERSION:
            # A trainer publishes a moment after its step: only a version that lasts is a trouble.
            waiting = replace(waiting, seconds=(now - self._lasts[1]) // 10 * 10)
        self._say_waiting(waiting, now)
        for problem in [*problems, *others]:
            if self._lasting.is_due(problem.key, now):
                _log.warning("%s", problem, extra=fields("trouble", **problem.record()))
        key = None if waiting is None else waiting.key
        if key != self._key or now - self._beat_at > TELEMETRY_SECONDS:
            self._beat_at, self._key = now, key
            state = beat()
            envs = {name: {**self.stats.envs.get(name, {}), **pool} for name, pool in state.get("envs", {}).items()}
            own_problems = [problem.record() for problem in problems]
            self._state = {**self.stats.run, **state, "envs": envs, "problems": own_problems}
            self.beat(waiting)

    def _say_waiting(self, waiting: Waiting | None, now: float) -> None:
        """Logs every other reason at DEBUG, and one that lasts as a line for people."""
        if self._waiting is None:
            self._waits_since = now
        is_new, self._waiting = waiting != self._waiting, waiting
        if waiting is None:
            return
        lasts = now - self._waits_since >= QUIET_SECONDS and now - self._said_at >= WAITING_SECONDS
        is_due = lasts and self._lasting.is_due(waiting.key, now)
        if is_due:
            self._said_at = now
        if is_new or is_due:
            extra = fields("waiting", **waiting.record(), sentence=str(waiting))
            _log.log(logging.INFO if is_due else logging.DEBUG, "waiting: %s", waiting, extra=extra)

    def beat(self, waiting: Waiting | None = None, *, has_stopped: bool = False) -> None:
        """Sends the leader's heartbeat. Safe from another thread."""
        waiting_record = {} if waiting is None else {"waiting": waiting.record()}
        stopped = {"stopped": True} if has_stopped else {}
        self._store.heartbeat("batcher", LEADER, self._state | identity() | waiting_record | stopped)

    def say_goodbye(self, last: Waiting | None = None) -> None:
        """The last heartbeat: whoever asks whether the batcher is alive need not wait until it has been silent."""
        self.beat(last, has_stopped=True)

    def dropped(self, drops: Iterable[Drop]) -> None:
        """Groups were dropped: counted for the next step's line."""
        is_heard = _log.isEnabledFor(logging.DEBUG)
        for drop in drops:
            self.count(drop.reason, drop.rollouts, drop.tokens)
            self.stats.drop(drop)
            if is_heard:
                _log.debug("group %s is dropped: %s", drop.group_id, drop.reason, extra=fields("drop", drop))

    def count(self, reason: str, rollouts: int, tokens: int) -> None:
        """Adds to what was dropped since the last step."""
        totals = self._drops.setdefault(reason, [0, 0])
        totals[0] += rollouts
        totals[1] += tokens

    def ended(self, step: int) -> None:
        """The run has ended after `step`."""
        parts = str(Waiting(kind=Wait.ENDED, step=step)), drops_text(self._drops)
        _log.info("%s", "  ".join(part for part in parts if part), extra=fields("ended", step=step, drops=self._drops))

    def step(self, header: StepHeader, build_ms: float, flat: int) -> None:
        """A step was committed: one line with all that was dropped since the last one. `flat` of its groups teach
        nothing."""
        text = step_line(header, build_ms, self._drops, flat)
        extra = fields("step", header, build_ms=build_ms, drops=self._drops, flat=flat)
        _log.info("%s", text, extra=extra)
        figures = {"groups": len(header.group_ids), "rollouts": header.rollouts, "reward": header.reward, "flat": flat}
        self._steps.appendleft(figures)
        self._is_unread, self._drops = True, {}


def step_line(header: StepHeader, build_ms: float, drops: Mapping[str, Sequence[int]], flat: int) -> str:
    """A committed step for people; `drops` is reason -> (rollouts, tokens)."""
    total = sum(env["tokens"] for env in header.envs.values()) or 1
    parts = [
        f"step {header.step}",
        f"{amount(header.tokens)} tok",
        f"fill {percent(header.capacity_share)}" if header.capacity_share else "",
        f"groups {len(header.group_ids)}",
        f"reward {header.reward:.2f}" if header.reward is not None else "",
        f"age {header.age:.1f} max {header.max_age}",
        " ".join(f"{name} {percent(env['tokens'] / total)}" for name, env in sorted(header.envs.items())),
        drops_text(drops),
        _flat_text(header, flat),
        f"{build_ms:.0f} ms",
    ]
    return "  ".join(part for part in parts if part)


def drops_text(drops: Mapping[str, Sequence[int]]) -> str:
    """``dropped 5: 3 stale 2 flat (31k tok)``; "" when nothing was dropped."""
    if not drops:
        return ""
    rollouts = sum(d[0] for d in drops.values())
    parts = " ".join(f"{d[0]} {reason}" for reason, d in sorted(drops.items(), key=lambda item: -item[1][0]))
    return f"dropped {rollouts}: {parts} ({amount(sum(d[1] for d in drops.values()))} tok)"


def _flat_text(header: StepHeader, flat: int) -> str:
    """``2 of 8 groups teach nothing``; "" where all teach."""
    groups = len(header.group_ids)
    if flat < groups or not groups:
        return f"{flat} of {groups} groups teach nothing" if flat else ""
    alone = header.rollouts == groups
    why = "each group is one rollout, and none has an advantage" if alone else "no rollout has an advantage"
    return f"! it teaches nothing: {why}"
