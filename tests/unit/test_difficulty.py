"""Prompts are skipped by how their last groups went, the same on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlbuffer.batcher.teaching import Teaching
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ServerRefused
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import Rollout, TokenSequence
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


def test_a_failed_attempt_is_no_other_reward() -> None:
    marks, teaching = Marks(), Teaching(BatcherConfig(64, flat_by="right"))
    scored = [replace(r, rewards={"right": 1.0}) for r in group(1.0, 0.0, 0.0).rollouts]
    mixed = replace(group(1.0, 0.0, 0.0), rollouts=(*scored[:2], replace(scored[2], failure=Failure("tool"))))
    difficulty(marks, teaching).note(mixed)
    assert marks == {"p": "e"}


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


@pytest.mark.parametrize(
    ("columns", "named", "needs", "flat_by", "mark"),
    [
        (("teacher_logprobs",), 0.0, True, "", "e"),
        (("advantages",), 0.0, True, "", "m"),
        ((), 0.0, False, "", "m"),
        (("advantages",), 0.0, False, "acc", "e"),
        ((), 0.0, True, "acc", "e"),
        ((), 0.5, True, "acc", "e"),
    ],
)
def test_a_visit_whose_group_teaches_whatever_its_rewards_are_is_no_reason_to_skip(
    columns: tuple[str, ...], named: float, needs: bool, flat_by: str, mark: str
) -> None:
    marks, solved = Marks(), group(1.0, 1.0)
    its = {name: np.zeros(2, np.float32) for name in columns}
    rollouts = tuple(replace(rollout, columns=its, rewards={"acc": named}) for rollout in solved.rollouts)
    teaching = Teaching(BatcherConfig(64, flat_by=flat_by), needs_advantage=needs)
    difficulty(marks, teaching).note(replace(solved, rollouts=rollouts))
    assert marks == {"p": mark}


def test_a_column_that_one_sequence_has_teaches_as_it_does_for_the_batcher() -> None:
    marks, solved = Marks(), group(1.0, 1.0)
    teaching = Teaching(BatcherConfig(64), needs_advantage=True)
    further = TokenSequence.from_turns(
        [{"role": "user", "tokens": [1]}, {"role": "assistant", "tokens": [3], "logprobs": [-0.5]}],
        policy_version=0,
        columns={"advantages": np.ones(2, np.float32)},
    )
    its = replace(solved, rollouts=tuple(replace(rollout, further=(further,)) for rollout in solved.rollouts))
    difficulty(marks, teaching).note(its)
    assert (marks, teaching.of_push(its.info())) == ({"p": "m"}, True)


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
