"""The trainer's side: pull committed steps in order, assemble micro-batches, acknowledge what was trained."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from rlbuffer.client.arguments import function, whole_number
from rlbuffer.client.lessons import alone, last_steps
from rlbuffer.client.progress import Progress, remembered
from rlbuffer.client.ranks import RankZeroWatch, Skew
from rlbuffer.client.refusals import REFUSAL_PAUSE_SECONDS, Away, LongWait, Refusals, no_batch, refused_for
from rlbuffer.client.step_pull import StepPull, damage_of, left_out
from rlbuffer.errors import (
    BatcherFailed,
    BatchTimeout,
    ConfigError,
    InvalidArgument,
    InvalidRollout,
    NotFound,
    RlbufferError,
    ServerRefused,
    ServerUnreachable,
    StepRetired,
)
from rlbuffer.process.identity import identity
from rlbuffer.process.threads import begun
from rlbuffer.records.checks import read_only, shown
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.waiting import Problem, Wait, Waiting
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.records import Meta, PartRollout, TrainedStep
from rlbuffer.store.trainer import TrainerStore

READER_BLOCK_SECONDS = 1.0
"""One blocking read; between two the reader looks for a fatal error of the batcher and for its own end."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between the rank's heartbeats; rank 0's report is the attempt's heartbeat as well. A batcher that has taken
over waits for it before it commits, and shall commit within a lease and two seconds of the other's last word."""
DAMAGE_SHOWN_STEPS = 64
"""Steps for which a rank says that one lacked rollouts."""
CLOSED = "the reader was closed"
ANYTHING = Trainable()
_log = logging.getLogger(__name__)
READ_RECORDS = 1000
"""Newest records of the history that are read for a step's own."""


class StepSource(Protocol):
    """Makes of a committed step what the trainer's loop is given of it."""

    def part(self, header: StepHeader) -> Any:
        """What is read before the payloads. Raises NotFound: the server has it no more."""

    def step(self, header: StepHeader, part: Any) -> tuple[Any, list[tuple[PartRollout, str]]]:
        """With `number`, `digest` and `header`; and the rollouts that cannot be trained, each with the reason."""


class NotAwaited(Exception):
    """The caller of :meth:`Reader.steps` does not wait any longer, or the run has ended."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A pull under way. Nobody waits for an abandoned one, so it must not keep its thread."""

    future: Future[Any]
    is_abandoned: threading.Event

    def abandon(self) -> None:
        """Lets its thread go, and takes it back where it has not begun."""
        self.is_abandoned.set()
        self.future.cancel()


class Reader:
    """Pulls the steps of one rank. Made by :meth:`rlbuffer.client.buffer.Buffer.reader`.

    A step goes from the server into the trainer's state::

        COMMITTED --prefetch--> PULLED --given--> IN HAND --trained--> ACKNOWLEDGED --checkpointed--> may retire
                                  |                  |
                                  +------ lost ------+--> pulled again: the server may have another step of its number

    `start` begins an attempt, and fences older ones. :meth:`steps` calls it where nobody did.
    :meth:`steps` gives step after step, and has the next one pulled meanwhile. Pulling acknowledges nothing.
    Asking for the next step, or :meth:`trained`, acknowledges the last one. The batcher commits further steps then.
    :meth:`checkpointed` says that the trainer's state holds it. The server may let it go then.
    :meth:`still_there` lets go of a step in hand that the server has lost.
    `close` ends every pull and the heartbeat. What is not acknowledged stays on the server.

    docs/tutorial/your_trainer.md has whole loops.

    While the server is away its methods wait, up to `timeout_seconds` and at least 30 s, and raise ServerUnreachable
    then.

    Example:
        Two groups make a step. The batcher and the worker are in this process, too.

        >>> import threading, rlbuffer
        >>> from rlbuffer.daemon import Daemon
        >>> buffer = rlbuffer.connect("memory://", run="reader")
        >>> daemon = Daemon(buffer, rlbuffer.BatcherConfig(64, step_groups=2))
        >>> batcher = threading.Thread(target=daemon.run, args=(threading.Event(),), daemon=True)
        >>> batcher.start()
        >>> writer = buffer.writer("worker-0")
        >>> pushed = [writer.push(rlbuffer.testing.make_group(env="math", seed=seed)) for seed in range(4)]
        >>> writer.done("math")
        >>> reader = buffer.reader(rank=0, world_size=1, timeout_seconds=30.0)
        >>> reader.start()
        >>> for step in reader.steps():
        ...     print(step.number, step.header.group_ids, [micro_batch.length for micro_batch in step])
        ...     reader.trained(step)
        ...     is_new = reader.announce(rlbuffer.PolicyVersion(version=step.number))
        ...     reader.checkpointed(step)
        ...     state = reader.state_dict()
        1 ('math.0', 'math.1') [63, 59, 58]
        2 ('math.2', 'math.3') [64, 55, 10]
        >>> assert reader.has_ended
        >>> reader.close()
        >>> buffer.reader().load_state_dict(state)
        >>> _ = batcher.join(), buffer.close()
    """

    def __init__(
        self,
        store: TrainerStore,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        pad_token_id: int = 0,
        pad_to_multiple_of: int = 1,
        can: Trainable = ANYTHING,
        source: StepSource | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise InvalidArgument(
                f"reader: rank {rank} is outside world size {world_size}: ranks count from 0 to {world_size - 1}"
            )
        # No shorter than other calls: a server that is killed, or fails over, is back after seconds.
        patience = max(store.patience_seconds, timeout_seconds)
        self._store = store = store.patient(patience, on_retry=Away(f"rank {rank}", self._held_up))
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._can = can
        self._is_stopped = False
        """The caller's own `until` has ended its steps: it means to go on later."""
        self._until: tuple[int, Callable[[], bool]] | None = None
        """The thread of a loop that asks whether the run goes on, and its `until`."""
        self._waiting: Waiting | None = None
        self._held: Waiting | None = None
        self._feeds = "ranks" if source is None else "stream"
        self._source: StepSource = source or StepPull(
            store, rank, world_size, can, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        self._progress = Progress(store, world_size=world_size, reports=rank == 0, announces=source is not None)
        self._rank_0 = RankZeroWatch(store, world_size)
        self.has_ended = False
        """The run has ended: every env was done, and the last step was trained. :meth:`steps` stops then."""
        self.warns = True
        """Rank 0 warns when it waits for long; not where something else shows it."""
        self._fault: RlbufferError | None = None
        self._stop = threading.Event()
        self._refusals = Refusals(f"rank {rank}", self._stop)
        self._skew = Skew(rank, world_size)
        self._alone: set[str] = set()
        """Envs with a step here in which each group was one rollout."""
        self._damage: Problem | None = None
        """Of the last step with rollouts that could not be trained."""
        self._given: StepHeader | None = None
        """Of the last step of :meth:`steps`: a server that comes back without it takes its number all the same."""
        self._is_started = False
        self._heart: threading.Thread | None = None
        self._fetches: set[Future[Step]] = set()

    @property
    def attempt(self) -> int:
        """Number of the registered attempt; 0 before :meth:`start` and on ranks other than 0."""
        return self._progress.attempt

    @property
    def is_closed(self) -> bool:
        """:meth:`close` was called, or its ``with`` block was left."""
        return self._stop.is_set()

    @property
    def step(self) -> int:
        """The last step that is acknowledged as trained, or that :meth:`load_state_dict` has set; 0 at the beginning.
        It is the policy version of a trainer that begins, or goes on, there."""
        return self._progress.place.step

    def start(self, resume_step: int | None = None, *, settings: Mapping[str, Any] | None = None) -> None:
        """Begins an attempt: from here on an older trainer of this run is fenced. :meth:`steps` calls it if nobody did.

        `resume_step` is the last step that the trainer's state contains; None: what :meth:`load_state_dict` set, or 0.
        `settings` is what the trainer trains with, in types of msgpack, for the run's history and its archive.
        """
        if self._is_started:
            return
        if settings is not None:
            try:
                self._progress.settings = read_only("start: settings", settings)
            except InvalidRollout as error:
                raise InvalidArgument(str(error)) from None
        if resume_step is not None:
            resume_step = whole_number("start: resume_step", resume_step, low=0)
        self._refusals.waited_out(lambda: self._progress.begin(resume_step), self.timeout_seconds)
        # A write on every rank: where the server takes none, all of them wait here, and none in an exchange.
        self._refusals.waited_out(self._say_alive, self.timeout_seconds)
        self._is_started = True
        self._heart = threading.Thread(target=self._beat, name="rlbuffer-heartbeat", daemon=True)
        self._heart.start()

    def steps(
        self, start: int | None = None, *, last: int | None = None, until: Callable[[], bool] | None = None
    ) -> Iterator[Step]:
        """Yields step after step, from `start` (default: the one after the last trained) to `last`, or until the caller
        stops.

        Asking for the next step acknowledges the last one as trained. A caller that stops earlier calls
        :meth:`trained`. While it waits for a step it asks `until` about once a second, and ends when that says True: so
        a signal handler need only leave a note. It ends as well when the run has ended (`has_ended`): every env is
        done, and everything is trained.

        Raises:
            BatchTimeout: no step came within `timeout_seconds`; the message says what the batcher waits for, or why the
                server refuses.
            ServerUnreachable: the server stayed away for so long.
            BatcherFailed: the batcher stopped with a fatal error.
            RunGone: the run is not on the server any more, or was rewound.
            StepRetired: the step was trained, checkpointed and removed; resume from a newer checkpoint.
            AttemptFenced: a newer attempt has taken over.
        """
        function("steps: until", until)
        start = None if start is None else whole_number("steps: start", start, low=1)
        last = None if last is None else whole_number("steps: last", last, low=0)
        self.start(None if start is None else start - 1)
        if self.rank == 0 and self._store.policy().version < 0:
            self.announce(PolicyVersion(version=self._progress.place.step))
        number = self._progress.place.step + 1 if start is None else start
        self._is_stopped = False
        self._progress.lets_go()
        if last is not None and number > last:
            return
        for step in self.given(number, until=until):
            yield step
            if step.number > self._progress.place.step and not self._progress.is_postponed(step.number):
                self.trained(step)
            if step.number == last:
                return

    def given(self, number: int, *, until: Callable[[], bool] | None = None) -> Iterator[Any]:
        """Yields step after step from `number` on, as :meth:`steps` does, and acknowledges nothing."""
        fetch = self._fetch(number)
        try:
            while True:
                try:
                    step = self._await(number, fetch.future, until)
                    if not self._may_have(step, until):
                        fetch = self._fetch(number)
                        continue
                except NotAwaited:
                    return
                fetch = self._fetch(number + 1)
                self._tell_alone(step.header)
                self._given = step.header
                yield step
                number = step.number + 1
        finally:
            fetch.abandon()

    def pull(self, number: int) -> Step:
        """Pulls one step, waiting for it as :meth:`steps` does; acknowledges nothing.

        Raises:
            NotFound: the run has ended before this step.
        """
        number = whole_number("pull: number", number, low=1)
        self.start()
        fetch = self._fetch(number)
        try:
            step: Step = self._await(number, fetch.future)
            self._tell_alone(step.header)
            return step
        except NotAwaited:
            raise NotFound(f"run {self._store.run!r} has ended: there will be no step {number}.") from None
        finally:
            fetch.abandon()

    def _tell_alone(self, header: StepHeader) -> None:
        """Warns once of each env whose groups are one rollout each and teach nothing, as the leader judges, too: it
        knows what the loss needs. A server that is away is met again by what needs it."""
        new = {env for env, amounts in header.envs.items() if amounts["groups"] == amounts["rollouts"]} - self._alone
        if self.rank or not new:
            return
        self._alone |= new
        with suppress(RlbufferError):
            messages = {env: text for env, text in alone(header, self._store.meta().config).items() if env in new}
            steps = last_steps(self._store.history(READ_RECORDS)) if messages else ()
            flat = max((r.get("flat") or 0 for r in steps if r.get("step") == header.step), default=0)
            for text in messages.values() if flat >= sum(header.envs[env]["groups"] for env in messages) else ():
                _log.warning("%s", text)

    def still_there(self, step: Step) -> bool:
        """True when the server has `step`, which this rank was given; False also while the server is away.

        For a trainer that knows of a rank without the step, so that nobody trains it yet. When the server has lost it,
        this rank lets go of it, and the batcher may commit another one in its place.
        """
        if not isinstance(step, Step):
            raise InvalidArgument(f"still_there: expected a Step, got {shown(step)}")
        return self._progress.still_there(step.number, step.digest)

    def trained(self, step: Step | int) -> None:
        """Acknowledges `step` (or the step of that number) as trained.

        Its rollouts move from packed to trained, and the next may be committed. :meth:`steps` does it when the next
        step is asked for. A server that takes no writes for now (a full disk, a failover) hears it as soon as it does.

        Raises:
            AttemptFenced: a newer attempt has taken over.
            NotFound: no step of this number is committed.
            StepRetired: it was retired.
        """
        self._raise_fault()
        if not isinstance(step, Step):
            step = whole_number("trained: step", step, low=1)
        if isinstance(step, Step):
            header: StepHeader | None = step.header
        elif self._given is not None and self._given.step == step:
            header = self._given
        else:
            header = self._store.wait_step(step, block_seconds=0.0)
        if header is None:
            last = self._store.meta().step
            raise NotFound(f"run {self._store.run!r} has no step {step}: the last committed one is {last}.")
        place = remembered(header.step, header.digest, header.group_ids, header.envs)
        self._refusals.told_later(lambda: self._progress.trained(place, epoch=header.epoch))

    def postpones(self, step: Step) -> None:
        """Says that `step` is trained, and that :meth:`trained` follows later: asking for the next step does not
        acknowledge it. Steps are acknowledged in their order.

        For a trainer whose version of the step is still being written: what it has acknowledged is announced. The
        step stays in hand meanwhile, beside the next one, should the server lose it.
        """
        if not isinstance(step, Step):
            raise InvalidArgument(f"postpones: expected a Step, got {shown(step)}")
        self._progress.postpones(step.number, step.digest)

    def acknowledge(self, steps: Sequence[TrainedStep], *, epoch: int) -> None:
        """Acknowledges several steps as trained, as :meth:`trained` does one. Of a stream."""
        self._raise_fault()
        if steps:
            self._refusals.told_later(lambda: self._progress.trained(*steps, epoch=epoch))

    def holds(self, steps: Sequence[TrainedStep]) -> None:
        """The steps that a stream's trainer was given and has not acknowledged, the first one first."""
        self._progress.held = tuple(steps)

    def checkpointed(self, step: Step | int, *, oldest_kept: int | None = None) -> None:
        """Says that a checkpoint of `step` exists; steps up to `oldest_kept` (default `step`) may be retired.

        Raises:
            AttemptFenced: a newer attempt has taken over.
        """
        self._raise_fault()
        number = step.number if isinstance(step, Step) else whole_number("checkpointed: step", step, low=0)
        oldest = number if oldest_kept is None else whole_number("checkpointed: oldest_kept", oldest_kept, low=0)
        self._progress.oldest_kept = max(self._progress.oldest_kept, oldest)
        self._progress.checkpoint = number
        self._refusals.told_later(self._progress.report)

    def announce(self, version: PolicyVersion) -> bool:
        """The same as :meth:`rlbuffer.client.buffer.Policy.announce`, repeated to a server that has lost writes."""
        if not isinstance(version, PolicyVersion):
            raise InvalidArgument(f"announce: expected a PolicyVersion, got {shown(version)}")
        return self._progress.announce(version)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Keeps what the trainer measured in a step, for the archive: ``step``, ``digest`` and figures by name.

        `rlbuffer train` sends each line of ``metrics.jsonl``. Of several records of a step the last one counts.
        """
        if not isinstance(record, Mapping):
            raise InvalidArgument(f"add_record: expected a mapping of figures, got {shown(record)}")
        self._store.add_record(record)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint must keep to continue the same sequence of steps."""
        return self._progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the step that `state` was taken at. Before :meth:`start`.

        Raises:
            CheckpointError: `state` is not what :meth:`state_dict` of a reader has given.
            RlbufferError: the reader has begun already.
        """
        if self._is_started:
            raise RlbufferError(
                f"load_state_dict: the reader has begun already, at step {self.step}: load the state before its first "
                "step"
            )
        self._progress.load_state_dict(state)

    def is_trained(self) -> bool:
        """True when the run has the last trained step of this reader, as it was trained: nothing was lost since, nor
        taken back. Begins no attempt."""
        return self._progress.is_known()

    def waits(self, waiting: Waiting | None) -> None:
        """What the rank waits for beside its steps, which its heartbeat says; None: nothing any more."""
        self._held = waiting

    def finished(self) -> None:
        """Says that the trainer has made its last step: the run has ended, `rlbuffer serve` says so, and workers leave
        with success.

        A reader in a ``with`` block says it when the block is left without an exception, and not behind a ``steps``
        that `until` has ended. Rank 0's counts. A trainer that is started later takes it back: the run goes on, with
        workers that are started then. A server that is away or refuses hears it from the next heartbeat.

        Raises:
            AttemptFenced: a newer attempt has taken over.
        """
        self._raise_fault()
        self._progress.is_finished = True
        with suppress(ServerUnreachable):
            self._refusals.told_later(self._progress.report)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._is_started and not self._is_stopped:
                self.finished()
        finally:
            self.close()

    def close(self) -> None:
        """Stops the prefetch and the heartbeat; acknowledges nothing. Does not wait for a server that is away."""
        self._stop.set()
        wait(tuple(self._fetches), timeout=2 * READER_BLOCK_SECONDS)
        if self._heart is not None:
            self._heart.join(timeout=4 * HEARTBEAT_SECONDS)

    # -- waiting ---------------------------------------------------------------------------------------------------
    def _fetch(self, number: int) -> Fetch:
        if not self._is_started or self._stop.is_set():
            raise RlbufferError(CLOSED)
        is_abandoned = threading.Event()
        fetch = Fetch(begun(partial(self._pull, number, is_abandoned), "rlbuffer-prefetch"), is_abandoned)
        self._fetches.add(fetch.future)
        fetch.future.add_done_callback(self._fetches.discard)
        return fetch

    def _await(self, number: int, future: Future[Any], until: Callable[[], bool] | None = None) -> Any:
        """The prefetched step; the time allowed counts from the asking, not from when the prefetch began."""
        deadline = time.monotonic() + self.timeout_seconds
        long = LongWait(self._store)
        try:
            while not wait([future], timeout=min(READER_BLOCK_SECONDS, max(0.0, deadline - time.monotonic()))).done:
                self._go_on(number, until)
                if time.monotonic() >= deadline:
                    refusal = self._refusals.current
                    seconds = self.timeout_seconds
                    raise BatchTimeout(
                        refused_for(seconds, refusal) if refusal else no_batch(self._store, number, seconds)
                    )
                if self.rank == 0 and self.warns:
                    long.warn(f"step {number}")
                self._waiting = Waiting(kind=Wait.STEP, step=number)
            self._raise_fault()
            step = future.result()
        except CancelledError:
            raise RlbufferError(f"{CLOSED} while it waited for step {number}") from None
        finally:
            self._waiting = None
        return step

    def _may_have(self, step: Any, until: Callable[[], bool] | None) -> bool:
        """True when the caller gets the step: the server had it when rank 0 got it. False: it is to be pulled again."""
        if self.rank == 0:
            return self._refusals.waited_out(
                lambda: self._progress.takes(step.number, step.digest), self.timeout_seconds
            )

        def check() -> str:
            self._go_on(step.number, until)
            return self._refusals.current

        return self._rank_0.has(step.number, step.digest, silence_seconds=self.timeout_seconds, check=check)

    def _go_on(self, number: int, until: Callable[[], bool] | None) -> None:
        """Raises when there is no use in waiting for the step any more."""
        self._raise_fault()
        if self._stop.is_set():
            raise RlbufferError(f"{CLOSED} while it waited for step {number}")
        if until is None:
            self._check_run(number)
            return
        self._until = threading.get_ident(), until
        try:
            self._ask_until()
            self._check_run(number)
        finally:
            self._until = None

    def _ask_until(self) -> None:
        """Raises NotAwaited in a loop's thread whose `until` says so."""
        if self._until is not None and self._until[0] == threading.get_ident() and self._until[1]():
            self._is_stopped = True
            raise NotAwaited

    def _held_up(self, error: RlbufferError) -> None:
        """A call waits for the server. Raises where nobody needs it any more."""
        if self._stop.is_set():
            raise error
        self._ask_until()

    def _check_run(self, number: int) -> None:
        """Every rank looks for itself: rank 0 would say it only in an exchange that the others do not come to."""
        meta = self._progress.check_run()
        if self.rank:
            self._rank_0.check(number, meta.step)
        check_feeds(self._store.run, meta, self._feeds)
        if meta.error:
            raise BatcherFailed(f"the batcher of run {self._store.run!r} failed: {meta.error}")
        self.has_ended = meta.ended is not None and number > meta.step and self._store.has_ended()
        if self.has_ended:
            raise NotAwaited

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._progress.report()
                self._say_alive()
                self._look_at_the_others()
                self._refusals.are_over()
            except ServerUnreachable:
                # The server is away: the next beat tries again, and whoever needs it waits with a message of its own.
                continue
            except ServerRefused as error:
                self._refusals.note(error)
            except RlbufferError as error:
                # A newer attempt, or a run that is gone or was rewound: no step can come any more.
                self._fault = error
                return
            except Exception as error:  # without its heartbeat the rank must not go on, and whoever waits must hear why
                self._fault = RlbufferError(
                    f"the heartbeat of rank {self.rank} failed: {type(error).__name__}: {error}"
                )
                self._fault.__cause__ = error
                return

    def _say_alive(self) -> None:
        ours = {"step": self._progress.place.step, "world_size": self.world_size}
        record = ours | identity() | self._can.record()
        if (waiting := self._held or self._waiting) is not None:
            record["waiting"] = waiting.record()
        if (damage := self._damage) is not None and self.step < damage.step + DAMAGE_SHOWN_STEPS:
            record["problems"] = [damage.record()]
        self._store.heartbeat("rank", str(self.rank), record)

    def _look_at_the_others(self) -> None:
        beats = self._store.heartbeats("rank") if self._skew.watches else {}
        if wrong := self._skew.fault(self.step, beats, now=time.monotonic()):
            _log.warning("run %s: %s", self._store.run, wrong)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # -- pulling ---------------------------------------------------------------------------------------------------
    def _pull(self, number: int, is_abandoned: threading.Event) -> Any:
        """The step. A server that is away is waited for: whoever asks for the step waits no longer than it wants to."""
        while True:
            try:
                return self._pulled(number, is_abandoned)
            except ServerUnreachable:
                if self._stop.wait(REFUSAL_PAUSE_SECONDS):
                    raise

    def _pulled(self, number: int, is_abandoned: threading.Event) -> Any:
        missed = ""
        while True:
            if self._stop.is_set() or is_abandoned.is_set():
                raise RlbufferError(f"{CLOSED} while it waited for step {number}")
            try:
                header = self._store.wait_step(number, block_seconds=READER_BLOCK_SECONDS)
            except StepRetired:
                if not self._progress.is_going_back(number):
                    raise
                self._stop.wait(0.1)
                continue
            if header is None:
                continue
            try:
                part = self._source.part(header)
                break
            except NotFound:
                # The server has lost the step between the two reads, or has it again after a rollback that undid its
                # retirement. A step that has no part the second time either is damaged.
                again = self._store.wait_step(number, block_seconds=0.0)
                if again is not None and again.digest == header.digest == missed:
                    raise
                missed = header.digest
        step, damaged = self._source.step(header, part)
        if damaged:
            self._damage = damage_of(number, damaged)
            _log.warning("rank %d leaves out %s", self.rank, left_out(number, damaged))
            names = [f"{ref.group_id} {ref.info.rollout_id}" for ref, _ in damaged]
            self._refusals.waited_out(lambda: self._store.count_damaged(number, names), self.timeout_seconds)
        return step


def check_feeds(run: str, meta: Meta, feeds: str) -> None:
    """Raises ConfigError where the run's steps are for another kind of reader: of ranks, or of a stream."""
    kind = meta.config.get("feeds", "ranks")
    if not meta.config or kind == feeds:
        return
    raise ConfigError(
        f"run {run!r} feeds a stream (batcher.feeds), which has no rows for ranks: read it with `buffer.stream()`"
        if kind == "stream"
        else f"run {run!r} plans rows for ranks (batcher.feeds = {kind!r}), so it has no stream of groups: read it "
        f"with `buffer.reader()`, or begin another run with batcher.feeds = 'stream'",
        setting="batcher.feeds",
    )
