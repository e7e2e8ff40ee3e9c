"""miles' fully async rollout: its producer, its buffer and its train calls, without engines and without a model. The
loop has the shape of `train_async.py`. Started again, it goes on from its newest checkpoint.

``python miles_loop.py RUN URL FOLDER`` starts a process for each line ``CALLS [stock]`` of its input, and says its
pid: to import miles takes ten seconds. What is pushed and trained is written down as lines of JSON in FOLDER, for the
test alone. ``stock``: miles' own buffer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from miles.utils.misc import load_function
from miles.utils.types import AdapterRef, Sample
from miles_parts import base_types, fully_async

DOOR, STOCK = "rlbuffer.doors.miles.DataBuffer", "miles.rollout.fully_async_data_buffer.DefaultDataBuffer"
BATCH, SIZE, SAVE_EVERY = 3, 2, 2
TRAIN_SECONDS, SAMPLE_SECONDS = 0.03, 0.005


def made(prompt: int, version: int) -> list[Any]:
    """A finished group with every kind of field that a sample has; none is like another one."""
    dice = random.Random(f"{os.getpid()} {prompt} {os.urandom(8).hex()}")

    def one(index: int) -> Sample:
        length, response = dice.randint(5, 30), dice.randint(2, 4)
        status = Sample.Status.TRUNCATED if dice.random() < 0.2 else Sample.Status.COMPLETED
        images = {"pixels": np.full((2, 3), dice.random(), np.float32), 3: (1, None)}
        sample = Sample(
            group_index=prompt,
            index=prompt * SIZE + index,
            prompt=[{"role": "user", "content": f"{prompt}é"}],
            tokens=[dice.randrange(150_000) for _ in range(length)],
            response="text " * response,
            response_length=response,
            label=str(prompt),
            reward=dice.choice([0.0, 1.0, 1 / 3]),
            loss_mask=[1, *(dice.randint(0, 1) for _ in range(response - 1))],
            weight_versions=[str(version)] * dice.randint(1, 2),
            rollout_log_probs=[-dice.random() * 9 for _ in range(response)],
            status=status,
            metadata={"nested": {"a": [1, None, 2.5]}, "many": [dice.random() for _ in range(20)]},
            teacher_log_probs=[-dice.random() for _ in range(response)] if dice.random() < 0.5 else None,
            rollout_routed_experts=np.full((length - 1, 2, 4), prompt, np.int32) if prompt % 2 else None,
            multimodal_train_inputs=images if prompt % 3 == 0 else None,
            adapter=AdapterRef("a", 1) if prompt % 5 == 0 else None,
        )
        sample.prefix_cache_info.cached_tokens = 7
        sample.session_id = f"s{index}"  # an attribute that is no field
        return sample

    return [[one(i), one(i)] if dice.random() < 0.3 else one(i) for i in range(SIZE)]


def digest(group: list[Any]) -> str:
    """Every attribute of every sample, with its type."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return (str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, dict):
            return [(key, plain(item)) for key, item in value.items()]
        if isinstance(value, list | tuple):
            return (type(value).__name__, [plain(item) for item in value])
        return plain(vars(value)) if isinstance(value, Sample | Sample.SpecInfo | Sample.PrefixCacheInfo) else value

    return hashlib.sha256(repr(plain(group)).encode()).hexdigest()[:16]


def note(kind: str, **values: Any) -> None:
    with (Path(sys.argv[3]) / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **values}) + "\n")


def kept(name: str) -> int:
    """A number that a checkpoint holds; 0 without one."""
    file = Path(sys.argv[3]) / name
    return int(file.read_text()) if file.exists() else 0


def keep(name: str, number: int) -> None:
    file = Path(sys.argv[3]) / name
    file.with_suffix(".tmp").write_text(str(number))
    file.with_suffix(".tmp").replace(file)


class Source:
    """miles' data source: prompts in their order."""

    def __init__(self) -> None:
        self.prompt = kept("prompt")

    def get_samples(self, count: int) -> list[list[Any]]:
        groups = [[Sample(group_index=self.prompt + i) for _ in range(SIZE)] for i in range(count)]
        self.prompt += count
        return groups

    def save(self, rollout_id: int) -> None:
        keep("prompt", self.prompt)


async def main(run: str, url: str, calls: int, kind: str) -> None:
    os.environ |= {"RLBUFFER_RUN": run, "RLBUFFER_REDIS_URL": url}
    args = Namespace(
        start_rollout_id=None,  # so its rollout manager has it: the driver knows it later
        num_rollout=calls,
        num_epoch=None,
        rollout_batch_size=BATCH,
        n_samples_per_prompt=SIZE,
        rollout_global_dataset=True,
        rollout_submission_granularity="group",
        rollout_sample_filter_path=None,
        async_max_concurrent_samples=None,
        async_unused_samples_handler="drop",
        custom_async_data_buffer_path=kind,
        save_interval=SAVE_EVERY,
        save_trigger_sentinel=None,
        reward_key=None,
        max_weight_staleness=None,
        async_data_buffer_capacity_factor=2.0,
        dynamic_sampling_filter_path=None,
    )
    version = 1  # as miles counts, from 1 in each process

    async def generate(state: Any, prompts: list[Any], **others: Any) -> list[Any]:
        group = made(prompts[0].group_index, version)
        await asyncio.sleep(SAMPLE_SECONDS)
        note("sampled", digest=digest(group))
        return group

    buffer = load_function(kind)
    put = buffer.put

    async def noted(self: Any, input: Any) -> None:
        await put(self, input)
        note("pushed", digest=digest(input.group))

    buffer.put = noted
    fully_async.generate_and_rm_group = generate
    source, first = Source(), kept("calls")
    rollout = fully_async.FullyAsyncRolloutFn(base_types.RolloutFnConstructorInput(args=args, data_source=source))

    def call_for(number: int) -> asyncio.Task[Any]:
        return asyncio.create_task(rollout(base_types.RolloutFnTrainInput(rollout_id=number, weight_version=version)))

    ahead = call_for(first)
    for call in range(first, calls):
        groups = (await ahead).samples
        if call + 1 < calls:
            ahead = call_for(call + 1)
        await asyncio.sleep(TRAIN_SECONDS)
        note("trained", call=call, digests=[digest(group) for group in groups])
        if (call + 1) % SAVE_EVERY == 0 or call + 1 == calls:
            keep("calls", call + 1)
            source.save(call)
        if call + 1 < calls:
            await ahead  # miles syncs the generation before it updates weights
            version += 1
    if hasattr(source, "close"):
        source.close()
    rollout._worker.cancel()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        calls, *kind = line.split()
        if not (pid := os.fork()):
            asyncio.run(main(sys.argv[1], sys.argv[2], int(calls), STOCK if kind == ["stock"] else DOOR))
            note("ended")
            os._exit(0)
        print(pid, flush=True)
