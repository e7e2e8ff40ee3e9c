"""The env as a worker uses it: prompts in a fixed order, and a score for whatever a policy answers.

An env speaks token ids only. Nothing is rendered to text and tokenised again between the sampler and the trainer: that
round trip is not the identity, and a logprob would then belong to a token that was never sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.rollout import Rollout
from rlbuffer.worker.envs.prompt import Prompt, Score

if TYPE_CHECKING:
    from rlbuffer.worker.envs.episode import Ask, Episode
    from rlbuffer.worker.samplers.base import Sampling


class Env(Protocol):
    """A named source of tasks. Ticket n of the env samples ``prompt(n)``, on whichever worker holds it.

    An instance serves one worker process. An env is a :class:`SingleTurnEnv`, which scores one completion, or a
    :class:`MultiTurnEnv`, which plays an episode, or a :class:`WholeRolloutEnv`, which makes rollouts itself.

    Four members are optional. ``tickets`` (int or None): how many tickets the env has in all; when their groups are
    made it is done, and so are its workers. None, or no such member: it has no end. ``identity`` (mapping of plain
    values): what decides which prompt a number is, by name, such as a file's digest and a seed; nothing that only
    changes what an answer earns. A run that goes on with another one is told, see :mod:`rlbuffer.worker.place`; without
    this member the first few prompts are compared. ``max_concurrent`` (int): rollouts of this worker that may be played
    or scored at once, where tools or judges bear no more. ``async close()``: called once, when the worker ends.
    """

    @property
    def name(self) -> str:
        """`[A-Za-z0-9_.-]{1,64}`: budgets, tickets and the ledger use it."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a model with a smaller vocabulary is refused."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends a completion; it is part of it."""

    @property
    def max_new_tokens(self) -> int:
        """Longest completion, in tokens, unless the worker's settings say otherwise."""

    def prompt(self, number: int) -> Prompt:
        """The prompt of ticket `number` (from 0): the same in every process, so that a ticket can be taken over.

        Raises:
            Skip: nothing is sampled for this ticket, now or later; it is closed without a group.
        """

    def render(self, tokens: NDArray[np.int32]) -> str:
        """Tokens as text for people; nothing computes with it."""


class SingleTurnEnv(Env, Protocol):
    """One completion per rollout: a group's are sampled in one request."""

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score | Awaitable[Score]:
        """Scores one completion. It may be slow: it runs in a thread, or is a coroutine. An exception from it costs
        its rollout only.

        Shapes: ``tokens`` [C] int32, the end token included when ``finish_reason`` is ``stop``; not included (and
        never sampled) when it is ``length``.
        """


class MultiTurnEnv(Env, Protocol):
    """Several completions per rollout, with tool output or a user's turns between them."""

    async def play(self, prompt: Prompt, episode: Episode) -> Score:
        """Plays one rollout: asks `episode` for completions, adds what answers them, and scores it all.

        `episode` holds the prompt already. An exception costs this rollout only; it is tried again.
        """


class WholeRolloutEnv(Env, Protocol):
    """Makes whole rollouts itself, for frameworks that drive the policy on their own."""

    async def rollout(self, prompt: Prompt, policy: PolicyAccess) -> Rollout:
        """Makes one rollout: tokens, mask, logprobs and version spans as `policy` gave them, and scored.

        An exception costs this rollout only; it is tried again.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAccess:
    """The access to tokens for an env that makes rollouts itself."""

    ask: Ask
    """Samples one completion of a prompt; it says which version sampled which token. SamplerUnavailable and Aborted
    must reach the worker as they are: they are no failure of the rollout."""
    sampling: Sampling
    """Sampling options, by the worker's settings and the env."""
