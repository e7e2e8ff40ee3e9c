"""How the groups of a prompt went, for all workers of a run: what a filter of prompts by difficulty goes by."""

from __future__ import annotations

from collections.abc import Sequence

from rlbuffer.store.session import Session, text


class Visits(Session):
    """One short text per prompt. It decides which prompts are sampled, and nothing else."""

    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]:
        """What was noted last for each prompt; "" for one not met yet."""
        if not prompt_ids:
            return []
        reply = self.look(lambda client: client.hmget(self.keys.visits(env), list(prompt_ids)))
        return ["" if value is None else text(value) for value in reply]

    def note_visits(self, env: str, prompt_id: str, marks: str) -> None:
        """Replaces what is noted for a prompt. Of two workers that do so at once, one is lost."""
        self.look(lambda client: client.hset(self.keys.visits(env), prompt_id, marks))
