"""Slow rewards: a function of the user's own adds them, and what it does wrong costs its group only."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scorer_stage
from scorer_stage import OVER, Stage, eventually

from rlbuffer.errors import RewardFailed
from rlbuffer.process import heartbeat
from rlbuffer.records.failure import Failure
from rlbuffer.records.waiting import Wait
from rlbuffer.scorer import loop, rewards
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.testing import make_group

LARGEST = "18446744073709551615-18446744073709551615"


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.02)
    made: list[Stage] = []

    def make(function: str, **options: Any) -> Stage:
        made.append(Stage(score={"one": {"reward": f"scorer_stage:{function}", **options}}))
        return made[-1]

    OVER.clear()
    yield make
    OVER.set()
    for stage in made:
        stage.finish()
        stage.buffer.close()


def unscored(seed: int, *, rewards: Any = (None, None), needs: Any = ("reward",), answer: Any = None):
    return make_group(env="a", seed=seed, rewards=list(rewards), lengths=[8, 9], needs=needs, answer=answer)


def test_a_plain_function_scores_rollouts_and_leaves_a_reward_that_is_there(stages: Any):
    stage = stages("share_of_zeros")
    group = unscored(1, rewards=[None, 0.25], answer=3)
    stage.writer.push(group)
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    first, second = stage.pool()["a.1"][1]
    assert first.reward == pytest.approx(3 + (group.rollouts[0].tokens == 0).mean())
    assert second.reward == 0.25
    (entry,) = stage.buffer.store.read_pool()
    assert [r.reward for r in entry.info.rollouts] == [first.reward, 0.25]
    stage.finish()
    assert stage.buffer.verify().findings == ()


def test_a_failed_attempt_is_not_scored(stages: Any):
    stage = stages("never_failed")
    group = unscored(1)
    failed, sound = group.rollouts
    failed = replace(failed, failure=Failure("tool", "away"))
    stage.writer.push(replace(group, rollouts=(failed, sound)))
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    first, second = stage.pool()["a.1"][1]
    assert (first.reward, first.failure, second.reward) == (None, failed.failure, 1.0)


def test_an_async_function_may_give_named_rewards_whose_sum_is_the_reward(stages: Any):
    stage = stages("three_numbers", gives=["reward", "rewards.truth"])
    stage.writer.push(unscored(1, needs=("reward", "rewards.truth")))
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    first, second = stage.pool()["a.1"][1]
    assert (first.reward, second.reward) == (9.25, 10.25)
    assert first.rewards == {"style": 0.25, "truth": 8.0, "length": 1.0}


def test_a_named_reward_leaves_the_reward_as_it_is(stages: Any):
    stage = stages("judged", gives=["rewards.judge"])
    stage.writer.push(unscored(1, rewards=[0.0, 1.0], needs=("rewards.judge",)))
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    assert [(r.reward, dict(r.rewards)) for r in stage.pool()["a.1"][1]] == [
        (0.0, {"judge": 0.5}),
        (1.0, {"judge": 0.5}),
    ]


def test_what_the_function_does_wrong_is_said_and_tried_three_times_and_costs_no_other_group(
    stages: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rewards, "TIMEOUT_SECONDS", 1.0)
    stage = stages("broken")
    answers = ["raise", "hang", "nan", "words", "endless", "too much", "name", "late", "fine"]
    for seed, answer in enumerate(answers):
        stage.writer.push(unscored(seed, answer=answer))
    stage.start()
    eventually(lambda: len(stage.told("trouble")) >= 24)
    said = {event.text for event in stage.told("trouble")}
    reasons = (
        "KeyError: 'no judge'",
        "no reward within 1 s",
        "nan",
        "'good'",
        "type int",
        "1e+39",
        "n" * 65,
        "the judge",
    )
    for number, reason in enumerate(reasons):
        its = sorted(text for text in said if text.startswith(f"group a.{number} "))
        assert all(f"rollout a.{number}/0: " in text and reason in text for text in its)
        assert all(scorer_stage.__file__ in text for text in its)
        assert its[1] == f"{its[0]} (3 times: it is left alone)"
    assert stage.waiting_groups() == [f"a.{i}" for i in range(8)]
    stage.finish()  # threads that hang hold nobody
    assert stage.raised is None
    record = stage.buffer.store.heartbeats("scorer")["s"]
    assert (record["gives"], record["groups"], record["failed_groups"]) == (["reward"], 1, 8)


@pytest.mark.parametrize("function", ["broken", "broken_later"])
def test_a_function_that_exits_or_is_cancelled_costs_its_group_and_no_other(stages: Any, function: str):
    stage = stages(function)
    for seed, answer in enumerate(["exit", "cancel", "fine"]):
        stage.writer.push(unscored(seed, answer=answer))
    stage.start()
    eventually(lambda: len(stage.told("trouble")) == 6)
    eventually(lambda: stage.waiting_groups() == ["a.0", "a.1"])
    assert ["sys.exit(10) was called" in event.text for event in stage.told("trouble")].count(True) == 3
    stage.finish()
    assert stage.raised is None


def test_the_function_is_asked_about_rollouts_of_several_groups_at_once(stages: Any):
    stage = stages("waits_for_others", concurrent=6)
    for seed in range(3):
        stage.writer.push(unscored(seed))
    stage.start()
    eventually(lambda: stage.told("trouble") or not stage.waiting_groups())
    assert stage.told("trouble") == []


def test_a_scorer_that_has_left_a_group_alone_says_that_it_has_nothing_to_do(stages: Any):
    stage = stages("broken")
    stage.writer.push(unscored(0, answer="raise"))
    stage.start()
    eventually(lambda: len(stage.told("trouble")) == 3)
    beats = stage.buffer.store.heartbeats
    waiting = eventually(lambda: beats("scorer")["s"].get("waiting"))
    assert waiting["kind"] == Wait.NO_NEED


def test_a_function_is_named_by_the_line_that_it_was_loaded_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its file may be edited while it works; and to look for the line each time would hold up other rollouts."""
    module = tmp_path / "edited_judge.py"
    module.write_text("class Judge:\n    def __call__(self, rollout, group):\n        return 'none'\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = rewards.RewardFunction(
        importlib.import_module("edited_judge").Judge(), concurrent=1, timeout_seconds=10.0
    )
    module.write_text(f"# a line\n{module.read_text()}")
    with pytest.raises(RewardFailed, match=re.escape(f"({module}:1)")):
        asyncio.run(function.add(unscored(0), frozenset({"reward"})))


def test_a_payload_that_is_gone_is_said(stages: Any):
    stage = stages("judged")
    stage.writer.push(unscored(1))
    (entry,) = stage.buffer.store.read_pool()
    stage.buffer.store.connection.client.delete(entry.payload_key)
    stage.start()
    assert "the payload of rollout a.1/0 is missing" in eventually(lambda: stage.told("trouble"))[0].text


def test_an_answer_that_comes_after_another_scorers_is_a_duplicate(stages: Any, monkeypatch: pytest.MonkeyPatch):
    """The claim of a scorer that hung expires, another is faster, and the first one's answer changes nothing."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 3600.0)
    monkeypatch.setattr(loop, "CLAIM_SECONDS", 0.1)
    stage = stages("judged")
    stage.writer.push(unscored(1))
    (entry,) = stage.buffer.store.read_pool()
    real, seen = stage.buffer.store.role(ScorerStore).read_payloads, []

    def slow(refs: Any) -> Any:
        seen.append(refs)
        if len(seen) == 1:  # the first scorer waits until the other is done
            eventually(lambda: not stage.waiting_groups())
        return real(refs)

    stage.buffer.store.role(ScorerStore).read_payloads = slow
    stage.start("first")
    eventually(lambda: seen)
    stage.start("second")
    assert [line.group_id for line in eventually(lambda: stage.told("late"))] == ["a.1"]
    stage.finish()
    del stage.buffer.store.role(ScorerStore).read_payloads
    assert stage.raised is None
    assert len(stage.told("scored")) == 1
    (scored,) = stage.buffer.store.read_pool()
    assert scored.replaces == entry.entry_id
    account = stage.buffer.ledger().total()
    assert account.pushed == account.pending == (2, 17)
    assert stage.buffer.verify().findings == ()


def test_a_run_that_was_rewound_is_served_on_in_its_new_epoch(stages: Any):
    stage = stages("judged")
    stage.start()
    eventually(lambda: stage.told("ready"))
    stage.writer.push(unscored(1))
    eventually(lambda: stage.told("scored"))
    stage.buffer.store.role(OperatorStore).rewind(0)
    writer = stage.buffer.writer("w2")
    writer.push(unscored(2))
    eventually(lambda: len(stage.told("scored")) == 2)
    stage.finish()
    assert stage.raised is None
    assert len(stage.told("restart")) == 1


def test_a_scorer_reads_on_once_a_pool_that_took_no_push_any_more_is_removed(stages: Any):
    stage = stages("judged")
    store = stage.buffer.store.role(ScorerStore)
    real, seen = store.read_pool, []

    def noted(*args: Any, **options: Any) -> Any:
        entries = real(*args, **options)
        seen.extend(entry.entry_id for entry in entries)
        return entries

    store.read_pool = noted
    client, pool = stage.buffer.store.connection.client, stage.buffer.store.keys.pool
    client.xadd(pool, {"env": "a", "group": "a.9", "rollouts": 1, "tokens": 1}, id=LARGEST)
    stage.start()
    eventually(lambda: LARGEST in seen)
    client.delete(pool)
    stage.writer.push(unscored(1))
    eventually(lambda: stage.told("scored"))
    del store.read_pool


def test_a_scorer_ends_with_its_run(stages: Any):
    stage = stages("judged", gives=["rewards.judge"])
    stage.writer.push(unscored(1, rewards=[0.0, 1.0], needs=("rewards.judge",)))
    client = stage.buffer.store.connection.client
    client.hset(stage.buffer.store.keys.meta, "ended", 0)  # but more was pushed since
    stage.start()
    eventually(lambda: stage.told("scored"))
    assert stage.told("stopped") == []
    client.delete(stage.buffer.store.keys.pool)
    eventually(lambda: stage.told("stopped"))
    stage.threads[0].join(60)
    assert not stage.threads[0].is_alive()
    assert stage.raised is None


def test_a_scorer_ends_with_the_last_step_of_the_trainer_and_one_that_comes_later_waits(stages: Any) -> None:
    stage = stages("judged", gives=["rewards.judge"])
    client, meta = stage.buffer.store.connection.client, stage.buffer.store.keys.meta
    stage.start()
    stage.writer.push(unscored(1, rewards=[0.0, 1.0], needs=("rewards.judge",)))
    eventually(lambda: stage.told("scored"))
    assert stage.told("stopped") == []
    client.hset(meta, "finished", "7 3")  # as the leader writes it
    eventually(lambda: stage.told("stopped"))
    stage.threads[0].join(60)
    assert stage.raised is None
    stage.start()
    stage.writer.push(unscored(2, rewards=[0.0, 1.0], needs=("rewards.judge",)))
    eventually(lambda: len(stage.told("scored")) == 2)
    assert len(stage.told("stopped")) == 1
