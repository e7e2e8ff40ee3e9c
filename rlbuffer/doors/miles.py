"""The door of miles' fully async rollout: ``--custom-async-data-buffer-path rlbuffer.doors.miles.DataBuffer``.

Engines, router, rewards, data source, filters, trainer and weight transfer stay miles' own. What changes: a finished
group is pushed to the run, and a train call gets the groups of the run's stream in their order. ::

    FullyAsyncRolloutFn._worker_loop -> put -> push            (miles' filters and capacity before it)
    FullyAsyncRolloutFn._drain       <- get <- stream          (a train call is `rollout_batch_size` groups)

A train call is trained when the call behind the next one begins: ``train_async.py`` asks for one call ahead. The
place of a checkpoint is its number of train calls times the batch size, so nothing needs to be in it.

Source: miles at 31f1ca9, miles/rollout/fully_async_data_buffer.py, fully_async_rollout.py and train_async.py.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import math
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.doors.drops import Drops
from rlbuffer.doors.labels import Labels
from rlbuffer.doors.values import as_bytes, of_bytes
from rlbuffer.errors import PayloadError, RlbufferError
from rlbuffer.records.rollout import MIN_LOGPROB, Rollout, TokenSequence
from rlbuffer.records.spans import VersionSpan

ENV = "miles"
RUN_VARIABLE = "RLBUFFER_RUN"
"""Environment variable with the name of the run; without it the settings say it. miles gives a buffer no arguments of
one's own."""
VALUES = "miles"
"""Attachment of a sequence: everything of its sample but the tokens."""
POLL_SECONDS = 0.02
"""Pause between two looks for the next group, inside miles' event loop."""
DROPS_SECONDS = 1.0
"""Pause between two looks at what the batcher has dropped."""
QUEUED_GROUPS = 8
"""Groups that wait for a train call in this process. The stream has further ones ready behind them."""
WAIT_SECONDS = 7 * 86_400.0
"""miles waits for groups as long as its worker is well, and so does the stream."""
NEEDED: Mapping[str, Sequence[str]] = {
    "miles.rollout.fully_async_data_buffer": ("DefaultDataBuffer", "DataBufferInput", "iter_samples"),
    "miles.utils.types": ("Sample", "AdapterRef", "RewardSpec"),
}
"""Module -> names of it that the door works with."""
NEEDED_OF_A_BUFFER = ("_buffer", "_cond", "_unused_handler_fn", "_metric_stale_groups", "_metric_consumed_staleness")
NEEDED_OF_ARGS = ("rollout_batch_size", "start_rollout_id", "max_weight_staleness", "reward_key", "save_interval")
_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """`DataBuffer`, made when miles asks for it by its path."""
    if name == "DataBuffer":
        return _data_buffer()
    raise AttributeError(f"module 'rlbuffer.doors.miles' has no attribute {name!r}")


def check() -> None:
    """Raises RlbufferError in one sentence unless miles has all that the door needs. It has no versions to go by."""
    for module, names in NEEDED.items():
        try:
            there = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
                raise  # miles is there, and one of its own needs is not
            raise RlbufferError(f"rlbuffer.doors.miles needs {module}, and this miles has none: {error}") from None
        for name in names:
            if not hasattr(there, name):
                raise RlbufferError(f"rlbuffer.doors.miles needs {module}.{name}, and this miles has none")


def _check_buffer(buffer: Any, args: Any) -> None:
    for name in NEEDED_OF_A_BUFFER:
        if not hasattr(buffer, name):
            raise RlbufferError(f"rlbuffer.doors.miles needs DefaultDataBuffer.{name}, and this miles has none")
    for name in NEEDED_OF_ARGS:
        if not hasattr(args, name):
            raise RlbufferError(f"rlbuffer.doors.miles needs the argument {name} of miles, and this miles has none")
    if args.max_weight_staleness is not None:
        raise RlbufferError(
            f"--max-weight-staleness is {args.max_weight_staleness}, and rlbuffer judges staleness when a group is "
            "committed: set max_age of [batcher], and leave the option out"
        )


# -- the codec ---------------------------------------------------------------------------------------------------------
def rollout_of(item: Any, reward_key: str | None, version: int) -> Rollout:
    """One trajectory: a Sample, or a list of the several of one.

    Raises:
        InvalidRollout: a sample has a value that cannot be kept, such as an image.
    """
    samples = item if isinstance(item, list) else [item]

    def fields(sample: Any) -> dict[str, Any]:
        tokens = sample.tokens or [0, 0]  # a rollout has tokens
        length, response = len(tokens), min(sample.response_length, len(sample.tokens))
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        if response:
            mask[length - response :] = 1 if sample.loss_mask is None else np.array(sample.loss_mask, np.bool_)
            mask &= not sample.remove_sample
            mask[0] = False
        if response and sample.rollout_log_probs is not None:
            logprobs[length - response :] = np.clip(sample.rollout_log_probs, MIN_LOGPROB, 0.0)
        values = sample.to_dict() | {
            "adapter": None if sample.adapter is None else asdict(sample.adapter),
            "reward_spec": None if sample.reward_spec is None else asdict(sample.reward_spec),
        }
        del values["tokens"]
        packed = {"is_list": isinstance(item, list), "is_empty": not sample.tokens, "sample": values}
        return {
            "tokens": np.array(tokens, np.int32),
            "loss_mask": mask,
            "logprobs": logprobs,
            "version_spans": (VersionSpan(version, 0, length),),
            "attachments": {VALUES: as_bytes(packed, f"sample {sample.index} of group {sample.group_index}")},
        }

    first = samples[0]
    reward = first.reward.get(reward_key) if isinstance(first.reward, Mapping) and reward_key else first.reward
    scored = float(reward) if isinstance(reward, int | float | np.number) else 0.0
    return Rollout(
        **fields(first),
        reward=scored if math.isfinite(scored) else 0.0,
        is_truncated=first.status.value == "truncated",
        text=first.response if isinstance(first.response, str) else None,
        further=tuple(TokenSequence(**fields(sample)) for sample in samples[1:]),
    )


def item_of(rollout: Rollout) -> Any:
    """The inverse of :func:`rollout_of`. Raises PayloadError."""
    types = importlib.import_module("miles.utils.types")
    made, is_list = [], False
    for sequence in rollout.sequences:
        packed = of_bytes(sequence.attachments[VALUES])
        values, is_list = packed["sample"], packed["is_list"]
        for name, kind in (("adapter", types.AdapterRef), ("reward_spec", types.RewardSpec)):
            values[name] = None if values[name] is None else kind(**values[name])
        made.append(types.Sample.from_dict({"tokens": [] if packed["is_empty"] else sequence.tokens.tolist()} | values))
    return made if is_list else made[0]


def group_of(taken: Taken) -> list[Any]:
    """The trajectories of a group. miles counts on all of them: in the place of one that is damaged stands another, and
    miles leaves it out of the loss (`remove_sample`)."""
    items = [item_of(rollout) for rollout in taken.rollouts]
    if not items:
        raise PayloadError(f"group {taken.group_id}, place {taken.place}: all of its rollouts are damaged or missing")
    for rollout_id in taken.damaged:
        _log.warning(
            "rollout %s is damaged or missing: another one stands in its place, and does not train", rollout_id
        )
        item = item_of(taken.rollouts[0])
        for sample in item if isinstance(item, list) else [item]:
            sample.remove_sample = True
        items.append(item)
    return items


# -- the seam ----------------------------------------------------------------------------------------------------------
class MilesRun:
    """The run between miles' producer and its train calls, from any of its threads."""

    def __init__(self, buffer: Buffer, *, batch: int, start: int, save_interval: int | None) -> None:
        self._batch, self._start, self._save_interval = batch, start, save_interval
        self._buffer = buffer
        self._writer = buffer.writer(f"miles-{os.getpid()}")
        self._stream = buffer.stream(timeout_seconds=WAIT_SECONDS)
        place = start * batch
        self._stream.resume({**Stream.BEGINNING, "reader": {**Stream.BEGINNING["reader"], "step": place}})
        self._labels = Labels(self._stream, "start")
        self._ready: queue.Queue[Taken] = queue.Queue(QUEUED_GROUPS)
        self._error: BaseException | None = None
        self._given: list[int] = []
        """Place of the last group of each train call that was given whole or in part."""
        self._count = 0
        self._drops = Drops(buffer.store, ENV)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._pull, name="rlbuffer-groups", daemon=True)
        self._thread.start()

    def _pull(self) -> None:
        try:
            for taken in self._stream:
                while not self._is_closed.is_set():
                    with suppress(queue.Full):
                        self._ready.put(taken, timeout=0.2)
                        break
        except BaseException as error:  # the train call must hear of it, in its own thread
            self._error = error

    def close(self) -> None:
        """Leaves the run; acknowledges nothing."""
        self._is_closed.set()
        self._stream.close()
        self._thread.join()
        self._buffer.close()

    def version(self, label: int | None) -> int:
        """The run's version for miles' own."""
        return self._labels.version(label)

    def push(self, group: Sequence[Any], reward_key: str | None, oldest: int | None, prompt_id: str) -> str:
        """-> the group's id."""
        version = self.version(oldest)
        rollouts = [rollout_of(item, reward_key, version) for item in group]
        (ticket,) = self._writer.take(ENV, hold=1)
        self._writer.push(ticket, rollouts, prompt_id=prompt_id, planned_size=len(rollouts))
        return ticket.group_id

    def next(self) -> Taken | None:
        """The next group; None while there is none. Raises whatever ended the stream."""
        if self._error is not None and self._ready.empty():
            raise self._error
        try:
            taken = self._ready.get_nowait()
        except queue.Empty:
            return None
        if self._count % self._batch == 0:
            self._given.append(taken.place)
        self._given[-1] = taken.place
        self._count += 1
        return taken

    def begins_a_call(self) -> bool:
        """The next group is the first one of a train call."""
        return self._count % self._batch == 0

    def acknowledge(self) -> None:
        """At the beginning of a train call: what the call before the last one was given is trained."""
        if len(self._given) < 2:
            return
        self._stream.trained(self._given[-2])
        calls, every = self._start + len(self._given) - 1, self._save_interval
        if every is None:
            self._stream.checkpointed()
        elif (oldest := (calls // every - 1) * every) > 0:
            # The newest checkpoint may still be on its way to the disk: the one before it can be resumed from, too.
            self._stream.checkpointed((oldest + every) * self._batch, oldest_kept=oldest * self._batch)

    def dropped(self) -> dict[str, int]:
        """Group -> rollouts of it that the batcher has dropped since the last call."""
        return self._drops.new()


@functools.cache
def _data_buffer() -> Any:
    check()
    there = importlib.import_module("miles.rollout.fully_async_data_buffer")

    class DataBuffer(there.DefaultDataBuffer):  # type: ignore[misc, name-defined]
        """miles' own buffer, whose groups lie in a run: it filters and bounds them, and counts what waits.

        The server and the run are those of ``RLBUFFER_REDIS_URL``, ``RLBUFFER_RUN`` and ``rlbuffer.toml``.

        Raises:
            RlbufferError: miles lacks a name that the door needs, or judges staleness itself.
        """

        def __init__(self, input: Any) -> None:
            super().__init__(input)
            args = input.args
            _check_buffer(self, args)
            self._reward_key = args.reward_key
            run = os.environ.get(RUN_VARIABLE)
            self._line = MilesRun(
                connect(run=run) if run else connect(),
                batch=args.rollout_batch_size,
                start=int(args.start_rollout_id or 0),
                save_interval=args.save_interval,
            )
            self._out: dict[str, Any] = {}
            """Group -> its entry in `_buffer`, of those that this process has pushed and that still wait."""
            self._looked = 0.0

        async def put(self, input: Any) -> None:
            await super().put(input)
            if not any(entry is input for entry in self._buffer):
                return  # miles' filters have rejected it
            first = next(there.iter_samples(input.group))
            oldest = there.group_oldest_weight_version(input.group)
            try:
                group_id = await asyncio.to_thread(
                    self._line.push, input.group, self._reward_key, oldest, str(first.group_index)
                )
            except BaseException:
                await self._leaves(input)
                raise
            self._out[group_id] = input

        async def get(self, current_version: int | None = None, **context: Any) -> Any:
            if current_version is not None:
                self._current_version = current_version
                await asyncio.to_thread(self._line.version, int(current_version))
            if self._line.begins_a_call():
                await asyncio.to_thread(self._line.acknowledge)
            await self._notices_drops()
            while (taken := self._line.next()) is None:
                await asyncio.sleep(POLL_SECONDS)
                await self._notices_drops()
            group = group_of(taken)
            entry = self._out.pop(taken.group_id, None)
            if entry is not None:
                await self._leaves(entry)
            staleness = self._staleness(group, current_version)
            if staleness is not None:
                self._metric_consumed_staleness.append(staleness)
            return there.DataBufferInput(prompt_group=[] if entry is None else entry.prompt_group, group=group)

        def close(self) -> None:
            """Leaves the run. miles never does: its process ends."""
            self._line.close()

        async def _notices_drops(self) -> None:
            """What the batcher has dropped goes to miles' handler of unused groups, and makes room."""
            now = asyncio.get_running_loop().time()
            if now - self._looked < DROPS_SECONDS:
                return
            self._looked = now
            for group_id, rollouts in (await asyncio.to_thread(self._line.dropped)).items():
                entry = self._out.get(group_id)
                if entry is not None and rollouts >= len(entry.group):
                    del self._out[group_id]
                    await self._leaves(entry)
                    self._metric_stale_groups += 1
                    self._unused_handler_fn(entry.prompt_group)

        async def _leaves(self, entry: Any) -> None:
            async with self._cond:
                self._buffer[:] = [other for other in self._buffer if other is not entry]
                self._cond.notify_all()

    return DataBuffer
