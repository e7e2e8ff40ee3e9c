"""Packed attention beside a dense mask, and the chunked head beside whole logits: CPU seconds and peak memory."""

from __future__ import annotations

import multiprocessing
import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.report import Report, best_of

TOKENS, ROLLOUTS = 8192, 16
ATTENTION_TIMES = 8.0
"""Dense sdpa must cost at least this many times the CPU seconds."""
LOGITS = 1e-5
"""Largest difference between the two, of logits."""
HEAD_TOKENS, HEAD_VOCABULARY, HEAD_WIDTH = 4096, 32000, 64
HEAD_SHARE = 0.10
"""The chunked head's peak may be this share of the plain one's."""


def run(report: Report) -> None:
    """Forward and backward of one packed row both ways, then the head's memory, each way in a process of its own."""
    import torch

    from rlbuffer.trainer.model.attention import ATTENTION
    from rlbuffer.trainer.model.packed_policy import PackedPolicy
    from rlbuffer.weights.model import TINY_QWEN3, model_from_config

    report.begin(
        "attention and head",
        measures=f"forward and backward of the demo's model over {TOKENS} tokens in {ROLLOUTS} rollouts of 512, CPU "
        "seconds of all threads, best of three; the growth of a fresh process's peak memory in the head",
        not_measured="GPUs and their kernels, 16 bit, larger models (where the products outweigh attention), "
        "rollouts of unlike lengths",
    )
    torch.manual_seed(0)
    model = model_from_config(dict(TINY_QWEN3) | {"max_position_embeddings": 1024}).train(False)
    ids = torch.randint(0, 13, (TOKENS,))
    bounds = torch.from_numpy(np.linspace(0, TOKENS, ROLLOUTS + 1).astype(np.int64))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds.tolist())])
    head = model.get_output_embeddings().weight
    seconds, logits = {}, {}
    for attention in (ATTENTION, "sdpa"):
        model.set_attn_implementation(attention)
        policy = PackedPolicy(model, attention=attention)

        def both(policy: PackedPolicy = policy) -> torch.Tensor:
            hidden = policy.hidden_states(ids, positions, bounds)
            torch.autograd.backward(hidden.square().mean())
            return hidden.detach()

        seconds[attention], _ = best_of(both, times=3)
        logits[attention] = both() @ head.detach().T
    times = seconds["sdpa"] / seconds[ATTENTION]
    apart = float((logits["sdpa"] - logits[ATTENTION]).abs().max())
    peaks = {}
    for how in ("plain", "chunked"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[how] = pool.apply(head_peak, (how == "chunked",))
    share = peaks["chunked"] / peaks["plain"]
    report.table(
        ["what", "dense or plain", "ours", "ratio", "target", "met"],
        [
            [
                "attention, CPU s",
                f"{seconds['sdpa']:.2f}",
                f"{seconds[ATTENTION]:.2f}",
                f"{times:.1f}x",
                f">= {ATTENTION_TIMES:g}x",
                report.target(f"attention: {times:.1f} times, target {ATTENTION_TIMES:g}", times >= ATTENTION_TIMES),
            ],
            [
                "largest difference of logits",
                "",
                "",
                f"{apart:.1e}",
                f"<= {LOGITS:g}",
                report.target(f"attention: logits differ by {apart:.1e}, target {LOGITS:g}", apart <= LOGITS),
            ],
            [
                f"head, T {HEAD_TOKENS} x V {HEAD_VOCABULARY}, MiB",
                f"{peaks['plain']:.0f}",
                f"{peaks['chunked']:.0f}",
                f"{share:.3f}",
                f"<= {HEAD_SHARE:g}",
                report.target(
                    f"head: {share:.3f} of the plain one's memory, target {HEAD_SHARE:g}", share <= HEAD_SHARE
                ),
            ],
        ],
    )


def head_peak(is_chunked: bool) -> float:
    """MiB by which this process's peak memory grows in a head's forward and backward pass."""
    import torch

    from rlbuffer.trainer.model.logprobs import token_logprobs

    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(HEAD_TOKENS, HEAD_WIDTH, generator=made, requires_grad=True)
    weight = torch.randn(HEAD_VOCABULARY, HEAD_WIDTH, generator=made, requires_grad=True)
    targets = torch.randint(0, HEAD_VOCABULARY, (HEAD_TOKENS,), generator=made)
    torch.autograd.backward((hidden[:8] @ weight.T).sum())  # threads and gradients are there before the measurement
    before = _peak()
    if is_chunked:
        logprobs, _ = token_logprobs(hidden, weight, targets)
    else:
        logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward(logprobs.sum())
    return _peak() - before


def _peak() -> float:
    """MiB that this program has had at most (Linux). Not `ru_maxrss`: a child begins with its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")
