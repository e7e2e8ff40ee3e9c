"""Prompts are skipped by how their last groups went, the same on every worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ServerRefused
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import Rollout
from rlbuffer.worker.difficulty import Difficulty
from rlbuffer.worker.envs import Prompt


class Marks(dict[str, str]):
    """Marks that are kept with a run."""

    is_full = False

    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]:
        return [self.get(prompt_id, "") for prompt_id in prompt_ids]

    def note_visits(self, env: str, prompt_id: str, marks: str) -> None:
        if self.is_full:
            raise ServerRefused("the server is full")
        self[prompt_id] = marks


def difficulty(marks: Marks, teaching: Teaching | None = None, visits: int = 2) -> Difficulty:
    return Difficulty(marks, "math", visits, teaching or Teaching(BatcherConfig(64)))


def reasons(filter_: Difficulty, *numbers: int, prompt_id: str = "p") -> list[str]:
    prompt = Prompt(prompt_id=prompt_id, tokens=np.array([1], np.int32))
    tickets = [Ticket(env="math", number=n, group_id=f"math.{n}") for n in numbers]
    return filter_.reasons(tickets, [prompt] * len(tickets))


def group(*rewards: float) -> Group:
    rollouts = tuple(
        Rollout.from_completion(prompt_ids=[1], token_ids=[2], logprobs=[-0.5], reward=reward, policy_version=0)
        for reward in rewards
    )
    return Group(group_id="math.0", env="math", prompt_id="p", rollouts=rollouts, planned_size=len(rollouts))


@pytest.mark.parametrize(
    ("marks", "is_skipped"), [("", False), ("e", False), ("ee", True), ("mm", False), ("me", False), ("mee", True)]
)
def test_a_prompt_is_skipped_when_its_last_visits_all_had_equal_rewards(marks: str, is_skipped: bool) -> None:
    said = reasons(difficulty(Marks(p=marks)), 0, 1)
    assert list(map(bool, said)) == [is_skipped] * 2


@pytest.mark.parametrize(
    ("rewards", "mark"),
    [
        ((1.0, 1.0), "e"),
        ((0.0, 0.0), "e"),
        ((0.5,), "e"),
        ((1.0, 0.99), "m"),
        ((0.0, 1.0), "m"),
    ],
)
def test_a_visit_is_marked_by_whether_all_its_rewards_are_equal(rewards: tuple[float, ...], mark: str) -> None:
    marks = Marks()
    difficulty(marks).note(group(*rewards))
    assert marks == {"p": mark}


def test_only_the_last_visits_are_kept() -> None:
    marks = Marks(p="mm")
    for rewards in ((0.9, 0.9), (0.2, 0.1), (0.9, 0.9)):
        difficulty(marks).note(group(*rewards))
    assert marks == {"p": "me"}


def test_a_tenth_of_the_tickets_is_sampled_all_the_same_and_every_worker_agrees_which() -> None:
    marks = Marks(p="ee")
    one, other = (reasons(difficulty(marks), *range(1000)) for _ in range(2))
    assert one == other
    assert 60 < one.count("") < 150


def test_without_the_setting_nothing_is_asked_or_noted() -> None:
    marks = Marks(p="ee")
    filter_ = difficulty(marks, visits=0)
    assert reasons(filter_, 0) == [""]
    filter_.note(group(1.0))
    assert marks == {"p": "ee"}


def test_a_server_that_is_full_costs_the_note_only() -> None:
    marks = Marks(p="e")
    marks.is_full = True
    difficulty(marks).note(group(1.0))
    assert marks == {"p": "e"}
