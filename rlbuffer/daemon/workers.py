"""The leader's sentences about workers whose groups cannot be made, and about runs without a worker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from rlbuffer.narration import waiting
from rlbuffer.process.lasting import AGAIN_SECONDS
from rlbuffer.state.heartbeats import FRESH_SECONDS, Failed, failures_of, silent_envs, troubles
from rlbuffer.store.protocol import Store

WORKERS_LOOK_SECONDS = 1.0
"""Seconds between the leader's looks at the workers' heartbeats while a step waits."""

Told = dict[str, tuple[object, str, float]]
"""Subject -> what its sentence is made of except numbers, the sentence, and when it was made."""


class WorkerWatch:
    """Watches the workers whose groups do not come, and says why."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._beats: dict[str, Mapping[str, Any]] = {}
        """Of the workers that a sentence may be about. A run has a thousand others, and a sentence for each push."""
        self._is_known = False
        """Any worker has a heartbeat that counts."""
        self._is_served = False
        """Any worker is alive."""
        self._is_warned_of = False
        """A warning about a worker stands on every screen."""
        self._looked = float("-inf")
        self.trouble = ""
        """What of the last sentence somebody must cure."""
        self._told: Told = {}
        self._failing: Told = {}

    def sentence(self, said: str) -> str:
        """The batcher's sentence `said`, with the workers' troubles behind it.

        Counts grow all the time: they are said again every minute, and when another kind comes.
        """
        now = time.monotonic()
        self._look(now)
        self.trouble = ""
        if not self._is_known and said.endswith(waiting.NOTHING_YET):
            return f"{said} {waiting.NO_WORKER}"
        nobody = f" {waiting.NO_WORKER}" if self._is_known and not self._is_served else ""
        envs: dict[str, dict[str, Mapping[str, Any]]] = {}
        for name, beat in self._beats.items():
            envs.setdefault(str(beat.get("env", "")), {})[name] = beat
        self._told = {env: past for env, past in self._told.items() if env in envs}
        texts = [text for env, beats in sorted(envs.items()) if (text := self._of(env, beats, now))]
        self.trouble = " ".join(texts)
        if texts or self._is_warned_of:
            said = waiting.not_normal(said)
        return said + "".join(f" {text}" for text in texts) + nobody

    def failing(self) -> str:
        """Envs of which groups fail, also while others are made and steps go on; "" when all are made. Said again as
        sentences are."""
        now = time.monotonic()
        self._look(now)
        envs: dict[str, dict[str, Failed]] = {}
        texts: dict[str, tuple[object, str]] = {}
        """Subject -> what its text is made of except numbers, and the text."""
        for name, beat in self._beats.items():
            env, failed = str(beat.get("env", "")), failures_of(beat)
            if failed.kinds:
                envs.setdefault(env, {})[name] = failed
            if beat.get("ended"):
                texts[f"ended {name}"] = str(beat["ended"]), waiting.for_worker(env, name, str(beat["ended"]))
        for env, failures in sorted(envs.items()):
            kinds: Counter[str] = Counter()
            for failed in failures.values():
                kinds.update(failed.kinds)
            text = waiting.for_failures(env, kinds, next(reversed(failures.values())).last, list(failures))
            texts[f"failing {env}"] = (tuple(failures), tuple(sorted(kinds))), text
        sentences = [self._anew(self._failing, what, key, text, now) for what, (key, text) in texts.items()]
        self._failing = {what: self._failing[what] for what in texts}
        return " ".join(sentences)

    def _look(self, now: float) -> None:
        if now - self._looked <= WORKERS_LOOK_SECONDS:
            return
        self._looked = now
        beats = self._store.heartbeats("worker")
        alive = {name for name, beat in beats.items() if beat["seconds_ago"] <= FRESH_SECONDS}
        served = {str(beats[name].get("env")) for name in alive}
        # The last words of a worker that has ended count until another one samples its env.
        dead = {
            name
            for name, beat in beats.items()
            if (failures_of(beat).kinds or beat.get("ended") or beat.get("doing"))
            and str(beat.get("env")) not in served
        }
        self._beats = {name: beats[name] for name in sorted(alive | dead) if _has_a_word(beats[name])}
        self._is_known, self._is_served = bool(alive | dead), bool(alive)
        warnings = chain(silent_envs(beats).values(), *(troubles(name, beat) for name, beat in beats.items()))
        self._is_warned_of = any(warnings)

    @staticmethod
    def _anew(past: Told, what: str, key: object, text: str, now: float) -> str:
        """`text`, or its last form while only numbers have changed since."""
        before = past.get(what)
        if before is not None and before[0] == key and now < before[2] + AGAIN_SECONDS:
            return before[1]
        past[what] = (key, text, now)
        return text

    def _of(self, env: str, beats: Mapping[str, Mapping[str, Any]], now: float) -> str:
        failing = {name: failures for name, beat in beats.items() if (failures := failures_of(beat)).kinds}
        busy = {name: str(beat["busy"]) for name, beat in beats.items() if beat.get("busy")}
        troubled = {
            name: str(beat.get("ended") or beat["error"])
            for name, beat in beats.items()
            if beat.get("ended") or beat.get("error")
        }
        silent = {
            name: str(beat["doing"])
            for name, beat in beats.items()
            if beat.get("doing") and beat["seconds_ago"] > FRESH_SECONDS
        }
        kinds: Counter[str] = Counter()
        for failures in failing.values():
            kinds.update(failures.kinds)
        key = (tuple(failing), tuple(sorted(kinds)), tuple(busy), tuple(silent), tuple(troubled) if not failing else ())
        parts = []
        if troubled and failing:
            last = next(reversed(failing.values())).last
            parts.append(waiting.for_failures(env, kinds, last, list(failing)))
        elif troubled:
            name, error = next(iter(troubled.items()))
            parts.append(waiting.for_worker(env, name, error))
        if silent:
            name, what = next(iter(silent.items()))
            parts.append(waiting.for_silent(env, name, what))
        elif busy:
            name, what = next(iter(busy.items()))
            parts.append(waiting.for_busy(env, name, what))
        return self._anew(self._told, env, key, " ".join(parts), now)


def _has_a_word(beat: Mapping[str, Any]) -> bool:
    return any(beat.get(name) for name in ("failures", "ended", "error", "busy", "doing"))
