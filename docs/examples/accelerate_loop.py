"""Accelerate, fed by a reader: model and optimizer are prepared, the reader is not, since every rank has its own.

accelerate launch docs/examples/accelerate_loop.py redis://host:6379 RUN MODEL_DIR STEPS
"""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from plain_loop import loss_of
from transformers import AutoModelForCausalLM

import rlbuffer


def train(model, buffer, steps):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    reader = buffer.reader(accelerator.process_index, accelerator.num_processes)
    for step in reader.steps():
        for i, mb in enumerate(step):
            with nullcontext() if i == len(step) - 1 else accelerator.no_sync(model):
                loss = loss_of(model, mb.to(accelerator.device))
                accelerator.backward(loss * accelerator.num_processes)  # DDP averages over ranks: undo it
        optimizer.step()
        optimizer.zero_grad()
        if step.number == steps:
            reader.trained(step)
            return


def main(url, run, path, steps):
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with rlbuffer.connect(url, run=run) as buffer:
        train(model, buffer, steps)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
