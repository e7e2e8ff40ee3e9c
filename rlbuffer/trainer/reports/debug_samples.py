"""``rlbuffer train --debug-samples N``: what the trainer sees of the first rollouts, before it trains.

Most of what goes wrong between a sampler and a trainer shows here first: a mask that is off by one, logprobs of other
tokens, another temperature or chat template, an advantage that is missing. `rlbuffer inspect` shows what is kept here
token by token.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rlbuffer.client.trainer_values import SAMPLE_SCHEMA, SAMPLES_FILE
from rlbuffer.process.files import append_lines
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.state.text import printable
from rlbuffer.trainer.losses.tokens import TrainedTokens
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.trainer.update.update import trained_tokens

NEAR = 0.05
"""Nats: at age 0 the mean |trainer - inference| of a rollout is below this, unless engine and trainer disagree."""


@torch.no_grad()
def show_samples(session: TrainerSession, step: Step, most: int) -> None:
    """Prints rank 0's first `most` rollouts of `step` to stderr (stdout may be data), with checks, and keeps their
    values. All ranks call it: they may share the model."""
    for micro_batch in step:
        if session.ranks.first(most) <= 0:
            return
        on_device = micro_batch.to(session.ranks.device)
        trainer = session.settings.trainer
        tokens = trained_tokens(
            session.module, on_device, temperature=trainer.temperature, replays_experts=trainer.replay_experts
        )
        if session.is_first:
            for text in checked(micro_batch, tokens.logprobs.cpu(), step.number)[:most]:
                print(printable(text, lines=True), file=sys.stderr, flush=True)
            with suppress(OSError):  # a full disk must not end the training that somebody looks into
                keep(session.settings.output_dir / SAMPLES_FILE, micro_batch, tokens, step.number, most)
        most -= len(micro_batch.samples)


def keep(file: Path, micro_batch: MicroBatch, tokens: TrainedTokens, step: int, most: int) -> None:
    """Adds logprobs and entropies of the first `most` rollouts to `file`: what `rlbuffer inspect` shows per token."""
    counts = [int(torch.as_tensor(mask).sum()) for mask in micro_batch.unpack(micro_batch.loss_mask)]
    logprobs, entropy = (torch.split(values.cpu(), counts) for values in (tokens.logprobs, tokens.entropy))
    lines = [
        {
            "schema": SAMPLE_SCHEMA,
            "group_id": sample.group_id,
            "rollout_id": f"{sample.rollout_id}.{sample.sequence}" if sample.sequences > 1 else sample.rollout_id,
            "step": step,
            "logprobs": [round(value, 6) for value in logprobs[i].tolist()],
            "entropy": [round(value, 6) for value in entropy[i].tolist()],
        }
        for i, sample in enumerate(micro_batch.samples[:most])
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    append_lines(file, "".join(f"{json.dumps(line)}\n" for line in lines))


def checked(micro_batch: MicroBatch, logprobs: Tensor, step: int) -> list[str]:
    """A text per rollout: what it is, and its checks below that.

    Shapes: ``logprobs`` [N], the trainer's, of the micro-batch's trained tokens in their order.
    """
    trainer = torch.full((micro_batch.length,), math.nan, dtype=torch.float64)
    trainer[torch.as_tensor(micro_batch.loss_mask)] = logprobs.double()
    columns = (micro_batch.loss_mask, micro_batch.logprobs, trainer, micro_batch.advantages)
    out = []
    for sample, *values in zip(micro_batch.samples, *(micro_batch.unpack(c) for c in columns), strict=True):
        mask, inference, ours, advantages = map(torch.as_tensor, values)
        reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
        head = (
            f"rollout {sample.rollout_id} of group {sample.group_id}, env {sample.env}: reward {reward}, advantage "
            f"{sample.advantage:+.4g}, {sample.length} tokens, {sample.prompt_tokens} of them prompt, policy versions "
            f"{sample.policy_versions[0]} to {sample.policy_versions[1]}, trained in step {step}"
        )
        checks = _checks(sample, mask, inference[mask].double(), ours[mask], advantages, step)
        out.append("\n".join([head, *checks]))
    return out


def _checks(sample: Sample, mask: Tensor, sampled: Tensor, trained: Tensor, advantages: Tensor, step: int) -> list[str]:
    """``ok`` or ``!`` with what was looked at, one line each.

    Shapes: ``mask``, ``advantages`` [length]; ``sampled``, ``trained`` logprobs of its trained tokens.
    """
    prompt, stray = int(mask[: sample.prompt_tokens].sum()), int((advantages[~mask] != 0).sum())
    zeros = int((sampled == 0).sum())
    bounds = f"{float(sampled.min()):.4f} to {float(sampled.max()):.4f}" if len(sampled) else "nothing"
    mean = float((trained - sampled).abs().mean()) if len(sampled) else 0.0
    age = max(0, step - 1 - sample.policy_versions[0])
    verdicts = [
        (len(mask) == sample.length, f"its span holds {len(mask)} tokens, {sample.length} were pushed"),
        (prompt == 0, f"{prompt} of {sample.prompt_tokens} prompt tokens are trained"),
        (len(sampled) > 0, f"{len(sampled)} tokens are trained"),
        (stray == 0, f"{stray} tokens that are not trained carry an advantage"),
        (bool((sampled <= 0).all()), f"inference logprobs are from {bounds}, none above 0"),
        (zeros < max(1, len(sampled)), f"{zeros} of {len(sampled)} inference logprobs are exactly 0"),
        (
            age > 0 or mean <= NEAR,
            f"at age {age} trainer and inference differ by {mean:.4f} nats a token{'' if age else ', near 0'}",
        ),
    ]
    return [f"  {'ok' if good else '! '} {text}" for good, text in verdicts]
