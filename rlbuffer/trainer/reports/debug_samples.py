"""``rlbuffer train --debug-samples N``: what the trainer sees of the first rollouts, token by token, before it trains.

Most of what goes wrong between a sampler and a trainer shows here first: a mask that is off by one, logprobs of other
tokens, another temperature or chat template, an advantage that is missing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


def show_samples(
    session: TrainerSession, step: Step, count: int, *, write: Callable[[str], None] | None = None
) -> None:
    """Prints rank 0's first `count` rollouts of `step`, with checks. All ranks call it: they may share the model.

    `write`: where the text goes; default: stderr, since stdout may be data.
    """
    say = write or (lambda text: print(printable(text, lines=True), file=sys.stderr, flush=True))
    decode = decoder(session.settings)
    left = session.ranks.first(min(count, sum(len(m.samples) for m in step)))
    for micro_batch in step:
        shown = session.ranks.first(len(micro_batch.samples))
        if left <= 0:
            return
        with torch.no_grad():
            tokens = trained_tokens(
                session.module,
                micro_batch.to(session.ranks.device),
                temperature=session.settings.trainer.temperature,
            )
        if session.is_first:
            for text in tables(micro_batch, tokens.logprobs.cpu(), step.number, decode)[:left]:
                say(text)
            with suppress(OSError):  # a full disk must not end the training that somebody looks into
                keep(session.settings.output_dir / SAMPLES_FILE, micro_batch, tokens, step.number, left)
        left -= shown


def keep(file: Path, micro_batch: MicroBatch, tokens: TrainedTokens, step: int, most: int) -> None:
    """Adds logprobs and entropies of the first `most` rollouts to `file`: what `rlbuffer inspect` shows per token."""
    counts = [int(torch.as_tensor(mask).sum()) for mask in micro_batch.unpack(micro_batch.loss_mask)]
    ends = [*accumulate(counts, initial=0)]
    logprobs, entropy = ([round(v, 6) for v in values.tolist()] for values in (tokens.logprobs, tokens.entropy))
    lines = [
        {
            "schema": SAMPLE_SCHEMA,
            "group_id": sample.group_id,
            "rollout_id": f"{sample.rollout_id}.{sample.sequence}" if sample.sequences > 1 else sample.rollout_id,
            "step": step,
            "logprobs": logprobs[first:end],
            "entropy": entropy[first:end],
        }
        for sample, (first, end) in zip(micro_batch.samples, pairwise(ends), strict=True)
    ][:most]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{json.dumps(line)}\n" for line in lines))


class _Tokens(NamedTuple):
    """The tokens of one rollout, each [length]."""

    ids: Tensor
    mask: Tensor
    inference: Tensor
    trainer: Tensor
    reference: Tensor
    """NaN where there is none."""
    advantages: Tensor


def tables(
    micro_batch: MicroBatch, logprobs: Tensor, step: int, decode: Callable[[int], str] = lambda token: ""
) -> list[str]:
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
    names = (micro_batch.input_ids, micro_batch.loss_mask, micro_batch.logprobs)
    columns = [micro_batch.unpack(values) for values in (*names, trainer, reference, micro_batch.advantages)]
    out = []
    for sample, *values in zip(micro_batch.samples, *columns, strict=True):
        tokens = _Tokens(*map(torch.as_tensor, values))
        reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
        head = (
            f"rollout {sample.rollout_id} of group {sample.group_id}, env {sample.env}: reward {reward}, advantage "
            f"{sample.advantage:+.4g}, {sample.length} tokens, {sample.prompt_tokens} of them prompt, policy versions "
            f"{sample.policy_versions[0]} to {sample.policy_versions[1]}, trained in step {step}"
        )
        out.append("\n".join([head, TABLE_HEAD, *_rows(tokens, decode), *_checks(sample, tokens, step)]))
    return out


def _rows(tokens: _Tokens, decode: Callable[[int], str]) -> Iterator[str]:
    length, half = len(tokens.ids), MOST_ROWS // 2
    ratios = (tokens.trainer - tokens.inference).clamp(max=50.0).exp()
    for t in range(length):
        if length > MOST_ROWS and half <= t < length - half:
            if t == half:
                yield f"{'...':>7} {length - MOST_ROWS} more"
            continue
        token = int(tokens.ids[t])
        start = f"{token:>7} {decode(token)[:14]:<14}"
        if not tokens.mask[t]:
            yield f"{start} ."
            continue
        logprobs = [float(values[t]) for values in (tokens.inference, tokens.trainer, tokens.reference)]
        cells = " ".join(f"{'' if math.isnan(value) else f'{value:.4f}':>9}" for value in logprobs)
        yield f"{start} x    {cells} {float(ratios[t]):>7.3f} {float(tokens.advantages[t]):>+7.3f}"


def _checks(sample: Sample, tokens: _Tokens, step: int) -> list[str]:
    """``ok`` or ``!`` with what was looked at, one line each."""
    mask, sampled = tokens.mask, tokens.inference[tokens.mask].double()
    length, prompt = len(mask), int(mask[: sample.prompt_tokens].sum())
    stray = int((tokens.advantages[~mask] != 0).sum())
    zeros = int((sampled == 0).sum())
    bounds = f"{float(sampled.min()):.4f} to {float(sampled.max()):.4f}" if len(sampled) else "nothing"
    mean = float((tokens.trainer[mask] - sampled).abs().mean()) if len(sampled) else 0.0
    age = max(0, step - 1 - sample.policy_versions[0])
    verdicts = [
        (length == sample.length, f"its span holds {length} tokens, {sample.length} were pushed"),
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


def decoder(settings: RunSettings) -> Callable[[int], str]:
    """Token id -> its text, with the tokenizer in the model's folder; "" where there is none."""
    decode = text_decoder(settings)
    return lambda token: _visible(decode([token]))


def text_decoder(settings: RunSettings) -> Callable[[Sequence[int]], str]:
    """Token ids -> their text, as :func:`decoder`."""
    tokenizer: Any = None
    if settings.model.path:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                settings.model.path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError):
            tokenizer = None
    return (lambda tokens: "") if tokenizer is None else lambda tokens: str(tokenizer.decode(tokens))


def _visible(text: str) -> str:
    """Rollouts are untrusted: whatever moves the cursor is shown as Python writes it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
