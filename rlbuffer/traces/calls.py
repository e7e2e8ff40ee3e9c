"""Model calls as token sequences: a call whose prompt begins with an earlier call's prompt and answer goes on from it.

Four producers record calls, not sequences; each has the same rule for what belongs together (exact ids, the longest
beginning wins) and its own for what was a retry. A call is trained once, in the first sequence that holds it; in a
later one it is context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.routed import ROUTED_EXPERTS, joined
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.support import SUPPORT, is_kept, support_column
from rlbuffer.traces.attempt import Stretch
from rlbuffer.traces.values import Value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One request of a policy: what it saw, and what it sampled."""

    prompt: NDArray[np.int32]
    """Every token that it saw."""
    tokens: NDArray[np.int32]
    """What was sampled."""
    logprobs: NDArray[np.float32]
    """One per sampled token."""
    mask: NDArray[np.bool_]
    """Which of them are trained."""
    support: NDArray[np.int32] | None = None
    """[n, W]; the tokens that restricted sampling left for each, where somebody knows them. One of too many is not
    trained."""
    version: int | None = None
    """Policy version; None: the producer does not say, or `version_spans` do."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Policy version of each range of `tokens`, where a producer knows several."""
    temperature: float = 1.0
    """What it was sampled at, where the logprobs are those of that temperature."""
    role: str = "user"
    """Who spoke the last of the prompt."""
    key: Any = ""
    """The producer's own id."""
    about: Mapping[str, Any] | None = None
    """Metadata of the turn that it sampled."""
    routed: NDArray[Any] | None = None
    """[R, layers, K]; the experts that took in the last R tokens of prompt and answer (:mod:`rlbuffer.records.routed`);
    None where they are not recorded."""

    @property
    def end(self) -> bytes:
        """Prompt and answer, as bytes that can be compared."""
        return self.prompt.tobytes() + self.tokens.tobytes()


def call_of(prompt: Value, tokens: Value, logprobs: Value, mask: Value | None = None, **more: Any) -> Call:
    """The call of these fields; `mask` is over the prompt and the answer.

    Raises:
        InvalidRollout: a field is missing, of another type, or of another length.
    """
    ids, sampled, values = prompt.ids(), tokens.ids(), logprobs.floats()
    if not len(ids):
        raise prompt.wrong("empty: the first token of a sequence cannot be trained")
    if len(values) != len(sampled):
        raise logprobs.wrong(f"{len(values)} logprobs for {len(sampled)} sampled tokens")
    trained = np.ones(len(sampled), np.bool_)
    if mask is not None and mask.value is not None:
        whole = mask.flags()
        if len(whole) != len(ids) + len(sampled):
            raise mask.wrong(f"{len(whole)} flags for {len(ids)} tokens of the prompt and {len(sampled)} sampled ones")
        if whole[: len(ids)].any():
            raise mask.wrong("a token of the prompt cannot be trained")
        trained = whole[len(ids) :]
    return Call(prompt=ids, tokens=sampled, logprobs=values, mask=trained, **more)


def parents_of(calls: Sequence[Call]) -> list[list[int]]:
    """For each call, those that it goes on from: the longest beginning; several where they end in the same tokens."""
    ends = [call.end for call in calls]
    by_length = sorted(range(len(calls)), key=lambda i: -len(ends[i]))
    found: list[list[int]] = []
    for call in calls:
        prompt, parents = call.prompt.tobytes(), list[int]()
        for i in by_length:
            if parents and len(ends[i]) < len(ends[parents[0]]):
                break
            if len(ends[i]) <= len(prompt) and len(calls[i].prompt) < len(call.prompt) and prompt.startswith(ends[i]):
                parents.append(i)
        found.append(sorted(parents))
    return found


def paths_of(parents: Sequence[int | None]) -> list[list[int]]:
    """From each root to each leaf, in the order of the leaves."""
    inner = {parent for parent in parents if parent is not None}
    paths = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path, at = list[int](), leaf
        while True:
            path.append(at)
            above = parents[at]
            if above is None:
                break
            at = above
        paths.append(path[::-1])
    return paths


def tree(calls: Sequence[Call]) -> list[list[Call]]:
    """Calls as paths: each goes on from the call, of any time, that is the longest beginning of its prompt."""
    parents = [above[0] if above else None for above in parents_of(calls)]
    return [[calls[i] for i in path] for path in paths_of(parents)]


def line(calls: Sequence[Call]) -> list[list[Call]]:
    """Calls as paths: each goes on from the one right before it, or begins a new path."""
    paths: list[list[Call]] = []
    for call in calls:
        if paths and call.prompt.tobytes().startswith(paths[-1][-1].end):
            paths[-1].append(call)
        else:
            paths.append([call])
    return paths


def sequences_of(paths: Sequence[Sequence[Call]]) -> tuple[Stretch, ...]:
    """A sequence per path; a call that an earlier path holds is trained there alone."""
    seen: set[int] = set()
    return tuple(_sequence(path, seen) for path in paths if any(id(call) not in seen for call in path))


def _sequence(path: Sequence[Call], seen: set[int]) -> Stretch:
    tokens, mask, logprobs = list[NDArray[Any]](), list[NDArray[Any]](), list[NDArray[Any]]()
    spans, turns, position = list[VersionSpan](), list[Turn](), 0
    routed = list[tuple[int, NDArray[Any]]]()
    temperatures = np.ones(len(path[-1].prompt) + len(path[-1].tokens), np.float32)
    supports = list[tuple[int, NDArray[np.int32] | None]]()
    for call in path:
        context, end = call.prompt[position:], len(call.prompt) + len(call.tokens)
        trained = call.mask if call.support is None else call.mask & is_kept(call.support)
        if id(call) in seen:
            trained = np.zeros_like(call.mask)
        elif call.version is not None:
            spans.append(VersionSpan(call.version, len(call.prompt), end))
        else:
            at = len(call.prompt)
            spans += [VersionSpan(span.policy_version, at + span.start, at + span.end) for span in call.version_spans]
        seen.add(id(call))
        tokens += [context, call.tokens]
        mask += [np.zeros(len(context), np.bool_), trained]
        logprobs += [np.zeros(len(context), np.float32), call.logprobs]
        if len(context):
            turns.append(Turn(call.role, position, len(call.prompt)))
        turns.append(Turn("assistant", len(call.prompt), end, metadata=call.about))
        temperatures[len(call.prompt) : end] = call.temperature
        if call.routed is not None:
            routed.append((end, call.routed))
        supports += [(len(context), None), (len(call.tokens), call.support)]
        position = end
    experts, support = joined(routed, position), support_column(supports)
    return Stretch(
        tokens=np.concatenate(tokens),
        loss_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        version_spans=tuple(spans),
        turns=tuple(turns),
        columns={
            **({"temperatures": temperatures} if (temperatures != 1).any() else {}),
            **({} if experts is None else {ROUTED_EXPERTS: experts}),
            **({} if support is None else {SUPPORT: support}),
        },
    )
