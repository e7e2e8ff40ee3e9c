"""The column of restricted sampling: as wide as it must be in a step, told in the record, and part of a rollout."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from step_headers import step_of
from test_episodes import PROMPT, Scripted, completion
from test_packing import make_item, one
from test_step_columns import agreed, group
from torch import Tensor, nn

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.errors import ConfigError, PackingError
from rlbuffer.packing.further_columns import specs_of
from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.support import NO_TOKEN, SUPPORT, TOO_WIDE, WIDEST
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.trained import masked_words
from rlbuffer.trainer.reports.tally import _shares_of
from rlbuffer.trainer.update.update import SUMS, Updates, trained_tokens
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.envs.prompt import Score
from rlbuffer.worker.samplers import Sampling


def rows(width: int, dtype: Any = np.int32) -> np.ndarray:
    return np.full((4, width), 3, dtype)


def test_a_step_is_as_wide_as_its_widest_rollout_and_none_is_left_out_for_it() -> None:
    columns, odd = agreed(group(0, support=rows(2)), group(1, support=rows(5)), group(2), group(3, support=rows(2)))
    assert (columns, odd) == ({SUPPORT: ("<i4", (5,))}, {})


@pytest.mark.parametrize(
    ("support", "arrived"),
    [
        (np.full(4, 3, np.int32), "int32 [T]"),
        (rows(2, np.int64), "int64 [T, 2]"),
        (rows(WIDEST + 1), f"int32 [T, {WIDEST + 1}]"),
        (np.full((4, 2, 2), 3, np.int32), "int32 [T, 2, 2]"),
    ],
)
def test_what_is_no_support_leaves_the_step(support: Any, arrived: str) -> None:
    columns, odd = agreed(group(0, support=rows(2)), group(1, support=support))
    assert odd == {"a.1": f"column support is {arrived}, not int32 [T, 1 to {WIDEST}]"}
    assert columns == {SUPPORT: ("<i4", (2,))}
    assert agreed(group(1, support=support))[1] == odd
    with pytest.raises(PackingError, match="column support of rollout"):
        one([(0, 1)], [make_item(4, support=rows(2)), make_item(4, support=support)])


def test_rows_are_filled_up_with_no_token_and_so_are_rollouts_without_a_record() -> None:
    items = [
        make_item(2, support=[[0, 1], [2, 3]]),
        make_item(1),
        make_item(1, support=np.array([[7, 8, 9]], np.int32)),
    ]
    batch = one([(0, 1, 2)], [replace(i, rollout=_int32(i.rollout)) for i in items], pad_to_multiple_of=6)
    assert batch.columns[SUPPORT].tolist() == [[0, 1, -1], [2, 3, -1], [-1] * 3, [7, 8, 9], [-1] * 3, [-1] * 3]
    assert batch.lacking[SUPPORT].tolist() == [False, False, True, False, False, False]


def _int32(rollout: Any) -> Any:
    return replace(rollout, columns={name: values.astype(np.int32) for name, values in rollout.columns.items()})


def test_a_reader_takes_the_width_of_the_step() -> None:
    spec = specs_of({SUPPORT: ("<i4", (5,)), "x": ("<i2", (2,))})[SUPPORT]
    assert (spec.fill, spec.shape) == (NO_TOKEN, (5,))
    assert [spec.has(np.dtype("<i4"), (width,)) for width in (0, 1, 5, 6)] == [False, True, True, False]


class Uniform(nn.Module):
    """A policy of equal logits for ten tokens: the logprob says how many of them were left."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(10, dtype=torch.float64))

    def forward(
        self, tokens: Tensor, _: Any, __: Any, chosen: Tensor, ___: Any, support: Tensor
    ) -> tuple[Tensor, Tensor]:
        from rlbuffer.trainer.model.logprobs import token_logprobs

        ones = torch.ones(len(chosen), 1, dtype=torch.float64)
        return token_logprobs(ones, self.logits[:, None], tokens[chosen].long(), support=support)


def sampled(support: list[list[int]] | None, mask: list[bool] | None = None) -> Rollout:
    made = Rollout.from_completion(
        prompt_ids=[0], token_ids=[1, 2, 3], logprobs=[-1.0] * 3, reward=1.0, policy_version=0
    )
    columns = {} if support is None else {SUPPORT: np.array([[0] * len(support[0]), *support], np.int32)}
    return replace(made, columns=columns, loss_mask=np.array([False, *(mask or [True] * 3)]))


def test_tokens_are_trained_over_what_was_left_of_them_and_over_all_without_a_record() -> None:
    exact, partly = sampled([[1, 5], [2, NO_TOKEN], [4, 3]]), sampled([[1, 5], [NO_TOKEN] * 2, [4, 5]])
    batch = pack([exact, partly, sampled(None)], row_tokens=64)
    tokens = trained_tokens(Uniform(), batch.to("cpu"))
    expected = [1 / 2, 1, 1 / 2, 1 / 2, 1 / 10, 1 / 10, 1 / 10, 1 / 10, 1 / 10]
    assert tokens.logprobs.exp().tolist() == pytest.approx(expected)
    assert tokens.entropy.exp().tolist() == pytest.approx([1 / p for p in expected])


def test_the_record_says_which_tokens_of_restricted_sampling_are_not_exact() -> None:
    """Token 0 has no record to be: it is the prompt's. A rollout that was sampled from all tokens is none of these."""
    partly = sampled([[1, 5], [NO_TOKEN] * 2, [TOO_WIDE, NO_TOKEN]], [True, True, False])
    batch = pack([partly, sampled(None), sampled([[1, 5], [2, 3], [3, NO_TOKEN]])], [1.0, 1.0, 1.0], row_tokens=64)
    updates = Updates(Uniform(), step_of(batch), TrainerSettings(), Ranks(0, 1, torch.device("cpu")), longest=8)
    sums = dict(zip(SUMS, updates.accumulate(updates.parts[0]).tolist(), strict=True))
    counted = {name: sums[f"support/{name}"] for name in ("exact", "unrecorded", "too_wide")}
    assert counted == {"exact": 4, "unrecorded": 1, "too_wide": 1}
    record = StepRecord(support=_shares_of(counted))
    assert masked_words(record) == "support unrecorded 16.7%, too wide 16.7%"
    assert "support" not in StepRecord(support=_shares_of(dict.fromkeys(counted, 0.0))).as_object()


def test_an_episode_records_the_tokens_that_were_left_and_does_not_train_one_of_too_many() -> None:
    first = replace(completion([4, 5]), support=np.array([[4, 7, 9], [5, NO_TOKEN, NO_TOKEN]], np.int32))
    second = replace(completion([6, 12]), support=np.array([[TOO_WIDE], [12]], np.int32))

    async def play() -> Rollout:
        sampler = Scripted(first, second)

        async def ask(tokens: np.ndarray, sampling: Sampling) -> Any:
            return (await sampler.sample(tokens, n=1, sampling=sampling))[0]

        episode = Episode(PROMPT.tokens, ask, Sampling(max_new_tokens=4, top_k=3))
        await episode.sample()
        episode.extend([8])
        await episode.sample()
        return episode.rollout(Score(reward=1.0))

    rollout = asyncio.run(play())
    none = [NO_TOKEN] * 3
    wide = [TOO_WIDE, NO_TOKEN, NO_TOKEN]
    assert rollout.columns[SUPPORT].tolist() == [*[none] * 3, [4, 7, 9], [5, -1, -1], none, wide, [12, -1, -1]]
    assert rollout.loss_mask.tolist() == [False] * 3 + [True, True, False, False, True]


def test_min_p_needs_top_k_which_bounds_what_is_recorded() -> None:
    assert WorkerSettings(env="vcopy", top_k=5, min_p=0.05).min_p == 0.05
    with pytest.raises((ConfigError, ValueError), match="needs top_k above 0"):
        WorkerSettings(env="vcopy", min_p=0.05)
