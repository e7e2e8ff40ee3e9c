"""Prompts that teach nothing now are skipped: those that the last groups all solved, and those that all failed.

A ticket always stands for the same prompt; only whether it is sampled changes. The visits of a prompt are kept with
the run, for all its workers: a mark per visit, newest last.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ServerRefused
from rlbuffer.records.group import Group, Ticket
from rlbuffer.worker.envs.prompt import Prompt

SOLVED, FAILED, MIXED = "s", "f", "m"
"""Marks of a visit: all rollouts solved the prompt, all failed, or neither."""


class VisitStore(Protocol):
    """The store of visits, which are kept with the run."""

    def visits(self, env: str, prompt_ids: Sequence[str], /) -> list[str]: ...
    def note_visits(self, env: str, prompt_id: str, marks: str, /) -> None: ...


class Difficulty:
    """Says which prompts to skip, and notes how those that were sampled went.

    Args:
        store: where the marks are.
        env: the env's name.
        settings: `skip_visits`, `skip_failed`, `skip_solved`, `skip_retry`.
        teaching: says what a group is judged by.
    """

    def __init__(self, store: VisitStore, env: str, settings: WorkerSettings, teaching: Teaching) -> None:
        self._store, self._env, self._settings, self._teaching = store, env, settings, teaching

    def reasons(self, tickets: Sequence[Ticket], prompts: Sequence[Prompt]) -> list[str]:
        """The reason why each ticket's prompt is skipped; "" when it is to be sampled.

        A share `skip_retry` of the tickets is sampled all the same, whoever holds them: what was too hard for an
        earlier version may not be for this one.
        """
        visits = self._settings.skip_visits
        if not visits or not prompts:
            return [""] * len(prompts)
        known = self._store.visits(self._env, [prompt.prompt_id for prompt in prompts])
        out = []
        for ticket, marks in zip(tickets, known, strict=True):
            last = set(marks[-visits:]) if len(marks) >= visits else set()
            one_sided = last in ({SOLVED}, {FAILED})
            if not one_sided or np.random.default_rng(ticket.number).random() < self._settings.skip_retry:
                out.append("")
            else:
                out.append(f"{'solved' if last == {SOLVED} else 'failed'} by all rollouts of its last {visits} visits")
        return out

    def note(self, group: Group) -> None:
        """Remembers how a group went. A server that is full takes no note, and the prompt is visited once more."""
        visits = self._settings.skip_visits
        judged = self._teaching.judged(group.rollouts)
        if not visits or not judged:
            return
        columns = {name for rollout in group.rollouts for name in rollout.columns}
        if self._teaching.anyway(group.rollouts, columns):
            mark = MIXED
        elif min(judged) >= self._settings.skip_solved:
            mark = SOLVED
        elif max(judged) <= self._settings.skip_failed:
            mark = FAILED
        else:
            mark = MIXED
        with suppress(ServerRefused):
            known = self._store.visits(self._env, [group.prompt_id])[0]
            self._store.note_visits(self._env, group.prompt_id, (known + mark)[-visits:])
