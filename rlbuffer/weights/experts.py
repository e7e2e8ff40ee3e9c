"""The choice among experts of a Hugging Face model, recorded and replayed: one mechanism for all families.

An engine and a trainer that compute one layer with different experts have different policies, though their weights are
the same. So the sampler records which experts it took, and the trainer takes those.

A family with experts has a module ``...Router`` with `top_k` and `num_experts`. Its forward pass asks ``torch.topk``
once for the best `top_k` of [tokens, num_experts] scores, and gives its block the experts and their gates. While it
runs, a TorchFunctionMode answers that one call by the record: the recorded experts, and their scores as the current
weights give them. Gates, their normalisation, scale and gradient stay the library's own arithmetic, of every family.

Source: routing replay, arXiv 2507.18071 section 5.3 and 2510.11370.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlbuffer.config.models import experts_in
from rlbuffer.errors import ConfigError
from rlbuffer.weights.blocks import decoder_layers

_TRIED = 8
"""Tokens of the forward passes that try a model at the start."""


def is_recorded(rows: Tensor, experts: int | None = None) -> Tensor:
    """True where a row is a record of a model with so many `experts`: see :mod:`rlbuffer.records.routed`.

    Shapes: rows [..., K], signed integers -> [...] bool.
    """
    ordered = rows.sort(-1).values
    is_recorded = (ordered.diff(dim=-1) != 0).all(-1) & (ordered[..., 0] >= 0)
    return is_recorded if experts is None else is_recorded & (ordered[..., -1] < experts)


class Experts:
    """The routers of a model. :func:`experts_of` makes it, and puts it into the model.

    Outside of :meth:`replaying` and :meth:`recording` the routers run as the library has them.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = len(layers)
        """Of the model, those without experts too."""
        self.routers: list[tuple[int, Any]] = [
            (number, router) for number, layer in enumerate(layers) for router in _routers_in(layer)
        ]
        """(layer, router)."""
        self._replayed: Tensor | None = None
        self._taken: dict[int, list[Tensor]] | None = None
        for number, router in self.routers:
            router.forward = partial(self._forward, number, router, router.forward)

    @property
    def top_k(self) -> int:
        """Experts of a token in one layer, K."""
        return int(self.routers[0][1].top_k)

    @property
    def num_experts(self) -> int:
        """Experts of one layer."""
        return int(self.routers[0][1].num_experts)

    def fits(self, rows: Tensor) -> bool:
        """Recorded experts [T, ...] are of as many layers, and of as many experts for a token, as the model has."""
        return [*rows.shape[1:]] == [self.layers, self.top_k]

    @contextmanager
    def replaying(self, rows: Tensor | None) -> Iterator[None]:
        """Inside, forward passes over T tokens take the experts of `rows` [T, layers, K], and their own choice where a
        row is no record; None: everywhere."""
        before, self._replayed = self._replayed, rows
        try:
            yield
        finally:
            self._replayed = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` of torch's checkpoint: what is computed again has the record of its own call, whatever was
        replayed since."""
        return nullcontext(), self.replaying(self._replayed)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Inside, one forward pass is recorded."""
        self._taken = {number: [] for number, _ in self.routers}
        recording = Recording(self, self._taken)
        try:
            yield recording
        finally:
            self._taken = None

    def _forward(self, number: int, router: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._replayed is None and self._taken is None:
            return forward(*args, **kwargs)
        rows = None if self._replayed is None else self._replayed[:, number].long()
        with _Choice(rows, int(router.num_experts), int(router.top_k)) as choice:
            out = forward(*args, **kwargs)
        if choice.asked != 1:
            raise ConfigError(
                f"{type(router).__name__} asked {choice.asked} times for its best {router.top_k} of "
                f"{router.num_experts} experts, not once: its choice can neither be recorded nor replayed"
            )
        if self._taken is not None and choice.chosen is not None:
            self._taken[number].append(choice.chosen.detach())
        return out


class Recording:
    """The experts that one forward pass took."""

    def __init__(self, experts: Experts, taken: dict[int, list[Tensor]]) -> None:
        self._experts, self._taken = experts, taken

    def rows(self) -> Tensor:
        """[T, layers, K] int16, in the order in which the tokens went through the model; 0 in layers without experts.

        Raises:
            ConfigError: a router did not run, or more than once.
        """
        for number, router in self._experts.routers:
            if len(self._taken[number]) != 1:
                raise ConfigError(
                    f"{type(router).__name__} of layer {number} ran {len(self._taken[number])} times in a forward "
                    "pass, not once: where a fused kernel computes the block, no choice is seen"
                )
        first = next(iter(self._taken.values()))[0]
        none = torch.zeros_like(first)
        layers = [self._taken[number][0] if number in self._taken else none for number in range(self._experts.layers)]
        return torch.stack(layers, dim=1).short()


class _Choice(TorchFunctionMode):
    """Answers the one ``topk`` of a router by `rows` [T, K], where they are a record.

    A family that masks scores by group may take the gates from the masked ones (DeepSeek-V2 sets those of other groups
    to 0): an expert of the record that the current weights would have masked keeps its score.
    """

    def __init__(self, rows: Tensor | None, num_experts: int, top_k: int) -> None:
        super().__init__()
        self._rows, self._num_experts, self._top_k = rows, num_experts, top_k
        self._known = None if rows is None else is_recorded(rows, num_experts)[:, None]
        self.asked = 0
        self.chosen: Tensor | None = None
        """[T, K] int64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MASKS and self._known is not None and args[0].shape == (len(self._known), self._num_experts):
            return torch.where(self._known, args[0], out)
        if func in _CHOICES and self._is_the_one(args[0], args[1] if len(args) > 1 else kwargs["k"]):
            self.asked += 1
            values, self.chosen = out
            if self._rows is None or self._known is None:
                return out
            if len(self._rows) != len(values):
                raise ConfigError(f"a record of {len(self._rows)} tokens for a router's {len(values)}")
            self.chosen = torch.where(self._known, self._rows, self.chosen)
            return torch.return_types.topk((args[0].gather(1, self.chosen), self.chosen))
        return out

    def _is_the_one(self, scores: Tensor, k: int) -> bool:
        return scores.dim() == 2 and scores.shape[1] == self._num_experts and k == self._top_k


_MASKS = (torch.masked_fill, Tensor.masked_fill)
_CHOICES = (torch.topk, Tensor.topk)


def has_experts(model: PreTrainedModel) -> bool:
    """True where the model's config names experts."""
    return experts_in(model.config.to_dict()) is not None


def experts_of(model: PreTrainedModel) -> Experts:
    """The experts of a model, put into it, and tried by three short forward passes. The model is in eval mode.

    Raises:
        ConfigError: it has none; or its choice can neither be recorded nor replayed: its routers are of another kind,
            a fused kernel computes their blocks, or each token has a single expert, of which a record could not be
            told from none.
    """
    name = type(model).__name__
    if not has_experts(model):
        raise ConfigError(f"{name} has no experts")
    layers = decoder_layers(model)
    if not any(_routers_in(layer) for layer in layers):
        raise ConfigError(
            f"{name}: none of its modules is a router as transformers names them (...Router, with top_k and "
            "num_experts): its choice of experts can neither be recorded nor replayed"
        )
    experts = Experts(layers)
    kinds = {(int(router.num_experts), int(router.top_k)) for _, router in experts.routers}
    if len(kinds) > 1:
        raise ConfigError(f"{name}: layers of {sorted(kinds)} (experts, experts of a token) have no common record")
    if experts.top_k < 2:
        raise ConfigError(f"{name}: a token has one expert in a layer: a record of it could not be told from none")
    try:
        _try(model, experts)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"{name}: its choice of experts cannot be replayed: {error}") from error
    return experts


@torch.no_grad()
def _try(model: PreTrainedModel, experts: Experts) -> None:
    """Looks whether the routers are asked once, and whether the logprobs follow another choice."""
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(_TRIED, device=embeddings.weight.device) % len(embeddings.weight)

    def logits() -> tuple[Tensor, Tensor]:
        with experts.recording() as recording:
            out: Tensor = model(input_ids=ids[None], use_cache=False).logits
        return out, recording.rows()

    chosen_logits, chosen = logits()
    if experts.top_k == experts.num_experts:  # every token has all of them
        return
    other = (chosen.long() + 1) % experts.num_experts
    with experts.replaying(other):
        moved, taken = logits()
    numbers = [number for number, _ in experts.routers]
    if not torch.equal(taken[:, numbers].long(), other[:, numbers]) or torch.equal(chosen_logits, moved):
        raise ConfigError(f"{type(model).__name__}: its logits do not follow another choice of experts")


def _routers_in(layer: nn.Module) -> list[Any]:
    return [
        module
        for module in layer.modules()
        if type(module).__name__.endswith("Router") and hasattr(module, "top_k") and hasattr(module, "num_experts")
    ]
