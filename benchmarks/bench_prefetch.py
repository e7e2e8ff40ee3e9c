"""The trainer's wait for data when the rollouts were recorded beforehand: the target is under 5 % of its time.

The steps are committed before it begins, so whatever it waits is the reader's own cost that prefetch does not hide:
reading payloads, decoding, assembling. The first step is left out: nothing ran before it that could hide its pull.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
from pathlib import Path

import rlbuffer
from benchmarks.report import Report
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.narration.numbers import percent
from rlbuffer.testing import make_group

STEPS = 12
GROUPS = 8
"""Per step."""
MOST_WAITING = 0.05
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
    from rlbuffer.trainer.loop import train

    report.begin(
        "prefetch",
        measures=f"share of its time that one rank waits for data, over {STEPS - 1} steps of {GROUPS} groups of 8 that "
        "were pushed before; a tiny model on the CPU, the embedded server",
        not_measured="a GPU (pinned memory, copies), several ranks, a server over a network, large payloads",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    settings = RunSettings(
        run="bench",
        home=home,
        batcher={"row_tokens": 512, "step_groups": GROUPS, "max_age": STEPS},
        model={"config": MODEL},
        trainer={"steps": STEPS, "device": "cpu"},
    )
    try:
        _train_recorded(settings, train)
        lines = (settings.output_dir / "metrics.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(home, ignore_errors=True)
    seconds = [json.loads(line)["seconds"] for line in lines][1:]
    wait, total = sum(s["wait"] for s in seconds), sum(s["total"] for s in seconds)
    met = report.target(f"wait under {percent(MOST_WAITING)} of the time", wait / total < MOST_WAITING)
    median = statistics.median(s["total"] for s in seconds)
    report.table(
        ["", "step, median", "waited, all steps", "of the time", "target", "met"],
        [["prefetch", f"{median:.3f} s", f"{wait:.3f} s", f"{wait / total:.1%}", f"< {percent(MOST_WAITING)}", met]],
    )


def _train_recorded(settings: RunSettings, train: object) -> None:
    stop = threading.Event()
    with rlbuffer.connect(None, run=settings.run, config=settings) as buffer:
        writer = buffer.writer("bench")
        for seed in range(GROUPS * STEPS):
            writer.push(make_group(seed=seed, size=8, lengths=[200] * 8))
        daemon = Daemon(buffer, settings.batcher, on_event=lambda event: None)
        batcher = threading.Thread(target=daemon.run, args=(stop,))
        batcher.start()
        try:
            train(settings, rank=0, world_size=1)  # type: ignore[operator]
        finally:
            stop.set()
            batcher.join()
