"""slime's samples (`--save-debug-rollout-data`), one per line or as the object that it saves.

Facts: THUDM/slime @624b824a8 `slime/utils/types.py` (`Sample`; mask and logprobs are over the last `response_length`
tokens; samples of one `rollout_id`, else of one `index`, are one rollout), `slime/ray/rollout.py`
(segments of a rollout whose rewards differ are refused; no mask: all of the response trains;
`remove_sample`: none of it, and the reward still counts), `observability/rollout_data_utils.py` (`torch.save` of
``{"rollout_id": ..., "samples": [...]}``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.checks import shown
from rlbuffer.records.failure import Failure
from rlbuffer.records.spans import Turn
from rlbuffer.traces.attempt import Stretch, TraceAttempt, as_far_as_read, spans_of
from rlbuffer.traces.values import Value

NOT_FINISHED = frozenset(("pending", "aborted", "failed"))


def samples(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt, of the samples of one rollout: its segments."""
    yield _attempt(records)


def parts(record: Value) -> Iterable[Value]:
    """The samples of the object that slime saves; a sample is itself."""
    return (record,) if record.get("samples").value is None else record["samples"]


def rollout_of(sample: Value) -> tuple[str, str] | None:
    """The rollout that a sample is a segment of: `rollout_id`, else `index`, as slime falls back; None: its own."""
    rollout = sample.first("rollout_id", "index").text()
    return (sample.get("group_index").text(), rollout) if rollout else None


def _attempt(found: Sequence[Value]) -> TraceAttempt:
    first = found[0]
    status = next((one for one in found if one.get("status").text() in NOT_FINISHED), None)
    for other in found[1:] if status is None else ():
        if other.get("reward").value != first.get("reward").value:
            rewards = f"{shown(first.get('reward').value)} ({first.place}) and {shown(other.get('reward').value)}"
            rollout = other.first("rollout_id", "index")
            raise rollout.wrong(f"rollout {rollout.value} has the rewards {rewards}; segments of one share its reward")
    failure = Failure(status["status"].text(), "the sample is not finished") if status is not None else None
    reward, named = first.get("reward"), dict[str, float]()
    is_scalar = isinstance(reward.value, int | float)
    if reward.value is not None and not is_scalar:
        named = {name: reward[name].number() for name in reward.mapping if _is_number(reward.mapping[name])}
    truncated = any(one.get("status").text() == "truncated" for one in found)
    prompt = first["group_index"].text() if first.get("group_index").value is not None else ""
    return TraceAttempt(
        at=first,
        group=prompt,
        prompt=prompt,
        sequences=as_far_as_read(failure, lambda: [_sequence(one) for one in found]),
        reward=_scalar(reward) if is_scalar else None,
        rewards=named,
        finish_reason="length" if truncated else "stop",
        is_truncated=truncated,
        failure=failure,
        metadata={"sample": first.get("index").value},
    )


def _scalar(reward: Value) -> float:
    """The reward that slime trains: a verdict of true or false is 1 or 0 there."""
    return float(reward.value) if isinstance(reward.value, bool) else reward.number()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sequence(sample: Value) -> Stretch:
    tokens, length = sample["tokens"].ids(), sample["response_length"].integer()
    start = len(tokens) - length
    if start < 1:
        raise sample["response_length"].wrong(f"{length} of {len(tokens)} tokens leave no prompt")
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    logprobs[start:] = _of_response(sample["rollout_log_probs"], sample["rollout_log_probs"].floats(), length)
    trained = sample.get("loss_mask")
    if not sample.get("remove_sample").flag():
        mask[start:] = True if trained.value is None else _of_response(trained, trained.flags(), length)
    versions = [version.text() for version in sample.get("weight_versions").listed()]
    numbers = [int(version) for version in versions if version.isdecimal()]
    return Stretch(
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=spans_of(mask, min(numbers)) if numbers and len(numbers) == len(versions) else (),
        turns=(Turn("user", 0, start), Turn("assistant", start, len(tokens))),
    )


def _of_response(value: Value, numbers: NDArray[Any], length: int) -> NDArray[Any]:
    if len(numbers) != length:
        raise value.wrong(f"{len(numbers)} values for a response of {length} tokens")
    return numbers
