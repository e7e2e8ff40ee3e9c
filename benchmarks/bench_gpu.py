"""What the trainer costs on a GPU: attention of packed rows, the chunked head, copies, and a run beside the buffer.

Says so and measures nothing where there is no CUDA device.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.bench_prefetch import train_recorded
from benchmarks.report import Report
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.micro_batch import DERIVED_ARRAYS
from rlbuffer.state.text import percent
from rlbuffer.testing import make_group

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B's shape, with random weights."""
ROW_TOKENS = 16384
WINDOW = 1024
HEAD_TOKENS = 8192
CHUNKS = (2**23, 2**25, 2**26, 2**27, 2**28)
"""Logits held at once."""
STEPS, GROUPS, GROUP_SIZE, LENGTH = 6, 8, 8, 1024
MOST_WAITING = 0.05


def run(report: Report) -> None:
    """Each part by itself, then steps of groups that were pushed before."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    report.begin(
        "gpu",
        measures=f"{name}, torch {torch.__version__}: Qwen3-0.6B's shape in bfloat16, rows of {ROW_TOKENS} tokens, "
        "medians; a run of one rank whose groups were pushed before, home in memory where there is /dev/shm",
        not_measured="several GPUs, networks, sampling on the same GPU",
    )
    if not torch.cuda.is_available():
        report.line("nothing: it needs a CUDA device")
        return
    _head(report)
    _rows(report)
    _recorded(report)


def _milliseconds(work: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """Median time on the device, and GiB that its memory grows by at most."""
    import torch

    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, taken = torch.cuda.memory_allocated(), []
    event: Any = torch.cuda.Event
    for _ in range(times):
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken), (torch.cuda.max_memory_allocated() - before) / 2**30


def _head(report: Report) -> None:
    import torch

    from rlbuffer.trainer.model.logprobs import token_logprobs

    made = torch.Generator("cuda").manual_seed(0)
    vocabulary, width = MODEL["vocab_size"], MODEL["hidden_size"]
    weight = (torch.randn(vocabulary, width, generator=made, device="cuda") * 0.02).requires_grad_()
    hidden = torch.randn(HEAD_TOKENS, width, generator=made, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (HEAD_TOKENS,), generator=made, device="cuda")
    rows = []
    for elements in (None, *CHUNKS):

        def both(elements: int | None = elements) -> None:
            chunk = None if elements is None else -(-elements // vocabulary)
            logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=chunk)
            torch.autograd.grad((logprobs + 0.01 * entropy).sum(), [hidden, weight])

        taken, peak = _milliseconds(both, 3)
        rows.append(["as it is" if elements is None else f"{elements / 2**20:g} Mi", f"{taken:.1f}", f"{peak:.2f}"])
    report.line(f"head, {HEAD_TOKENS} tokens x {vocabulary} symbols, forward and backward")
    report.table(["logits at once", "ms", "GiB"], rows)


def _rows(report: Report) -> None:
    """Forward and backward of one row through the model, by its attention."""
    import torch

    from rlbuffer.trainer.model import attention
    from rlbuffer.trainer.model.attention import ATTENTION
    from rlbuffer.trainer.model.packed_policy import PackedPolicy
    from rlbuffer.weights.model import model_from_config

    torch.manual_seed(0)
    model: Any = model_from_config(MODEL).train(False)
    torch.nn.Module.to(model, torch.device("cuda"))
    ids = torch.randint(0, MODEL["vocab_size"], (ROW_TOKENS,), device="cuda")
    kernel = attention.can_use_varlen
    rows = []
    for lengths, window in (([512] * 32, None), ([4096] * 4, None), ([16384], None), ([4096] * 4, WINDOW)):
        for layer in model.model.layers:
            layer.self_attn.sliding_window = window
        bounds = torch.tensor([0, *accumulate(lengths)], device="cuda")
        positions = torch.cat([torch.arange(length) for length in lengths]).cuda()
        cells = [f"{len(lengths)} x {lengths[0]}" + (f", window {window}" if window else "")]
        for way in ("as it is", "without the kernel", "sdpa, dense mask")[: 2 if window else 3]:
            used = "sdpa" if way.startswith("sdpa") else ATTENTION
            model.set_attn_implementation(used)
            vars(attention)["can_use_varlen"] = kernel if way == "as it is" else lambda *_: False
            policy = PackedPolicy(model, attention=used, compute=torch.bfloat16)

            def both(policy: PackedPolicy = policy, bounds: Any = bounds, positions: Any = positions) -> None:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    hidden = policy.hidden_states(ids, positions, bounds)
                torch.autograd.backward(hidden.float().square().mean())

            try:
                taken, peak = _milliseconds(both, 3)
                cells.append(f"{taken:.0f} ms, {peak:.1f} GiB")
            except torch.OutOfMemoryError:
                cells.append("out of memory")
            model.zero_grad(set_to_none=True)
        rows.append(cells if len(cells) == 4 else [*cells, ""])
    vars(attention)["can_use_varlen"] = kernel
    report.line(f"\nforward and backward of a row of {ROW_TOKENS} tokens without head")
    report.table(["rollouts", "as it is", "without the kernel", "sdpa, dense mask"], rows)


def _recorded(report: Report) -> None:
    """Trains what was pushed before; the wait, and what a copy of a micro-batch costs beside it."""
    groups = [make_group(seed=seed, lengths=[LENGTH] * GROUP_SIZE) for seed in range(GROUPS * STEPS)]
    spread = [[replace(r, tokens=r.tokens * 97 % MODEL["vocab_size"]) for r in g.rollouts] for g in groups]
    groups = [replace(g, rollouts=tuple(rollouts)) for g, rollouts in zip(groups, spread, strict=True)]
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-", dir=memory if memory.is_dir() else None))
    settings = RunSettings(
        run="bench",
        home=home,
        batcher={"row_tokens": ROW_TOKENS, "step_groups": GROUPS, "max_age": STEPS},
        model={"config": MODEL, "dtype": "bfloat16"},
        trainer={"steps": STEPS, "publish": {"every": STEPS // 2}, "optimizer": {"learning_rate": 1e-5}},
    )
    began = time.perf_counter()
    try:
        train_recorded(settings, groups)
        lines = (settings.output_dir / "metrics.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    total = time.perf_counter() - began
    records = [json.loads(line) for line in lines]
    steady = records[1:]
    wait, taken = (sum(r["seconds"].get(part, 0.0) for r in steady) for part in ("wait", "total"))
    met = report.target(f"wait under {percent(MOST_WAITING)} of the time", wait / taken < MOST_WAITING)
    rows = []
    for record in records:
        seconds, rank = record["seconds"], record["ranks"][0]
        named = [seconds.get(part, 0.0) for part in ("wait", "train", "optimizer", "publish", "total")]
        passes = [rank.get("forward", 0.0), rank.get("backward", 0.0)]
        figures = [f"{record['tokens_per_second']:.0f}", f"{record.get('mfu') or 0:.3f}"]
        figures += [f"{record['memory_bytes'] / 2**30:.1f}", f"{record['loss']:.4f}", f"{record['grad_norm']:.3f}"]
        rows.append([str(record["step"]), *(f"{1000 * value:.1f}" for value in (*named, *passes)), *figures])
    report.line(
        f"\n{STEPS} steps of {GROUPS} x {GROUP_SIZE} x {LENGTH} tokens, pushed before; the whole run, with pushes, "
        f"start and checkpoint, {total:.1f} s. Waited {wait / taken:.2%} of the time after step 1 ({met})"
    )
    head = ["step", "wait ms", "train", "optimizer", "publish", "total", "forward", "backward"]
    report.table([*head, "tokens/s", "mfu", "GiB", "loss", "norm"], rows)
    _copies(report, settings)


def _copies(report: Report, settings: RunSettings) -> None:
    import torch

    from rlbuffer.trainer.fake import FakeRun

    step = next(FakeRun(settings, vocabulary=MODEL["vocab_size"]).reader().steps())
    micro_batch = max(step, key=lambda m: m.length)

    def copy() -> None:
        micro_batch.to("cuda")

    taken, _ = _milliseconds(copy, 20)
    size = sum(getattr(micro_batch, name).nbytes for name in _arrays_of(micro_batch))
    report.line(f"\na micro-batch of {micro_batch.length} tokens to the device: {taken:.2f} ms, {size / 1e6:.2f} MB")
    source = torch.randn(2**28)
    for name, given in (("pageable", source), ("pinned", source.pin_memory())):
        moved, _ = _milliseconds(partial(given.to, "cuda"), 3)
        report.line(f"1 GiB of {name} memory: {1.074e3 / moved:.1f} GB/s")


def _arrays_of(micro_batch: Any) -> list[str]:
    names = (*DERIVED_ARRAYS, *(f.name for f in fields(micro_batch)))
    return [name for name in names if hasattr(getattr(micro_batch, name), "nbytes")]
