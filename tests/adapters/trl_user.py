"""A user's script with AsyncGRPO. Started again, it goes on from its newest checkpoint.

``python trl_user.py stock|door PORT STEPS URL RUN [NAME=VALUE ...]``: arguments of AsyncGRPOConfig; the port of its
engine, 0 for none. What is scored and trained is written down as lines of JSON in the folder TRL_FOLDER, for the test
alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl.experimental.async_grpo.async_rollout_worker as rollout_worker
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_parts import FileTransfer, NoTransfer, run_on_the_cpu

torch.set_num_threads(1)
run_on_the_cpu()
FOLDER = Path(os.environ.get("TRL_FOLDER", "."))
ARGUMENTS = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "token_budget": 400,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "max_inflight_tasks": 8,
    "save_steps": 3,
    "save_total_limit": 2,
    "logging_steps": 1,
}


def digest(sample: Any) -> str:
    """Everything that TRL trains of a sample, and what its log shows."""
    found = hashlib.sha256()
    for array in (sample.input_ids, sample.completion_mask, sample.old_log_probs):
        found.update(str(array.dtype).encode() + array.tobytes())
    rest = [sample.advantage, sample.model_version, sample.metrics, sample.prompt, sample.completion]
    found.update(json.dumps(rest).encode())
    return found.hexdigest()[:16]


def content(sample: Any) -> str:
    """What is trained of a sample, whichever version has sampled it."""
    arrays = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
    return hashlib.sha256(b"".join(its.tobytes() for its in arrays) + repr(sample.advantage).encode()).hexdigest()[:16]


def note(kind: str, **fields: Any) -> None:
    with (FOLDER / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def reward(prompts: Any, completions: Any, **_: Any) -> list[float | None]:
    """The share of digits in an answer; an answer without any character cannot be scored."""
    answers = [answer[0]["content"] for answer in completions]
    return [sum(c in "0123456789" for c in text) / len(text) if text else None for text in answers]


class NotingLoop(rollout_worker._AsyncRolloutLoop):
    """The same loop; it writes down what it has scored."""

    _asked = 0

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("TRL_KEEPS_WEIGHTS"):  # the seeds of its requests, which are drawn, are the same then
            self._asked += 1
            random.seed(self._asked)
        made = await super()._generate_one(*args, **kwargs)
        if os.environ.get("TRL_FORKS") and len(made[1]) % 2:  # as if the history had forked: its last token once more
            first = made[2][0]
            other = rollout_worker.TrainingSequence(
                first.input_ids[:-1], first.completion_mask[:-1], first.old_log_probs[:-1], first.rollout_id
            )
            if any(other.completion_mask):
                return (made[0], made[1], [first, other], *made[3:])
        return made

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        note("scored", group=group.group_id, digests=[digest(sample) for sample in samples])
        return samples


rollout_worker.AsyncRolloutWorker._loop_cls = NotingLoop


class Delivered:
    """A queue whose samples are written down in the order in which the data loader takes them."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.digests: list[str] = []
        self.contents: list[str] = []
        self.places: list[list[int]] = []
        """Of each sample behind the door: place of its group in the stream, and its number there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get(self, timeout: float) -> Any:
        sample = self._real.get(timeout=timeout)
        self.digests.append(digest(sample))
        self.contents.append(content(sample))
        if hasattr(sample.group_id, "place"):
            self.places.append([sample.group_id.place, sample.group_id.index])
        return sample


class Steps(TrainerCallback):
    """How many samples each optimizer step has trained, by the collator's calls: TRL trains them in their order."""

    def __init__(self, queue: Delivered) -> None:
        self._queue, self.sizes, self._done, self._at = queue, list[int](), 0, 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._done += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        count = sum(self.sizes[: self._done + 1])
        del self.sizes[: self._done + 1]
        self._done = 0
        its = slice(self._at, self._at + count)
        places, digests = self._queue.places[its], self._queue.digests[its]
        note("trained", step=state.global_step, digests=digests, contents=self._queue.contents[its], places=places)
        self._at += count


class Publishes(TrainerCallback):
    """Gives the run the weights of each version that the door has announced."""

    def __init__(self, buffer: Any, trainer: Any) -> None:
        self._buffer, self._trainer = buffer, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._buffer.policy.publish(model, self._trainer.model_version, FOLDER / "published", keep=100)

    on_step_end = on_train_begin


def main(mode: str, port: str, steps: str, url: str, run: str, *options: str) -> None:
    given = {name: json.loads(value) for name, value in (option.split("=") for option in options)}
    server, out = f"http://127.0.0.1:{port}", FOLDER / "out"
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(4000)]})
    arguments = AsyncGRPOConfig(
        str(out),
        max_steps=int(steps),
        report_to=[],
        use_cpu=True,
        bf16=False,
        dtype="float32",
        gradient_checkpointing=False,
        disable_tqdm=True,
        vllm_server_base_url=server,
        chat_template_kwargs={"enable_thinking": False},
        **ARGUMENTS | given,
    )
    trainer = AsyncGRPOTrainer(
        model=str(FOLDER / "model"),
        train_dataset=data,
        reward_funcs=reward,
        weight_transfer=FileTransfer(server, FOLDER / "weights.safetensors") if port != "0" else NoTransfer(),
        args=arguments,
    )
    if mode == "door":
        import rlbuffer

        buffer = rlbuffer.doors.trl.attach(trainer, url, run=run)
        if os.environ.get("TRL_PUBLISHES"):
            trainer.add_callback(Publishes(buffer or rlbuffer.connect(url, run=run), trainer))
    if trainer.rollout_worker is not None:
        trainer.rollout_queue = queue = Delivered(trainer.rollout_queue)
        steps_made = Steps(queue)
        told = type(trainer._trained_groups)

        class Noted(told):  # type: ignore[misc, valid-type]
            def update(self, groups: Any) -> None:
                groups = list(groups)
                steps_made.sizes.append(len(groups))
                super().update(groups)

        if mode == "door":
            trainer._trained_groups.__class__ = Noted
        else:
            trainer._trained_groups = Noted()
        trainer.add_callback(steps_made)
    whole = sorted(out.glob("checkpoint-*/trainer_state.json"), key=lambda f: int(f.parent.name.split("-")[1]))
    note("started", resume=whole[-1].parent.name if whole else "", at=time.time())
    trainer.train(resume_from_checkpoint=str(whole[-1].parent) if whole else None)
    log = [
        {k: v for k, v in line.items() if k in ("step", "loss", "reward", "grad_norm")}
        for line in trainer.state.log_history
    ]
    note("finished", step=trainer.state.global_step, log=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
