"""``rlbuffer train --debug-samples N``: what the trainer sees of the first rollouts, token by token, before it trains.

Most of what goes wrong between a sampler and a trainer shows here first: a mask that is off by one, logprobs of other
tokens, another temperature or chat template, an advantage that is missing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbuffer.client.trainer_values import SAMPLE_SCHEMA, SAMPLES_FILE
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.micro_batch import MicroBatch, Sample, Step
from rlbuffer.state.text import printable
from rlbuffer.trainer.losses.tokens import TrainedTokens
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.trainer.update.update import trained_tokens

MOST_ROWS = 64
"""Tokens shown of one rollout: the first ones, and the last ones."""
NEAR = 0.05
"""Nats: at age 0 the mean |trainer - inference| of a rollout is below this, unless engine and trainer disagree."""
TABLE_HEAD = (
    f"{'token':>7} {'text':<14} {'mask':<4} {'inference':>9} {'trainer':>9} {'reference':>9} {'ratio':>7} {'adv':>7}"
)


@torch.no_grad()
def show_samples(session: TrainerSession, step: Step, most: int) -> None:
    """Prints rank 0's first `most` rollouts of `step` to stderr (stdout may be data), with checks, and keeps their
    values. All ranks call it: they may share the model."""
    decode, settings = text_decoder(session.settings), session.settings.trainer
    for micro_batch in step:
        if session.ranks.first(most) <= 0:
            return
        on_device = micro_batch.to(session.ranks.device)
        tokens = trained_tokens(session.module, on_device, temperature=settings.temperature)
        if session.is_first:
            for text in tables(micro_batch, tokens.logprobs.cpu(), step.number, decode)[:most]:
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
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{json.dumps(line)}\n" for line in lines))


def tables(micro_batch: MicroBatch, logprobs: Tensor, step: int, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """One table per rollout, its checks below it.

    Shapes: ``logprobs`` [N], the trainer's, of the micro-batch's trained tokens in their order.
    """
    trainer = torch.full((micro_batch.length,), math.nan, dtype=torch.float64)
    trainer[torch.as_tensor(micro_batch.loss_mask)] = logprobs.double()
    reference = torch.full_like(trainer, math.nan)
    if "ref_logprobs" in micro_batch.columns:
        reference[:] = torch.as_tensor(micro_batch.columns["ref_logprobs"])
    if "ref_logprobs" in micro_batch.lacking:
        reference[torch.as_tensor(micro_batch.lacking["ref_logprobs"])] = math.nan
    columns = (
        micro_batch.input_ids,
        micro_batch.loss_mask,
        micro_batch.logprobs,
        trainer,
        reference,
        micro_batch.advantages,
    )
    out = []
    for sample, *values in zip(micro_batch.samples, *(micro_batch.unpack(c) for c in columns), strict=True):
        ids, mask, inference, ours, theirs, advantages = map(torch.as_tensor, values)
        rows = []
        ratios = (ours - inference).clamp(max=50.0).exp()
        for t, token in enumerate(ids.tolist()):
            row = f"{token:>7} {printable(decode([token]))[:14]:<14} "
            if mask[t]:
                numbers = [float(of[t]) for of in (inference, ours, theirs)]
                cells = " ".join(f"{'' if math.isnan(number) else f'{number:.4f}':>9}" for number in numbers)
                row += f"x    {cells} {float(ratios[t]):>7.3f} {float(advantages[t]):>+7.3f}"
            rows.append(row if mask[t] else f"{row}.")
        if len(rows) > MOST_ROWS:
            rows[MOST_ROWS // 2 : -MOST_ROWS // 2] = [f"{'...':>7} {len(rows) - MOST_ROWS} more"]
        reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
        head = (
            f"rollout {sample.rollout_id} of group {sample.group_id}, env {sample.env}: reward {reward}, advantage "
            f"{sample.advantage:+.4g}, {sample.length} tokens, {sample.prompt_tokens} of them prompt, policy versions "
            f"{sample.policy_versions[0]} to {sample.policy_versions[1]}, trained in step {step}"
        )
        checks = _checks(sample, mask, inference[mask].double(), ours[mask], advantages, step)
        out.append("\n".join([head, TABLE_HEAD, *rows, *checks]))
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


def text_decoder(settings: RunSettings) -> Callable[[Sequence[int]], str]:
    """Token ids -> their text, by the tokenizer in the model's folder; "" where there is none."""
    if not settings.model.path:
        return lambda tokens: ""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            settings.model.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return lambda tokens: ""
    return lambda tokens: str(tokenizer.decode(tokens))
