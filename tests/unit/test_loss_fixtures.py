"""Every loss against figures recorded from reference implementations: loss and gradient (fixtures/losses/README.md)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlbuffer.config import losses
from rlbuffer.config.losses import LossChoice
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import TrainedTokens, loss_of
from rlbuffer.trainer.update.token_choice import choose

FOLDER = Path(__file__).parent / "fixtures" / "losses"
NAMES = sorted(path.stem for path in FOLDER.glob("*-*.json"))
INPUTS = json.loads((FOLDER / "inputs.json").read_text())
LENGTHS = INPUTS.pop("lengths")
TOLERANCE = 1e-7
"""The library verl divides by a rollout's length + 1e-8; everything else agrees to 1e-12."""


def tokens_of(record: dict[str, Any], logprobs: Tensor, entropy: Tensor) -> TrainedTokens:
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in INPUTS.items()}
    if record["old"] == "inference_logprobs":
        del columns["old_logprobs"]
    return TrainedTokens(
        **(columns | {"logprobs": logprobs, "entropy": entropy}),
        rollout=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    )


def computed(record: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns loss, gradient of the logprobs, gradient of the entropies."""
    settings = LossChoice(**record["settings"])
    leaves = [torch.tensor(INPUTS[n], dtype=torch.float64).requires_grad_() for n in ("logprobs", "entropy")]
    tokens = tokens_of(record, *leaves)
    [chosen] = choose([tokens], settings, lambda values: values)
    counts = Normalizers(loss_tokens=sum(LENGTHS), rollouts=len(LENGTHS), groups=1)
    loss = loss_of(replace(tokens, **chosen), settings, counts, longest=1)
    gradient, of_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), gradient, of_entropy


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_and_its_gradient_are_those_of_the_reference(name: str) -> None:
    record = json.loads((FOLDER / f"{name}.json").read_text())
    loss, gradient, of_entropy = computed(record)
    if record["loss"] is not None:
        assert float(loss) == pytest.approx(record["loss"], abs=TOLERANCE)
    assert gradient.tolist() == pytest.approx(record["gradient"], abs=TOLERANCE)
    if record["entropy_gradient"] is not None and of_entropy is not None:
        assert of_entropy.tolist() == pytest.approx(record["entropy_gradient"], abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_reaches_the_part_of_its_loss_that_makes_it_another_loss(name: str) -> None:
    """Without what the fixture sets (clip, cap, mask, correction) the gradient is another: it would notice its loss."""
    record = json.loads((FOLDER / f"{name}.json").read_text())
    _, gradient, of_entropy = computed(record)
    wide = {"clip_low": 0.999, "clip_high": 1e6, "max_ratio": 1e6, "cov_fraction": 1e-9, "cov_low": 1e8}
    wide |= {"cov_high": 1e9, "tv_low": 1.0, "tv_high": 1.0, "low": 0.0, "high": 1e9}
    plain_loss = record["settings"]["name"] in ("tis", "icepop", "decoupled")
    off = {"name": "clip" if plain_loss else record["settings"]["name"]}
    read = losses.LOSSES[off["name"]].options.model_fields  # type: ignore[union-attr]
    off["options"] = {name: value for name, value in wide.items() if name in read}
    _, plain, _ = computed(record | {"settings": off})
    moved = float((gradient - plain).abs().max())
    assert moved > 1e-4 or of_entropy is not None


def test_every_loss_that_is_registered_has_a_fixture() -> None:
    covered = {json.loads((FOLDER / f"{name}.json").read_text())["settings"]["name"] for name in NAMES}
    assert covered == set(losses.BUILT_IN_LOSSES)


def test_every_correction_has_a_fixture() -> None:
    named = {
        c for name in NAMES for c in json.loads((FOLDER / f"{name}.json").read_text())["settings"].get("correction", [])
    }
    assert named | {"tis", "icepop"} == set(losses.CORRECTION_FACTS)
