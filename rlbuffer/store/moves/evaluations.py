"""Evaluation results: one per policy version and env, whoever made it, beside the account and never in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.errors import PayloadError, ServerRefused, WrongAnswer
from rlbuffer.store.session import Fields, Session, number, ranged, text
from rlbuffer.wire import payload

KEPT_EVALUATIONS = 10_000
"""Results kept, about."""
KNOWN_MS = 7 * 86_400_000
"""Milliseconds that the server remembers that a version was evaluated."""
MAX_EVALUATION_BYTES = 2**20
"""Largest result that is decoded."""
_DONE = b"done"


class EvaluationMoves(Session):
    """Claims of evaluations, and their results."""

    _evaluated: dict[tuple[str, int], int]
    """(env, version) -> the line of versions in which this process took its evaluation."""

    def claim_evaluation(self, env: str, version: int, *, owner: str, ttl_seconds: float) -> bool:
        line, milliseconds = self._line(), max(1, round(1000 * ttl_seconds))
        key = self.keys.evaluating(env, version, line)
        self._evaluated[env, version] = line

        def claim(client: Any) -> bool:
            if client.set(key, owner, nx=True, px=milliseconds):
                return True
            holder = client.get(key)
            if holder == owner.encode():
                return bool(client.pexpire(key, milliseconds))
            if holder not in (None, _DONE):  # a clock that was set back since lets it run for longer than it was given
                client.pexpire(key, milliseconds, lt=True)
            return False

        return self.look(claim)

    def release_evaluation(self, env: str, version: int, *, owner: str) -> None:
        key = self.keys.evaluating(env, version, self._evaluated.get((env, version), 0))

        def release(client: Any) -> None:
            if client.get(key) == owner.encode():
                client.delete(key)

        self.look(release)

    def add_evaluation(self, env: str, version: int, record: Mapping[str, Any]) -> None:
        # Repeated after a lost reply it may be there twice: the first one counts.
        line = self._evaluated.get((env, version)) or self._line()
        fields = {"env": env, "version": version, "line": line, "record": payload.dumps(dict(record))}

        try:
            self.look(lambda client: client.xadd(self.keys.eval, fields, maxlen=KEPT_EVALUATIONS, approximate=True))
        except WrongAnswer as error:
            raise ServerRefused(f"{self.keys.eval} takes no result: {error}") from None
        # Not before: done is what has a result.
        self.look(lambda client: client.set(self.keys.evaluating(env, version, line), _DONE, px=KNOWN_MS))

    def _line(self) -> int:
        """The epoch in which version numbers began to mean what they mean now."""
        return self._place()[0]

    def _place(self) -> tuple[int, int]:
        """The line of versions, and the run's last step."""
        line, since, step = self.look(lambda client: client.hmget(self.keys.meta, ["line", "since", "step"]))
        return int(line or since or 0), int(step or 0)

    def evaluations(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        newest = self.look_at(lambda client: client.xrevrange(self.keys.eval, count=limit), [])
        now, step = self._place()
        entries: list[tuple[int, dict[str, Any]]] = []
        firsts: dict[str, dict[int, int]] = {}
        """Env -> line -> its first version."""
        for entry_id, fields in reversed(ranged(newest)):
            result = evaluation_of(entry_id, fields)
            line = number(fields.get(b"line")) or 0
            # Of a line that a rewind ended: before anything is evaluated again, this alone tells what was taken back.
            if result is not None and (line >= now or result["version"] <= step):
                entries.append((line, result))
                lines = firsts.setdefault(result["env"], {})
                lines[line] = min(lines.get(line, result["version"]), result["version"])
        results: dict[tuple[str, int], dict[str, Any]] = {}
        for line, result in entries:
            env, version = result["env"], result["version"]
            if not any(later > line and first <= version for later, first in firsts[env].items()):
                results.setdefault((env, version), result)
        return list(results.values())


def evaluation_of(entry_id: str, fields: Fields) -> dict[str, Any] | None:
    """A result as it was added; None when it did not come through :meth:`EvaluationMoves.add_evaluation`."""
    env, version = text(fields.get(b"env", b"")), number(fields.get(b"version"))
    try:
        record = payload.loads(fields.get(b"record", b""), limit=MAX_EVALUATION_BYTES)
    except PayloadError:
        return None
    if not env or version is None or not isinstance(record, dict):
        return None
    return {**record, "env": env, "version": version, "at": int(entry_id.partition("-")[0]) / 1000}
