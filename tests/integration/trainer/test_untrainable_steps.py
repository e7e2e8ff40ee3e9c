"""A committed step that cannot be trained: a restart meets the same bytes, so it names them and the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_several_updates import settings
from torch import Tensor

from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.trainer.launch.rank import end_by
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.losses import TrainedTokens

FAILS_AT = 2
"""Step."""
VOID = f"rlbuffer runs void {FAILS_AT}`"
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
        train(settings(output, once, steps=3, loss=chosen), rank=0, world_size=1, fake_data=True)
    return caught.value


def test_a_gradient_that_is_not_finite_names_the_rollout_it_comes_from_and_how_to_take_the_step_back(
    tmp_path: Path,
) -> None:
    error = ends_with(broken_in_one, tmp_path)
    assert isinstance(error, RlbufferError)
    text = end_by(error).text
    assert VOID in text
    named = [rollout for rollouts in SEEN for rollout in rollouts if f"{rollout}." in text or f"{rollout}," in text]
    assert named == [SEEN[0][1]]


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


RANK = """
import os, sys, json, torch
import torch.distributed as dist
from types import SimpleNamespace as Some
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.update.blame import Blame
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
logprobs = torch.zeros(4)
logprobs.grad = torch.tensor([1.0, -6.0, 2.0, 0.0]) * (1 + rank)
blame = Blame(7, Ranks(rank, 2, torch.device("cpu")))
samples = [Some(rollout_id=f"g{rank}/{i}") for i in range(2)]
blame.add(Some(logprobs=logprobs, rollout=torch.tensor([0, 0, 1, 1]), samples=samples))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(blame.not_finite(float("inf")), file)
os._exit(0)  # as a rank of the trainer ends: threads of gloo outlive main, and may abort the process
"""


def test_every_rank_names_the_largest_gradients_over_all_ranks(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)]) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    texts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert "up to 6, at the logprobs of rollouts g1/0, g0/0, g1/1." in texts[0]
