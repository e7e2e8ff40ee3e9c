"""The messages of a trace of verifiers, a graph, as token sequences: one per leaf."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.columns import as_column
from rlbuffer.records.routed import ROUTED_EXPERTS, joined
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.support import MOST_TOP_K, NO_TOKEN, SUPPORT, is_kept, support_column, support_of
from rlbuffer.traces.attempt import Stretch, spans_of
from rlbuffer.traces.calls import paths_of
from rlbuffer.traces.values import Value


class Sampled(NamedTuple):
    """What a sampler knows of a message."""

    spans: Sequence[VersionSpan]
    """From its own first token."""
    support: NDArray[np.int32] | None = None
    """[n, W]; the tokens that restricted sampling left for each sampled one."""


Told = Callable[[int, NDArray[np.int32], NDArray[np.bool_]], Sampled]
"""Number, ids and mask of a message -> what was sampled of it."""
Records = Callable[[int], NDArray[Any] | None]
"""Number of a message that was sampled, once its spans were asked for -> the experts [T, layers, K] that took in what
came before it and itself, as far as it was sampled; None where nobody knows."""


def sequences_of(
    trace: Value, version: int | None, told: Told | None, records: Records | None = None
) -> tuple[Stretch, ...]:
    """A sequence per path of which something trains; a message that paths share trains in the first."""
    nodes = trace["nodes"].listed()
    parents = [None if node.get("parent").value is None else node["parent"].integer() for node in nodes]
    attempts, resumed = set[int](), set[int]()
    for number, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
        if parent is not None and parent >= number:
            raise node["parent"].wrong(f"{parent} is not a message before this one")
        for link in node.get("semantic_parents").listed():
            if link["type"].text() == "compaction_attempt":
                attempts.add(number)
            elif link["type"].text() == "compaction":
                resumed.add(link["node"].integer())
    messages = [_Message(node) for node in nodes]
    for call in trace.get("calls").listed():
        at, temperature = call.get("node"), call.get("sampling").get("temperature")
        if at.value is not None and temperature.value is not None:
            if at.integer() >= len(messages):
                raise at.wrong(f"{at.value} is none of {len(messages)} messages")
            messages[at.integer()].temperature = temperature.number()
    trained, out = set[int](), list[Stretch]()
    for path in _trained_paths(parents, attempts - resumed):
        masks = [np.zeros_like(messages[n].mask) if n in trained else messages[n].mask for n in path]
        if any(mask.any() for mask in masks):
            exact = None if told is None else _exact(path, masks, messages, told)
            sequence = _sequence([messages[n] for n in path], masks)
            spans = spans_of(sequence.loss_mask, version) if version is not None else ()
            if records is not None and (experts := _recorded(path, sequence, messages, records)) is not None:
                sequence = replace(sequence, columns={**sequence.columns, ROUTED_EXPERTS: experts})
            out.append(replace(sequence, version_spans=spans if exact is None else exact))
            trained |= {n for n in path if messages[n].mask.any()}
    return tuple(out)


def _trained_paths(parents: Sequence[int | None], unused: Set[int]) -> list[list[int]]:
    """From each root to each leaf; those that end in an unused compaction without it, behind the others.

    Where the trace goes on beside such a compaction, another path trains what comes before it.
    """
    whole, cut = list[list[int]](), list[list[int]]()
    for path in paths_of(parents):
        kept = list(path)
        while kept and kept[-1] in unused:
            kept.pop()
        (whole if kept == path else cut).append(kept)
    return whole + [path for path in cut if path]


class _Message:
    """What one message adds to the tokens of its path."""

    __slots__ = ("logprobs", "mask", "reference", "role", "routed", "support", "temperature", "tokens")

    def __init__(self, node: Value) -> None:
        self.tokens, self.mask = node["token_ids"].ids(), node["mask"].flags()
        self.role = node["message"]["role"].text()
        self.temperature = 1.0
        if len(self.mask) != len(self.tokens):
            raise node["mask"].wrong(f"{len(self.mask)} flags for {len(self.tokens)} tokens")
        self.logprobs = self._spread(node["logprobs"])
        reference = node.get("reference_logprobs")
        self.reference = None if reference.value is None else self._spread(reference)
        self.routed = _array(node.get("routed_experts"))
        left = node.get("sampling_mask")
        self.support = None if left.value is None else self.spread_rows(_support(left, int(self.mask.sum())))

    def spread_rows(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """[n, W], a row per sampled token, as one row per token."""
        out = np.full((len(self.mask), rows.shape[1]), NO_TOKEN, np.int32)
        out[self.mask] = rows
        return out

    def _spread(self, values: Value) -> NDArray[np.float32]:
        """One number per sampled token, as one per token."""
        numbers, sampled = values.floats(), int(self.mask.sum())
        if len(numbers) != sampled:
            raise values.wrong(f"{len(numbers)} numbers for {sampled} sampled tokens")
        out = np.zeros(len(self.mask), np.float32)
        out[self.mask] = numbers
        return out


def _sequence(messages: Sequence[_Message], masks: Sequence[NDArray[np.bool_]]) -> Stretch:
    ends = np.cumsum([len(message.tokens) for message in messages]).tolist()
    columns: dict[str, NDArray[Any]] = {}
    if any(message.reference is not None for message in messages):
        zeros = [np.zeros(len(message.tokens), np.float32) for message in messages]
        both = zip(messages, zeros, strict=True)
        columns["ref_logprobs"] = np.concatenate([zero if m.reference is None else m.reference for m, zero in both])
    if any(message.temperature != 1 for message in messages):
        heat = [np.where(message.mask, np.float32(message.temperature), np.float32(1)) for message in messages]
        columns["temperatures"] = np.concatenate(heat)
    experts = _experts(messages, ends)
    if experts is not None:
        columns[ROUTED_EXPERTS] = experts
    mask = np.concatenate(masks)
    support = support_column([(len(message.tokens), message.support) for message in messages])
    if support is not None:
        columns[SUPPORT], mask = support, mask & is_kept(support)
    return Stretch(
        tokens=np.concatenate([message.tokens for message in messages]),
        loss_mask=mask,
        logprobs=np.concatenate([message.logprobs for message in messages]),
        turns=tuple(Turn(m.role, end - len(m.tokens), end) for m, end in zip(messages, ends, strict=True)),
        columns=columns,
    )


def _experts(messages: Sequence[_Message], ends: Sequence[int]) -> NDArray[Any] | None:
    """The record of a path: that of its messages which have one, and none of the others'. None where no message has it,
    or they are of different models."""
    parts = [
        (end - len(message.tokens) + len(rows), rows)
        for message, end in zip(messages, ends, strict=True)
        if (rows := message.routed) is not None and rows.ndim == 3 and rows.dtype.kind in "iu"
        if len(rows) <= len(message.tokens)
    ]
    is_one_kind = len({rows.shape[1:] for _, rows in parts}) == 1
    return joined(parts, ends[-1]) if is_one_kind else None


def _recorded(
    path: Sequence[int], sequence: Stretch, messages: Sequence[_Message], records: Records
) -> NDArray[Any] | None:
    """The record of a path by what is known of the calls that sampled its messages."""
    parts = list[tuple[int, NDArray[Any]]]()
    for number, turn in zip(path, sequence.turns, strict=True):
        sampled = np.flatnonzero(messages[number].mask)
        rows = records(number) if len(sampled) else None
        if rows is not None:
            end = turn.start + int(sampled[-1]) + 1
            # A call that saw another context, such as one without earlier thoughts, took in other tokens before it.
            parts.append((end, rows if len(rows) == end else rows[-len(sampled) :]))
    return joined(parts, len(sequence.tokens))


def _exact(
    path: Sequence[int], masks: Sequence[NDArray[np.bool_]], messages: Sequence[_Message], told: Told
) -> tuple[VersionSpan, ...]:
    """Version spans of the messages of a path that train in it. What the sampler has left for them wins over what the
    trace says."""
    found, start = list[VersionSpan](), 0
    for number, mask in zip(path, masks, strict=True):
        message = messages[number]
        if mask.any():
            spans, support = told(number, message.tokens, mask)
            found += [VersionSpan(one.policy_version, start + one.start, start + one.end) for one in spans]
            message.support = message.support if support is None else message.spread_rows(support)
        start += len(message.tokens)
    return tuple(found)


def _support(left: Value, sampled: int) -> NDArray[np.int32]:
    """The tokens that sampling left, as verifiers has them: the ids of all rows, and how many each row has."""
    given = {name: left[name] for name in ("ids", "counts")}
    lists: Any = {
        name: attachment.value if isinstance(attachment.value, list) else _array(attachment)
        for name, attachment in given.items()
    }
    try:
        flat, counts = (as_column(name, attachment, np.dtype("<i4")) for name, attachment in lists.items())
        if counts.shape != (sampled,) or counts.min(initial=0) < 0 or flat.shape != (counts.sum(),):
            raise ValueError(f"it is not of the {sampled} tokens that were sampled")
        rows = np.split(flat, np.cumsum(counts))
        return support_of([row.tolist() for row in rows[:-1]], MOST_TOP_K)
    except (InvalidRollout, ValueError, TypeError, IndexError) as error:
        raise left.wrong(str(error)) from None


def _array(value: Value) -> NDArray[Any] | None:
    """An array as verifiers puts it on its wire: dtype, shape and bytes."""
    if value.value is None:
        return None
    if isinstance(value.value, np.ndarray):
        return value.value
    data, dtype, shape = value["data"].value, value["dtype"].text(), [size.integer() for size in value["shape"]]
    try:
        raw = binascii.a2b_base64(data) if isinstance(data, str) else data
        return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
    except (TypeError, ValueError, SyntaxError) as error:  # all of them, of text that names no dtype
        raise value.wrong(str(error)) from None
