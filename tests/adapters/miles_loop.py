"""A process in the shape of miles' fully async training: its buffer's producer and its train calls, without engines and
without a model. Started again, it goes on from its newest checkpoint.

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
from miles.rollout.fully_async_data_buffer import (
    DataBufferConstructorInput,
    DataBufferInput,
    DefaultDataBuffer,
    first_sample,
)
from miles.utils.types import AdapterRef, Sample

import rlbuffer

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


def checkpoint() -> dict[str, int]:
    file = Path(sys.argv[3]) / "checkpoint.json"
    return json.loads(file.read_text()) if file.exists() else {"calls": 0, "prompt": 0}


def save(**values: int) -> None:
    folder = Path(sys.argv[3])
    (folder / "checkpoint.tmp").write_text(json.dumps(values))
    (folder / "checkpoint.tmp").replace(folder / "checkpoint.json")


async def main(run: str, url: str, calls: int, is_stock: bool) -> None:
    os.environ |= {"RLBUFFER_RUN": run, "RLBUFFER_REDIS_URL": url}
    begins = checkpoint()
    args = Namespace(
        start_rollout_id=begins["calls"],
        rollout_batch_size=BATCH,
        save_interval=SAVE_EVERY,
        reward_key=None,
        max_weight_staleness=None,
        async_data_buffer_capacity_factor=2.0,
        dynamic_sampling_filter_path=None,
    )
    kind = DefaultDataBuffer if is_stock else rlbuffer.doors.miles.DataBuffer
    buffer = kind(DataBufferConstructorInput(args, lambda prompts: note("unused", prompts=len(prompts))))
    version, prompt = 1, begins["prompt"]  # as miles counts, from 1 in each process

    async def produce() -> None:
        nonlocal prompt
        while True:
            group, prompt = made(prompt, version), prompt + 1
            await asyncio.sleep(SAMPLE_SECONDS)
            note("sampled", digest=digest(group))
            await buffer.put(DataBufferInput(prompt_group=[], group=group))
            note("pushed", digest=digest(group))

    async def drain() -> list[Any]:
        groups: list[Any] = []
        while len(groups) < BATCH:
            got = asyncio.create_task(buffer.get(current_version=version))
            await asyncio.wait({got, worker}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                worker.result()
            groups.append((await got).group)
        buffer.get_metrics()
        return groups

    worker = asyncio.create_task(produce())
    ahead = asyncio.create_task(drain())
    for call in range(begins["calls"], calls):
        groups = await ahead
        if call + 1 < calls:
            ahead = asyncio.create_task(drain())
        groups.sort(key=lambda group: first_sample(group).index)
        await asyncio.sleep(TRAIN_SECONDS)
        note("trained", call=call, digests=[digest(group) for group in groups])
        if (call + 1) % SAVE_EVERY == 0:
            save(calls=call + 1, prompt=prompt)
        if call + 1 < calls:
            await ahead  # miles syncs the generation before it updates weights
            version += 1
    worker.cancel()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        calls, *kind = line.split()
        if not (pid := os.fork()):
            asyncio.run(main(sys.argv[1], sys.argv[2], int(calls), kind == ["stock"]))
            note("ended")
            os._exit(0)
        print(pid, flush=True)
