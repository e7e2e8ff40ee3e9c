"""A sampler that stops to follow, and goes on under the new numbers, is found: it is looked at again now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worker_stage import Stage, eventually

from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import WrongLogprobs
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import build_model, config_of
from rlbuffer.worker.loop import CHECKED_LOADS, LOOKED_AGAIN_EVERY
from rlbuffer.worker.samplers.conformance import CONFIG
from rlbuffer.worker.samplers.decoding import Decoder

LOOKS = [CHECKED_LOADS - 1 + LOOKED_AGAIN_EVERY * n for n in (1, 2)]
"""Versions of the first two later looks, where every version is loaded."""


class Following(Decoder):
    """Loads versions up to `last`, and says of later ones that it has loaded them."""

    def __init__(self, last: int) -> None:
        super().__init__(seed=0)
        self._last = last

    def load(self, policy: PolicyVersion) -> None:
        held = None if self._model is None else [p.detach().clone() for p in self._model.parameters()]
        super().load(policy)
        if policy.version > self._last and held is not None and self._model is not None:
            for parameter, value in zip(self._model.parameters(), held, strict=True):
                parameter.data.copy_(value)


def announced_until(stage: Stage, folder: Path, last: int, *, change: float) -> None:
    """Announces one version after the other, each loaded before the next, until `last` or the worker's end."""
    model = build_model(ModelSettings(config=dict(CONFIG)), seed=0)
    for version in range(last + 1):
        stage.announce(publish(folder, version, state=model.state_dict(), config=config_of(model), keep=99))
        eventually(
            lambda v=version: stage.raised is not None or v in [event.version for event in stage.told("version")]
        )
        for parameter in model.parameters():
            parameter.data += change * torch.randn_like(parameter)


def looked_at(stage: Stage) -> list[int]:
    return [event.version for event in stage.told("checked")]


@pytest.mark.parametrize("last", [3, LOOKS[0]])
def test_a_sampler_that_stops_to_follow_ends_its_worker(stage: Stage, tmp_path: Path, last: int) -> None:
    stage.sampler = Following(last)  # type: ignore[assignment]
    stage.allow(2)
    stage.start(self_check="always")
    announced_until(stage, tmp_path, LOOKS[1], change=0.02)
    eventually(lambda: stage.raised is not None)
    assert isinstance(stage.raised, WrongLogprobs)
    right, wrong = (1, LOOKS[0]) if last == 3 else LOOKS
    assert str(stage.raised).startswith(f"the sampler was right at version {right} and is not at version {wrong}, so")
    assert looked_at(stage) == [0, 1] if last == 3 else [0, 1, LOOKS[0]]


@pytest.mark.parametrize(("last", "change"), [(99, 0.02), (3, 1e-9)], ids=["follows", "hardly changes"])
def test_a_sampler_that_follows_or_need_not_is_right_at_every_look(
    stage: Stage, tmp_path: Path, last: int, change: float
) -> None:
    stage.sampler = Following(last)  # type: ignore[assignment]
    stage.allow(2)
    stage.start(self_check="always")
    announced_until(stage, tmp_path, LOOKS[1], change=change)
    eventually(lambda: len(looked_at(stage)) == 4)
    stage.finish()
    assert stage.raised is None
    assert looked_at(stage) == [0, 1, *LOOKS]
    assert stage.troubles() == []


def test_where_another_worker_changes_the_weights_nobody_looks_again(stage: Stage, tmp_path: Path) -> None:
    stage.sampler = Following(0)  # type: ignore[assignment]
    stage.allow(2)
    stage.start(
        self_check="always", sampler="openai", sampler_options={"servers": "http://h", "updates_weights": False}
    )
    announced_until(stage, tmp_path, LOOKS[0] + 1, change=0.02)
    stage.finish()
    assert stage.raised is None
    assert looked_at(stage) == [0]
