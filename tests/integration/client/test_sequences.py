"""Rollouts of several sequences, from the writer to the ranks: compactions, sub-agents, branches of a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from store_runs import Run, plan_of
from trees import groups

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.client.step_pull import StepPull
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.packing.pack import pack
from rlbuffer.records.group import Group
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.step_plan import PlannedRollouts
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.verify.verify import verify

pytest_plugins = ("store_fixtures",)

ROW_TOKENS = 256
GROUPS, SIZE = 10, 4


def commit(run: Run, pushed: list[Group], *, world_size: int) -> None:
    for group in pushed:
        run.sequence += 1
        run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    entries = {entry.entry_id: entry for entry in run.pool()}
    batcher = Batcher(BatcherConfig(ROW_TOKENS, step_groups=len(pushed)))
    for entry in entries.values():
        assert entry.info is not None
        batcher.add(entry.info, entry_id=entry.entry_id, now=0.0)
    meta = run.store.meta()
    plan = batcher.next(meta.step + 1, world_size=world_size, now=0.0, rng=np.random.default_rng(0)).plan
    assert plan is not None
    assert run.store.pin(plan.rollouts, entries) == []
    status, _ = run.store.commit(plan, entries, meta=meta, columns={}, state={})
    assert status == "ok"


def pulled(run: Run, number: int, world_size: int) -> list[Step]:
    header = run.store.wait_step(number, block_seconds=0)
    assert header is not None
    steps = []
    for rank in range(world_size):
        pull = StepPull(run.store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        step, damaged = pull.step(header, pull.part(header))
        assert damaged == []
        steps.append(step)
    return steps


def segments(steps: list[Step]) -> Iterator[tuple[tuple[str, int], tuple[object, ...]]]:
    for step in steps:
        for mb in step:
            arrays = [mb.unpack(a) for a in (mb.input_ids, mb.loss_mask, mb.logprobs, mb.advantages, mb.position_ids)]
            for sample, *its in zip(mb.samples, *arrays, strict=True):
                yield (sample.rollout_id, sample.sequence), (sample, *its)


def test_trees_are_packed_once_counted_once_and_weigh_as_one(run: Run) -> None:
    run.lead()
    for seed in range(3):
        pushed = groups(seed, GROUPS, SIZE, version=seed)
        commit(run, pushed, world_size=4)
        rollouts = {r.rollout_id: r for group in pushed for r in group.rollouts}
        dealt = pulled(run, seed + 1, 4)
        assert Counter(key for key, _ in segments(dealt)) == Counter(
            (name, i) for name, r in rollouts.items() for i in range(len(r.sequences))
        )
        weights: dict[str, Fraction] = {}
        numbers: dict[str, set[int]] = {}
        advantages: dict[str, set[float]] = {}
        for (name, number), (sample, tokens, mask, logprobs, advantage, positions) in segments(dealt):
            sequence = rollouts[name].sequences[number]
            assert np.array_equal(tokens, sequence.tokens)
            assert np.array_equal(mask, sequence.loss_mask)
            assert np.array_equal(logprobs, sequence.logprobs)
            assert positions.tolist() == [*range(len(tokens))]
            assert (sample.sequences, sample.reward) == (len(rollouts[name].sequences), rollouts[name].reward)
            numbers.setdefault(name, set()).add(sample.rollout)
            advantages.setdefault(name, set()).update(advantage[mask].tolist())
            weights[name] = weights.get(name, Fraction(0)) + Fraction(int(mask.sum()), sample.rollout_loss_tokens)
        assert set(weights.values()) == {Fraction(1)}
        assert {len(its) for its in advantages.values()} == {1}
        assert sorted(numbers.values(), key=min) == [{number} for number in range(GROUPS * SIZE)]
        (one,) = pulled(run, seed + 1, 1)
        again = dict(segments([one]))
        for key, (_, *arrays) in segments(dealt):
            assert all(np.array_equal(a, b) for a, b in zip(arrays, again[key][1:], strict=True))
        assert (one.rollouts, one.normalizers.rollouts, one.groups) == (GROUPS * SIZE, GROUPS * SIZE, GROUPS)
        assert one.header.sequences == sum(len(r.sequences) for r in rollouts.values())
        assert one.header.tokens == sum(r.length for r in rollouts.values())
        assert one.normalizers.loss_tokens == sum(r.loss_tokens for r in rollouts.values())
        ledger = run.store.ledger().envs["a"]
        assert ledger.packed == ((seed + 1) * GROUPS * SIZE, ledger.pushed[1])
    report = verify(run.store)
    assert report.findings == ()


def test_every_sequence_has_the_verdicts_of_its_rollout_on_every_rank(run: Run) -> None:
    run.lead()
    (group,) = groups(5, 1, 8)
    verdicts = [{}, {"exact": True}, {"exact": False, "tidy": True}]
    its = tuple(replace(r, successes=verdicts[i % 3]) for i, r in enumerate(group.rollouts))
    commit(run, [replace(group, rollouts=its)], world_size=2)
    expected = {r.rollout_id: dict(r.successes) for r in its}
    for world_size in (2, 1):
        seen = [sample for step in pulled(run, 1, world_size) for mb in step for sample in mb.samples]
        assert {(s.rollout_id, s.sequence) for s in seen} == {
            (r.rollout_id, i) for r in its for i in range(len(r.sequences))
        }
        assert all(dict(sample.successes) == expected[sample.rollout_id] for sample in seen)
    assert verify(run.store).findings == ()
    packed = pack(its, row_tokens=4096)
    assert [sample.successes for sample in packed.samples] == [r.successes for r in its for _ in r.sequences]


def test_a_step_of_a_part_of_a_rollouts_sequences_is_found(run: Run) -> None:
    run.lead()
    (group,) = groups(3, 1, 1)
    assert len(group.rollouts[0].sequences) > 1
    run.store.push(group, producer="w", incarnation="u", sequence=1, epoch=run.meta.epoch)
    entries = run.pool()
    whole = plan_of(entries, 1)
    rows = tuple(tuple(tuple((0,) if 0 in row else () for row in rank) for rank in step) for step in whole.plan.rows)
    (use,) = whole.entries
    half = replace(
        whole,
        rollouts=PlannedRollouts([msgspec.structs.replace(use, places=[0])]),
        advantages=whole.advantages[:1],
        plan=replace(whole.plan, rows=rows),
    )
    run.store.commit(half, {e.entry_id: e for e in entries}, meta=run.store.meta(), columns={}, state={})
    assert "I2" in {finding.invariant for finding in verify(run.store).findings}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_damage_masks_one_sequence_and_nothing_else(run: Run, place: int) -> None:
    run.lead()
    rng = np.random.default_rng(5)
    sequences = [
        TokenSequence.from_turns(
            [{"role": "user", "tokens": [1]}, {"role": "assistant", "tokens": [n + 2, 3], "logprobs": [-0.5, -0.25]}],
            policy_version=0,
        )
        for n in range(3)
    ]
    group = Group(
        "a.0",
        env="a",
        prompt_id="p",
        planned_size=2,
        rollouts=(Rollout.from_sequences(sequences, reward=1.0), Rollout.from_sequences(sequences[:1], reward=0.0)),
    )
    commit(run, [group], world_size=1)
    (key,) = run.payload_keys()
    data = bytearray(run.client.hget(key, str(place)))
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    run.client.hset(key, str(place), bytes(data))
    header = run.store.wait_step(1, block_seconds=0)
    assert header is not None
    pull = StepPull(run.store, 0, 1, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
    step, damaged = pull.step(header, pull.part(header))
    assert (step.damaged, len(damaged)) == (("a.0/0",), 1)
    trained = {key: int(mask.sum()) for key, (_, _, mask, *_) in segments([step])}
    assert trained == {("a.0/0", n): 0 if n == place else 2 for n in range(3)} | {("a.0/1", 0): 2}
