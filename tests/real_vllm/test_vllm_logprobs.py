"""Which modes of a real vLLM server's logprobs the gateway takes for which settings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from taught_model import CONTEXT, taught_versions
from vllm_server import VllmServer

from rlbuffer.errors import ConfigError
from rlbuffer.gateway.engines.fleet import Fleet

RIGHT = {
    "raw_logprobs": {(1.0, 1.0), (1.0, 0.95)},
    "processed_logprobs": {(1.0, 1.0), (0.7, 1.0), (1.3, 1.0)},
}
DRAWN = ((1.0, 1.0), (0.7, 1.0), (1.3, 1.0), (1.0, 0.95), (0.7, 0.95))
"""Temperature and top_p."""


@pytest.mark.parametrize("mode", RIGHT)
def test_a_server_whose_logprobs_are_not_the_trainers_is_refused(
    runner: asyncio.Runner, folder: Path, tmp_path: Path, mode: str
) -> None:
    _, _, served = taught_versions(tmp_path, 1)

    async def is_taken(url: str, temperature: float, top_p: float) -> bool:
        fleet = Fleet([url], timeout_seconds=60.0, temperature=temperature, top_p=top_p)
        try:
            await fleet.start()
        except ConfigError:
            return False
        finally:
            await fleet.close()
        assert fleet.troubles == []
        return True

    with VllmServer(served, folder / f"log-{mode}", context=CONTEXT, mode=mode) as engine:
        runner.run(engine.until_ready())
        taken = {drawn for drawn in DRAWN if runner.run(is_taken(engine.url, *drawn))}
    assert taken == RIGHT[mode]
