"""The worker's sampler behind a local address: what it answers, what it refuses, what it remembers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from rlbuffer.errors import PromptTooLong, SamplerUnavailable
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.envs import PolicyAccess
from rlbuffer.worker.envs.local_engine import SESSION_HEADER, LocalEngine, TraceSession
from rlbuffer.worker.samplers import Completion, Sampling

OWN = Sampling(max_new_tokens=16, temperature=0.5, top_p=0.9, stop_token_ids=(12,))


def asked(
    parameters: dict[str, Any], *, error: Exception | None = None, session: str = "s"
) -> tuple[httpx.Response, TraceSession, list[tuple[list[int], Sampling]]]:
    """One request; -> its answer, the session, and what the sampler was asked."""
    seen: list[tuple[list[int], Sampling]] = []

    async def ask(prompt: np.ndarray, sampling: Sampling) -> Completion:
        seen.append((prompt.tolist(), sampling))
        if error is not None:
            raise error
        return Completion(
            tokens=np.array([3, 12], np.int32),
            logprobs=np.array([-1.25, -0.5], np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan(4, 0, 2),),
        )

    async def talk() -> tuple[httpx.Response, TraceSession]:
        engine = LocalEngine()
        await engine.start()
        opened = engine.open("s", PolicyAccess(ask=ask, sampling=OWN))
        try:
            async with httpx.AsyncClient(base_url=engine.url, headers={SESSION_HEADER: session}) as client:
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"
                body = {"token_ids": [1, 2], "model": "policy", "sampling_params": parameters}
                answer = await client.post("/inference/v1/generate", json=body)
                engine.forget("s")
                gone = await client.post("/inference/v1/generate", json=body)
                assert gone.status_code == 404
                return answer, opened
        finally:
            await engine.close()

    answer, opened = asyncio.run(talk())
    return answer, opened, seen


def test_tokens_go_in_and_tokens_with_logprobs_come_out_and_are_remembered_with_their_versions() -> None:
    answer, session, seen = asked({"max_tokens": 4, "stop_token_ids": [9], "logprobs": 1})
    assert answer.json()["choices"] == [
        {
            "index": 0,
            "token_ids": [3, 12],
            "logprobs": {
                "content": [
                    {"token": "token_id:3", "token_id": 3, "logprob": -1.25},
                    {"token": "token_id:12", "token_id": 12, "logprob": -0.5},
                ]
            },
            "finish_reason": "stop",
        }
    ]
    assert seen == [
        ([1, 2], Sampling(max_new_tokens=4, temperature=0.5, top_p=0.9, stop_token_ids=(12, 9))),
    ]
    assert [c.version_spans for c in session.completions] == [(VersionSpan(4, 0, 2),)]


def test_a_longer_turn_than_the_workers_own_is_cut_to_it() -> None:
    assert asked({"max_tokens": 400})[2][0][1].max_new_tokens == 16
    assert asked({})[2][0][1].max_new_tokens == 16


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"structured_outputs": {"choice": ["a"]}}, "sampling parameter structured_outputs = "),
        ({"n": 2}, "sampling parameter n = 2 is not the worker's own, 1"),
        ({"temperature": 1.0}, "sampling parameter temperature = 1.0 is not the worker's own, 0.5"),
        ({"top_p": 1.0}, "sampling parameter top_p = 1.0 is not the worker's own, 0.9"),
        ({"top_k": 20}, "sampling parameter top_k = 20 is not the worker's own, 0"),
        ({"min_p": 0.1}, "sampling parameter min_p = 0.1 is not the worker's own, 0"),
    ],
)
def test_sampling_that_the_worker_does_not_do_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    answer, session, seen = asked(parameters)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert str(session.error).startswith(message)
    assert seen == []


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [
        (SamplerUnavailable("away"), 503, True),
        (RuntimeError("odd"), 503, True),
        (PromptTooLong("no room"), 400, False),
    ],
)
def test_trouble_is_a_failed_request_and_kept_for_the_worker(error: Exception, status: int, kept: bool) -> None:
    answer, session, _ = asked({}, error=error)
    assert answer.status_code == status
    assert session.error is (error if kept else None)


def test_a_request_of_nobody_is_refused() -> None:
    answer, session, _ = asked({}, session="other")
    assert (answer.status_code, session.completions) == (404, [])
