"""The settings that each loss and correction reads, and the refusal of settings that nothing reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from rlbuffer.config.losses import BUILT_IN_LOSSES, CORRECTION_FACTS, LOSSES, check_losses, mistakes
from rlbuffer.config.trainer import LossChoice
from rlbuffer.errors import ConfigError
from rlbuffer.trainer.losses import CORRECTIONS as WEIGHTS
from rlbuffer.trainer.losses import LossSettings, TrainedTokens, get_loss
from rlbuffer.trainer.losses.selection import Means

MEANS = Means(tokens=4, advantage=0.1, logprob=-1.0)


class Watched:
    """Settings of a loss that remember which of them were looked at."""

    def __init__(self, **values: Any) -> None:
        self.seen: set[str] = set()
        self._settings = LossSettings(**values)

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self._settings, name)


def tokens() -> TrainedTokens:
    logprobs = torch.tensor([0.5, 0.9, 0.3, 0.1], dtype=torch.float64).log()
    return TrainedTokens(
        logprobs=logprobs,
        entropy=-logprobs,
        inference_logprobs=torch.tensor([0.4, 0.5, 0.35, 0.6], dtype=torch.float64).log(),
        old_logprobs=torch.tensor([0.45, 0.5, 0.35, 0.6], dtype=torch.float64).log(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        rollout=torch.tensor([0, 0, 1, 1]),
        is_selected=torch.tensor([True, False, False, True]),
    )


@pytest.mark.parametrize("name", BUILT_IN_LOSSES)
def test_a_loss_declares_exactly_the_settings_that_it_looks_at(name: str) -> None:
    loss, told = get_loss(name), Watched(clip_ceiling=3.0, dual_clip=3.0)
    loss.per_token(tokens(), told)  # type: ignore[arg-type]
    if loss.score is not None:
        loss.score(tokens(), told, MEANS)  # type: ignore[arg-type]
        told.seen.add("cov_fraction")  # how many are selected: `collect_known.choose`
    assert told.seen == set(LOSSES[name].reads or ())


@pytest.mark.parametrize("name", CORRECTION_FACTS)
def test_a_correction_declares_exactly_the_settings_that_it_looks_at(name: str) -> None:
    told = Watched()
    WEIGHTS[name](tokens(), told)  # type: ignore[arg-type]
    assert told.seen == set(CORRECTION_FACTS[name].reads)


def test_every_setting_of_losses_is_read_by_one() -> None:
    read = {name for facts in (*LOSSES.values(), *CORRECTION_FACTS.values()) for name in facts.reads or ()}
    assert read == {f.name for f in fields(LossSettings)} - {"options"}


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (
            {"name": "gspo", "clip_ceiling": 4.0, "dual_clip": 3.0},
            [
                (
                    "trainer.loss.clip_ceiling = 4.0 does nothing: trainer.loss.name = 'gspo' does not read it. Leave "
                    "it out; it is read by clip, dapo, dr_grpo, clip_cov, tis, icepop, decoupled"
                ),
                (
                    "trainer.loss.dual_clip = 3.0 does nothing: trainer.loss.name = 'gspo' does not read it. Leave "
                    "it out; it is read by clip, dapo, dr_grpo, clip_cov, tis, icepop, decoupled"
                ),
            ],
        ),
        (
            {"mask_kl": 0.2, "correction": ("tis",)},
            [
                (
                    "trainer.loss.mask_kl = 0.2 does nothing: trainer.loss.name = 'clip' with correction = ['tis'] "
                    "does not read it. Leave it out; it is read by the correction negative_mask"
                )
            ],
        ),
        (
            {"options": {"tau": 2}},
            [
                (
                    "trainer.loss.options = {'tau': 2} does nothing: trainer.loss.name = 'clip' does not read it. "
                    "Leave it out; it is read by a loss of your own"
                )
            ],
        ),
        (
            {"name": "dr_grpo", "normalizer": "tokens", "max_length": 9},
            [
                (
                    "trainer.loss.max_length = 9 does nothing: the divisor 'tokens' does not read it. Leave it out; "
                    "it is read by trainer.loss.normalizer = 'longest'"
                )
            ],
        ),
        (
            {"name": "decoupled", "correction": ("icepop",)},
            [
                (
                    "trainer.loss.correction: tis and icepop each weigh by the old policy over the inference policy "
                    "(trainer.loss.name = 'decoupled'), and together by its square: keep one of them"
                )
            ],
        ),
        ({"name": "gspo", "correction": ("sequence_tis", "geometric_mask")}, []),  # in place of the tis that it brings
        ({"name": "dr_grpo", "max_length": 9}, []),
        ({"normalizer": "longest", "max_length": 9}, []),
        ({"name": "gspo", "clip_low": 0.1, "mask_low": 0.5}, []),  # 0.5 is what it is anyway
        ({"correction": ("icepop", "negative_mask"), "mask_low": 0.1, "mask_kl": 0.2}, []),
        ({"name": "tis", "correction_cap": 3.0}, []),
        ({"name": "package.module:loss", "dual_clip": 3.0, "options": {"tau": 2}}, []),
    ],
)
def test_a_setting_that_the_chosen_loss_does_not_read_is_refused(values: dict[str, Any], texts: list[str]) -> None:
    loss = LossChoice(**values)
    assert [str(mistake) for mistake in mistakes(loss)] == texts
    if texts:
        with pytest.raises(ConfigError) as refused:
            check_losses(loss)
        assert str(refused.value) == texts[0]
