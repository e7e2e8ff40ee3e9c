"""An episode: the token-exact record of one rollout while it is being made.

An env adds what the policy did not say (tool output, a user's turn) as tokens, and asks for what it says next. Sampled
tokens are never turned into text and back: the next prompt is exactly the tokens so far.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PromptTooLong
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.routed import ROUTED_EXPERTS, joined, routed_column
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.support import SUPPORT, is_kept, support_column
from rlbuffer.worker.envs.prompt import Score
from rlbuffer.worker.samplers.base import Completion, Sampling

Ask = Callable[[NDArray[np.int32], Sampling], Awaitable[Completion]]
"""Samples one completion of a prompt."""


class Episode:
    """One rollout in the making.

    Args:
        prompt: [P] int32, P >= 1; what the policy is given first.
        ask: samples a completion.
        sampling: how, unless a turn says otherwise.
    """

    def __init__(self, prompt: NDArray[np.int32], ask: Ask, sampling: Sampling) -> None:
        self._ask = ask
        self._sampling = sampling
        self._parts: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.bool_]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._supports: list[NDArray[np.int32] | None] = []
        self._spans: list[VersionSpan] = []
        self._turns: list[Turn] = []
        self._length = 0
        self._routed: NDArray[Any] | None = None
        self.finish_reason = ""
        """Why the last completion ended; ``length`` also when the context was full."""
        self.extend(prompt, role="user")

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[T] int32; everything so far."""
        return np.concatenate(self._parts)

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled and that are trained."""
        return sum(int(mask.sum()) for mask in self._masks)

    def extend(self, tokens: Sequence[int] | NDArray[np.int32], *, role: str = "tool") -> None:
        """Adds tokens that the policy did not sample: they are context and not trained."""
        ids = np.asarray(tokens, np.int32)
        self._add(ids, np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32), role)

    def add(self, completion: Completion, *, role: str = "assistant") -> None:
        """Adds a completion of the tokens so far."""
        start, support = self._length, completion.support
        mask = np.ones(len(completion.tokens), np.bool_) if support is None else is_kept(support)
        self._add(completion.tokens, mask, completion.logprobs, role, support)
        if completion.routed_experts is not None:
            parts = [] if self._routed is None else [(len(self._routed), self._routed)]
            rows = routed_column(completion.routed_experts, self._length)
            self._routed = joined([*parts, (self._length, rows)], self._length)
        for version, first, end in completion.version_spans:
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.policy_version, last.end) == (version, start + first):
                self._spans[-1] = last._replace(end=start + end)
            else:
                self._spans.append(VersionSpan(version, start + first, start + end))
        self.finish_reason = completion.finish_reason

    async def sample(self, *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Completion:
        """Samples the policy's next turn, and adds it.

        Args:
            max_new_tokens: of this turn; None: as configured.
            stop_token_ids: end this turn, too.

        Raises:
            PromptTooLong: the context is full; the rollout then counts as truncated.
            SamplerUnavailable: the sampler is away; the worker tries the rollout again.
        """
        sampling = self._sampling
        if max_new_tokens is not None or stop_token_ids:
            sampling = replace(
                sampling,
                max_new_tokens=max_new_tokens or sampling.max_new_tokens,
                stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_token_ids))),
            )
        try:
            completion = await self._ask(self.tokens, sampling)
        except PromptTooLong:
            self.finish_reason = "length"
            raise
        self.add(completion)
        return completion

    def rollout(self, score: Score, *, text: str | None = None, further: Sequence[TokenSequence] = ()) -> Rollout:
        """The finished rollout, with `further` sequences behind this one (:meth:`sequence` of other episodes).

        Raises:
            InvalidRollout: a reward is not finite, or something else no record allows.
        """
        return Rollout(
            **self._fields(),
            reward=score.reward,
            rewards=score.rewards,
            successes=score.successes,
            finish_reason=self.finish_reason,
            text=text,
            metadata=score.metadata,
            further=tuple(further),
        )

    def sequence(self, name: str = "") -> TokenSequence:
        """The tokens so far, as a sequence of a rollout that another episode makes; `name` is for people."""
        return TokenSequence(**self._fields(), name=name)

    def _fields(self) -> dict[str, Any]:
        """Those of a sequence."""
        support = support_column(
            [(len(ids), part_support) for ids, part_support in zip(self._parts, self._supports, strict=True)]
        )
        return {
            "tokens": self.tokens,
            "loss_mask": np.concatenate(self._masks),
            "logprobs": np.concatenate(self._logprobs),
            "version_spans": tuple(self._spans),
            "turns": tuple(self._turns) if len(self._turns) > 2 else (),
            "columns": {
                **({} if support is None else {SUPPORT: support}),
                **({} if self._routed is None else {ROUTED_EXPERTS: routed_column(self._routed, self._length)}),
            },
        }

    def _add(
        self,
        ids: NDArray[np.int32],
        mask: NDArray[np.bool_],
        logprobs: NDArray[np.float32],
        role: str,
        support: NDArray[np.int32] | None = None,
    ) -> None:
        if not len(ids):
            return
        self._supports.append(support)
        self._parts.append(ids)
        self._masks.append(mask)
        self._logprobs.append(logprobs)
        self._turns.append(Turn(role, self._length, self._length + len(ids)))
        self._length += len(ids)
