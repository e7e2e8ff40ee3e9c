"""A pull takes the arrays out of payloads that are what their pushes announced, and masks the others."""

from __future__ import annotations

import gc
import struct
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from store_runs import Run, plan_of
from wounds import resealed

from rlbuffer.client import step_pull
from rlbuffer.client.details import find_group
from rlbuffer.client.reader import Reader
from rlbuffer.client.step_pull import StepPull
from rlbuffer.packing import assembly
from rlbuffer.packing.planner import redeal
from rlbuffer.records.group import Group
from rlbuffer.records.info import numbers_of
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.step_plan import Plan
from rlbuffer.store.payloads import Trainable
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytest_plugins = ("store_fixtures",)
Change = Callable[[Rollout], dict[str, Any]]


def only_text(rollout: Rollout) -> dict[str, Any]:
    return {"text": "wie viel ist π?", "metadata": {"tags": ["ä", None]}}


def several_versions(rollout: Rollout) -> dict[str, Any]:
    first = rollout.prompt_tokens
    return {"version_spans": (VersionSpan(0, first, first + 2), VersionSpan(1, first + 2, rollout.length))}


def several_turns(rollout: Rollout) -> dict[str, Any]:
    """The last token of all is context again."""
    mask = rollout.loss_mask & (np.arange(rollout.length) != rollout.length - 1)
    end = rollout.length - 1
    turns = tuple(Turn("user" if i % 2 else "tool", i, i + 1, 0.5, {"call": i}) for i in range(end))
    spans = (VersionSpan(0, rollout.prompt_tokens, end),)
    return {"loss_mask": mask, "logprobs": rollout.logprobs * mask, "turns": turns, "version_spans": spans}


def nothing_trained(rollout: Rollout) -> dict[str, Any]:
    return {"loss_mask": np.zeros(rollout.length, np.bool_)}


def further_columns(rollout: Rollout) -> dict[str, Any]:
    rng = np.random.default_rng(rollout.length)
    return {
        "columns": {
            "advantages": rng.normal(size=rollout.length),
            "ref_logprobs": -rng.random(rollout.length),
            "experts": rng.integers(0, 9, (rollout.length, 2, 2), dtype=np.int16),
        }
    }


def attachments(rollout: Rollout) -> dict[str, Any]:
    return {"attachments": {"image": np.arange(6, dtype=np.uint8).reshape(3, 2), "none": np.zeros((0, 4))}}


def cut_off(rollout: Rollout) -> dict[str, Any]:
    return {"is_truncated": True, "finish_reason": "length"}


SOUND: tuple[Change, ...] = (
    lambda rollout: {},
    only_text,
    several_versions,
    several_turns,
    nothing_trained,
    further_columns,
    attachments,
    cut_off,
)


def pushed(run: Run, change: Change, number: int) -> Group:
    plain = make_group(env="a", seed=number, size=4, answer={"is": number})
    group = replace(plain, rollouts=tuple(replace(r, **change(r)) for r in plain.rollouts))
    run.sequence += 1
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    return group


def committed(run: Run, **changes: Any) -> None:
    """All that is pending as one step of one rank: micro-batches of two rows of two rollouts."""
    run.lead()
    rollouts = sum(entry.rollouts for entry in run.pool())
    rows = tuple((((i, i + 1), (i + 2, i + 3)),) for i in range(0, rollouts, 4))
    plan = Plan(rows=rows, world_size=1, row_tokens=64, rows_per_micro_batch=2)
    assert run.commit(world_size=1, plan=plan, **changes)[0] == "ok"


def pull(run: Run, *, can: Trainable | None = None) -> Step:
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=30, can=can or Trainable()))
    return reader.pull(1)


def pull_one_by_one(run: Run, patch: pytest.MonkeyPatch, *, can: Trainable | None = None) -> Step:
    """As if each payload and each micro-batch were too large to be read or written with another."""
    with patch.context() as patched:
        patched.setattr(step_pull, "CHUNK_BYTES", 1)
        patched.setattr(assembly, "SLAB_TOKENS", 1)
        return pull(run, can=can)


def assert_same(step: Step, other: Step) -> None:
    assert step.damaged == other.damaged
    assert digest_step(step) == digest_step(other)
    assert [mb.samples for mb in step] == [mb.samples for mb in other]
    for mine, theirs in zip(step, other, strict=True):
        assert {k: v.tolist() for k, v in mine.lacking.items()} == {k: v.tolist() for k, v in theirs.lacking.items()}
        for a, b in zip(mine.samples, theirs.samples, strict=True):
            assert {k: v.tolist() for k, v in a.attachments.items()} == {
                k: v.tolist() for k, v in b.attachments.items()
            }


@pytest.mark.parametrize("masks", [False, True])
def test_a_pull_of_sound_payloads_makes_the_same_tensors_however_they_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, masks: bool
) -> None:
    for number, change in enumerate(SOUND):
        pushed(run, change, number)
    committed(run, masks_truncated=masks)
    careful = pull_one_by_one(run, monkeypatch)
    assert careful.damaged == ()
    step = pull(run)
    assert_same(step, careful)
    assert {s.group_id: s.answer for mb in step for s in mb.samples} == {f"a.{n}": {"is": n} for n in range(len(SOUND))}
    assert run.store.ledger().damaged == 0
    trained = [
        (s.is_truncated, m.any()) for mb in step for s, m in zip(mb.samples, mb.unpack(mb.loss_mask), strict=True)
    ]
    assert any(is_trained for is_truncated, is_trained in trained if is_truncated) is not masks


def array_at(data: bytes, rollout: Rollout, name: str) -> int:
    start = data.index(rollout.tokens.tobytes())
    for other in ("tokens", "loss_mask", "logprobs"):
        start += -start % 8
        if other == name:
            return start
        start += getattr(rollout, other).nbytes
    raise KeyError(name)


MARKS = bytes(make_group(seed=0).rollouts[1].prompt_tokens) + b"\x01\x02"
"""Up to the second trained token, whose mark counts like any other."""
LIES: tuple[tuple[str, str, bytes, str], ...] = (
    ("logprob that is no number", "logprobs", struct.pack("<f", float("nan")), "column logprobs: not finite at"),
    ("infinite logprob", "logprobs", struct.pack("<f", float("-inf")), "column logprobs: not finite at position 0"),
    ("huge logprob", "logprobs", struct.pack("<f", -1e13), "the number at position 0 is beyond the limit of 1e+12"),
    ("stand-in for a logprob", "logprobs", struct.pack("<f", -9999.0), "column logprobs: -9999 at position 0 is below"),
    ("logprob above 0", "logprobs", struct.pack("<f", 0.25), "column logprobs: 0.25 at position 0 is above 0"),
    ("negative token", "tokens", struct.pack("<i", -5), "column tokens: negative token id -5 at position 0"),
    ("token of no model", "tokens", struct.pack("<i", 512), "token 512 is outside of the model's vocabulary of 512"),
    ("first token trained", "loss_mask", b"\x01", "column loss_mask: the first token cannot be trained"),
    ("mark of no boolean", "loss_mask", MARKS, f"column loss_mask: not a boolean at position {len(MARKS) - 1}"),
)
"""Name, array, first bytes of it, what is said of it."""


def lying(array: str, lie: bytes) -> Callable[[Group], payload.EncodedPush]:
    """Encodes groups whose second rollout has these first bytes in one of its arrays."""
    encode = payload.encode_push

    def encoded(group: Group) -> payload.EncodedPush:
        push = encode(group)
        data = bytearray(push.payloads[1])
        at = array_at(push.payloads[1], group.rollouts[1], array)
        data[at : at + len(lie)] = lie
        false = resealed(data)
        info = push.info.rollouts[1].changed(checksum=payload.payload_checksum(false))
        rollouts = (push.info.rollouts[0], info, *push.info.rollouts[2:])
        infos = replace(push.info, rollouts=rollouts)
        its = (push.payloads[0], false, *push.payloads[2:])
        return replace(push, payloads=its, metadata=payload.encode_info(infos))

    return encoded


@pytest.mark.parametrize(("array", "lie", "wrong"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_rollout_whose_writer_lies_is_masked_and_counted_and_no_other_one(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    array: str,
    lie: bytes,
    wrong: str,
) -> None:
    """Its checksum and its metadata are right: they are the same writer's."""
    with monkeypatch.context() as patched:
        patched.setattr(payload, "encode_push", lying(array, lie))
        pushed(run, only_text, 0)
    pushed(run, further_columns, 1)
    committed(run)
    can = Trainable(vocabulary=512)
    careful = pull_one_by_one(run, monkeypatch, can=can)
    assert careful.damaged == ("a.0/1",)
    assert wrong in caplog.messages[-1]

    step = pull(run, can=can)
    assert caplog.messages[-1] == caplog.messages[-2]
    assert_same(step, careful)
    assert run.store.ledger().damaged == 1


def test_marks_of_a_truncated_rollout_that_nothing_of_is_trained_are_not_looked_at(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(payload, "encode_push", lying("loss_mask", MARKS))
        pushed(run, cut_off, 0)
    committed(run, masks_truncated=True)
    step = pull(run)
    assert step.damaged == ()
    assert not any(mb.loss_mask.any() for mb in step)


def test_what_is_missing_damaged_or_anothers_is_found_however_it_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number, change in enumerate(SOUND):
        pushed(run, change, number)
    committed(run)
    first, *others = run.store.read_parts(1)[0].rollouts
    client = run.client
    client.hdel(first.payload_key, str(first.index))
    flipped = bytearray(client.hget(others[0].payload_key, str(others[0].index)))
    flipped[-1] ^= 1
    client.hset(others[0].payload_key, str(others[0].index), bytes(flipped))
    client.hset(others[1].payload_key, str(others[1].index), bytes(flipped[:-3]))
    another = client.hget(others[3].payload_key, str(others[3].index))
    client.hset(others[2].payload_key, str(others[2].index), another)
    careful = pull_one_by_one(run, monkeypatch)
    step = pull(run)
    assert step.damaged == tuple(ref.info.rollout_id for ref in (first, *others[:3]))
    assert_same(step, careful)
    assert caplog.messages[-1] == caplog.messages[-2]
    assert run.store.ledger().damaged == 4


def test_a_column_that_the_trainer_needs_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed(run, only_text, 0)
    pushed(run, further_columns, 1)
    committed(run)
    can = Trainable(columns=("ref_logprobs",))
    step = pull(run, can=can)
    assert step.damaged == tuple(f"a.0/{i}" for i in range(4))
    assert_same(step, pull_one_by_one(run, monkeypatch, can=can))


def test_a_trainer_of_all_weights_trains_no_rollout_of_an_adapter(run: Run) -> None:
    run.sequence += 1
    group = make_group(env="a", size=4, adapter="tenant")
    run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    committed(run)
    assert pull(run).damaged == ()
    step = pull(run, can=Trainable(adapters=False))
    assert step.damaged == tuple(f"{group.group_id}/{i}" for i in range(4))
    assert not any(mb.loss_mask.any() for mb in step)


def test_who_keeps_a_micro_batch_keeps_no_payload_of_another(run: Run) -> None:
    for number in range(3):
        pushed(run, lambda rollout: {"attachments": {"image": np.zeros(1000, np.uint8)}}, number)
    committed(run)
    step = pull(run)
    first, *others = step.micro_batches
    images = [weakref.ref(its.attachments["image"]) for mb in others for its in mb.samples]
    assert len(images) == 8
    del step, others
    gc.collect()
    assert [image() is None for image in images] == [True] * 8
    assert first.samples[0].attachments["image"].tolist() == [0] * 1000


@pytest.mark.parametrize(("groups", "group_size"), [(8, 2), (5, 3)], ids=["full", "dummies"])
@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_a_rank_of_another_world_size_has_the_rows_that_redeal_gives_to_it(
    run: Run, world_size: int, groups: int, group_size: int
) -> None:
    for n in range(groups):
        run.push(f"a.{n}", size=group_size)
    header = run.step(world_size=8)
    parts = run.store.read_parts(1)
    ids = [[tuple(p.rollouts[i].info.rollout_id for i in row) for (row,) in p.rows] for p in parts]
    planned = Plan(
        rows=tuple(tuple((row,) for row in step) for step in zip(*ids, strict=True)),
        world_size=8,
        row_tokens=parts[0].row_tokens,
    )
    refs = {ref.info.rollout_id: ref for part in parts for ref in part.rollouts}
    for rank in range(world_size):
        pull = StepPull(run.store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        part = pull.part(header)
        assert all(ref == refs[ref.info.rollout_id] for ref in part.rollouts)
        named = [tuple(tuple(part.rollouts[i].info.rollout_id for i in row) for row in rows) for rows in part.rows]
        assert named == [step[rank] for step in redeal(planned, world_size).rows]


ROLLOUTS, TOKENS, STEPS = 8, 20_000, 4


def test_a_step_costs_a_rank_one_copy_of_it(run: Run) -> None:
    """And pulling one costs one more for a while. Pulled in this thread: each connection of a reader, and each of its
    threads, has a buffer of 1 MiB."""
    run.lead()
    for n in range(STEPS):
        run.push(f"a.{n}", lengths=[TOKENS] * ROLLOUTS, version=n)
        plan = plan_of(run.pool(), n + 1, world_size=1)
        run.commit(world_size=1, plan=replace(plan.plan, row_tokens=TOKENS))
    size = 9 * TOKENS * ROLLOUTS
    store = run.again()
    source = StepPull(store, 0, 1, Trainable(), pad_token_id=0, pad_to_multiple_of=1)

    def pulled(number: int) -> Step:
        header = store.wait_step(number, block_seconds=0.0)
        assert header is not None
        return source.step(header, source.part(header))[0]

    kept = [pulled(1)]  # connections, and the block that payloads are received into
    tracemalloc.start()
    try:
        kept += [pulled(n) for n in range(2, STEPS + 1)]
        grown, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(micro_batch.length for step in kept for micro_batch in step) == STEPS * ROLLOUTS * TOKENS
    assert grown <= 1.3 * size * (STEPS - 1)  # blocks are a quarter larger at most, so that the next step fits, too
    assert peak <= grown + 1.3 * size


def test_every_number_of_a_push_stands_in_the_sample_and_in_the_view(run: Run) -> None:
    run.push("a.0", size=4)
    info = run.pool()[0].info
    assert info is not None
    committed(run)
    samples = {sample.rollout_id: sample.info for micro_batch in pull(run) for sample in micro_batch.samples}
    views = {member.rollout_id: member for member in find_group(run.store, "a.0").members}
    for pushed in info.rollouts:
        for found in (samples[pushed.rollout_id], views[pushed.rollout_id]):
            assert numbers_of(found) == numbers_of(pushed)
