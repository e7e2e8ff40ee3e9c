"""The trainer's wait for data when the rollouts were recorded beforehand: the target is under 5 % of its time.

The steps are committed before it begins, so whatever it waits is the reader's own cost that prefetch does not hide:
reading payloads, decoding, assembling. The first step is left out: nothing ran before it that could hide its pull.

Then the trainer's own Python at the demo's size: CPU of its thread outside of forward, backward and optimizer.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rlbuffer
from benchmarks.report import Report
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.records.group import Group
from rlbuffer.state.text import percent
from rlbuffer.testing import make_group

STEPS = 12
GROUPS = 8
"""Per step."""
MOST_WAITING = 0.05
DEMO_GROUPS, DEMO_SIZE, DEMO_TOKENS = 16, 16, 20
"""Groups, rollouts and tokens of what one of the demo's two ranks trains in a step."""
MOST_OVERHEAD = 0.03
"""Share of a step's CPU that the trainer's thread may spend outside of the model and its optimizer."""
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def run(report: Report) -> None:
    """Records steps, trains them with one rank, looks at what it waited."""
    report.begin(
        "prefetch",
        measures=f"share of its time that one rank waits for data, over {STEPS - 1} steps of {GROUPS} groups of 8 that "
        "were pushed before; a tiny model on the CPU, the embedded server",
        not_measured="a GPU (pinned memory, copies), several ranks, a server over a network, large payloads",
    )
    groups = [make_group(seed=seed, size=8, lengths=[200] * 8) for seed in range(GROUPS * STEPS)]
    records = _records(groups, MODEL, {"row_tokens": 512, "step_groups": GROUPS, "max_age": STEPS})
    seconds = [record["seconds"] for record in records][1:]
    wait, total = sum(s["wait"] for s in seconds), sum(s["total"] for s in seconds)
    met = report.target(f"wait under {percent(MOST_WAITING)} of the time", wait / total < MOST_WAITING)
    median = statistics.median(s["total"] for s in seconds)
    report.table(
        ["", "step, median", "waited, all steps", "of the time", "target", "met"],
        [["prefetch", f"{median:.3f} s", f"{wait:.3f} s", f"{wait / total:.1%}", f"< {percent(MOST_WAITING)}", met]],
    )
    _own_python(report)


def _own_python(report: Report) -> None:
    """Trains steps of the demo's size with the trainer's clocks set to the CPU time of its thread."""
    import torch

    from rlbuffer.trainer.update import stopwatch
    from rlbuffer.weights.model import TINY_QWEN3

    lengths = [DEMO_TOKENS] * DEMO_SIZE
    vocabulary = int(TINY_QWEN3["vocab_size"])
    groups = [make_group(seed=seed, lengths=lengths) for seed in range(DEMO_GROUPS * STEPS)]
    groups = [replace(g, rollouts=tuple(replace(r, tokens=r.tokens % vocabulary) for r in g.rollouts)) for g in groups]
    clock = SimpleNamespace(perf_counter=time.thread_time)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the model computes is of the trainer's thread, too
    vars(stopwatch)["time"] = clock
    try:
        rules = {"row_tokens": 2560, "step_groups": DEMO_GROUPS, "max_age": STEPS}
        records = _records(groups, dict(TINY_QWEN3), rules)[1:]
    finally:
        vars(stopwatch)["time"] = time
        torch.set_num_threads(threads)
    parts = {
        "forward": [record["ranks"][0]["forward"] for record in records],
        "backward": [record["ranks"][0]["backward"] for record in records],
        **{part: [record["seconds"][part] for record in records] for part in ("optimizer", "publish", "total")},
    }
    spent = {part: statistics.median(values) for part, values in parts.items()}
    rest = statistics.median(
        total - sum(others) for total, *others in zip(parts.pop("total"), *parts.values(), strict=True)
    )
    total = spent.pop("total")
    met = report.target(
        f"the trainer's own Python: {rest / total:.1%} of a step's CPU, target {percent(MOST_OVERHEAD)}",
        rest / total < MOST_OVERHEAD,
    )
    rows = [[part, f"{1000 * value:.2f}", f"{value / total:.1%}", "", ""] for part, value in spent.items()]
    rows.append(["everything else", f"{1000 * rest:.2f}", f"{rest / total:.1%}", f"< {percent(MOST_OVERHEAD)}", met])
    report.line(
        f"\na step of the demo's size, {DEMO_GROUPS} groups of {DEMO_SIZE} x {DEMO_TOKENS} tokens on one rank, CPU of "
        "the trainer's thread:"
    )
    report.table(["part", "ms, median", "of the step", "target", "met"], rows)


def _records(groups: Sequence[Group], model: dict[str, Any], batcher: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of the steps that a trainer makes of `groups`, which are pushed before."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    settings = RunSettings(
        run="bench", home=home, batcher=batcher, model={"config": model}, trainer={"steps": STEPS, "device": "cpu"}
    )
    try:
        train_recorded(settings, groups)
        lines = (settings.output_dir / "metrics.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return [json.loads(line) for line in lines]


def train_recorded(settings: RunSettings, groups: Sequence[Group]) -> None:
    """Pushes groups, then trains them with one rank beside a batcher."""
    from rlbuffer.trainer.loop import train

    stop = threading.Event()
    with rlbuffer.connect(None, run=settings.run, config=settings) as buffer:
        writer = buffer.writer("bench")
        for group in groups:
            writer.push(group)
        daemon = Daemon(buffer, settings.batcher)
        batcher = threading.Thread(target=daemon.run, args=(stop,))
        batcher.start()
        try:
            train(settings, rank=0, world_size=1)
        finally:
            stop.set()
            batcher.join()
