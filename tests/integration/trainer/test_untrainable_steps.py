"""A committed step that cannot be trained: a restart meets the same bytes, so it names them and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_several_updates import settings
from torch import Tensor

from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.launch.rank import end_by
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.losses import TrainedTokens

FAILS_AT = 2
"""Step."""
VOID = f"rlbuffer runs rewind {FAILS_AT - 1} --keep-pending`"
SEEN: list[list[str]] = []
"""The rollouts of the micro-batches of that step."""
RAISED: list[Exception] = []


def seen(tokens: TrainedTokens) -> list[str]:
    if tokens.samples and tokens.samples[0].policy_versions[1] == FAILS_AT - 1:
        SEEN.append([sample.rollout_id for sample in tokens.samples])
        return SEEN[-1]
    return []


def broken_in_one(tokens: TrainedTokens, options: object) -> Tensor:
    loss = -tokens.logprobs * tokens.advantages
    if not seen(tokens) or len(SEEN) > 1:
        return loss
    return loss * torch.where(tokens.rollout == 1, torch.nan, 1.0)


def raising(tokens: TrainedTokens, options: object) -> Tensor:
    if seen(tokens):
        raise RAISED[0]
    return -tokens.logprobs * tokens.advantages


def ends_with(loss: Callable[..., Tensor], output: Path) -> Exception:
    SEEN.clear()
    once, chosen = {"passes": 1, "updates_per_pass": 1}, {"name": f"{__name__}:{loss.__name__}"}
    with pytest.raises(Exception) as caught:
        train(settings(output, once, steps=3, loss=chosen), rank=0, world_size=1, source=FakeRun)
    return caught.value


def test_a_gradient_that_is_not_finite_leaves_the_parameters_and_says_how_to_take_the_step_back(tmp_path: Path) -> None:
    error = ends_with(broken_in_one, tmp_path)
    assert isinstance(error, RlbufferError)
    assert VOID in end_by(error).text


@pytest.mark.parametrize(
    "error",
    [ValueError("a loss"), torch.OutOfMemoryError("CUDA out of memory"), RlbufferError("no ratio")],
)
def test_whatever_a_pass_raises_names_the_rollouts_in_it_and_how_to_take_the_step_back(
    tmp_path: Path, error: Exception
) -> None:
    RAISED[:] = [error]
    assert ends_with(raising, tmp_path) is error
    end = end_by(error)
    assert VOID in end.text
    assert all(rollout in end.text for rollout in SEEN[0][:3])
    assert end.is_final is isinstance(error, RlbufferError)


@pytest.mark.parametrize("error", [ConfigError("a setting"), RuntimeError("[gloo] Connection closed by peer")])
def test_a_step_is_not_blamed_for_a_setting_or_a_lost_rank(tmp_path: Path, error: Exception) -> None:
    RAISED[:] = [error]
    assert ends_with(raising, tmp_path) is error
    assert VOID not in end_by(error).text
