"""Accelerate, fed by a reader: model and optimizer are prepared, the reader is not, since every rank has its own.

accelerate launch docs/examples/accelerate_loop.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS
"""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from plain_loop import SAVE_EVERY, loss_of
from transformers import AutoModelForCausalLM

import rlbuffer


def checkpoints(output):
    """Those that are whole, the newest last."""
    return sorted(Path(output).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def save(accelerator, output, number):
    """A checkpoint gets its name when it is whole, so that a killed trainer leaves no half of one."""
    accelerator.save_state(f"{output}/new")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(output, "new").rename(Path(output, f"step-{number}"))
        for old in checkpoints(output)[:-2]:
            shutil.rmtree(old)


def train(model, buffer, output, steps):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    with buffer.reader(accelerator.process_index, accelerator.num_processes) as reader:
        run_steps(accelerator, model, optimizer, buffer, reader, output, steps)


def run_steps(accelerator, model, optimizer, buffer, reader, output, steps):
    accelerator.register_for_checkpointing(reader)
    if found := checkpoints(output):
        accelerator.load_state(str(found[-1]))
    buffer.policy.publish(model, reader.step, Path(output) / "weights")  # what workers sample with first
    for step in reader.steps(last=steps):
        for i, mb in enumerate(step):
            with nullcontext() if i == len(step) - 1 else accelerator.no_sync(model):
                loss = loss_of(model, mb.to(accelerator.device))
                accelerator.backward(loss * step.world_size)  # DDP averages over ranks: undo it
        optimizer.step()
        optimizer.zero_grad()
        buffer.policy.publish(model, step.number, Path(output) / "weights")
        reader.trained(step)  # before the checkpoint, so that the reader's state is of the same step
        if step.number % SAVE_EVERY == 0 or step.number == steps:
            save(accelerator, output, step.number)
            reader.checkpointed(step)


def main(url, run, path, output, steps):
    # in eval mode: without dropout
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    with rlbuffer.connect(url, run=run) as buffer:
        train(model, buffer, output, steps)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
