"""Notes on how the groups of a prompt went, for all workers of a run; the filter of prompts by difficulty uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbuffer.store.session import Session, text

MOST_VISITS = 100_000
"""Prompts of an env that are remembered, about 100 bytes each: an env that repeats none would fill the server."""
FORGOTTEN_AT_ONCE = 1000
"""Most that one note takes out: a run of before there was a limit comes down to it note by note."""


class Visits(Session):
    """One short text per prompt. It decides which prompts are sampled, and nothing else."""

    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]:
        if not prompt_ids:
            return []
        reply = self.look(lambda client: client.hmget(self.keys.visits(env), list(prompt_ids)))
        return ["" if value is None else text(value) for value in reply]

    def note_visits(self, env: str, prompt_id: str, marks: str) -> None:
        key = self.keys.visits(env)

        def note(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.hset(key, prompt_id, marks)
                pipe.hlen(key)
                return list(pipe.execute())

        surplus = min(self.look(note)[1] - MOST_VISITS, FORGOTTEN_AT_ONCE)
        others = self.look(lambda client: client.hrandfield(key, surplus)) if surplus > 0 else []
        if others:
            self.look(lambda client: client.hdel(key, *others))
