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
from itertools import accumulate, pairwise
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
            "rollout_id": sample.rollout_id,
            "step": step,
            "logprobs": logprobs[first:end],
            "entropy": entropy[first:end],
        }
        for sample, (first, end) in zip(micro_batch.samples, pairwise(ends), strict=True)
    ][:most]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(f"{json.dumps(line)}\n" for line in lines))


def tables(
    micro_batch: MicroBatch, logprobs: Tensor, step: int, decode: Callable[[int], str] = lambda token: ""
) -> list[str]:
    """One table per rollout, its checks below it.

    Shapes: ``logprobs`` [N], the trainer's, of the micro-batch's trained tokens in their order.
    """
    mask = torch.as_tensor(micro_batch.loss_mask)
    trainer = torch.full((micro_batch.length,), math.nan, dtype=torch.float64)
    trainer[mask] = logprobs.double()
    names = ("input_ids", "loss_mask", "logprobs", "advantages")
    cut: dict[str, list[Any]] = {name: micro_batch.unpack(getattr(micro_batch, name)) for name in names}
    cut["trainer"] = micro_batch.unpack(trainer)
    reference = micro_batch.columns.get("ref_logprobs")
    cut["reference"] = micro_batch.unpack(reference) if reference is not None else [None] * len(micro_batch.samples)
    if "ref_logprobs" in micro_batch.lacking:
        is_lacking = [bool(part.any()) for part in micro_batch.unpack(micro_batch.lacking["ref_logprobs"])]
        cut["reference"] = [None if no else part for part, no in zip(cut["reference"], is_lacking, strict=True)]
    out = []
    for i, sample in enumerate(micro_batch.samples):
        columns = {name: parts[i] for name, parts in cut.items()}
        reward = "-" if sample.reward is None else f"{sample.reward:.4g}"
        head = (
            f"rollout {sample.rollout_id} of group {sample.group_id}, env {sample.env}: reward {reward}, advantage "
            f"{sample.advantage:+.4g}, {sample.length} tokens, {sample.prompt_tokens} of them prompt, policy versions "
            f"{sample.policy_versions[0]} to {sample.policy_versions[1]}, trained in step {step}"
        )
        out.append("\n".join([head, TABLE_HEAD, *_rows(columns, decode), *checks(sample, columns, step)]))
    return out


def _rows(columns: dict[str, Any], decode: Callable[[int], str]) -> list[str]:
    length = len(columns["input_ids"])
    cut = length > MOST_ROWS
    shown = [*range(MOST_ROWS // 2), *range(length - MOST_ROWS // 2, length)] if cut else list(range(length))
    rows = []
    for before, t in pairwise([-1, *shown]):
        if t != before + 1:
            rows.append(f"{'...':>7} {t - before - 1} more")
        token, trained = int(columns["input_ids"][t]), bool(columns["loss_mask"][t])
        inference, trainer = float(columns["logprobs"][t]), float(columns["trainer"][t])
        reference = None if columns["reference"] is None else float(columns["reference"][t])
        cells = [
            f"{token:>7}",
            f"{decode(token)[:14]:<14}",
            f"{'x' if trained else '.':<4}",
            f"{inference:>9.4f}" if trained else f"{'':>9}",
            f"{trainer:>9.4f}" if trained else f"{'':>9}",
            f"{reference:>9.4f}" if trained and reference is not None else f"{'':>9}",
            f"{math.exp(min(trainer - inference, 50.0)):>7.3f}" if trained else f"{'':>7}",
            f"{float(columns['advantages'][t]):>+7.3f}" if trained else "",
        ]
        rows.append(" ".join(cells).rstrip())
    return rows


def checks(sample: Sample, columns: dict[str, Any], step: int) -> list[str]:
    """``ok`` or ``!`` with what was looked at, one line each."""
    mask = torch.as_tensor(columns["loss_mask"])
    inference = torch.as_tensor(columns["logprobs"]).double()
    advantages = torch.as_tensor(columns["advantages"]).double()
    verdicts: list[tuple[bool, str]] = []
    length = len(mask)
    verdicts.append((length == sample.length, f"its span holds {length} tokens, {sample.length} were pushed"))
    prompt = int(mask[: sample.prompt_tokens].sum())
    verdicts.append((prompt == 0, f"{prompt} of {sample.prompt_tokens} prompt tokens are trained"))
    verdicts.append((bool(mask.any()), f"{int(mask.sum())} tokens are trained"))
    stray = int((advantages[~mask] != 0).sum())
    verdicts.append((stray == 0, f"{stray} tokens that are not trained carry an advantage"))
    sampled = inference[mask]
    verdicts.append((bool((sampled <= 0).all()), f"inference logprobs are from {_range(sampled)}, none above 0"))
    zeros = int((sampled == 0).sum())
    verdicts.append((zeros < max(1, len(sampled)), f"{zeros} of {len(sampled)} inference logprobs are exactly 0"))
    drift = (torch.as_tensor(columns["trainer"])[mask] - sampled).abs()
    mean = float(drift.mean()) if len(drift) else 0.0
    age = step - 1 - sample.policy_versions[0]
    if age <= 0:
        verdicts.append((mean <= NEAR, f"at age 0 trainer and inference differ by {mean:.4f} nats a token, near 0"))
    else:
        verdicts.append((True, f"at age {age} trainer and inference differ by {mean:.4f} nats a token"))
    return [f"  {'ok' if good else '! '} {text}" for good, text in verdicts]


def _range(values: Tensor) -> str:
    return f"{float(values.min()):.4f} to {float(values.max()):.4f}" if len(values) else "nothing"


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
