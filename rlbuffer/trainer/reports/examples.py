"""The best and the worst rollout of one group, every few steps: numbers rise for many reasons, texts show which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlbuffer.config.settings import RunSettings
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.state.vocabulary import render

OF_SYMBOLS = {"vcopy", "repeat"}
"""Envs whose tokens are symbols."""
MOST_TOKENS = 200
"""Trained tokens shown of a rollout, the last ones: that is where the answer stands."""


def examples_of(step: Step, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """The rollouts with the highest and the lowest reward of one group; none where no rollout has a reward.

    Looked at are those that this rank holds, and the group is the one whose rewards lie furthest apart. `decode` gives
    the text of token ids, "" where there is no tokenizer.

    Returns:
        [best, worst], or one where all are alike: name (``best`` | ``worst``), group_id, rollout_id, env, reward,
        advantage, tokens (how many are trained), token_ids (the last :data:`MOST_TOKENS`), text.
    """
    groups: dict[str, list[tuple[float, MicroBatch, int]]] = {}
    for micro_batch in step:
        for i, sample in enumerate(micro_batch.samples):
            if sample.reward is not None and sample.sequence == 0:
                groups.setdefault(sample.group_id, []).append((sample.reward, micro_batch, i))
    if not groups:
        return []

    def spread(members: Sequence[tuple[float, MicroBatch, int]]) -> float:
        rewards = [reward for reward, _, _ in members]
        return max(rewards) - min(rewards)

    chosen = max(groups.values(), key=spread)
    best, worst = max(chosen, key=lambda member: member[0]), min(chosen, key=lambda member: member[0])
    named = [("best", best)] if best is worst else [("best", best), ("worst", worst)]
    return [_example(name, micro_batch, i, decode) for name, (_, micro_batch, i) in named]


def _example(name: str, micro_batch: MicroBatch, i: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    sample: Sample = micro_batch.samples[i]
    tokens = torch.as_tensor(micro_batch.unpack(micro_batch.input_ids)[i])
    trained = tokens[torch.as_tensor(micro_batch.unpack(micro_batch.loss_mask)[i]).bool()].tolist()
    shown = trained[-MOST_TOKENS:]
    return {
        "name": name,
        "group_id": sample.group_id,
        "rollout_id": sample.rollout_id,
        "env": sample.env,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "tokens": len(trained),
        "token_ids": shown,
        "text": decode(shown),
    }


def text_decoder(settings: RunSettings) -> Callable[[Sequence[int]], str]:
    """Token ids -> their text, by the tokenizer in the model's folder, without its special tokens; of the built-in envs
    by their symbols; "" where neither says it."""
    if not settings.model.path:
        envs = {worker.env for worker in settings.worker.values()}
        return render if envs and envs <= OF_SYMBOLS else lambda tokens: ""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            Path(settings.model.path).expanduser(), local_files_only=True, trust_remote_code=False
        )
    except Exception:  # of the library and of what it asks for: a file or a package that is missing, or too old
        return lambda tokens: ""
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
