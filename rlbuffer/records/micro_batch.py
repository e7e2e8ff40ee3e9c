"""The micro-batches that a rank trains on.

A step's life: the batcher makes a :class:`StepPlan`, the store commits it, each rank's reader turns its part into a
:class:`Step` of :class:`MicroBatch` es.

The order of the fields that have no default is public: these records can be made by position, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidLoss, PackingError
from rlbuffer.records.checks import as_integer, shown
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.memory import empty
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import AdapterProgress, Normalizers, version_trained

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything that a trainer may want to know of a segment: of one rollout, or of one of its sequences."""

    rollout_id: str
    """Unique in its group."""
    group_id: str
    """Its group."""
    env: str
    """Named source of tasks."""
    reward: float | None
    """The whole reward."""
    rewards: Mapping[str, float]
    """Named components of the reward."""
    advantage: float
    """One number, broadcast to its trained tokens; where a column ``advantages`` has one each, their mean."""
    policy_versions: tuple[int, int]
    """(oldest, newest)."""
    answer: Any
    """Reference answer of its group."""
    prompt_tokens: int
    """Tokens before the first trained one."""
    length: int
    """Tokens of the segment."""
    adapter: str = ""
    """LoRA adapter that it trains; "" is all weights."""
    is_truncated: bool = False
    """Sampling ended at a length limit."""
    attachments: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False)
    """The sequence's own: named arrays of any shape. Empty where it is damaged."""
    sequence: int = 0
    """Place of the sequence in its rollout."""
    sequences: int = 1
    """Sequences of the rollout. They are packed each by itself, on any rank."""
    rollout: int = 0
    """Number of the rollout in its step, from 0: the same on all ranks and for all of its sequences."""
    rollout_loss_tokens: int = 0
    """Trained tokens of the rollout, over all of its sequences, as planned."""
    info: RolloutInfo | None = field(default=None, compare=False)
    """Every number that its push said of it; None of a sample that is made by hand."""
    successes: Mapping[str, bool] = field(default_factory=dict)
    """Named verdicts of the rollout, on each of its sequences. Empty where it is damaged."""
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The rollout's own, on the first of its sequences. Empty where it is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeSample(Sample):
    """A sample with its tokens: what a trainer needs that packs for itself. See :meth:`Step.samples`."""

    tokens: NDArray[np.int32]
    """[T] int32; token ids. Of a damaged one the padding."""
    loss_mask: NDArray[np.bool_]
    """[T] bool; True where a token is trained. All False of a damaged one."""
    logprobs: NDArray[np.float32]
    """[T] float32; inference logprobs, 0 where not sampled."""
    advantages: NDArray[np.float32]
    """[T] float32; 0 where not trained."""
    token_versions: NDArray[np.int64]
    """[T] int64; the policy version that sampled the token, -1 where none did."""
    columns: Mapping[str, NDArray[Any]]
    """Further columns, [T] or [T, ...]; only those that its rollout came with."""
    age: int
    """Policy versions between the oldest one that sampled it and the one that its step trains."""


def _on_host(array: Any) -> NDArray[Any]:
    """A numpy view or copy of an array that `MicroBatch.to` may have turned into a tensor on a device."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu())


def _move(array: Any, *, device: torch.device, non_blocking: bool) -> Any:
    """A tensor on `device` with what is in an array, or in a tensor."""
    import torch

    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array, copy=True))
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, non_blocking=non_blocking)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padded:
    """One rollout a row, padded on the right.

    As in a micro-batch everything belongs to the token itself: the logprob of token t comes from the logits at t - 1,
    and token 0 is never trained.

    Rows beyond the rollouts hold padding that nothing masks, of which nothing is trained: there is at least one row, so
    that every rank has a forward pass to make, and as many as were asked for, where ranks must have equally many.
    """

    input_ids: NDArray[np.int32]
    """[B, L] int32; padding is `pad_token_id`."""
    attention_mask: NDArray[np.bool_]
    """[B, L] bool; False where a rollout is padded."""
    loss_mask: NDArray[np.bool_]
    """[B, L] bool; True where a token is trained."""
    advantages: NDArray[np.float32]
    """[B, L] float32; 0 where not trained."""
    logprobs: NDArray[np.float32]
    """[B, L] float32; inference logprobs, 0 where not sampled."""
    policy_versions: NDArray[np.int64]
    """[B, L] int64; the policy version that sampled the token, -1 where none did."""
    columns: Mapping[str, NDArray[Any]]
    """Further columns, [B, L] or [B, L, ...]; 0 in padding."""
    samples: tuple[Sample, ...]
    """The rollouts, in the order of the rows."""
    normalizers: Normalizers
    """Divisors of the whole update, over all ranks."""


IGNORE_INDEX = -100
"""Target where there is no next token; what torch's cross entropy leaves out."""
DERIVED_ARRAYS = ("position_ids", "advantages", "targets", "sample_index", "policy_versions")
"""Arrays of a micro-batch that follow from the others and from its segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segments of a micro-batch, each a rollout or the padding of a row: what its derived arrays follow from.

    The arrays are three quarters of a micro-batch's bytes, and few trainers read all of them on the host; to make a
    record of each rollout took longer than to receive it. So they are made when somebody asks for them.
    """

    spans: Sequence[Sequence[Sequence[int]]]
    """(policy version, start, end) of every stretch that was sampled; () of padding, and of a rollout that is missing
    or damaged."""
    advantages: Sequence[float]
    """One each; 0 of padding."""
    own_advantages: Mapping[int, NDArray[Any]]
    """Segment -> its own column of them, which wins."""
    are_samples: Sequence[bool]
    """False for padding."""
    samples: Callable[[], tuple[Sample, ...]]
    """Makes the records."""
    ignore_index: int = IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The rows of one forward pass on one rank, packed: all arrays are [T], aligned to the token itself.

    The logprob of token t comes from the logits at t - 1; `targets` gives the same alignment from the other side:
    ``targets[t]`` is the token that the logits at t predict, `ignore_index` at the end of each rollout and in padding.

    `position_ids`, `advantages`, `targets`, `sample_index`, `policy_versions`, `samples` and `attachments` are made
    when first read, the arrays from the other arrays as they are then.

    Example:
        >>> import rlbuffer
        >>> group = rlbuffer.testing.make_group(env="math", rewards=[0.0, 1.0], lengths=[3, 4])
        >>> micro_batch = rlbuffer.packing.pack(group.rollouts, [-0.5, 0.5], row_tokens=8, pad_to_multiple_of=8)
        >>> micro_batch.length, micro_batch.cu_seqlens.tolist(), micro_batch.position_ids.tolist()
        (8, [0, 3, 7, 8], [0, 1, 2, 0, 1, 2, 3, 0])
        >>> micro_batch.advantages.tolist()
        [0.0, -0.5, -0.5, 0.0, 0.5, 0.5, 0.5, 0.0]
        >>> [sample.rollout_id for sample in micro_batch.samples]
        ['math.0/0', 'math.0/1']
    """

    input_ids: NDArray[np.int32]
    """[T] int32; padding is `pad_token_id`."""
    cu_seqlens: NDArray[np.int32]
    """[S + 1] int32; segment boundaries, each rollout one, the padding of a row one more."""
    loss_mask: NDArray[np.bool_]
    """[T] bool; True where a token is trained."""
    logprobs: NDArray[np.float32]
    """[T] float32; inference logprobs, 0 where not sampled."""
    columns: Mapping[str, NDArray[Any]]
    """Further columns, [T] or [T, ...], filled where a rollout lacks one (see `lacking`)."""
    adapter_tokens: Mapping[str, int]
    """adapter -> tokens, padding included, in the order of the rows: running sums cut T by adapter."""
    normalizers: Normalizers
    """Divisors of the whole update, over all ranks."""
    is_dummy: bool
    """Nothing here is trained; it exists so that every rank makes the same number of forward passes."""
    segments: Segments
    """What the derived arrays and the samples are made of."""
    world_size: int = 1
    """Ranks that train the step."""
    lacking: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Column -> [T] bool; True where the token's rollout came without it, so that what stands there is its fill. Only
    columns that a rollout of this micro-batch lacks are named. Not part of the digest: it follows from what is."""

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The rollouts, in segment order."""
        return self.segments.samples()

    @cached_property
    def attachments(self) -> Mapping[str, NDArray[Any]]:
        """Name -> those of all samples behind one another, [N, ...], in segment order: a sample that lacks one adds no
        row. Only names whose arrays have rows, of one shape and dtype, are here; `samples` have each one's own."""
        arrays: dict[str, list[NDArray[Any]]] = {}
        for sample in self.samples:
            for name, array in sample.attachments.items():
                arrays.setdefault(name, []).append(array)
        return {
            name: self._moved(np.concatenate(parts))
            for name, parts in arrays.items()
            if parts[0].ndim and len({(array.ndim, array.shape[1:], array.dtype) for array in parts}) == 1
        }

    def _moved(self, array: NDArray[Any]) -> Any:
        """It, or a tensor where :meth:`to` has moved the others."""
        return array

    @cached_property
    def position_ids(self) -> NDArray[np.int32]:
        """[T] int32; from 0 in every rollout."""
        lengths = np.diff(self.cu_seqlens).tolist()
        ramp = np.arange(max(lengths), dtype=np.int32)
        return np.concatenate([ramp[:length] for length in lengths], out=empty((self.length,), np.int32))

    @cached_property
    def sample_index(self) -> NDArray[np.int32]:
        """[T] int32; index into `samples`, -1 in padding. A damaged rollout keeps its index and is masked."""
        number = count()
        return self._of_segments(
            [next(number) if is_sample else -1 for is_sample in self.segments.are_samples], np.int32
        )

    @cached_property
    def advantages(self) -> NDArray[np.float32]:
        """[T] float32; 0 where not trained."""
        out = self._of_segments(self.segments.advantages, np.float32)
        for i, advantages in self.segments.own_advantages.items():
            start = self.cu_seqlens[i]
            out[start : start + len(advantages)] = advantages
        np.multiply(out, self.loss_mask, out=out)
        np.add(out, np.float32(0), out=out)  # a negative advantage times an untrained token is -0.0
        return out

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """[T] int64; next token inside the same rollout, `ignore_index` elsewhere."""
        out, bounds = empty((self.length,), np.int64), self.cu_seqlens
        out[:-1] = self.input_ids[1:]
        out[bounds[1:] - 1] = self.segments.ignore_index
        for i, spans in enumerate(self.segments.spans):
            if not spans:
                out[bounds[i] : bounds[i + 1]] = self.segments.ignore_index
        return out

    @cached_property
    def policy_versions(self) -> NDArray[np.int64]:
        """[T] int64; the policy version that sampled the token, -1 where none did."""
        out = empty((self.length,), np.int64)
        out.fill(-1)
        for begin, spans in zip(self.cu_seqlens.tolist(), self.segments.spans, strict=False):
            for version, start, end in spans:
                out[begin + start : begin + end] = version
        return out

    def _of_segments(self, values: Iterable[float], dtype: type[np.generic]) -> NDArray[Any]:
        """The value of each segment, on all of its tokens."""
        out = empty((self.length,), dtype)
        for value, (start, end) in zip(values, pairwise(self.cu_seqlens.tolist()), strict=True):
            out[start:end] = value
        return out

    @property
    def length(self) -> int:
        """Tokens T, padding included."""
        return len(self.input_ids)

    def unpack(self, values: Any) -> list[Any]:
        """Cuts [T, ...] values (numpy or torch) into one piece per sample, padding left out.

        The inverse of packing: ``micro_batch.unpack(micro_batch.input_ids)[i]`` is the i-th rollout's tokens. The
        pieces are views where slicing gives views.

        Raises:
            PackingError: `values` do not have T rows.
        """
        if not hasattr(values, "__len__"):
            raise PackingError(f"unpack: expected {self.length} values, got {shown(values)}")
        if len(values) != self.length:
            raise PackingError(f"unpack: {len(values)} values do not match {self.length} tokens")
        bounds = _on_host(self.cu_seqlens)
        starts, ends = bounds[:-1], bounds[1:]
        is_sample = _on_host(self.sample_index)[starts] >= 0
        return [
            values[start:end] for start, end in zip(starts[is_sample].tolist(), ends[is_sample].tolist(), strict=True)
        ]

    def padded(self, *, rows: int = 1, pad_token_id: int = 0, pad_to_multiple_of: int = 1) -> Padded:
        """One rollout a row, [B, L], of a micro-batch that is on the host. See :class:`Padded`."""
        return _padded((self,), rows=rows, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of)

    def attention_mask(self) -> NDArray[np.bool_]:
        """[T, T] bool; True where the row's token may attend to the column's: the same segment, not later.

        It knows no sliding window, and transformers applies none beside a dense mask: give its models `position_ids`,
        ``use_cache=False`` and no mask.
        """
        bounds = _on_host(self.cu_seqlens)
        segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        same: NDArray[np.bool_] = segment[:, None] == segment[None, :]
        return np.tril(same)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass of this micro-batch's part of the step's loss, times the world size.

        The loss is a sum over the micro-batch's tokens or rollouts, divided by `normalizers`, which count the whole
        step over all ranks. DDP and FSDP average gradients over ranks; the factor undoes that. So the micro-batches of
        a step add up to the same gradient whatever the number of ranks and micro-batches: divide by neither. In a
        single process, with or without DDP, the factor is 1.

        Every rank calls it once for every micro-batch, also where nothing is trained (`is_dummy`): the others wait for
        this rank's part in the exchange of gradients. A loss of such a micro-batch is 0, made of the model's output.
        Where all micro-batches but the last run under DDP's ``no_sync``, the exchange is made once a step.

        Who has a backward of another library to call (Accelerate, DeepSpeed) multiplies the loss by
        ``step.world_size`` for it. Where the ranks' gradients are added up instead, ``loss.backward()`` is right.

        Shapes: `loss` is a scalar tensor.

        Raises:
            InvalidLoss: `loss` is no scalar tensor, has no gradient, or is not finite. No gradient was computed.
        """
        import torch

        if not isinstance(loss, torch.Tensor):
            raise InvalidLoss(
                f"backward: expected a scalar tensor for a loss, got {shown(loss)} ({type(loss).__name__}): where "
                "nothing is trained, take the model's output times 0, because the other ranks wait for this one's part"
            )
        if loss.numel() != 1:
            raise InvalidLoss(
                f"backward: expected a scalar tensor for a loss, got shape {list(loss.shape)}: take its sum, divided "
                "by a count of `normalizers`"
            )
        if not loss.requires_grad:
            raise InvalidLoss(
                f"backward: the loss, {loss.item():g}, has no gradient: compute it from the model's output, outside of "
                "`torch.no_grad` and without `detach` or `item`"
            )
        if not torch.isfinite(loss):
            ids = [sample.rollout_id for sample in self.samples]
            raise InvalidLoss(
                f"backward: the loss is {loss.item():g}, so no gradient is computed from it: look at the logprobs of "
                f"the model and of this micro-batch's rollouts, {shown(ids)}"
            )
        (loss * self.world_size).backward()  # type: ignore[no-untyped-call]

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> MicroBatch:
        """The same micro-batch with torch tensors on `device` in place of the arrays; imports torch when called.

        Host memory is pinned on its way to a GPU, and the copy does not hold up the caller: torch keeps the pinned
        block until the copy is done.
        """
        import torch

        try:
            place = torch.device(device)
        except (RuntimeError, TypeError):
            raise PackingError(f"to: {shown(device)} is no device: 'cpu', 'cuda', 'cuda:1' or a torch.device") from None
        move = partial(_move, device=place, non_blocking=non_blocking)
        names = "input_ids", "cu_seqlens", "loss_mask", "logprobs"
        stored: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        columns, lacking = ({k: move(v) for k, v in table.items()} for table in (self.columns, self.lacking))
        moved = replace(self, **stored, columns=columns, lacking=lacking)
        vars(moved).update({name: move(getattr(self, name)) for name in DERIVED_ARRAYS}, samples=self.samples)
        vars(moved)["_moved"] = move  # those of a trainer that reads none stay where they are
        return moved


NO_HEADER = cast(StepHeader, None)
"""Default header of a step that is made by hand: the step makes its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step as one rank trains it. Iterating gives its micro-batches.

    Example:
        >>> import rlbuffer
        >>> group = rlbuffer.testing.make_group(env="math", rewards=[0.0, 1.0], lengths=[3, 4])
        >>> micro_batch = rlbuffer.packing.pack(group.rollouts, [-0.5, 0.5], row_tokens=8)
        >>> step = Step(
        ...     number=1,
        ...     epoch=1,
        ...     digest="",
        ...     world_size=1,
        ...     normalizers=micro_batch.normalizers,
        ...     rollouts=2,
        ...     groups=1,
        ...     micro_batches=(micro_batch,),
        ... )
        >>> [micro_batch.length for micro_batch in step], step.header.tokens
        ([7], 7)
        >>> step.padded().input_ids.shape
        (2, 4)
    """

    number: int
    """Number of the step, from 1: step s trains version s - 1 and makes version s."""
    epoch: int
    """Grows when a run is rewound or recovered, and with a new line of policy versions."""
    digest: str
    """SHA-256 of the step, chained on the last one's; equal on all ranks."""
    world_size: int
    """Ranks that train it."""
    normalizers: Normalizers
    """Divisors of the step, over all ranks."""
    rollouts: int
    """Rollouts of the step, over all ranks."""
    groups: int
    """Groups of the step, over all ranks."""
    micro_batches: tuple[MicroBatch, ...] = ()
    """Micro-batches of this rank, as many as on every other rank. The trainer decides how many make an optimizer
    update."""
    damaged: tuple[str, ...] = ()
    """Ids of this rank's rollouts that were missing or damaged and became masked padding."""
    header: StepHeader = NO_HEADER
    """The step as it was committed: per env tokens, rollouts, reward, ages; what it asks the trainer for. One that is
    made without a header gets one that knows the step's own counts and no env."""
    adapters: Mapping[str, AdapterProgress] = field(default_factory=dict)
    """Adapter ("" is all weights) -> how far it is with this step: which optimizers step after it."""

    def __post_init__(self) -> None:
        if self.header is NO_HEADER:
            object.__setattr__(self, "header", _plain_header(self))

    def padded(self, *, rows: int = 1, pad_token_id: int = 0, pad_to_multiple_of: int = 1) -> Padded:
        """All of this rank's rollouts as one batch for one forward pass: one rollout a row, [B, L].

        B differs from rank to rank, unless all ask for the same number of `rows`, as many as any of them has or more.
        """
        return _padded(tuple(self), rows=rows, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of)

    def samples(self) -> tuple[WholeSample, ...]:
        """This rank's samples, each with its tokens, in the order in which their rollouts were selected.

        For a trainer that packs for itself. A rollout of several sequences has a sample for each; further ones stand
        behind the first, as far as this rank has them. The arrays are views of the micro-batches.

        Example:
            >>> import rlbuffer
            >>> group = rlbuffer.testing.make_group(env="math", rewards=[0.0, 1.0], lengths=[3, 4])
            >>> packed = rlbuffer.packing.pack(group.rollouts, [-0.5, 0.5], row_tokens=8)
            >>> step = Step(1, 1, "", 1, packed.normalizers, rollouts=2, groups=1, micro_batches=(packed,))
            >>> [(sample.reward, sample.age, sample.advantages.tolist()) for sample in step.samples()]
            [(0.0, 0, [0.0, -0.5, -0.5]), (1.0, 0, [0.0, 0.5, 0.5, 0.5])]
        """
        found = [sample for micro_batch in self for sample in _whole(micro_batch, self)]
        return tuple(sorted(found, key=lambda sample: (sample.rollout, sample.sequence)))

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def _whole(micro_batch: MicroBatch, step: Step) -> Iterator[WholeSample]:
    cut = {name: micro_batch.unpack(values) for name, values in micro_batch.columns.items()}
    lacking = {name: micro_batch.unpack(values) for name, values in micro_batch.lacking.items()}
    names = "input_ids", "loss_mask", "logprobs", "advantages", "policy_versions"
    arrays = zip(*[micro_batch.unpack(getattr(micro_batch, name)) for name in names], strict=True)
    for i, (sample, (tokens, mask, logprobs, advantages, versions)) in enumerate(
        zip(micro_batch.samples, arrays, strict=True)
    ):
        version = version_trained(step.adapters, sample.adapter, step.number)
        yield WholeSample(
            **{f.name: getattr(sample, f.name) for f in fields(Sample)},
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            advantages=advantages,
            token_versions=versions,
            columns={
                name: slices[i] for name, slices in cut.items() if name not in lacking or not lacking[name][i].any()
            },
            age=version - sample.policy_versions[0],
        )


def _plain_header(step: Step) -> StepHeader:
    samples = [sample for micro_batch in step for sample in micro_batch.samples]
    return StepHeader(
        step=step.number,
        epoch=step.epoch,
        digest=step.digest,
        previous_digest="",
        world_size=step.world_size,
        normalizers=asdict(step.normalizers),
        rollouts=step.rollouts,
        sequences=len(samples),
        tokens=sum(sample.length for sample in samples),
        group_ids=tuple(dict.fromkeys(sample.group_id for sample in samples)),
        closed_by=ClosedBy.GROUPS,
        fill=0.0,
        envs={},
        reward=None,
        age=0.0,
        max_age=0,
        committed_ms=0,
        columns={},
    )


def _padded(
    micro_batches: Sequence[MicroBatch], *, rows: int = 1, pad_token_id: int = 0, pad_to_multiple_of: int = 1
) -> Padded:
    """The rollouts of these micro-batches, which are on the host, in their order; `rows` rows or more."""
    rows = as_integer("padded: rows", rows)
    pad_to_multiple_of = as_integer("padded: pad_to_multiple_of", pad_to_multiple_of, low=1)
    first = micro_batches[0]
    longest = max([s.length for m in micro_batches for s in m.samples], default=first.length)
    length = longest + -longest % pad_to_multiple_of
    count = max(rows, sum(len(m.samples) for m in micro_batches))

    def table(values: Sequence[Any], fill: float = 0) -> NDArray[Any]:
        out = np.full((count, length, *values[0].shape[1:]), fill, values[0].dtype)
        parts = [
            part
            for m, micro_batch_values in zip(micro_batches, values, strict=True)
            for part in m.unpack(micro_batch_values)
        ]
        for row, part in zip(out, parts, strict=False):
            row[: len(part)] = part
        return out

    attention = table([np.ones(m.length, np.bool_) for m in micro_batches])
    attention[sum(len(m.samples) for m in micro_batches) :] = True  # a row that sees nothing would be NaN
    return Padded(
        input_ids=table([m.input_ids for m in micro_batches], pad_token_id),
        attention_mask=attention,
        loss_mask=table([m.loss_mask for m in micro_batches]),
        advantages=table([m.advantages for m in micro_batches]),
        logprobs=table([m.logprobs for m in micro_batches]),
        policy_versions=table([m.policy_versions for m in micro_batches], -1),
        columns={name: table([m.columns[name] for m in micro_batches]) for name in first.columns},
        samples=tuple(sample for m in micro_batches for sample in m.samples),
        normalizers=first.normalizers,
    )
