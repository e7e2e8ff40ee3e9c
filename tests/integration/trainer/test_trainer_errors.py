"""Refusals: what a trainer refuses of models, micro-batches, checkpoints, weights and of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_agreement import step
from test_checkpoint import made, trained
from torch import nn

from rlbuffer.config.settings import ModelSettings, RunSettings
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.errors import CheckpointError, ConfigError, PackedForwardError, RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.process.signals import StopRequest
from rlbuffer.trainer.checkpoints import checkpoint
from rlbuffer.trainer.losses import register_loss
from rlbuffer.trainer.model.attention import SegmentPlan, segment_attention
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.pulls import Pulls
from rlbuffer.trainer.ranks.stalls import StallWatch
from rlbuffer.trainer.session import TrainerSession, device_of
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.weights.model import TINY_QWEN3, build_model, model_from_config

ALONE = Ranks(0, 1, torch.device("cpu"))


class Headless(nn.Module):
    def get_output_embeddings(self) -> None:
        return None


def attend(tokens: int = 4, **options: Any) -> None:
    query = torch.zeros(1, 2, tokens, 8)
    segment_attention(nn.Identity(), query, query, query, None, **options)


@pytest.mark.parametrize(
    ("do", "error"),
    [
        (lambda: PackedPolicy(Headless(), attention="sdpa"), PackedForwardError),
        (lambda: attend(segments=SegmentPlan([0, 4]), s_aux=torch.zeros(2)), PackedForwardError),
        (lambda: attend(segments=SegmentPlan([0, 4]), position_bias=torch.zeros(2)), PackedForwardError),
        (attend, PackedForwardError),
        (lambda: attend(3, segments=SegmentPlan([0, 4])), PackedForwardError),
        (lambda: register_loss("mine", lambda *_: torch.zeros(1), divisor="rows"), ConfigError),
        (lambda: trained_tokens(nn.Identity(), SimpleNamespace(loss_mask=torch.tensor([True]))), RlbufferError),
        (lambda: build_model(ModelSettings(), seed=0), ConfigError),
        (lambda: build_model(ModelSettings(path="x", config={"model_type": "qwen3"}), seed=0), ConfigError),
        (lambda: model_from_config({**TINY_QWEN3, "model_type": "qwen99"}), ConfigError),
        (lambda: model_from_config({**TINY_QWEN3, "vocab_size": "many"}), ConfigError),
        (lambda: model_from_config({**TINY_QWEN3, "hidden_size": -1}), ConfigError),
        (lambda: prepare(model_from_config({**TINY_QWEN3, "num_attention_heads": 3})), PackedForwardError),
    ],
)
def test_what_cannot_be_trained_is_refused_in_these_words(do: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        do()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test wants to miss")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError):
        device_of(RunSettings(trainer=TrainerSettings(device="cuda")))


# -- the loop ----------------------------------------------------------------------------------------------------------
def pulls(steps: list[Any], ranks: Any = ALONE) -> Pulls:
    """Pulls from a reader that gives `steps`: the refusals need no model."""
    bare: Any = object.__new__(TrainerSession)
    reader = SimpleNamespace(steps=lambda start, until: iter(steps), has_ended=False, still_there=lambda step: True)
    given = {
        "ranks": ranks,
        "stop": StopRequest(),
        "settings": RunSettings(),
        "reader": reader,
        "stalls": StallWatch(ranks, None),
    }
    for name, value in given.items():
        object.__setattr__(bare, name, value)
    idle: Any = SimpleNamespace(look=lambda: False, check=lambda: None)
    return Pulls(bare, idle)


@pytest.mark.parametrize("steps", [[], [step(9)]])
def test_a_reader_that_does_not_give_the_next_step_ends_the_trainer(steps: list[Any]) -> None:
    with pytest.raises(RlbufferError):
        pulls(steps).next(4)


def test_ranks_that_never_agree_end_with_what_each_holds() -> None:
    def gather_text(mine: str, **_: Any) -> list[str]:
        return [mine, mine.replace(step(4).digest, "another")]

    with pytest.raises(RlbufferError, match="rank 1: step 4 of epoch 1, digest another"):
        pulls([step(4)], SimpleNamespace(gather_text=gather_text)).next(4)


# -- files -------------------------------------------------------------------------------------------------------------
def test_checkpoints_that_cannot_be_written_or_read_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "step-00000001"
    with pytest.raises(CheckpointError, match=str(place)):
        checkpoint.save(tmp_path / "file", made(1), *trained(), keep=1)

    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path, 4, run="r")


def test_a_checkpoint_that_one_rank_cannot_write_fails_on_all(tmp_path: Path) -> None:
    """A rank of two whose peer says, in the first exchange, that it has failed."""
    ranks: Any = SimpleNamespace(
        rank=1,
        world_size=2,
        first=lambda value: 7,
        gather_text=lambda mine: ['{"error": "rank 0: no space", "lack": 0}', mine],
    )
    with pytest.raises(CheckpointError, match="rank 0: no space"):
        checkpoint.save(tmp_path, made(1), *trained(), keep=1, ranks=ranks)
