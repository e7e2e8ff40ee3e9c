"""Prompts that teach nothing now are skipped: all rollouts of their last groups had the same reward.

A ticket always stands for the same prompt; only whether it is sampled changes. The visits of a prompt are kept with
the run, for all its workers: a mark per visit, newest last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from rlbuffer.batcher.teaching import Teaching
from rlbuffer.errors import ServerRefused
from rlbuffer.records.group import Group, Ticket
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker.envs.prompt import Prompt

EQUAL, MIXED = "e", "m"
"""Marks of a visit: all rollouts had the same reward, or not."""
RETRIED_SHARE = 0.1
"""Share of the tickets of skipped prompts that are sampled all the same."""


class Difficulty:
    """Says which prompts to skip, and notes how those that were sampled went.

    Args:
        store: where the marks are.
        env: the env's name.
        visits: in a row, after which a prompt is skipped; 0: never.
        teaching: says what a group is judged by.
    """

    def __init__(self, store: WorkerStore, env: str, visits: int, teaching: Teaching) -> None:
        self._store, self._env, self._visits, self._teaching = store, env, visits, teaching

    def reasons(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> list[str]:
        """The reason why each ticket's prompt is skipped; "" when it is to be sampled.

        A share of the tickets is sampled all the same, whoever holds them: what was too hard for an
        earlier version may not be for this one.
        """
        visits = self._visits
        if not visits or not prompts:
            return [""] * len(prompts)
        marks_of_prompts = self._store.visits(self._env, [prompt.prompt_id for prompt in prompts])
        why = f"the same reward for all rollouts of each of its last {visits} visits"
        return [
            why if marks[-visits:] == EQUAL * visits and _share_of(ticket) >= RETRIED_SHARE else ""
            for ticket, marks in zip(tickets, marks_of_prompts, strict=True)
        ]

    def note(self, group: Group) -> None:
        """Remembers how a group went. A server that is full takes no note, and the prompt is visited once more."""
        visits = self._visits
        rollouts = [rollout for rollout in group.rollouts if not rollout.failure]
        judged = self._teaching.judged(rollouts)
        if not visits or not judged:
            return
        columns = {name for sequence in group.sequences() for name in sequence.columns}
        is_equal = min(judged) == max(judged) and not self._teaching.anyway(rollouts, columns)
        mark = EQUAL if is_equal else MIXED
        with suppress(ServerRefused):
            marks_so_far = self._store.visits(self._env, [group.prompt_id])[0]
            self._store.note_visits(self._env, group.prompt_id, (marks_so_far + mark)[-visits:])


def _share_of(ticket: Ticket) -> float:
    """A number in 0-1 that every worker has of a ticket."""
    return float(np.random.default_rng(ticket.number).random())
