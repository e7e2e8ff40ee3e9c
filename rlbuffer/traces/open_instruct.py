"""open-instruct's rollouts (`--save_traces`): a flat line per response.

Facts: allenai/open-instruct @e6c3044aa `open_instruct/rl_utils.py` (`RolloutRecord`: ids, logprobs of the response, no
mask), `vllm_utils.py` (tool output is appended to the response with logprob 0, `mask_tool_use` keeps it out of the
loss, and the mask is not saved), `data_loader.py` (logprob NaN where an end token was appended that nobody sampled).
`step` is the step that trained, not the version that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlbuffer.records.failure import Failure
from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.calls import Call, call_of, sequences_of
from rlbuffer.traces.values import Value


def responses(records: Sequence[Value]) -> Iterator[TraceAttempt]:
    """An attempt per line."""
    for record in records:
        step, prompt = record.get("step").text(), record["prompt_idx"].text()
        info = record.get("request_info")
        failure = None
        if info.get("tool_calleds").flag() or info.get("tool_outputs").text():
            failure = Failure("tools", "which tokens of the response a tool wrote is not in the file")
        yield TraceAttempt(
            at=record,
            group=f"{step}.{prompt}",
            prompt=f"{step}.{prompt}",
            env=record.get("dataset").text() if isinstance(record.get("dataset").value, str) else "",
            sequences=() if failure else sequences_of([[_call(record)]]),
            reward=record["reward"].number(),
            finish_reason=record.get("finish_reason").text(),
            failure=failure,
            metadata={"step": record.get("step").value, "sample": record.get("sample_idx").value},
        )


def _call(record: Value) -> Call:
    """Prompt and response; a token without a logprob was not sampled, and is not trained."""
    logprobs = record["logprobs"].floats()
    sampled = ~np.isnan(logprobs)
    filled = Value(np.where(sampled, logprobs, np.float32(0)), record.place, "logprobs")
    call = call_of(record["prompt_tokens"], record["response_tokens"], filled)
    return replace(call, mask=sampled)
