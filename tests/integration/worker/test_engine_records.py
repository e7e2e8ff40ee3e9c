"""Records of experts in vLLM's answers. They are made up, by what its code writes: on a CPU it records none."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from answering_server import answering

from rlbuffer.errors import RequestFailed
from rlbuffer.records.routed import is_record
from rlbuffer.worker.samplers.base import Completion, Sampling, with_record
from rlbuffer.worker.samplers.endpoint import Endpoint
from rlbuffer.worker.samplers.vllm import VllmSampler

PROMPT = np.array([3, 4, 5], np.int32)
ROWS = np.array([[[0, 0], [i, i + 1]] for i in range(4)], np.uint8)
"""Of three tokens of a prompt and two of a completion, without the last: a layer without experts, then one with."""


def npy(rows: Any) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def sampled(routed: Any, *, records: bool = True) -> Completion:
    """What a worker reads of a server's answer with this field."""
    choice = {
        "token_ids": [6, 7],
        "logprobs": {"token_logprobs": [-1.0, -0.5]},
        "finish_reason": "length",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        **({} if routed is None else {"routed_experts": routed}),
    }

    async def ask(url: str) -> Completion:
        endpoint = Endpoint(url, timeout_seconds=60.0, records_experts=records)
        try:
            return (await endpoint.sample(PROMPT, n=1, sampling=Sampling(max_new_tokens=2)))[0]
        finally:
            await endpoint.close()

    with answering(lambda path: (200, json.dumps({"choices": [choice]}))) as url:
        return asyncio.run(ask(url))


def test_a_servers_record_is_read_with_none_for_the_last_token() -> None:
    rows = sampled(npy(ROWS)).routed_experts
    assert rows is not None
    assert (rows.dtype, rows.shape) == (np.uint8, (5, 2, 2))
    assert np.array_equal(rows[:4], ROWS)
    assert is_record(rows)[:, 1].tolist() == [True] * 4 + [False]
    assert not is_record(rows)[:, 0].any()
    assert sampled(npy(ROWS), records=False).routed_experts is None


@pytest.mark.parametrize(
    ("routed", "says"),
    [
        (None, "--enable-return-routed-experts"),
        (npy(ROWS[:3]), "3 of 5 tokens"),
        (npy(np.zeros((6, 2, 2), np.uint8)), "is none"),
        (npy(ROWS.astype(float)), "expected integers"),
        ("no base64", "no completion"),
        (base64.b64encode(b"no array").decode(), "no completion"),
        (npy(np.array([{}])), "no completion"),
        (7, "no completion"),
    ],
)
def test_a_server_without_a_record_of_its_tokens_is_named_with_what_is_wrong(routed: Any, says: str) -> None:
    with pytest.raises(RequestFailed, match=says):
        sampled(routed)


def test_an_engine_in_process_is_asked_for_records_and_gives_them_as_arrays() -> None:
    sampler = VllmSampler(seed=0, top_p=1.0, options={}, records_experts=True)
    assert sampler._options["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in VllmSampler(seed=0, top_p=1.0, options={})._options
    completion = sampled(None, records=False)
    rows = with_record(completion, len(PROMPT), ROWS).routed_experts
    assert rows is not None
    assert np.array_equal(rows[:4], ROWS)
    with pytest.raises(RequestFailed, match="does not say which experts"):
        with_record(completion, len(PROMPT), None)
