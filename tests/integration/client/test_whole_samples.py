"""A packed step as samples: each with the tokens, numbers and metadata that its rollout was pushed with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from store_runs import Run

from rlbuffer.client.reader import Reader
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import TokenSequence
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def pushed_group(number: int) -> Group:
    """Two rollouts, of which the first has a second sequence, and metadata of its own; the second has a column."""
    both = make_group(env="a", group_id=f"a.{number}", rewards=[1.0, 0.0], lengths=[6, 9], seed=number)
    first, second = both.rollouts
    more = make_group(env="a", lengths=[5], rewards=[0.0], seed=100 + number).rollouts[0]
    further = TokenSequence(
        tokens=more.tokens, loss_mask=more.loss_mask, logprobs=more.logprobs, version_spans=more.version_spans
    )
    first = replace(first, further=(further,), metadata={"turns": number, "nested": {"tools": ["a", None]}})
    second = replace(second, columns={"values": np.arange(9, dtype=np.float32) + number})
    return Group(f"a.{number}", "a", "p", (first, second), 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_steps_samples_are_the_rollouts_that_were_pushed(run: Run, world_size: int) -> None:
    groups = [pushed_group(number) for number in range(3)]
    for group in groups:
        run.sequence += 1
        run.store.push(group, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)
    run.lead()
    run.commit(world_size=world_size)
    readers = [
        run.closes(Reader(run.again(), rank=rank, world_size=world_size, timeout_seconds=30.0))
        for rank in range(world_size)
    ]
    ranks = [reader.pull(1).samples() for reader in readers]

    for samples in ranks:
        places = [(sample.rollout, sample.sequence) for sample in samples]
        assert places == sorted(places)
    there = {(s.group_id, s.rollout_id, s.sequence): s for samples in ranks for s in samples}
    assert len(there) == sum(map(len, ranks)) == 9
    for group in groups:
        for rollout in group.rollouts:
            for place, sequence in enumerate(rollout.sequences):
                sample = there[group.group_id, rollout.rollout_id, place]
                assert sample.tokens.tolist() == sequence.tokens.tolist()
                assert sample.loss_mask.tolist() == sequence.loss_mask.tolist()
                assert sample.logprobs.tolist() == sequence.logprobs.tolist()
                assert {name: values.tolist() for name, values in sample.columns.items()} == {
                    name: values.tolist() for name, values in sequence.columns.items()
                }
                assert (sample.reward, sample.age) == (rollout.reward, 0)
                assert sample.metadata == (rollout.metadata if place == 0 else {})
                assert sample.advantages[sequence.loss_mask].tolist() == [sample.advantage] * sequence.loss_mask.sum()
