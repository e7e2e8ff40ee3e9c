"""One thing is one thing, in whatever is printed of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from batcher_calls import ask, batcher, drops_of, put

from rlbuffer.client.views import GroupView
from rlbuffer.narration import waiting
from rlbuffer.narration.numbers import plural
from rlbuffer.records.states import State
from rlbuffer.testing import make_group
from rlbuffer_cli.browse.tokens import headings
from rlbuffer_cli.render.group import headline


@pytest.mark.parametrize(("count", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1000, "1,000 ranks")])
def test_a_noun_has_an_s_but_for_one(count: int, words: str) -> None:
    assert plural(count, "rank") == words


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [plural(n, "push", "pushes") for n in (1, 2)] == ["1 push", "2 pushes"]


def test_sentences_of_one_step_and_one_failure() -> None:
    assert waiting.ended(1) == "The run has ended: the trainer has made its 1 step."
    assert "It has failed 1 time so far" in waiting.for_file(failed=1)


def test_the_details_of_drops_of_one_rollout() -> None:
    made: Any = batcher(step_groups=1, min_group_size=1, flat="drop")
    put(made, "flat", lengths=(25,), rewards=[0.5])
    assert [drop[2] for drop in drops_of(ask(made))] == ["its only rollout has reward 0.5"]
    made = batcher(step_groups=1, min_group_size=2)
    put(made, "small", lengths=(25,))
    assert [drop[2] for drop in drops_of(ask(made))] == ["1 valid rollout < min_group_size 2"]


@pytest.mark.parametrize(("setting", "ready"), [("step_groups", "0 of 1 group"), ("step_rollouts", "0 of 1 rollout")])
def test_a_step_of_one(setting: str, ready: str) -> None:
    made: Any = batcher(**{setting: 1})
    assert f"({ready} ready)" in ask(made).waiting


def test_a_group_of_one_rollout_and_a_turn_of_one_token() -> None:
    one = GroupView(
        group_id="a.0",
        env="a",
        prompt_id="",
        state=State.READY,
        reason="",
        rollouts=1,
        planned_size=1,
        reward=None,
        rewards=(),
        age=None,
        tokens=2,
        created=None,
        waited_seconds=None,
        worker="",
        step=None,
        detail="",
        min_version=0,
        max_version=0,
    )
    assert headline(one)[1].startswith("  1 of 1 rollout · ")
    assert headline(replace(one, planned_size=0))[1].startswith("  1 rollout · ")
    assert headline(replace(one, planned_size=8))[1].startswith("  1 of 8 rollouts · ")
    rollout = make_group(env="a", lengths=[20]).rollouts[0]
    last = rollout.turns[-1]
    turns = (*rollout.turns[:-1], last._replace(end=19), last._replace(start=19, end=20))
    assert headings(replace(rollout, turns=turns))[19].endswith(" · 1 token")
