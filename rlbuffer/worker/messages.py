"""The worker's messages: what it logs, and what its heartbeat says of troubles and waiting."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from rlbuffer.errors import PromptTooLong
from rlbuffer.process.logs import Lasting, fields
from rlbuffer.process.progress import Progress
from rlbuffer.records.group import Group
from rlbuffer.records.waiting import Waiting
from rlbuffer.state.text import plural
from rlbuffer.worker.heartbeat import Pulse

SAY_WAITING_SECONDS = 5.0
"""Waiting is normal; for this long it is worth a sentence."""
_log = logging.getLogger(__name__)


class Messages:
    """Says the same in the log and in the heartbeat."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._progress = Progress(_log, "pushed")
        self._lasting, self._failing = Lasting(), Lasting()
        self._waiting_since: float | None = None
        self._said_waiting = 0.0

    def loaded(self, version: int, seconds: float) -> None:
        """`version` serves now (-1: none); loading took so long."""
        level = logging.INFO if self._pulse.version < 0 else logging.DEBUG
        self._pulse.version = version
        if version >= 0:
            own = fields("version", version=version, seconds=seconds)
            _log.log(level, "sampling with policy version %d", version, extra=own)

    def pushed(self, group: Group, seconds: float) -> None:
        """A group is on the server, `seconds` after its prompt was there."""
        count, tokens = len(group.rollouts), sum(rollout.length for rollout in group.rollouts)
        self._pulse.groups += 1
        self._pulse.rollouts += count
        self._pulse.tokens += tokens
        self._lasting.is_over()
        version, rewards = self._pulse.version, [r.reward for r in group.rollouts if r.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        own = fields(
            "group",
            group_id=group.group_id,
            version=version,
            rollouts=count,
            tokens=tokens,
            reward=mean,
            seconds=seconds,
            lowest=min(rewards, default=None),
            highest=max(rewards, default=None),
        )
        _log.debug("group %s is pushed", group.group_id, extra=own)
        self._progress.add(count, tokens, reward=mean * count, more=f"version {version}")

    def trouble(self, sentence: str, *, kind: str = "", passes: bool = True) -> None:
        """Something is wrong, and the worker goes on. Said at once, and each minute while it lasts.

        Args:
            kind: what of it is always the same; "": all of the sentence.
            passes: it is over when a group is pushed, and said at once the next time.
        """
        is_due = (self._lasting if passes else self._failing).is_due(kind or sentence, time.monotonic())
        if is_due:
            self._pulse.error = sentence
        _log.log(logging.WARNING if is_due else logging.DEBUG, "%s", sentence, extra=fields("trouble"))

    def given_up(self, sentence: str, kind: str, trace: str = "") -> None:
        """A group could not be made: said with its traceback, for each kind of error once a minute."""
        self._pulse.error = sentence
        self._say_failure(sentence, kind, trace)

    def left_out(self, error: PromptTooLong) -> None:
        """A prompt is skipped: nothing can be sampled for it."""
        sentence, kind = f"{error}; such prompts are skipped and counted", type(error).__name__
        self._pulse.failures.note(kind, sentence)
        self._say_failure(sentence, kind)

    def waits(self, waiting: Waiting) -> None:
        """Notes what is waited for, and says it once it has lasted."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting = now
        waiting = replace(waiting, seconds=round(now - self._waiting_since, 1))
        self._pulse.waiting = waiting
        if now - self._said_waiting >= SAY_WAITING_SECONDS:
            self._said_waiting = now
            level = logging.INFO if self._lasting.is_due(waiting.key, now) else logging.DEBUG
            own = fields("waiting", **waiting.record())
            _log.log(level, "waiting for %.0f s: %s", waiting.seconds, waiting, extra=own)

    def works(self) -> None:
        """Nothing is waited for any more."""
        self._waiting_since = None
        self._pulse.waiting = None

    def ended(self) -> None:
        """The worker has ended: counts since its start."""
        self._progress.say()
        pulse = self._pulse
        failed = f", {pulse.failed_groups} given up" if pulse.failed_groups else ""
        text = f"stopped after {plural(pulse.groups, 'group')}, {plural(pulse.rollouts, 'rollout')}{failed}"
        counts = {"groups": pulse.groups, "rollouts": pulse.rollouts, "failed_groups": pulse.failed_groups}
        _log.info("%s", text, extra=fields("stopped", **counts))

    def _say_failure(self, sentence: str, kind: str, trace: str = "") -> None:
        level = logging.DEBUG
        if self._failing.is_due(kind, time.monotonic()):
            level, count = logging.WARNING, self._pulse.failures.record().get(kind, 0)
            again = f" ({kind}: {plural(count, 'time')} so far)" if count > 1 else ""
            sentence = "\n".join(filter(None, (sentence + again, trace)))
        _log.log(level, "%s", sentence, extra=fields("trouble", kind=kind))
