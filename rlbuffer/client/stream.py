"""The trainer's side of a stream: committed groups, whole and in one order, for a trainer that packs for itself.

A stream's step is one group; its number is the group's place. ::

    stream = buffer.stream()
    stream.resume(state)                  # what the checkpoint holds; None: from what the server says is trained
    stream.version(0)                     # these weights can be sampled from
    for taken in stream:                  # as many may be held at once as an update takes
        batch += samples_of(taken)
        if is_full(batch):
            update(batch)
            batch, updates = [], updates + 1
            stream.trained(taken.place)   # up to this place; what is left of the next one: part
            stream.version(updates)

    waiting -> taken -> trained           # or unused: given, and not trained
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import TracebackType
from typing import Any, ClassVar

from rlbuffer.client.arguments import names, text, whole_number
from rlbuffer.client.progress import remembered
from rlbuffer.client.reader import ANYTHING, Reader, check_feeds
from rlbuffer.client.refusals import Away
from rlbuffer.errors import CheckpointError, InvalidArgument, InvalidRollout, PayloadError, RlbufferError
from rlbuffer.packing.further_columns import specs_of
from rlbuffer.process.garbage_collection import without_garbage_collection
from rlbuffer.records.checks import as_integer, shown
from rlbuffer.records.policy_version import MAX_LABEL, PolicyVersion
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.payloads import Trainable, read_rollouts
from rlbuffer.store.records import Meta, NotTrained, PartRollout, TrainedStep
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire import payload

SPARE_LABELS = 2
"""Labels that are kept beyond those of versions that may still train: of the newest, and of one that is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """One group of a stream, as the trainer is given it."""

    place: int
    """Place in the stream, from 1: the same group stands there whenever it is asked for."""
    group_id: str
    env: str
    """Named source of tasks."""
    prompt_id: str
    """Name of the prompt that the rollouts share."""
    adapter: str
    """LoRA adapter that sampled them; "" is all weights."""
    rollouts: tuple[Rollout, ...]
    """As they were pushed: with all sequences, columns, attachments and metadata."""
    advantages: tuple[float, ...]
    """One for each of `rollouts`, by the env's estimator; a column ``advantages`` of a rollout wins over it."""
    answer: Any
    """Reference answer of the group."""
    metadata: Mapping[str, Any]
    """The group's own."""
    version: int
    """Policy version that the trainer had announced last when the group was committed."""
    age: int
    """Policy versions between the oldest one that sampled it and `version`."""
    part: int = 0
    """Samples of it that are trained already, as :meth:`Stream.trained` was told before the checkpoint."""
    damaged: tuple[str, ...] = ()
    """Ids of rollouts that were missing or damaged, and so are not among `rollouts`."""
    header: StepHeader = field(repr=False)
    """The step as it was committed."""

    @property
    def number(self) -> int:
        """Number of the step: the place."""
        return self.place

    @property
    def digest(self) -> str:
        """SHA-256 of the step, chained on that of the place before."""
        return self.header.digest


@dataclass(slots=True, kw_only=True)
class _Held:
    """A group that was taken, until it is acknowledged."""

    header: StepHeader
    rollouts: Mapping[str, NotTrained]
    """Rollout -> what is told of it where it is not trained."""
    unused: set[str] = field(default_factory=set)

    def step(self) -> TrainedStep:
        """The group as it is acknowledged."""
        header = self.header
        unused = {rollout_id: self.rollouts[rollout_id] for rollout_id in sorted(self.unused)}
        return remembered(header.step, header.digest, header.group_ids, header.envs, unused)


class GroupPull:
    """Reads the groups of a stream; several threads may."""

    def __init__(self, store: Viewer, can: Trainable) -> None:
        self._store, self._can = store, can

    def part(self, header: StepHeader) -> StepPart:
        """The only part of a stream's step. Raises NotFound: the server has it no more."""
        (part,) = self._store.read_parts(header.step, [0])
        return part

    @without_garbage_collection()
    def step(self, header: StepHeader, part: StepPart) -> tuple[Taken, list[tuple[PartRollout, str]]]:
        """The group; and the rollouts that cannot be trained, each with the reason."""
        schema = specs_of(header.columns)
        refs = [*part.rollouts]
        read = dict(enumerate(read_rollouts(self._store, refs, schema, self._can)))
        rollouts: dict[int, list[TokenSequence]] = {}
        damaged: dict[int, tuple[PartRollout, str]] = {}
        for ref, sequence in read.values():
            if isinstance(sequence, str):
                damaged.setdefault(ref.number, (ref, sequence))
            else:
                rollouts.setdefault(ref.number, []).append(sequence)
        sound = {number: _whole(records) for number, records in rollouts.items() if number not in damaged}
        first = refs[0]
        credit = {ref.number: ref.advantage for ref in refs}
        answer, metadata = self._of_group(first.payload_key)
        version = version_trained(header.adapters, first.adapter, header.step)
        taken = Taken(
            place=header.step,
            group_id=first.group_id,
            env=first.env,
            prompt_id=first.prompt_id,
            adapter=first.adapter,
            rollouts=tuple(sound.values()),
            advantages=tuple(credit[number] for number in sound),
            answer=answer,
            metadata=metadata,
            version=version,
            age=version - min(ref.info.min_version for ref in refs),
            damaged=tuple(ref.info.rollout_id for ref, _ in damaged.values()),
            header=header,
        )
        return taken, [*damaged.values()]

    def _of_group(self, key: str) -> tuple[Any, Mapping[str, Any]]:
        """Nothing trains on an answer: a damaged one is shown as missing, as the group's view does."""
        (data,) = self._store.read_group_payloads([key])
        try:
            return (None, {}) if data is None else payload.decode_group_payload(data)
        except PayloadError:
            return None, {}


def _whole(sequences: Sequence[TokenSequence]) -> Rollout:
    first, *further = sequences
    if not isinstance(first, Rollout):
        raise PayloadError("a rollout of a stream lacks its first sequence")
    return replace(first, further=tuple(further)) if further else first


class Stream:
    """The groups of a run, for one trainer that packs for itself. Made by
    :meth:`rlbuffer.client.buffer.Buffer.stream`; safe from several threads, of which one iterates.

    The run's settings have ``[batcher] feeds = "stream"``. Policy versions count what the trainer announces with
    :meth:`version`, so an update may take as many groups as it likes. A stream that nobody closes ends with its
    process. While the server is away its methods wait as those of a :class:`rlbuffer.client.reader.Reader` do.

    Example:
        The batcher and the worker are in this process, too.

        >>> import threading, rlbuffer
        >>> from rlbuffer.daemon import Daemon
        >>> from rlbuffer.testing import make_group
        >>> buffer = rlbuffer.connect("memory://", run="stream")
        >>> daemon = Daemon(buffer, rlbuffer.BatcherConfig(64, feeds="stream"))
        >>> batcher = threading.Thread(target=daemon.run, args=(threading.Event(),), daemon=True)
        >>> batcher.start()
        >>> stream = buffer.stream(timeout_seconds=30.0)
        >>> stream.resume()
        >>> stream.version("initial")
        0
        >>> writer = buffer.writer("worker-0")
        >>> for seed in range(3):
        ...     pushed = writer.push(make_group(env="math", seed=seed, size=2))
        >>> writer.version("initial")
        0
        >>> writer.done("math")
        >>> for taken in stream:
        ...     print(taken.place, taken.group_id, [rollout.length for rollout in taken.rollouts], taken.age)
        ...     stream.trained(taken.place, unused=[taken.rollouts[0].rollout_id] if taken.place == 2 else [])
        1 math.0 [28, 23] 0
        2 math.1 [19, 20] 0
        3 math.2 [28, 14] 0
        >>> account = buffer.ledger().envs["math"]
        >>> account.trained[0], account.dropped["unused"][0]
        (5, 1)
        >>> stream.close()
        >>> _ = batcher.join(), buffer.close()
    """

    BEGINNING: ClassVar[Mapping[str, Any]] = {
        "part": 0,
        "unused": [],
        "version": -1,
        "reader": {"step": 0, "epoch": 0, "digest": "", "steps": []},
    }
    """The state of a trainer whose weights are fresh: it is given the groups from the first one on, also where an
    earlier start, of which no checkpoint is left, has trained some."""

    def __init__(self, store: TrainerStore, *, timeout_seconds: float, can: Trainable = ANYTHING) -> None:
        self._store = store.patient(max(store.patience_seconds, timeout_seconds), on_retry=Away("the stream"))
        self.reader = Reader(
            store, rank=0, world_size=1, timeout_seconds=timeout_seconds, can=can, source=GroupPull(store, can)
        )
        """What pulls, beats and reports for it."""
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._is_resumed = False
        self._next = 1
        self._part, self._part_unused = 0, frozenset[str]()
        self._place = 0
        self._version, self._labels = -1, dict[str, int]()
        self._label: str | None = None
        """The newest version's, where this process has announced it."""

    @property
    def place(self) -> int:
        """The last place that is acknowledged as trained; 0 at the beginning."""
        return self._place

    @property
    def has_ended(self) -> bool:
        """The run has ended: every env was done, and the last group was trained. Iterating stops then."""
        return self.reader.has_ended

    def resume(self, state: Mapping[str, Any] | None = None) -> None:
        """Begins an attempt of the trainer behind what `state` says; an older trainer of the run is fenced.

        `state` is what :attr:`Stream.state` was when the checkpoint was written: then the stream gives the same groups
        again as after it. :attr:`Stream.BEGINNING` is that of fresh weights. None: it goes on behind what the
        server says is trained, whatever weights those groups are in; it knows no step of before, so when the server
        loses such a step it ends with ResumeRefused, and nothing is given twice unseen. Iterating resumes with None if
        nobody did.

        Raises:
            RlbufferError: it was resumed already.
            CheckpointError: `state` is another thing.
            ConfigError: the run plans rows for ranks.
            ResumeRefused: the run does not reach to that place.
            ResumeRetired: groups behind that place were removed from the server.
        """
        if self._is_resumed:
            raise RlbufferError("the stream is resumed already: make another one to begin again")
        check_feeds(self._store.run, self._store.meta(), "stream")
        if state is None:
            trainer = self._store.trainer()
            self.reader.start(resume_step=trainer.trained)
        else:
            part, unused, version = _checked(state)
            self.reader.load_state_dict(state["reader"])
            self.reader.start()
            self._part, self._part_unused, self._version = part, unused, version
        self._place = self.reader.step
        self._next = self._place + 1
        there = self._store.policy()
        self._version, self._labels = max(self._version, there.version), dict(there.labels)
        self._is_resumed = True

    def __iter__(self) -> Iterator[Taken]:
        """Yields group after group, each once, behind the last one that was taken. Acknowledges nothing.

        Ends when the run has ended.

        Raises:
            BatchTimeout: no group came within `timeout_seconds`; the message says what the batcher waits for.
            BatcherFailed: the batcher stopped with a fatal error.
            RunGone: the run is not on the server any more, or was rewound.
            StepRetired: the group was trained, checkpointed and removed; resume from a newer checkpoint.
            AttemptFenced: a newer attempt has taken over.
        """
        if not self._is_resumed:
            self.resume()
        for taken in self.reader.given(self._next):
            held = _Held(header=taken.header, rollouts={held.rollout_id: _told(held) for held in taken.rollouts})
            is_first, part = taken.place == self._place + 1, self._part
            if is_first and part:
                taken = replace(taken, part=part)
                held.unused.update(self._part_unused & held.rollouts.keys())
            with self._lock:
                self._held[taken.place] = held
                self._next = taken.place + 1
                self.reader.holds(tuple(held.step() for _, held in sorted(self._held.items())))
            yield taken

    def trained(self, place: Taken | int, *, part: int = 0, unused: Iterable[str] = ()) -> None:
        """Acknowledges the groups up to `place` (or up to that group) as trained, and `part` samples of the one behind
        it.

        What a sample is, is the trainer's: a checkpoint that is taken now remembers the number, and the group comes
        again with it after a resume. `unused` are ids of rollouts of groups that are taken and not acknowledged yet,
        those up to `place` included: they were given and not trained, and are dropped with that reason when their group
        is acknowledged. A place that is acknowledged already stays so.

        A server that takes no writes for now (a full disk, a failover) hears it as soon as it does.

        Raises:
            InvalidArgument: an argument is of another kind, `place` was not taken, or an id of `unused` is in no group
                that waits for its acknowledgement, or in several.
            AttemptFenced: a newer attempt has taken over.
        """
        place, part = _place("trained: place", place), whole_number("trained: part", part, low=0)
        unused = names("trained: unused", unused)
        with self._lock:
            if place >= self._next:
                raise InvalidArgument(f"trained: place {place} was not taken: the last one is {self._next - 1}")
            for rollout_id in unused:
                self._holder(rollout_id).unused.add(rollout_id)
            done = [self._held.pop(number) for number in sorted(self._held) if number <= place]
            if place >= self._place:
                self._part, self._part_unused = part, frozenset()
            self._place = max(self._place, place)
            steps = [held.step() for held in done]
            self.reader.holds(tuple(held.step() for _, held in sorted(self._held.items())))
            self.reader.acknowledge(steps, epoch=max([held.header.epoch for held in done], default=0))

    def version(self, label: str | int) -> int:
        """Says that the trainer's weights of this name can be sampled from. -> the run's version of them.

        The run's versions count these calls, over all attempts: a trainer that counts its own from 0 after each start
        gets new ones. Named again while they are the newest, they are the same version. Producers ask for the version
        of a label with :meth:`rlbuffer.client.writer.Writer.version`; labels are kept for ``max_age`` + 2 versions.

        Raises:
            AttemptFenced: a newer attempt has taken over.
            InvalidArgument: the label is neither a string of at most 64 characters nor an integer.
        """
        name = _label(label)
        if not self._is_resumed:
            self.resume()
        with self._lock:
            if name == self._label:
                return self._version
            version = self._version + 1
            kept = _largest_max_age(self._store.meta()) + SPARE_LABELS
            labels = {other: label for other, label in self._labels.items() if label > version - kept and other != name}
            self._labels, self._label, self._version = labels | {name: version}, name, version
            self.reader.announce(PolicyVersion(version=version, labels=self._labels))
            return version

    @property
    def state(self) -> dict[str, Any]:
        """The state that a checkpoint must keep, as JSON types: give it to :meth:`resume`."""
        with self._lock:
            held = self._held.get(self._place + 1)
            unused = self._part_unused if held is None else held.unused
            return {
                "part": self._part,
                "unused": sorted(unused) if self._part else [],
                "version": self._version,
                "reader": self.reader.state_dict(),
            }

    def checkpointed(self, place: Taken | int | None = None, *, oldest_kept: int | None = None) -> None:
        """Says that a checkpoint holds the groups up to `place` (None: all that are acknowledged); those up to
        `oldest_kept` (default `place`) may be removed from the server.

        Raises:
            AttemptFenced: a newer attempt has taken over.
        """
        place = self._place if place is None else _place("checkpointed: place", place)
        self.reader.checkpointed(place, oldest_kept=oldest_kept)

    def finished(self) -> None:
        """Says that the trainer has made its last update: the run has ended, as :meth:`rlbuffer.Reader.finished` says.

        A ``with`` block says it when it is left without an exception."""
        self.reader.finished()

    def close(self) -> None:
        """Stops the prefetch and the heartbeat; acknowledges nothing."""
        self.reader.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.__exit__(kind, error, trace)

    def _holder(self, rollout_id: str) -> _Held:
        holders = [held for held in self._held.values() if rollout_id in held.rollouts]
        if len(holders) == 1:
            return holders[0]
        why = (
            f"{len(holders)} groups that are taken have a rollout of this id: give rollouts ids that are unique"
            if holders
            else "no group that is taken and not acknowledged has it"
        )
        raise InvalidArgument(f"trained: unused rollout {rollout_id!r}: {why}")


def _place(name: str, given: Taken | int) -> int:
    """Place of a group, or the place that is given itself. Raises InvalidArgument."""
    return given.place if isinstance(given, Taken) else whole_number(name, given, low=0)


def _label(given: str | int) -> str:
    if isinstance(given, bool) or not isinstance(given, str | Integral) or len(str(given)) > MAX_LABEL:
        what = f"a string of at most {MAX_LABEL} characters, or an integer"
        raise InvalidArgument(f"version: label: expected {what}, got {shown(given)}")
    return text("version: label", str(given))


def _checked(state: Any) -> tuple[int, frozenset[str], int]:
    """`part`, `unused` and `version` of what :attr:`Stream.state` was. Raises CheckpointError."""
    if not isinstance(state, Mapping) or (lacking := {"reader", "part", "unused", "version"} - state.keys()):
        what = shown(state) if not isinstance(state, Mapping) else f"one without {min(lacking)!r}"
        raise CheckpointError(f"resume: expected what `state` of a stream was, got {what}")
    try:
        part = as_integer("part", state["part"], low=0)
        version = as_integer("version", state["version"], low=-1)
        return part, frozenset(names("unused", state["unused"])), version
    except (InvalidRollout, InvalidArgument) as error:
        raise CheckpointError(f"resume: {error}: give what `state` of a stream was") from None


def _told(rollout: Rollout) -> NotTrained:
    """What is told of a rollout that is not trained."""
    spans = [span.policy_version for sequence in rollout.sequences for span in sequence.version_spans]
    tokens = sum(len(sequence.tokens) for sequence in rollout.sequences)
    return NotTrained(tokens=tokens, min_version=min(spans, default=0), reward=rollout.reward)


def _largest_max_age(meta: Meta) -> int:
    """The largest `max_age` of the run's settings; 1, the default, while no batcher has brought any."""
    config = meta.config
    of_envs = [env.get("max_age") for env in (config.get("envs") or {}).values()]
    return max([int(config.get("max_age", 1)), *(int(age) for age in of_envs if age is not None)])
