"""Losses from outside: registered by name, or named by a dotted path."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial, wraps
from types import ModuleType

import pytest
import torch
from torch import Tensor
from trained_tokens import tokens

from rlbuffer.config.imports import defined_at
from rlbuffer.config.losses import LossChoice, columns_of
from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.losses import TrainedTokens, loss_of, register_loss


# What a newcomer writes, whole:
def sapo(tokens: TrainedTokens, options: Mapping[str, float]) -> Tensor:
    """``-A 4/tau sigmoid(tau (r - 1))``: a soft gate in place of the clip (arXiv 2511.20347)."""
    tau = torch.where(tokens.advantages > 0, options.get("tau_high", 1.0), options.get("tau_low", 1.05))
    return -tokens.advantages * torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau


def given() -> TrainedTokens:
    return tokens([0.5, 0.9], advantages=torch.tensor([1.0, -1.0], dtype=torch.float64))


def value(**settings: object) -> float:
    counts = Normalizers(loss_tokens=2, rollouts=1, groups=1)
    return float(loss_of(given(), LossChoice(**settings), counts, longest=1))


def expected(low: float = 1.05) -> float:
    def gate(tau: float, ratio: float) -> float:
        return float(torch.sigmoid(torch.tensor(tau * (ratio - 1), dtype=torch.float64))) * 4 / tau

    return (-gate(1.0, 1.25) + gate(low, 1.8)) / 2


def test_a_loss_that_is_registered_from_outside_is_trained_by_its_name() -> None:
    register_loss("sapo", sapo, columns=("teacher_logprobs",))
    assert columns_of(LossChoice(name="sapo", kl_beta=0.1)) == ("ref_logprobs", "teacher_logprobs")
    assert value(name="sapo") == pytest.approx(expected())
    assert value(name="sapo", options={"tau_low": 2.0}) == pytest.approx(expected(2.0))


def test_a_loss_is_named_by_its_dotted_path_with_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_losses")
    vars(module)["sapo"] = sapo
    monkeypatch.setitem(sys.modules, "my_losses", module)
    assert value(name="my_losses:sapo") == pytest.approx(expected())
    assert value(name="my_losses:sapo", normalizer="rollouts") == pytest.approx(expected())
    assert value(name="my_losses:sapo", normalizer="longest") == pytest.approx(expected() * 2)
    assert value(name="my_losses:sapo", options={"tau_low": 2.0}) == pytest.approx(expected(2.0))


def test_a_loss_that_gives_no_loss_per_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("bad_losses")
    vars(module)["mean"] = lambda tokens, options: sapo(tokens, options).mean()
    vars(module)["number"] = lambda tokens, options: 1.0

    monkeypatch.setitem(sys.modules, "bad_losses", module)
    for name, given in (("mean", "shape []"), ("number", "float")):
        with pytest.raises(ConfigError) as error:
            value(name=f"bad_losses:{name}")
        assert f"'bad_losses:{name}' gave {given}" in str(error.value)
        assert f"({__file__}:" in str(error.value)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_refused_by_its_name_and_place(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    module = ModuleType("odd_losses")
    vars(module)["odd"] = lambda tokens, options: tokens.logprobs * number
    monkeypatch.setitem(sys.modules, "odd_losses", module)
    monkeypatch.setattr("rlbuffer.trainer.losses.registry._LOSSES", {})
    with pytest.raises(RlbufferError) as error:
        value(name="odd_losses:odd")
    assert not isinstance(error.value, ConfigError)
    assert "'odd_losses:odd' gave" in str(error.value)
    assert f"({__file__}:" in str(error.value)


def test_a_loss_that_is_registered_is_held_to_the_same_shape() -> None:
    register_loss("sapo_mean", lambda tokens, options: sapo(tokens, options).mean())
    with pytest.raises(ConfigError, match=r"^trainer\.loss\.name = 'sapo_mean' gave shape \[\]: it must give one loss"):
        value(name="sapo_mean")


def test_a_loss_without_a_gradient_is_refused_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flat_losses")
    vars(module)["detached"] = lambda tokens, options: sapo(tokens, options).detach()
    vars(module)["sapo"] = sapo
    vars(module)["nothing"] = lambda tokens, options: torch.zeros_like(tokens.logprobs)
    monkeypatch.setitem(sys.modules, "flat_losses", module)
    policy = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)
    made, counts = replace(given(), logprobs=policy.log()), Normalizers(loss_tokens=2, rollouts=1, groups=1)
    with pytest.raises(ConfigError, match=re.escape(f"({__file__}:")):
        loss_of(made, LossChoice(name="flat_losses:detached"), counts, longest=1)
    loss_of(made, LossChoice(name="flat_losses:sapo"), counts, longest=1).backward()
    assert policy.grad is not None
    # A micro-batch of which it has nothing to say; other terms may carry the gradient.
    assert float(loss_of(made, LossChoice(name="flat_losses:nothing"), counts, longest=1)) == 0.0
    with torch.no_grad():  # only the value is asked for
        assert float(loss_of(made, LossChoice(name="flat_losses:detached"), counts, longest=1)) == pytest.approx(
            expected()
        )


def test_a_divisor_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^loss 'x': divisor 'steps' must be rollouts, tokens or longest$"):
        register_loss("x", sapo, divisor="steps")  # type: ignore[arg-type]


def doubled(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def inner(*arguments: object) -> object:
        return [function(*arguments)] * 2

    return inner


def test_the_place_of_a_partial_or_decorated_function_is_its_own() -> None:
    place = defined_at(sapo)
    assert place.startswith(f" ({__file__}:")
    wrapping = doubled(sapo), partial(sapo, options={}), partial(doubled(sapo)), cache(sapo), torch.no_grad()(sapo)
    assert {defined_at(named) for named in wrapping} == {place}
