"""Hugging Face's Trainer, fed by a reader: one of its batches is this rank's part of one step, so one update per step.

Trainer would divide by counts of its own, and over ranks; here the loss keeps the step's own counts, whatever the
number of ranks and micro-batches. Schedules, clipping, logging and callbacks are Trainer's.
"""

from contextlib import nullcontext

from plain_loop import loss_of
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback


class Steps(IterableDataset):
    """The reader's steps up to number `last`."""

    def __init__(self, reader, last):
        self.reader, self.last = reader, last

    def __iter__(self):
        for step in self.reader.steps():  # asking for the next acknowledges the last as trained
            yield {"step": step}
            if step.number == self.last:
                return


class BufferTrainer(Trainer):
    """Use it with ``gradient_accumulation_steps = 1`` and ``max_steps``; micro-batches are accumulated in here."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # not dealt over ranks: each has a reader of its own

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        step, total = inputs["step"], 0.0
        for i, mb in enumerate(step):
            is_last = i == len(step) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                loss = loss_of(model, mb.to(self.args.device))
                self.accelerator.backward(loss * self.accelerator.num_processes)  # DDP averages over ranks: undo it
            total = total + loss.detach()
        return total


class Acknowledge(TrainerCallback):
    """The last step has no next one that would acknowledge it."""

    def __init__(self, reader):
        self.reader = reader

    def on_train_end(self, args, state, control, **kwargs):
        self.reader.trained(state.global_step)


def train(model, reader, arguments):
    """`arguments`: Trainer's own, from step 1 on; ``reader.load_state_dict`` before it goes on later."""
    steps = Steps(reader, arguments.max_steps)
    BufferTrainer(model, arguments, train_dataset=steps, callbacks=[Acknowledge(reader)]).train()
