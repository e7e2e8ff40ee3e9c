"""The door of miles' fully async rollout: ``--custom-async-data-buffer-path rlbuffer.doors.miles.DataBuffer``.

Engines, router, rewards, data source, filters, trainer and weight transfer stay miles' own. What changes: a finished
group is pushed to the run, and a train call gets the groups of the run's stream in their order. ::

    FullyAsyncRolloutFn._worker_loop -> put -> push            (miles' filters and capacity before it)
    FullyAsyncRolloutFn._drain       <- get <- stream          (a train call is `rollout_batch_size` groups)
                                     -> which call begins: the one before the last one is trained
    data_source.save                 -> a checkpoint is written: so is what stands before it
    data_source.close                -> the training has ended, and the run with it

``train_async.py`` asks for one call ahead, so the call before the last one is the newest that must be trained. The
place of a checkpoint is its number of train calls times the batch size, so nothing needs to be in it.

Source: miles at 31f1ca9, miles/rollout/fully_async_data_buffer.py, fully_async_rollout.py, miles/ray/rollout/
rollout_manager.py and train_async.py.
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
from rlbuffer.doors.needs import need
from rlbuffer.doors.values import as_bytes, values_of
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
ROLLOUT = "miles.rollout.fully_async_rollout"
NEEDED: Mapping[str, Sequence[str]] = {
    "miles.rollout.fully_async_data_buffer": ("DefaultDataBuffer", "DataBufferInput", "iter_samples"),
    ROLLOUT: ("FullyAsyncRolloutFn",),
    "miles.utils.types": ("Sample", "AdapterRef", "RewardSpec"),
}
"""Module -> names of it that the door works with."""
NEEDED_OF_A_BUFFER = (
    "_args",
    "_buffer",
    "_cond",
    "_unused_handler_fn",
    "_metric_stale_groups",
    "_metric_consumed_staleness",
)
NEEDED_OF_ARGS = (
    "rollout_batch_size",
    "num_rollout",
    "num_epoch",
    "max_weight_staleness",
    "reward_key",
    "save_interval",
    "save_trigger_sentinel",
)
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
        need("miles", module, there, *names, whose="this miles")
    rollout = importlib.import_module(ROLLOUT).FullyAsyncRolloutFn
    need("miles", "FullyAsyncRolloutFn", rollout, "_drain", whose="this miles")


def _check_buffer(buffer: Any, args: Any) -> None:
    need("miles", "DefaultDataBuffer", buffer, *NEEDED_OF_A_BUFFER, whose="this miles")
    need("miles", "args", args, *NEEDED_OF_ARGS, whose="this miles")
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
    for packed, sequence in zip(values_of(rollout, VALUES), rollout.sequences, strict=True):
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
    """The run between miles' producer and its train calls, from any of its threads. `call` is the first train call of
    this process; `keeps`: checkpoints are written, and the groups behind them are kept."""

    def __init__(self, buffer: Buffer, *, batch: int, call: int, keeps: bool) -> None:
        self._batch, self._call, self._keeps = batch, call, keeps
        self._buffer = buffer
        self._writer = buffer.writer(f"miles-{os.getpid()}")
        self._stream = buffer.stream(timeout_seconds=WAIT_SECONDS)
        self._saved = call * batch
        """Place of the newest checkpoint."""
        self._stream.resume({**Stream.BEGINNING, "reader": {**Stream.BEGINNING["reader"], "step": self._saved}})
        self._labels = Labels(self._stream, "start")
        self._ready: queue.Queue[Taken] = queue.Queue(QUEUED_GROUPS)
        self._error: BaseException | None = None
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
        with suppress(queue.Empty):
            return self._ready.get_nowait()
        return None

    def begins(self, call: int) -> None:
        """A train call begins: those up to the one before the last are trained."""
        self._call = call
        self._trained(call - 1)

    def _trained(self, calls: int) -> None:
        """The first so many train calls of the run are trained."""
        if calls * self._batch <= self._stream.place:
            return
        self._stream.trained(calls * self._batch)
        if not self._keeps:
            self._stream.checkpointed()

    def checkpointed(self, calls: int) -> None:
        """A checkpoint holds so many train calls. As it may be on its way to the disk, the one before can be resumed
        from, too."""
        self._trained(calls)
        place = calls * self._batch
        self._stream.checkpointed(place, oldest_kept=self._saved)
        self._saved = place

    def finished(self, calls: int) -> None:
        """The training of so many calls in all has ended, with the last of them or, for debugging, before: then the
        call that was asked for ahead is not trained."""
        is_last = self._call + 1 >= calls
        self._trained(self._call + is_last)
        if is_last:
            self._stream.finished()
        self.close()

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
            name = os.environ.get(RUN_VARIABLE)
            self._opened = connect(run=name) if name else connect()
            self._run: MilesRun | None = None
            """From the first train call on, whose number says where the stream goes on."""
            self._out: dict[str, Any] = {}
            """Group -> its entry in `_buffer`, of those that this process has pushed and that still wait."""
            self._looked = 0.0

        @property
        def run(self) -> MilesRun:
            """The run, once it is known with which train call this process begins."""
            if self._run is None:
                raise RlbufferError("rlbuffer.doors.miles: no train call has begun: FullyAsyncRolloutFn says when")
            return self._run

        async def begins(self, call: int, source: Any) -> None:
            """A train call of this number begins; `source` is miles' data source, which hears of checkpoints."""
            if self._run is not None:
                await asyncio.to_thread(self._run.begins, call)
                return
            args = self._args  # before anything is awaited: the producer has begun
            keeps = args.save_interval is not None or args.save_trigger_sentinel is not None
            self._run = opened = MilesRun(self._opened, batch=args.rollout_batch_size, call=call, keeps=keeps)
            save, close = source.save, getattr(source, "close", None)

            def saves(rollout_id: int) -> None:
                save(rollout_id)
                opened.checkpointed(rollout_id + 1)

            def closes() -> None:
                if close is not None:
                    close()
                opened.finished(train_calls(args, source))

            source.save, source.close = saves, closes

        async def put(self, input: Any) -> None:
            await super().put(input)
            if not any(entry is input for entry in self._buffer):
                return  # miles' filters have rejected it
            first = next(there.iter_samples(input.group))
            oldest = there.group_oldest_weight_version(input.group)
            try:
                group_id = await asyncio.to_thread(
                    self.run.push, input.group, self._reward_key, oldest, str(first.group_index)
                )
            except BaseException:
                await self._leaves(input)
                raise
            self._out[group_id] = input

        async def get(self, current_version: int | None = None, **context: Any) -> Any:
            if current_version is not None:
                self._current_version = current_version
                await asyncio.to_thread(self.run.version, int(current_version))
            await self._notices_drops()
            while (taken := self.run.next()) is None:
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
            """Leaves the run, without a word of what is trained."""
            if self._run is None:
                self._opened.close()
            else:
                self._run.close()

        async def _notices_drops(self) -> None:
            """What the batcher has dropped goes to miles' handler of unused groups, and makes room."""
            now = asyncio.get_running_loop().time()
            if now - self._looked < DROPS_SECONDS:
                return
            self._looked = now
            for group_id, rollouts in (await asyncio.to_thread(self.run.dropped)).items():
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

    rollout = importlib.import_module(ROLLOUT).FullyAsyncRolloutFn
    drain = rollout._drain

    async def begins(self: Any, input: Any) -> Any:
        if isinstance(self._output, DataBuffer):
            await self._output.begins(input.rollout_id, self.data_source)
        return await drain(self, input)

    rollout._drain = begins
    return DataBuffer


def train_calls(args: Any, source: Any) -> int:
    """Train calls of the whole run, as miles counts them: the arguments of its rollout manager may say epochs."""
    if args.num_rollout is not None:
        return int(args.num_rollout)
    return int(len(source.dataset) // args.rollout_batch_size * args.num_epoch)
