"""One peer of the buffer, in the environment that it is installed in: a process that moves the same groups on request.

``python peer.py GROUPS.npz reverb|transfer_queue`` prints a line of JSON, ``{"name": ...}`` or ``{"missing": ...}``,
and then, for each line that it reads, one round: ``{"push": CPU seconds, "pull": CPU seconds}`` of this process and of
all processes that it has started. It imports nothing of rlbuffer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

GROUP_SIZE = 16
Group = list[dict[str, Any]]
"""A rollout's arrays by name."""


def load(path: str) -> list[Group]:
    """The groups of a file that bench_beside has written."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    bounds = np.cumsum(arrays.pop("lengths"))[:-1]
    parts = {name: np.split(values, bounds) for name, values in arrays.items()}
    rollouts = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return [rollouts[i : i + GROUP_SIZE] for i in range(0, len(rollouts), GROUP_SIZE)]


class Reverb:
    """A group is an item of a queue; its arrays are concatenated, as Reverb stores arrays and not records."""

    package = "dm-reverb"

    def __init__(self) -> None:
        reverb: Any = importlib.import_module("reverb")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        code = f"import reverb; reverb.Server(tables=[reverb.Table.queue('q', max_size=100000)], port={port}).wait()"
        self._server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        self._client = reverb.Client(f"localhost:{port}")
        self._client.server_info(timeout=120)

    def push(self, groups: list[Group]) -> None:
        for number, group in enumerate(groups):
            columns = [np.concatenate([rollout[name] for rollout in group]) for name in group[0]]
            lengths = np.array([len(rollout["tokens"]) for rollout in group], np.int32)
            self._client.insert([*columns, lengths, np.array([number])], priorities={"q": 1.0})

    def pull(self, groups: list[Group]) -> int:
        samples = self._client.sample("q", num_samples=len(groups), emit_timesteps=False)
        return sum(sample.data[0].size for sample in samples)  # [1, tokens]: an item of one timestep

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


class TransferQueue:
    """A group is a batch of keys with jagged columns, on one unit of its simple storage."""

    package = "TransferQueue"

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._queue: Any = importlib.import_module("transfer_queue")
        self._table: Any = importlib.import_module("tensordict").TensorDict
        ray: Any = importlib.import_module("ray")
        self._torch.set_num_threads(1)
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
        settings: Any = importlib.import_module("omegaconf").OmegaConf
        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
        self._queue.init(settings.create({"backend": storage}))

    def push(self, groups: list[Group]) -> None:
        torch = self._torch
        for number, group in enumerate(groups):
            columns = {
                name: torch.nested.as_nested_tensor(
                    [torch.from_numpy(rollout[name]) for rollout in group], layout=torch.jagged
                )
                for name in group[0]
            }
            self._queue.kv_batch_put(
                keys=self._keys(number),
                partition_id="train",
                fields=self._table(columns, batch_size=[GROUP_SIZE]),
                tags=[{"version": 0}] * GROUP_SIZE,
            )

    def pull(self, groups: list[Group]) -> int:
        tokens = 0
        for first in range(0, len(groups), 2):
            keys = [key for number in range(first, min(first + 2, len(groups))) for key in self._keys(number)]
            batch = self._queue.kv_batch_get(keys=keys, partition_id="train")
            tokens += sum(len(part) for part in batch["tokens"].unbind())
            self._queue.kv_clear(keys=keys, partition_id="train")
        return tokens

    def close(self) -> None:
        self._queue.close()

    @staticmethod
    def _keys(number: int) -> list[str]:
        return [f"{number}_{i}" for i in range(GROUP_SIZE)]


PEERS: dict[str, type[Reverb] | type[TransferQueue]] = {"reverb": Reverb, "transfer_queue": TransferQueue}


def started_seconds() -> float:
    """CPU seconds of every process that descends from this one (Linux)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    ours, nanoseconds = {os.getpid()}, 0
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for pid in ours - {os.getpid()}:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                nanoseconds += int(task.read_text().split()[0])
            except OSError:
                continue
    return nanoseconds / 1e9


def main(path: str, name: str) -> None:
    kind = PEERS[name]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print as they like

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    try:
        version = importlib.metadata.version(kind.package)
        peer = kind()
    except Exception as error:
        return answer({"missing": f"{type(error).__name__}: {error}"})
    groups = load(path)
    expected = sum(len(rollout["tokens"]) for group in groups for rollout in group)
    answer({"name": f"{kind.package} {version}"})
    try:
        for _ in sys.stdin:
            costs: dict[str, float] = {}
            for leg, work in (("push", peer.push), ("pull", peer.pull)):
                before, started = time.process_time(), started_seconds()
                moved = work(groups)
                costs[leg] = time.process_time() - before + started_seconds() - started
                if moved is not None and moved != expected:
                    raise RuntimeError(f"{name} gave {moved} tokens of {expected}")
            answer(costs)
    finally:
        peer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
