"""A rollout that came without a column: what stands in for it is known as a fill, and trains as what is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_headers import step_of
from test_packing import make_item, one
from torch import Tensor, nn

from rlbuffer.config.losses import LossChoice
from rlbuffer.errors import ConfigError
from rlbuffer.records.micro_batch import MicroBatch
from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import loss_of
from rlbuffer.trainer.update.update import trained_tokens

COUNTS = Normalizers(loss_tokens=3, rollouts=2, groups=1)


class Policy(nn.Module):
    """Gives logprob -1 for every token, and shows the temperatures that it was asked for."""

    asked: Tensor | float = 0.0

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, chosen: Tensor, scale: Any
    ) -> tuple[Tensor, Tensor]:
        self.asked = scale
        return torch.full((len(chosen),), -1.0), torch.zeros(len(chosen))


def mixed(**columns: list[float]) -> MicroBatch:
    """A rollout of three tokens with the columns, then one of two without them."""
    return one([(0, 1)], [make_item(3, **columns), make_item(2)], pad_to_multiple_of=8)


def test_a_micro_batch_says_which_tokens_came_without_a_column() -> None:
    batch = mixed(mine=[1.0, 2.0, 3.0])
    assert {name: mask.tolist() for name, mask in batch.lacking.items()} == {
        "mine": [False] * 3 + [True] * 2 + [False] * 3
    }
    assert one([(0, 1)], [make_item(3, mine=[1.0] * 3), make_item(2, damaged=True)]).lacking == {}
    assert one([()], [], columns=["ref_logprobs"]).lacking == {}


def test_the_digest_of_a_step_does_not_depend_on_it() -> None:
    batch = mixed(mine=[1.0, 2.0, 3.0])
    values = {name: getattr(batch, name) for name in MicroBatch.__dataclass_fields__}
    assert digest_step(step_of(MicroBatch(**(values | {"lacking": {}})))) == digest_step(step_of(batch))


def test_a_rollout_without_temperatures_is_divided_by_the_trainers_own() -> None:
    policy = Policy()
    trained_tokens(policy, mixed(temperatures=[0.5, 0.5, 0.5]).to("cpu"), temperature=0.7)
    assert isinstance(policy.asked, Tensor)
    assert policy.asked.tolist() == pytest.approx([0.5, 0.5, 0.7])
    trained_tokens(policy, one([(0,)], [make_item(2)]).to("cpu"), temperature=0.7)
    assert policy.asked == 0.7


def test_a_rollout_without_reference_logprobs_is_refused_with_its_env_and_not_trained_against_a_sure_reference() -> (
    None
):
    tokens = trained_tokens(Policy(), mixed(ref_logprobs=[0.0, -1.5, -1.5]).to("cpu"))
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kl_beta .* of env a .* ref_logprobs"):
        loss_of(tokens, LossChoice(kl_beta=0.1), COUNTS, longest=1)
    loss_of(tokens, LossChoice(), COUNTS, longest=1)


def test_a_loss_gets_every_column_and_the_age_of_each_token() -> None:
    tokens = trained_tokens(Policy(), mixed(mine=[1.0, 2.0, 3.0]).to("cpu"), version=5)
    assert tokens.columns["mine"].tolist() == [2.0, 3.0, 0.0]
    assert tokens.lacking["mine"].tolist() == [False, False, True]
    assert tokens.ages is not None
    assert tokens.ages.tolist() == [2, 2, 2]
    assert [tokens.samples[i].rollout_id for i in tokens.rollout.tolist()] == ["r", "r", "r"]
    assert trained_tokens(Policy(), mixed().to("cpu")).ages is None


def test_a_column_that_some_tokens_lack_is_refused_where_a_loss_needs_it() -> None:
    tokens = trained_tokens(Policy(), mixed(mine=[1.0, 2.0, 3.0]).to("cpu"))
    for name, whose in (("mine", " of env a"), ("theirs", "")):
        with pytest.raises(ConfigError, match=f"column {name}, .* the rollouts{whose} carry none"):
            tokens.column(name)
    whole = trained_tokens(Policy(), one([(0,)], [make_item(3, mine=[1.0, 2.0, 3.0])]).to("cpu"))
    assert whole.column("mine").tolist() == [2.0, 3.0]
    nothing = trained_tokens(Policy(), one([()], []).to("cpu"))
    assert nothing.column("mine").tolist() == []


def test_padding_and_masked_rollouts_need_no_reference() -> None:
    sound = make_item(3, ref_logprobs=[0.0, -1.5, -1.5])
    beside = one([(0, 1)], [sound, make_item(2, damaged=True)], pad_to_multiple_of=8)
    alone = one([(0,)], [make_item(2, damaged=True)])
    for batch, expected in ((beside, True), (alone, False)):
        tokens = trained_tokens(Policy(), batch.to("cpu"))
        loss = loss_of(tokens, LossChoice(kl_beta=0.1), COUNTS, longest=1)
        assert torch.isfinite(loss)
        assert bool(len(tokens.logprobs)) is expected


def test_weights_that_are_not_given_are_one() -> None:
    tokens = trained_tokens(Policy(), mixed(weights=[3.0, 3.0, 3.0]).to("cpu"))
    assert tokens.weights is not None
    assert tokens.weights.tolist() == [3.0, 3.0, 1.0]
