"""The door of TRL's AsyncGRPOTrainer, of versions 1.16: ``rlbuffer.doors.trl.attach(trainer)`` behind its constructor.

Rollout loop, rewards, advantages, packing, loss and weight transfer stay TRL's. What changes: the loop takes its
prompts as tickets and pushes scored groups to the run; the trainer's queue is the run's stream; an optimizer step
acknowledges what it has trained, and a checkpoint holds the place. ::

    AsyncRolloutWorker's child                         the trainer's main process
    _repeat_iterator <- tickets                        rollout_queue <- stream
    _score_group -> push                               _trained_groups: which samples a micro-batch has
                                                       on_step_end -> stream.trained, stream.version(model_version)
                                                       checkpoint's trainer_state.json <- stream.state

Source: TRL 1.16.0, experimental/async_grpo/async_grpo_trainer.py and async_rollout_worker.py.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.client.writer import Writer
from rlbuffer.doors.needs import need, supported_version
from rlbuffer.doors.values import PushedElsewhere
from rlbuffer.errors import EnvDone, RlbufferError, UnknownLabel
from rlbuffer.records.group import Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import MIN_LOGPROB, Rollout, TokenSequence
from rlbuffer.records.spans import VersionSpan

KNOWN = ((1, 16), (1, 17))
"""Versions of TRL from the first on and before the second."""
ENV = "trl"
"""Env of the groups, unless the caller names another."""
NOTE = "trl"
"""Metadata of a rollout with what is not per token, as JSON: it keeps NaN, and floats bit for bit."""
TICKET_SECONDS = 20.0
"""Time for which a prompt stays out without renewal: a rollout process that is killed is made up for after that."""
RENEW_SECONDS = 4.0
ASK_SECONDS = 0.05
"""Pause between two asks for a ticket, while the rollout loop wants one."""
RELOAD_SECONDS = 2.0
"""Pause after weights that could not be loaded."""
UNTOLD_SECONDS = 30.0
"""A loop that has waited so long for a trainer's first weights says so."""
ROUND_TRIP_SECONDS = 0.05
"""The rollout loop waits for an answer at most so long, and only where the last answer was a ticket."""
MOST_METRICS = 4096
"""Metrics of the rollout process that wait for TRL's log, as in TRL."""
QUEUED_SAMPLES = 8
"""Samples that wait for TRL's data loader. The stream has further groups ready behind them."""
WAIT_SECONDS = 7 * 86_400.0
"""TRL waits for samples as long as its rollout process is well, and so does the stream."""
NO_LIMIT = 2**31
"""Largest staleness by TRL's own filter."""
_log = logging.getLogger(__name__)

Connect = Callable[[], Buffer]


@dataclass(frozen=True, slots=True)
class Needed:
    """One private name of TRL that the door works with."""

    owner: str
    name: str
    use: str


NEEDED = (
    Needed("AsyncGRPOTrainer", "rollout_worker", "the rollout process, whose loop the door extends"),
    Needed("AsyncGRPOTrainer", "rollout_queue", "what the data loader reads, which the stream takes the place of"),
    Needed("AsyncGRPOTrainer", "_trained_groups", "which the collator tells of each micro-batch"),
    Needed("AsyncRolloutWorker", "_loop_cls", "the class of the rollout loop"),
    Needed("AsyncRolloutWorker", "_process", "which is started again when it was killed"),
    Needed("_AsyncRolloutLoop", "_repeat_iterator", "where the loop takes its prompts"),
    Needed("_AsyncRolloutLoop", "_generate_loop", "which looks whether it shall stop before it takes one"),
    Needed("_AsyncRolloutLoop", "_score_group", "where a group is whole and scored"),
)


def attach(
    trainer: Any,
    url: str | None = None,
    *,
    run: str = "default",
    config: str | Path | None = None,
    env: str = ENV,
    on_step: Callable[[int, Sequence[tuple[str, int]]], None] | None = None,
) -> Buffer | None:
    """Puts a run's stream in the place of the trainer's queue. Call it between the constructor and ``train()``.

    On every rank; those without the rollout process have nothing to do, and get None. Returns the opened run. `url`,
    `run` and `config` are those of :func:`rlbuffer.connect`. `on_step` hears of each optimizer step: its number, and
    (rollout id, sample of the rollout) of what it has trained.

    Raises:
        RlbufferError: TRL is of a version that the door does not know, or lacks a name that it needs; the trainer has a
            rollout worker of another kind, or a data set without a length.
    """
    check(trainer)
    worker = trainer.rollout_worker
    if worker is None:
        return None
    opened = functools.partial(_opened, url, run, config)
    buffer = opened()
    worker._loop_cls = functools.partial(extended_loop, worker._loop_cls, opened, env)
    stream = SampleStream(buffer, functools.partial(_revived, worker))
    trained = MicroBatches()
    trainer.rollout_queue, trainer._trained_groups = stream, trained
    trainer.add_callback(_callback(trainer, stream, trained, on_step))
    return buffer


def check(trainer: Any) -> None:
    """Raises RlbufferError in one sentence unless this is a trainer that the door knows, with all that it needs."""
    version = supported_version("trl", "trl", "TRL", KNOWN, "leave the line out")
    module = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    worker = getattr(trainer, "rollout_worker", None)
    kind = getattr(module, "AsyncRolloutWorker", None)
    if worker is not None and kind is not None and not isinstance(worker, kind):
        raise RlbufferError(
            f"rlbuffer.doors.trl extends TRL's AsyncRolloutWorker, and this trainer has a {type(worker).__name__}: "
            "leave rollout_worker out of the constructor's arguments, or push to the run from your worker"
        )
    owners = {
        "AsyncGRPOTrainer": trainer,
        "AsyncRolloutWorker": worker or kind,
        "_AsyncRolloutLoop": getattr(module, "_AsyncRolloutLoop", None),
    }
    for needed in NEEDED:
        if worker is not None or needed.name != "_process":  # which is made later
            need("trl", needed.owner, owners[needed.owner], needed.name, whose=f"TRL {version}", use=needed.use)
    if worker is not None and not hasattr(worker._loop_kwargs.get("dataset"), "__len__"):
        raise RlbufferError(
            "rlbuffer.doors.trl gives prompts by number, and train_dataset is an IterableDataset: load it as a Dataset"
        )


def _opened(url: str | None, run: str, config: str | Path | None) -> Buffer:
    return connect(url, run=run, config=config) if run != "default" else connect(url, config=config)


def _revived(worker: Any) -> None:
    """Starts a rollout process again that was killed; one that failed is TRL's to tell."""
    process = worker._process
    if process is not None and not process.is_alive() and not worker._failed_event.is_set():
        _log.warning("the rollout process %s was killed: another one goes on with its prompts", process.pid)
        # What it shared may be locked for good: a lock that a killed process held, an event that it waited for.
        made = worker._mp_ctx
        worker._stop_event_mp = made.Event()
        worker._heartbeat_value = made.Value("d", 0.0)
        worker._model_version_value = made.Value("i", worker._model_version_value.get_obj().value)
        worker.metrics_queue = made.Queue(maxsize=MOST_METRICS)
        worker._process = None
        worker.start()


# -- the codec ---------------------------------------------------------------------------------------------------------
def rollout_of(samples: Sequence[Any], version: int) -> Rollout:
    """The samples of one conversation: one, or several where its history forked."""

    def fields(sample: Any) -> dict[str, Any]:
        length = len(sample.input_ids)
        return {
            "tokens": sample.input_ids.astype(np.int32),
            "loss_mask": sample.completion_mask.astype(bool),
            "logprobs": np.maximum(sample.old_log_probs, MIN_LOGPROB),
            "version_spans": (VersionSpan(version, 0, length),),
            "columns": {"advantages": np.full(length, sample.advantage, np.float32)},
        }

    first = samples[0]
    reward = first.metrics.get("reward", 0.0)
    note = {
        "prompt": first.prompt,
        "completion": first.completion,
        "metrics": first.metrics,
        "advantage": first.advantage,
        "model_version": first.model_version,
        "enqueued_at": time.time(),
    }
    return Rollout(
        **fields(first),
        reward=0.0 if np.isnan(reward) else reward,  # one that nobody could score trains with an advantage of 0
        metadata={NOTE: json.dumps(note)},
        further=tuple(TokenSequence(**fields(sample)) for sample in samples[1:]),
    )


def samples_of(taken: Taken) -> Iterator[Any]:
    """TRL's samples of a group, in the order in which they were scored. Raises PayloadError: they are none."""
    made = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    index = 0
    for rollout in taken.rollouts:
        if NOTE not in rollout.metadata:
            raise PushedElsewhere("trl", rollout)
        note = json.loads(rollout.metadata[NOTE])
        for number, sequence in enumerate(rollout.sequences):
            yield made(
                prompt=note["prompt"],
                completion=note["completion"],
                input_ids=sequence.tokens.astype(np.int64),
                completion_mask=sequence.loss_mask.astype(np.int64),
                old_log_probs=sequence.logprobs.copy(),
                advantage=note["advantage"],
                model_version=note["model_version"],
                group_id=GroupNumber(taken, index, rollout.rollout_id, number),
                metrics=dict(note["metrics"]),
                enqueued_at=note["enqueued_at"],
            )
            index += 1


class GroupNumber(int):
    """A group's number that remembers which sample of the stream it came with: TRL hands it on to its collator."""

    place: int
    index: int
    rollout_id: str
    sequence: int

    def __new__(cls, taken: Taken, index: int, rollout_id: str, sequence: int) -> GroupNumber:
        made = super().__new__(cls, taken.place - 1)
        made.place, made.index, made.rollout_id, made.sequence = taken.place, index, rollout_id, sequence
        return made


# -- the trainer's side ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class GivenGroup:
    """A group whose samples are in TRL's hands."""

    samples: list[GroupNumber]
    first: int
    """Samples before this one were trained before the checkpoint."""
    trained: set[int] = field(default_factory=set)


class SampleStream:
    """`AsyncGRPOTrainer.rollout_queue`: the samples of the run's groups, in order. `start` comes before the first
    `get`."""

    def __init__(self, buffer: Buffer, revive: Callable[[], None]) -> None:
        self.buffer = buffer
        self.stream: Stream = buffer.stream(timeout_seconds=WAIT_SECONDS)
        self._revive = revive
        self._ready: queue.Queue[Any] = queue.Queue(QUEUED_SAMPLES)
        self._error: BaseException | None = None
        self.groups: dict[int, GivenGroup] = {}
        """Number -> group, of those that are given and not acknowledged."""

    def start(self, state: Mapping[str, Any]) -> None:
        """Begins behind what `state` says."""
        self.stream.resume(state)
        threading.Thread(target=self._pull, name="rlbuffer-samples", daemon=True).start()

    def _pull(self) -> None:
        try:
            for taken in self.stream:
                samples = list(samples_of(taken))
                self.groups[taken.place] = GivenGroup([sample.group_id for sample in samples], taken.part)
                for sample in samples[taken.part :]:
                    self._ready.put(sample)
        except BaseException as error:  # the data loader must hear of it, in its own thread
            self._error = error

    def get(self, timeout: float | None = None) -> Any:
        """The next sample. Raises queue.Empty, and whatever ended the stream."""
        self._revive()
        if self._error is not None and self._ready.empty():
            raise self._error
        return self._ready.get(timeout=timeout)

    def qsize(self) -> int:
        """Samples that wait for the data loader."""
        return self._ready.qsize()

    def acknowledge(self, places: Iterable[GroupNumber]) -> None:
        """These samples are trained. Those before the last of them that are not among them never will be."""
        places = list(places)
        if not places:
            return
        last = max((place.place, place.index) for place in places)
        for place in places:
            self.groups[place.place].trained.add(place.index)
        unused: list[str] = []
        part, whole = 0, last[0]
        for number in sorted(number for number in [*self.groups] if number <= last[0]):
            group = self.groups[number]
            is_whole = number < last[0] or last[1] == len(group.samples) - 1
            end = len(group.samples) if is_whole else last[1] + 1
            unused += _untrained(group, end)
            if is_whole:
                del self.groups[number]
            else:
                whole, part = number - 1, end
        self.stream.trained(whole, part=part, unused=unused)


def _untrained(group: GivenGroup, end: int) -> Iterator[str]:
    """Rollouts of which all samples before `end` are known and none is trained: TRL has dropped them."""
    fates: dict[str, list[bool]] = {}
    for place in group.samples[:end]:
        fates.setdefault(place.rollout_id, []).append(place.index in group.trained or place.index < group.first)
    beyond = {place.rollout_id for place in group.samples[end:]}
    yield from (rollout_id for rollout_id, fate in fates.items() if not any(fate) and rollout_id not in beyond)


class MicroBatches(set[int]):
    """`AsyncGRPOTrainer._trained_groups`: TRL counts groups by it. It remembers the samples of each micro-batch, too,
    that the collator has made.

    Its numbers count from 0 in each process, as TRL's own do: a checkpoint adds them to those of before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[list[GroupNumber]] = []
        self._number: dict[int, int] = {}

    def update(self, *groups: Iterable[int]) -> None:
        """Hears of the group of each sample of a micro-batch."""
        for batch in groups:
            places = [place for place in batch if isinstance(place, GroupNumber)]
            self._made.append(places)
            super().update(self._number.setdefault(place.place, len(self._number)) for place in places)

    def take(self, count: int) -> list[GroupNumber]:
        """The samples of the next `count` micro-batches, which are trained."""
        done, self._made = self._made[:count], self._made[count:]
        return [place for places in done for place in places]


def _callback(
    trainer: Any,
    stream: SampleStream,
    trained: MicroBatches,
    on_step: Callable[[int, Sequence[tuple[str, int]]], None] | None,
) -> Any:
    transformers = importlib.import_module("transformers")
    exportable = importlib.import_module("transformers.trainer_callback").ExportableState

    class RlbufferStream(transformers.TrainerCallback, exportable):  # type: ignore[misc, name-defined, valid-type]
        """Acknowledges, announces, and keeps the stream's place in TRL's checkpoints."""

        def __init__(self) -> None:
            self._micro_batches = 0
            self._places: dict[str, int] = {}
            """Checkpoint -> the last place that it holds whole."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved = state.stateful_callbacks.get("RlbufferStream") if state.global_step else None
            self._places = dict(saved["places"]) if saved else {}
            stream.start(saved["stream"] if saved else Stream.BEGINNING)
            if saved:  # its file was written before `on_save` heard of it
                self._places[f"checkpoint-{state.global_step}"] = stream.stream.place
            stream.stream.version(trainer.model_version)
            # One judge: the run's max_age, when a group is committed. The ledger has counted it by then.
            trainer._rollout_dataset.max_staleness = NO_LIMIT

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._micro_batches += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            places = trained.take(self._micro_batches + 1)
            self._micro_batches = 0
            stream.acknowledge(places)
            stream.stream.version(trainer.model_version)
            if on_step is not None:
                on_step(state.global_step, [(place.rollout_id, place.sequence) for place in places])

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {}, "stream": stream.stream.state, "places": self._places}

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._places[f"checkpoint-{state.global_step}"] = stream.stream.place
            there = {path.name for path in Path(args.output_dir).glob("checkpoint-*")}
            self._places = {name: place for name, place in self._places.items() if name in there}
            oldest = min(self._places.values(), default=0)
            stream.stream.checkpointed(oldest_kept=oldest)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stream.stream.finished()
            stream.stream.close()

    return RlbufferStream()


# -- the rollout side: in the child of AsyncRolloutWorker, or in any process on any host -------------------------------
class TicketLoop:
    """What the rollout loop does in place of TRL's own: prompts are tickets, and what is scored is pushed."""

    dataset: Any
    num_generations: int
    max_inflight_tasks: int
    _heartbeat_value: Any
    _loop: Any
    _stop_event: Any
    _groups_to_score: Any

    def begin(self, opened: Connect, env: str, parent: int, load: Callable[[PolicyVersion], None] | None) -> None:
        """Connects; `parent` is the process without which this one ends, 0 for none."""
        self._buffer, self._env, self._load = opened(), env, load
        self._writer: Writer = self._buffer.writer(f"trl-{os.getpid()}", ticket_seconds=TICKET_SECONDS)
        self._out: dict[int, Ticket] = {}
        self._versions: dict[int, int] = {}
        self._loaded: PolicyVersion | None = None
        """What `load` has brought into the engine."""
        self._stops = threading.Event()
        self._error: BaseException | None = None
        """What has ended the thread that asks."""
        self._ready: queue.SimpleQueue[tuple[Ticket, int]] = queue.SimpleQueue()
        """A ticket that was taken ahead, for the loop that asks next, and the version that the engine had then."""
        self._wants, self._answered = threading.Event(), threading.Event()
        self._has_leave = True
        """The last ask got a ticket: the next one is a matter of a round trip."""
        self._began, self._is_due = time.monotonic(), True
        """When the loop began; it has not said yet that it waits for weights."""
        self._left = 0
        """Generations of the last ticket that the loop has not begun yet."""
        calls, stop = self._loop.call_soon_threadsafe, self._stop_event.set

        def call(callback: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
            if callback == stop:
                self._stops.set()  # the loop may stand still at a ticket, and would never hear of it
            return calls(callback, *args, **kwargs)

        self._loop.call_soon_threadsafe = call
        threading.Thread(target=self._renew, args=(parent,), name="rlbuffer-tickets", daemon=True).start()
        threading.Thread(target=self._ask, name="rlbuffer-asks", daemon=True).start()

    def _renew(self, parent: int) -> None:
        while not self._stops.wait(RENEW_SECONDS):
            if parent and os.getppid() != parent:
                # The trainer was killed; TRL leaves this process to sample into a queue that nobody reads.
                os.kill(os.getpid(), signal.SIGKILL)
            if out := list(self._out.values()):
                try:
                    self._writer.renew(out)
                except RlbufferError as error:
                    _log.warning("tickets cannot be renewed: %s", error)

    def _ask(self) -> None:
        """Takes a ticket whenever the loop wants one, behind the newest weights: what is begun with a ticket is sampled
        by the version that it came with, or by a later one."""
        try:
            while not self._stops.is_set():
                if self._wants.wait(RENEW_SECONDS) and not self._take():
                    self._stops.wait(ASK_SECONDS)
        except BaseException as error:  # the loop must hear of it, in its own thread
            self._error = error
            self._answered.set()

    def _take(self) -> bool:
        """A ticket was to be had. As many groups are open as the loop's slots take, and as wait to be scored: with
        fewer the loop would stand still for good."""
        hold = -(-self.max_inflight_tasks // self.num_generations) + 2 + SCORED_AT_ONCE
        version = self._sampling_version()
        tickets: list[Ticket] = []
        if version is not None:
            with suppress(EnvDone):  # the trainer has made its last step, and stops this loop
                tickets = self._writer.take(self._env, hold=hold, wait=False)
        self._has_leave = bool(tickets)
        if tickets and version is not None:
            self._wants.clear()
            self._out[tickets[0].number] = tickets[0]  # renewed from here on: the loop may stand still before it begins
            self._ready.put((tickets[0], version))
        self._answered.set()
        return bool(tickets)

    def _sampling_version(self) -> int | None:
        """The version that the engine has. Where this loop brings it the weights: once they are published; None while
        it has none of this run."""
        newest = self._buffer.policy.current()
        if self._load is None:
            return max(0, newest.version)
        if newest.location and newest != self._loaded:
            try:
                self._load(newest)
            except Exception as error:
                _log.warning("the engine has no version %d, and gets no prompts: %s", newest.version, error)
                self._stops.wait(RELOAD_SECONDS)
                return None
            self._loaded = newest
        if self._loaded is None and self._is_due and time.monotonic() > self._began + UNTOLD_SECONDS:
            self._is_due = False
            _log.warning("no weights are published yet: the trainer calls policy.publish for each version")
        return None if self._loaded is None else self._loaded.version

    def has_prompt(self) -> bool:
        """The loop can take a prompt without a wait; else one is asked for. Raises what the asking has ended with."""
        if self._error is not None:
            raise self._error
        if self._left or not self._ready.empty():
            return True
        self._answered.clear()
        self._wants.set()
        if self._has_leave:
            self._answered.wait(ROUND_TRIP_SECONDS)
        return not self._ready.empty()

    def _ticket(self) -> tuple[Ticket, int] | None:
        """The next one with its version; None when the loop shall stop."""
        while not self._stops.is_set():
            with suppress(queue.Empty):
                return self._ready.get(timeout=0.0 if self.has_prompt() else ASK_SECONDS)
            self._heartbeat_value.value = time.time()  # the trainer takes a silent loop for one that hangs
        return None

    def repeat(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """TRL's `_repeat_iterator`: the ticket's number and prompt, once for each generation."""
        while True:
            taken = self._ticket()
            if taken is None:  # TRL takes one more prompt before it hears of the end, and does not score it
                yield -1, self.dataset[0]
                continue
            ticket, version = taken
            self._versions[ticket.number] = version
            row = self.dataset[ticket.number % len(self.dataset)]
            for number in range(self.num_generations):
                self._left = self.num_generations - number - 1
                yield ticket.number, row

    def push(self, number: int, model_version: int, rollouts: list[list[Any]]) -> None:
        """Pushes the samples of a group, conversation by conversation."""
        if number not in self._out:
            return  # what it took when it was about to stop
        version, ticket = self._versions.pop(number), self._out[number]
        if self._load is None:
            # It is announced a moment after it is loaded; the version before makes the group a little older.
            with suppress(UnknownLabel):
                version = self._writer.version(model_version)
        made = [rollout_of(samples, version) for samples in rollouts if samples]
        if made:
            prompt_id = str(number % len(self.dataset))
            self._writer.push(ticket, made, prompt_id=prompt_id, planned_size=len(made))
        else:
            self._writer.skip([ticket])  # nothing of it can be trained
        self._out.pop(number, None)


SCORED_AT_ONCE = 16
"""Groups that wait to be scored: TRL's `score_queue_maxsize`."""


class StopOrWait:
    """TRL's stop event, as its generating loop sees it. Before it takes a prompt, the loop looks whether it shall stop:
    while there is none to take it hears yes, leaves its slot free, and goes on with the answers under way.

    The loop counts what is under way right after it took its prompts, and asks again then: there it hears the truth.
    """

    def __init__(self, real: Any, loop: TicketLoop) -> None:
        self._real, self._loop, self._has_counted = real, loop, False

    def counted(self) -> None:
        """The loop has taken its prompts: until it stands still once, it asks whether to stop."""
        self._has_counted = True
        asyncio.get_running_loop().call_soon(self._begins)

    def _begins(self) -> None:
        self._has_counted = False

    def is_set(self) -> bool:
        """The loop shall stop, or cannot take a prompt now."""
        is_about_the_end = self._has_counted or self._loop._groups_to_score.full()
        is_over = self._real.is_set() or self._loop._stops.is_set()  # the latter first, of what ends the loop
        return is_over or not (is_about_the_end or self._loop.has_prompt())


def extended_loop(
    base: Any,
    opened: Connect,
    env: str,
    load: Callable[[PolicyVersion], None] | None = None,
    **kwargs: Any,
) -> Any:
    """An instance of TRL's rollout loop, of the class `base`, that takes tickets and pushes. Made in the process that
    runs it."""

    class Loop(base, TicketLoop):  # type: ignore[misc]
        _stop_or_wait: StopOrWait | None = None

        @property
        def _inflight(self) -> int:
            """TRL's own count of the answers under way."""
            return int(self.__dict__.get("_inflight", 0))

        @_inflight.setter
        def _inflight(self, count: int) -> None:
            self.__dict__["_inflight"] = count
            if self._stop_or_wait is not None:
                self._stop_or_wait.counted()

        async def _generate_loop(self, stop_event: Any) -> None:
            self._stop_or_wait = StopOrWait(stop_event, self)
            await super()._generate_loop(self._stop_or_wait)

        def _repeat_iterator(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
            return self.repeat()

        async def _score_group(self, group: Any) -> list[Any]:
            samples: list[Any] = await super()._score_group(group)
            rest = iter(samples)
            rollouts = [[next(rest) for _ in sequences] for sequences in group.completions_sequences]
            await asyncio.to_thread(self.push, group.group_id, group.model_version, rollouts)
            return samples

    loop = Loop(**kwargs | {"rollout_buffer": _Nowhere()})
    loop.begin(opened, env, 0 if load is not None else os.getppid(), load)
    return loop


class _Nowhere:
    """In the place of the queue to the trainer: what is pushed needs none."""

    def put_nowait(self, sample: Any) -> None:
        """Takes it."""

    def qsize(self) -> int:
        """Nothing waits."""
        return 0


class _Value:
    """In the place of a number that TRL shares between two processes."""

    def __init__(self, value: float = 0) -> None:
        self.value = value


def work(
    url: str | None = None,
    *,
    run: str = "default",
    config: str | Path | None = None,
    env: str = ENV,
    load: Callable[[PolicyVersion], None],
    stop: threading.Event | None = None,
    **loop: Any,
) -> None:
    """Runs TRL's rollout loop on any host, for a run whose trainer has the door attached. Returns when `stop` is set.

    The trainer publishes each version (``buffer.policy.publish(model, version, folder)``), and no prompt is taken
    before the first. `load` gets the newest one whose weights are published before the next group is begun, and brings
    them from ``version.location`` into the engine behind ``vllm_server_url``. A thread of the door calls it; while it
    raises, no prompt is taken, and it is called again after 2 s. `loop` are the arguments of TRL's `_AsyncRolloutLoop`:
    ``model_name``, ``dataset`` (the trainer's own, in its order), ``reward_funcs``, ``processing_class``,
    ``eos_token_ids``, ``num_generations`` ...

    Raises:
        RlbufferError: TRL is of a version that the door does not know.
    """
    module = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker")
    opened = functools.partial(_opened, url, run, config)
    version = _Value()

    def loaded(there: PolicyVersion) -> None:
        load(there)
        label = next((name for name, number in there.labels.items() if number == there.version), "")
        version.value = int(label) if label.isdigit() else there.version

    made = extended_loop(
        module._AsyncRolloutLoop,
        opened,
        env,
        loaded,
        model_version_value=version,
        heartbeat_value=_Value(),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(1),
        **loop,
    )
    if stop is not None:
        threading.Thread(
            target=lambda: (stop.wait(), made._loop.call_soon_threadsafe(made._stop_event.set)), daemon=True
        ).start()
    made.run()
