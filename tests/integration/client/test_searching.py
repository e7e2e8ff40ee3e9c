"""Filters over a run: terms about a rollout, and those that read payloads, pending and in steps."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

import rlbuffer
from rlbuffer.client import searching
from rlbuffer.client.groups import every_group
from rlbuffer.client.operations import choose
from rlbuffer.errors import FilterError, RlbufferError
from rlbuffer.testing import make_group


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    yield made
    made.close()


def push(run: Run, group_id: str, *rollouts: dict[str, Any]) -> None:
    """One rollout for each mapping of fields."""
    group = make_group(env=group_id.split(".")[0], group_id=group_id, size=len(rollouts))
    members = tuple(replace(r, **fields) for r, fields in zip(group.rollouts, rollouts, strict=True))
    run.sequence += 1
    run.store.push(
        replace(group, rollouts=members), producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch
    )


@pytest.fixture
def buffer(run: Run) -> Iterator[rlbuffer.Buffer]:
    """Two groups in steps, one dropped, two in the pool."""
    push(run, "a.0", {"finish_reason": "length", "is_truncated": True, "reward": 0.0}, {"reward": 1.0})
    run.step()
    push(run, "a.1", {"text": "the answer is 41", "reward": 0.0}, {"text": "is 42", "reward": 0.5})
    run.step()
    push(run, "b.2", {"text": "the answer is 42"})
    run.drop("stale", run.pool())
    push(
        run,
        "b.3",
        {"finish_reason": "length", "is_truncated": True, "reward": 0.75},
        {"text": "</think> 42", "reward": 0.25},
    )
    push(run, "b.4", {})
    with rlbuffer.connect(run.url, run=run.store.run) as opened:
        yield opened


@pytest.mark.parametrize("becomes", ["packed", "dropped"])
def test_a_group_that_leaves_the_pool_while_groups_are_read_is_named_once(run: Run, becomes: str) -> None:
    push(run, "a.0", {})
    run.step()
    push(run, "a.1", {})
    read = every_group(run.store)
    found = [next(read)[0]]
    if becomes == "packed":
        run.step()
    else:
        run.drop("stale", run.pool())
    found += [view for view, _ in read]
    assert sorted(view.group_id for view in found) == ["a.0", "a.1"]
    assert {view.group_id: str(view.state) for view, _ in every_group(run.store)}["a.1"] == becomes


def test_a_part_that_was_dropped_stands_beside_its_group(run: Run) -> None:
    push(run, "a.0", {})
    run.step()
    push(run, "a.1", {})
    run.drop("late", run.pool())
    push(run, "a.1", {})
    states = [str(view.state) for view, _ in every_group(run.store) if view.group_id == "a.1"]
    assert sorted(states) == ["dropped", "ready"]


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("stop:length", ["b.3", "a.0"]),
        ("truncated:yes", ["b.3", "a.0"]),
        ("truncated:no rollout.reward<0.5 stop!=length", ["b.4", "b.3", "a.1", "b.2"]),
        ("rollout.logprob<0 state:packed", ["a.1", "a.0"]),
        ("rollout.logprob>0", []),
        ("stop:length rollout.reward>0.5", ["b.3"]),
        ("stop:length state:packed", ["a.0"]),
        ("text:/\\b42$/", ["b.3", "a.1", "b.2"]),
        ("rollout.tokens>1 state:dropped", ["b.2"]),
        ("text:41 state:dropped", []),
        ("text:/answer is \\d/ rollout.reward<0.1", ["a.1", "b.2"]),
        ("text:42 stop:length", []),
        ("rollout.advantage>0.1", ["a.1", "a.0"]),
        ("step:2", ["a.1"]),
        ("step:2 state:ready", []),
        ("rollout.tokens>1M", []),
    ],
)
def test_groups_are_chosen_by_their_rollouts(buffer: rlbuffer.Buffer, where: str, ids: list[str]) -> None:
    assert [view.group_id for view in buffer.groups(where)] == ids


def test_a_text_that_was_not_pushed_is_asked_for(buffer: rlbuffer.Buffer) -> None:
    groups = searching.list_groups(
        buffer.store, where="text:made", text_of=lambda rollout: f"made of {len(rollout.tokens)}"
    )
    assert [view.group_id for view, _ in groups] == ["b.4", "b.3", "a.0"], "a.1 was pushed with texts"


def test_every_sequence_of_a_rollout_is_searched(run: Run) -> None:
    made = make_group(env="t", group_id="t.0", size=2, lengths=[8, 12]).rollouts
    names = ("tokens", "loss_mask", "logprobs", "version_spans")
    sequences = [rlbuffer.TokenSequence(**{name: getattr(rollout, name) for name in names}) for rollout in made]
    tree = rlbuffer.Rollout.from_sequences(sequences, reward=1.0)
    group = rlbuffer.Group("t.1", env="t", prompt_id="p", rollouts=(tree,), planned_size=1)
    run.store.push(group, producer="w", incarnation="u", sequence=1, epoch=run.meta.epoch)
    for text in ("made of 8", "made of 12"):
        found = searching.list_groups(
            run.store, where=f'text:"{text}"', text_of=lambda sequence: f"made of {len(sequence.tokens)}"
        )
        assert [view.group_id for view, _ in found] == ["t.1"]


def test_pending_groups_are_dropped_by_what_their_rollouts_say(buffer: rlbuffer.Buffer) -> None:
    assert [drop.group_id for drop, _ in choose(buffer.store, "stop:length").drops] == ["b.3"]
    assert choose(buffer.store, "text:/nowhere/").drops == ()


def test_a_search_that_reads_too_much_says_so_after_what_it_has_seen(
    buffer: rlbuffer.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "PAGE_BYTES", 1)
    monkeypatch.setattr(searching, "MOST_BYTES_READ", 600)
    problems: list[RlbufferError] = []
    matches = searching.list_groups(buffer.store, where="stop:length", problems=problems)
    assert [view.group_id for view, _ in matches] == ["b.3"]
    assert ["which is not all" in str(problem) for problem in problems] == [True]
    with pytest.raises(FilterError, match="which is not all"):
        buffer.groups("stop:length")


def test_a_rollout_whose_payload_is_gone_matches_nothing_that_is_in_it(run: Run, buffer: rlbuffer.Buffer) -> None:
    for key in run.payload_keys():
        run.client.delete(key)
    assert buffer.groups("stop!=length") == []
    assert [view.group_id for view in buffer.groups("truncated:yes")] == ["b.3", "a.0"]


def test_a_dropped_group_has_its_rollouts_until_they_are_swept(run: Run, buffer: rlbuffer.Buffer) -> None:
    detail = buffer.group("b.2")
    assert [(m.rollout_id, m.text, m.step, m.advantage) for m in detail.members] == [
        ("b.2/0", "the answer is 42", None, None)
    ]
    (listed,) = searching.list_details(buffer.store, where="state:dropped")
    assert listed == detail
    run.client.delete(*buffer.store.dropped_payloads(["b.2"])["b.2"])
    assert buffer.group("b.2").members == ()


def test_groups_of_a_step_are_listed_whole_by_one_read_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(2):
        for number in range(3):
            push(run, f"a.{3 * step + number}", {"reward": 0.0}, {"reward": 1.0})
        run.step()
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        expected = [buffer.group(f"a.{number}") for number in range(6)]
        read, read_parts = list[int](), buffer.store.read_parts

        def counted(step: int, ranks: Any = None) -> Any:
            read.append(step)
            return read_parts(step, ranks)

        chosen = searching.list_groups(buffer.store, where="state:packed")
        monkeypatch.setattr(searching, "list_groups", lambda *_, **__: chosen)
        monkeypatch.setattr(buffer.store, "read_parts", counted)
        found = list(searching.list_details(buffer.store, where="state:packed"))
    assert sorted(found, key=lambda detail: detail.view.group_id) == expected
    assert sorted(read) == [1, 2]


def test_a_dropped_group_names_the_adapter_that_it_would_have_trained(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("c.0", adapter="x")
    run.drop("stale", [entry for entry in run.pool() if entry.group_id == "c.0"])
    (view,) = buffer.groups("adapter:x state:dropped")
    assert (view.group_id, view.adapter, view.age) == ("c.0", "x", None)


def test_what_is_damaged_of_a_dropped_group_is_left_out(run: Run, buffer: rlbuffer.Buffer) -> None:
    push(run, "c.0", {"text": "one", "reward": 0.0}, {"text": "two", "reward": 1.0})
    run.drop("stale", [entry for entry in run.pool() if entry.group_id == "c.0"])
    (key,) = buffer.store.dropped_payloads(["c.0"])["c.0"]
    run.client.hset(key, "0", b"torn")
    assert [member.text for member in buffer.group("c.0").members] == ["two"]
