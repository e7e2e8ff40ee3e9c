"""A rank of the trainer whose versions are written behind the next step's update: `python late_publishing.py FOLDER
DTYPE PARALLEL`, with the environment of torchrun. Rank 0 keeps what the weights were after each step."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlbuffer.config.settings import RunSettings
from rlbuffer.trainer import loop, publishing
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.weights.model import TINY_QWEN3, narrow_dtype
from rlbuffer.weights.state import model_state

STEPS = 3
PATIENCE_SECONDS = 300.0


def main(folder: Path, dtype: str, parallel: Any) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    settings = RunSettings(
        home=folder,
        batcher={"row_tokens": 64},
        model={"config": model, "dtype": dtype},
        trainer={
            "steps": STEPS,
            "output": folder,
            "device": "cpu",
            "parallel": parallel,
            "publish": {"every": 1},
            "checkpoint": {"every": 1_000_000},
        },
    )
    changed = [threading.Event() for _ in range(STEPS + 1)]
    take_step, write = loop.take_step, publishing.publish_model

    def taken(policy: Any, *args: Any, step: int, **values: Any) -> float:
        norm = take_step(policy, *args, step=step, **values)
        state = model_state(policy, inside="model", dtype=narrow_dtype(settings.model))
        if rank == 0:
            save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / f"step-{step}")
        changed[step].set()
        return norm

    def late(directory: Path, version: int, **values: Any) -> Any:
        if 0 < version < STEPS and not changed[version + 1].wait(PATIENCE_SECONDS):
            raise TimeoutError(f"step {version + 1} waits for version {version}")
        return write(directory, version, **values)

    loop.take_step, publishing.publish_model = taken, late
    assert loop.train(settings, rank=rank, world_size=ranks, source=FakeRun)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    os._exit(0)
