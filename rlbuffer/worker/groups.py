"""From completions to a group: scored, with the versions and reasons that sampling ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rlbuffer.records import Group, Rollout, Ticket
from rlbuffer.worker.envs.base import Env, Prompt
from rlbuffer.worker.samplers.base import Completion


def build_group(
    env: Env,
    ticket: Ticket,
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    worker: str,
    temperature: float,
) -> Group:
    """Scores every completion and puts them into the group of their ticket.

    A temperature other than 1 goes along as the column ``temperatures`` [T], so that the trainer can divide its logits
    by what the sampler divided by.

    Raises:
        InvalidRollout: the env gave a reward that is not finite, or something else no record allows.
        Exception: whatever the env's own code raises.
    """
    rollouts = []
    for completion in completions:
        score = env.score(prompt, completion.tokens, finish_reason=completion.finish_reason)
        length = len(prompt.tokens) + len(completion.tokens)
        rollouts.append(
            Rollout.from_completion(
                prompt_ids=prompt.tokens,
                token_ids=completion.tokens,
                logprobs=completion.logprobs,
                reward=score.reward,
                rewards=score.rewards,
                successes=score.successes,
                policy_version=completion.policy_version,
                finish_reason=completion.finish_reason,
                is_truncated=completion.finish_reason == "length",
                columns={} if temperature == 1 else {"temperatures": np.full(length, temperature, np.float32)},
                text=env.render(prompt.tokens) + env.render(completion.tokens),
            )
        )
    return Group(
        group_id=ticket.group_id,
        env=ticket.env,
        prompt_id=prompt.prompt_id,
        rollouts=tuple(rollouts),
        planned_size=len(rollouts),
        answer=prompt.answer,
        metadata=prompt.metadata,
        worker=worker,
        created=time.time(),
    )
