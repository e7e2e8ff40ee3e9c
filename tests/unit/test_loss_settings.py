"""The options that each loss and correction has: what it reads, and the refusal of what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trained_tokens import logs, tokens

from rlbuffer.config.loading import validated
from rlbuffer.config.losses import BUILT_IN_LOSSES, CORRECTION_FACTS, LOSSES, LossChoice, doubts
from rlbuffer.errors import ConfigError
from rlbuffer.trainer.losses import CORRECTIONS as WEIGHTS
from rlbuffer.trainer.losses import get_loss
from rlbuffer.trainer.losses.selection import Means

MEANS = Means(tokens=4, advantage=0.1, logprob=-1.0)
GIVEN = tokens(
    rollout=[0, 0, 1, 1],
    old_logprobs=logs([0.45, 0.5, 0.35, 0.6]),
    is_selected=torch.tensor([True, False, False, True]),
)


class Watched(SimpleNamespace):
    """Options that remember which of them were looked at."""

    def __getattribute__(self, name: str) -> Any:
        seen = object.__getattribute__(self, "seen")
        if name == "seen":
            return seen
        seen.add(name)
        return super().__getattribute__(name)


def watched(record: Any, **values: Any) -> Watched:
    return Watched(seen=set(), **record(**values).model_dump())


@pytest.mark.parametrize("name", BUILT_IN_LOSSES)
def test_a_loss_has_exactly_the_options_that_it_looks_at(name: str) -> None:
    loss, record = get_loss(name), LOSSES[name].options
    assert record is not None
    clips = {key: 3.0 for key in ("clip_ceiling", "dual_clip") if key in record.model_fields}
    told = watched(record, **clips)
    loss.per_token(GIVEN, told)
    if loss.score is not None:
        loss.score(GIVEN, told, MEANS)
        told.seen.add("cov_fraction")  # how many are selected: `token_choice.choose`
    # `loss_of` reads the constant of the divisor.
    assert told.seen == set(record.model_fields) - {"max_length"}


@pytest.mark.parametrize("name", CORRECTION_FACTS)
def test_a_correction_has_exactly_the_options_that_it_looks_at(name: str) -> None:
    record = CORRECTION_FACTS[name].options
    told = watched(record)
    WEIGHTS[name](GIVEN, told)
    assert told.seen == set(record.model_fields)


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"name": "ratio", "options": {"max_ratio": 0.5}}, "options.max_ratio"),
        ({"name": "masked_ratio", "options": {"low": 6.0}}, "options.high"),
        ({"name": "clip_cov", "options": {"cov_low": 9.0}}, "options.cov_high"),
        ({"options": {"tau": 2}}, "options"),
        ({"name": "package.module:loss", "options": 3}, "options"),
        ({"normalizer": "longest", "options": {"max_length": 9}}, "options"),
        ({"correction": {"tis": {"cap": 0}}}, "correction.tis.cap"),
        ({"name": "decoupled", "correction": {"icepop": {}}}, "correction"),
        ({"name": "gspo", "correction": {"sequence_tis": {}, "geometric_mask": {}}}, ""),  # in place of its own tis
        ({"name": "dr_grpo", "options": {"max_length": 9}}, ""),
        ({"correction": {"icepop": {"low": 0.1}, "negative_mask": {"most": 0.2}}}, ""),
        ({"name": "tis", "correction": {"tis": {"cap": 3.0}}}, ""),
        ({"name": "package.module:loss", "columns": ["x"], "options": {"tau": 2}}, ""),
    ],
)
def test_an_option_that_the_chosen_loss_does_not_have_is_refused(values: dict[str, Any], setting: str) -> None:
    if not setting:
        validated({"trainer": {"loss": values}})
        return
    with pytest.raises(ConfigError) as refused:
        validated({"trainer": {"loss": values}})
    assert refused.value.setting == f"trainer.loss.{setting}"


@pytest.mark.parametrize(
    ("correction", "longest"),
    [
        ({"sequence_tis": {}}, 2310),  # exp(-0.0003 n) is 0.5 at 2310.5 tokens
        ({"sequence_mask": {}}, 2310),  # from 0.5 to 2: the same
        ({"sequence_mask": {"low": 0.1, "high": 2.0}}, 2310),
        ({"sequence_mask": {"low": 0.1, "high": 20.0}}, 7675),  # log(0.1) / 0.0003
        ({"sequence_mask": {"low": 0.0, "high": 20.0}}, 9985),
        ({"tis": {}}, 10**6),
        ({"tis": {}, "geometric_mask": {}, "negative_mask": {}}, 10**6),
    ],
)
def test_a_product_over_a_long_answer_is_doubted_from_the_length_where_a_small_bias_halves_or_masks_it(
    correction: dict[str, Any], longest: int
) -> None:
    def told(row_tokens: int) -> list[str]:
        found = doubts(LossChoice(correction=correction), largest_age=0, row_tokens=row_tokens)
        return [text for text, settings in found if "batcher.row_tokens" in settings]

    assert told(longest) == []
    assert len(told(longest + 1)) == ("tis" not in correction)


def test_the_weight_of_ten_thousand_tokens_is_said() -> None:
    (found,) = doubts(LossChoice(correction={"sequence_tis": {}}), largest_age=0, row_tokens=10_000)
    assert "batcher.row_tokens = 10000 tokens has a weight of 0.05, and hardly trains" in found[0]
