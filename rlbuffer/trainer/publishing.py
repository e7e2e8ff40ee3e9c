"""The policy versions that samplers get: which are published, and how one is written while the next step trains.

A version is all of the policy's weights, or with LoRA the adapter beside a base that is written once. The trainer only
announces. Workers find out how good a version is: they evaluate announced versions (``[eval.NAME]``), so that no rank
ever waits for an evaluation.

A trainer of the user's own publishes its model through :mod:`rlbuffer.weights.publishing`, and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from rlbuffer.errors import RlbufferError
from rlbuffer.process.room import lack_of_room
from rlbuffer.process.stages import Stages
from rlbuffer.process.threads import begun
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer.model.lora import adapter_config, adapter_state
from rlbuffer.trainer.ranks.room import NoRoom
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.weights.companions import companions
from rlbuffer.weights.files import publish as publish_model
from rlbuffer.weights.files import publish_adapter
from rlbuffer.weights.model import config_of, narrow_dtype
from rlbuffer.weights.places import announced, kept_versions
from rlbuffer.weights.publishing import announce, is_due, weights_folder
from rlbuffer.weights.state import detached, is_sharded, model_state

LEAVE_SECONDS = 5.0
"""Time that a version which is on its way has left when something else ends this rank. A killed one has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that was announced."""

    version: int
    seconds: Mapping[str, float]
    """By stage: ``gather``, in which all ranks take part and training stands still; then ``write``, ``hash``,
    ``delta``, ``flush`` and ``announce``, beside the next step."""


class Publishing:
    """The versions of a trainer. At most one is on its way. ::

        idle --publish, after_step--> gathered --(rank 0's thread)--> written -> announced -> its step acknowledged
        any of these --finish--> idle      # waits for the thread, and raises what it has raised
        no room for it --finish, look--> gathered      # the copy is still there: it is written again

    All ranks make the same calls: ``publish`` and ``after_step`` gather, ``finish`` waits. The next publication, the
    next step's end, a checkpoint and the end of training call it. So a step is acknowledged behind the announcement of
    its version, and in order, and nobody downstream sees another one. Rank 0 alone has something on its way; it keeps
    a copy of what is published until then: 2 bytes a parameter in bfloat16.

    A process that is killed leaves a folder with a temporary name, or a version that nobody has announced. The next one
    resumes from its checkpoint, and trains and publishes what follows as after any kill. Where a newer attempt has
    taken over, or the run was rewound, the server refuses the announcement, and ``finish`` raises what it says.
    """

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
        self._is_settled = True
        """On all ranks alike: nothing was begun since the last `finish`."""
        self._work: Callable[[], None] | None = None
        """What rank 0 has to write, announce and acknowledge."""
        self._way: Future[None] | None = None
        """The thread that does."""
        batcher = session.settings.batcher
        ages = [batcher.max_age, *(env.max_age for env in batcher.envs.values())]
        self._next_waits = batcher.lookahead == 0 or 0 in ages
        """The next step cannot come before this one's version: nothing is gained beside it, and ranks that waited in
        their reader would give up on a disk that is full for longer."""
        self._no_room = NoRoom(session.settings.output_dir, session.reader)
        self.newest: Published | None = None
        """The version that was announced last; on rank 0."""

    def __enter__(self) -> Publishing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error a version may be on its way; what ends this rank is said, and not what becomes of that."""
        if self._way is not None:
            wait([self._way], timeout=LEAVE_SECONDS)

    def after_step(self, step: Step) -> None:
        """A step was trained. Its version is published at every ``publish.every``, at the end, and where it is waited
        for; the step is acknowledged behind that."""
        self.finish()
        settings, header = self._session.settings.trainer, step.header
        if step.number % settings.publish.every == 0 or step.number == settings.steps:
            self._begin(step.number, step=step)
        elif header.waiting_for_version is not None:
            # Nothing that could be sampled with an older one would still be young enough for the next step.
            self._begin(step.number, step=step, unless=header.waiting_for_version)
        else:
            self._session.reader.trained(step)
        if self._next_waits:
            self.finish()

    def publish(self, version: int) -> None:
        """Publishes a version, unless samplers have it, or a newer one."""
        self.finish()
        self._begin(version)

    def finish(self) -> None:
        """Waits until nothing is on its way; while a disk takes nothing all ranks wait together.

        Raises:
            RlbufferError: the version could not be written or announced, or its step not acknowledged; asked to stop
                while there was no room for it.
        """
        if not self._is_settled:
            self._session.when_there_is_room(self._join)
            self._is_settled = True

    def has_failed(self) -> bool:
        """Asked again and again while rank 0 waits for a step, which may be waiting for this very version. -> True: it
        will not come, and :meth:`check` says why.

        One for which there was no room is written again.
        """
        if self._way is None or not self._way.done():
            return False
        error = self._way.exception()
        if error is None:
            self._has_room()
            return False
        if not isinstance(error, OSError | RlbufferError) or not lack_of_room(error):
            return True
        self._no_room.since(error)
        self._way = self._started()
        return False

    def check(self) -> None:
        """Raises what the thread has raised, unless it is tried again."""
        if self.has_failed() and self._way is not None:
            self._way.result()

    # -- on its way ---------------------------------------------------------------------------------------------------
    def _begin(self, version: int, *, step: Step | None = None, unless: int | None = None) -> None:
        session, took = self._session, Stages()
        self._is_settled = False
        write = None
        with took.measure("gather"):
            sharded = is_sharded(session.policy)
            if session.publishes and is_due(
                session.buffer.policy, version, ranks=session.ranks, is_sharded=sharded, unless=unless
            ):
                write = self._gathered(version)
        if write is not None:
            if step is not None:
                session.reader.postpones(step)
            self._work = partial(self._do, write, step, gather=took.seconds)
            self._way = self._started()
        elif step is not None:
            session.reader.trained(step)

    def _gathered(self, version: int) -> Callable[..., PolicyVersion] | None:
        """What writes the policy as it is now, given what counts its stages. Sharded: all ranks must call it. None on
        all but rank 0."""
        session = self._session
        settings, policy = session.settings, session.policy
        lora = settings.trainer.lora.is_used
        dtype = narrow_dtype(settings.model)
        state = model_state(policy, inside="model", dtype=None if lora else dtype, only_trained=lora)
        if not session.is_first:
            return None
        state = detached(state if session.base is None else adapter_state(state), policy)
        folder, keep = weights_folder(settings), kept_versions(settings)
        beside = companions(settings.model.path, settings.trainer.lora.path)
        if session.base is None:
            return partial(
                publish_model,
                folder,
                version,
                state=state,
                config=config_of(policy.model, dtype=dtype),
                keep=keep,
                beside=beside,
                with_delta=bool(settings.weights.url),
            )
        located = replace(session.base, location=announced(settings, session.base.location))
        return partial(
            publish_adapter,
            folder,
            version,
            state=state,
            config=adapter_config(policy.model, base=located.location),
            base=located,
            keep=keep,
            beside=beside,
        )

    def _started(self) -> Future[None] | None:
        return None if self._work is None else begun(self._work, "rlbuffer-publishing")

    def _do(self, write: Callable[..., PolicyVersion], step: Step | None, *, gather: Mapping[str, float]) -> None:
        """In the thread. Where it has failed it may be done again from the start."""
        session, took = self._session, Stages()
        written = write(took=took)
        with took.measure("announce"):
            announce(session.buffer.policy, session.settings, written)
        if step is not None:
            session.reader.trained(step)
        self.newest = Published(version=written.version, seconds={**gather, **took.seconds})

    def _join(self) -> None:
        """Waits for the thread, and raises what it has raised; called again after that, it lets it begin again."""
        way, self._way = self._way or self._started(), None
        if way is not None:
            way.result()
            self._has_room()
        self._work = None

    def _has_room(self) -> None:
        if self._no_room.waiting is not None:
            self._no_room.is_over()
            self._no_room.goes_on()
