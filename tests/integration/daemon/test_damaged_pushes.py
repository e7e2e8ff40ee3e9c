"""Pushes that ranks cannot train: by their metadata they drop; what only a payload shows is masked, and said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.store.payloads import Trainable
from rlbuffer.wire import payload

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=20, lookahead=0)


def push_damaged(run: Run, group_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes payloads that were never sound: every size is right, and a byte of each is not."""
    encode = payload.encode_push

    def damaged(*args: object, **options: object) -> payload.EncodedPush:
        push = encode(*args, **options)  # type: ignore[arg-type]
        return replace(push, payloads=tuple(bytes([*p[:-1], p[-1] ^ 1]) for p in push.payloads))

    with monkeypatch.context() as patched:
        patched.setattr(payload, "encode_push", damaged)
        run.push(group_id, worker="odd\x1b one")


def train(run: Run, reader: Reader) -> rlbuffer.Step:
    """The next step, trained."""
    step = reader.pull(run.store.trainer().trained + 1)
    reader.trained(step)
    return step


def start(run: Run, **can: object) -> Reader:
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60, can=Trainable(**can)))  # type: ignore[arg-type]
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    return reader


def of_run(run: Run) -> tuple[Problem, ...]:
    return read_run_state(run.store).problems


def groups_of(step: rlbuffer.Step) -> list[str]:
    return sorted(step.header.group_ids)


def test_what_a_hostile_producer_damages_is_masked_step_after_step_counted_and_named(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served.run
    reader = start(run)
    for number in range(0, 24, 2):
        push_damaged(run, f"a.{number}", monkeypatch)
        run.push(f"a.{number + 1}") if number < 4 else push_damaged(run, f"a.{number + 1}", monkeypatch)
    served.serve(CONFIG)
    steps = [train(run, reader) for _ in range(12)]
    assert [len(step.damaged) for step in steps] == [2, 2, *[4] * 10]
    assert run.store.ledger().damaged == 44
    found = served.wait_for(lambda: next((p for p in of_run(run) if p.kind is Trouble.DAMAGED and p.step == 12), None))
    assert (found.count, found.detail) == (4, "4 of env a by odd\\x1b one")
    served.wait_for(lambda: [line for line in served.said("trouble") if line["kind"] == "damaged"])
    assert served.said("drop") == []
    assert run.store.verify().ok


def test_a_rank_says_no_more_of_damage_that_is_long_ago(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.client.reader.DAMAGE_SHOWN_STEPS", 2)
    run = served.run
    reader = start(run)
    push_damaged(run, "a.0", monkeypatch)
    run.push("a.1")
    served.serve(CONFIG)
    train(run, reader)
    served.wait_for(lambda: any(p.kind is Trouble.DAMAGED for p in of_run(run)))
    for number in range(2, 6):
        run.push(f"a.{number}")
    for _ in range(2):
        train(run, reader)
    served.wait_for(lambda: not any(p.kind is Trouble.DAMAGED for p in of_run(run)))


def test_an_adapter_where_none_is_trained_is_dropped_before_any_rank_sees_it(served: Served) -> None:
    run = served.run
    reader = start(run, vocabulary=100_000, adapters=False)
    run.push("a.0", adapter="l")
    run.push("a.1")
    run.push("a.2")
    served.serve(CONFIG)
    step = train(run, reader)
    assert (groups_of(step), step.damaged) == (["a.1", "a.2"], ())
    (drop,) = served.said("drop", reason="invalid")
    assert (drop["group_id"], drop["detail"]) == (
        "a.0",
        "it is of adapter 'l', and the trainer trains all weights and no adapters",
    )


def test_a_push_without_the_reference_that_the_trainer_needs_is_dropped(served: Served) -> None:
    """A step of such pushes alone would end the trainer, at every restart again."""
    run = served.run
    reader = start(run)
    settings = RunSettings.model_validate({"trainer": {"loss": {"kl_beta": 0.1}}})
    lacking = run.push("a.0", lengths=[8, 8])
    for name in ("a.1", "a.2"):
        run.push(name, lengths=[8, 8], columns=[{"ref_logprobs": np.zeros(8, np.float32)}] * 2)
    served.serve(CONFIG, settings=settings)
    assert groups_of(train(run, reader)) == ["a.1", "a.2"]
    (drop,) = served.said("drop", reason="invalid")
    assert (drop["group_id"], drop["detail"]) == (
        lacking.group_id,
        "it lacks column ref_logprobs, without which the trainer cannot train",
    )


def test_a_rollout_without_the_reference_beside_one_that_has_it_is_masked_and_named(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The push has the column, by its other rollout: only who reads the payload sees it."""
    run = served.run
    reader = start(run, columns=["ref_logprobs"])
    settings = RunSettings.model_validate({"trainer": {"loss": {"kl_beta": 0.1}}})
    column = {"ref_logprobs": np.full(8, -1.0, np.float32)}
    for name, columns in (("a.0", [column, {}]), ("a.1", [column, column])):
        run.push(name, lengths=[8, 8], columns=columns)
    served.serve(CONFIG, settings=settings)
    step = train(run, reader)
    assert step.damaged == ("a.0/1",)
    assert all(not micro_batch.lacking for micro_batch in step)
    assert "The first is a.0/1 of group a.0, env a: it lacks column ref_logprobs, without which the" in caplog.text


def test_a_token_that_the_trainers_model_does_not_have_is_dropped_before_any_rank_sees_it(served: Served) -> None:
    run = served.run
    within = rlbuffer.testing.make_group(lengths=[8, 8])
    vocabulary = 1 + max(int(r.tokens.max()) for r in within.rollouts)
    reader = start(run, vocabulary=vocabulary)
    beyond = run.push("a.0", lengths=[60, 60])
    assert max(int(r.tokens.max()) for r in beyond.rollouts) >= vocabulary
    for name in ("a.1", "a.2"):
        run.push(name, lengths=[8, 8])
    served.serve(CONFIG)
    step = train(run, reader)
    assert (groups_of(step), step.damaged) == (["a.1", "a.2"], ())
    (drop,) = served.said("drop", reason="invalid")
    assert drop["group_id"] == "a.0"
    assert run.store.verify().ok
