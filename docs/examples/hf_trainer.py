"""Hugging Face's Trainer, fed by a reader: one of its batches is this rank's part of one step, so one update per step.

torchrun --nproc-per-node 2 docs/examples/hf_trainer.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS

Trainer would divide by counts of its own, and over ranks; here the loss keeps the step's own counts, whatever the
number of ranks and micro-batches. Schedules, clipping, checkpoints, logging and callbacks are Trainer's.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from plain_loop import SAVE_EVERY, loss_of
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import rlbuffer


class Steps(IterableDataset):
    """The reader's steps up to number `last`."""

    def __init__(self, reader, last):
        self.reader, self.last = reader, last

    def __iter__(self):
        for step in self.reader.steps(last=self.last):
            yield {"step": step}


class BufferTrainer(Trainer):
    """Use it with ``gradient_accumulation_steps = 1`` and ``max_steps``; micro-batches are accumulated in here."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # not dealt over ranks: each has a reader of its own

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.eval()  # without dropout: with it the trained policy would not be the one that sampled
        step, total = inputs["step"], 0.0
        for i, mb in enumerate(step):
            is_last = i == len(step) - 1
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                loss = loss_of(model, mb.to(self.args.device))
                self.accelerator.backward(loss * self.accelerator.num_processes)  # DDP averages over ranks: undo it
            total = total + loss.detach()
        return total


class Buffered(TrainerCallback):
    """Publishes what workers sample with, acknowledges steps, and keeps the reader's place in each checkpoint."""

    def __init__(self, buffer, reader, folder):
        self.buffer, self.reader, self.folder = buffer, reader, folder

    def place(self, args, state):
        return Path(args.output_dir, f"checkpoint-{state.global_step}", "reader.json")

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.buffer.policy.publish(model, self.reader.step, self.folder)  # what workers sample with first

    def on_step_end(self, args, state, control, model, **kwargs):
        self.buffer.policy.publish(model, state.global_step, self.folder)
        self.reader.trained(state.global_step)  # before the checkpoint, so that the reader's state is of the same step
        if state.is_world_process_zero:
            self.place(args, state).unlink(missing_ok=True)  # a step trained again is saved again: not whole meanwhile

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.place(args, state).write_text(json.dumps(self.reader.state_dict()))
            self.reader.checkpointed(state.global_step)


def train(model, buffer, reader, arguments, trainer_class=BufferTrainer):
    """`arguments`: Trainer's own. Goes on from the newest whole checkpoint in their folder."""
    arguments.ignore_data_skip = True  # the reader goes on by itself
    steps = Steps(reader, arguments.max_steps)
    buffered = Buffered(buffer, reader, Path(arguments.output_dir, "weights"))
    trainer = trainer_class(model, arguments, train_dataset=steps, callbacks=[buffered])
    whole = Path(arguments.output_dir).glob("checkpoint-*/reader.json")
    newest = max(whole, key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), default=None)
    if newest is not None:
        reader.load_state_dict(json.loads(newest.read_text()))
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest.parent))


def main(url, run, path, output, steps):
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
    )
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", trust_remote_code=False, use_safetensors=True
    )
    place = arguments.process_index, arguments.world_size
    with rlbuffer.connect(url, run=run) as buffer, buffer.reader(*place) as reader:
        train(model, buffer, reader, arguments)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
