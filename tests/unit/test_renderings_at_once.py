"""The two renderings of a splice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlbuffer.errors import RequestFailed, RlbufferError, SamplerUnavailable
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.gateway.splice import spliced

END, OPENS = 1, 2
SECONDS = 60.0
REQUEST = AgentRequest(
    messages=(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
)


def tokens(opens: bool) -> np.ndarray:
    """Two turns; a third one and the beginning of an answer where it `opens` one."""
    return np.array([7, END, 8, END, *([9, END, OPENS] if opens else [])], np.int32)


def test_an_engine_is_asked_for_both_at_once() -> None:
    async def play() -> np.ndarray | None:
        both_asked = asyncio.Barrier(2)

        async def render(request: AgentRequest, opens: bool) -> np.ndarray:
            await both_asked.wait()
            return tokens(opens)

        return await asyncio.wait_for(spliced(render, REQUEST, 2, END), SECONDS)

    found = asyncio.run(play())
    assert found is not None
    assert found.tolist() == [9, END, OPENS]


@pytest.mark.parametrize("error", [RequestFailed("no"), SamplerUnavailable("no")])
@pytest.mark.parametrize("fails", [False, True])
def test_neither_is_at_work_any_more_when_one_has_failed(fails: bool, error: RlbufferError) -> None:
    ended = []

    async def render(request: AgentRequest, opens: bool) -> np.ndarray:
        if opens is fails:
            raise error
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(opens)
        return tokens(opens)

    if isinstance(error, RequestFailed):
        assert asyncio.run(spliced(render, REQUEST, 2, END)) is None
    else:
        with pytest.raises(SamplerUnavailable):
            asyncio.run(spliced(render, REQUEST, 2, END))
    assert ended == [not fails]
