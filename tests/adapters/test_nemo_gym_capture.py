"""NeMo Gym's real capture with rlbuffer's sink and source: its middleware, its finalizer, its own tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from fake_engine import logprobs_of
from gateway_stage import Stage, trained_samples
from own_server import OwnServer

if find_spec("nemo_gym") is not None:
    import nemo_gym.base_responses_api_model  # sets variables of the environment

PROMPT, TOKENS = [5, 6, 7], [8, 9]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with OwnServer(tmp_path / "server") as server:
        made = Stage(server.url, "gym")
        yield made
        made.close()


def config_of(stage: Stage, folder: Path) -> str:
    file = folder / "rlbuffer.toml"
    file.write_text(f'run = "{stage.run}"\nredis_url = "{stage.server}"\n[gateway]\nengines = ["{stage.engine_url}"]\n')
    return str(file)


def capturing(config: str) -> Any:
    """The app of a model server of Gym's, whose model says one thing: its sink is the one that its settings name."""
    from fastapi import Body, Request
    from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
    from nemo_gym.openai_utils import NeMoGymResponse
    from nemo_gym.server_utils import ServerClient

    logprobs = [float(value) for value in logprobs_of([*PROMPT, *TOKENS], len(PROMPT))]
    content = [{"type": "output_text", "text": "a tree", "annotations": []}]
    ids = {"prompt_token_ids": PROMPT, "generation_token_ids": TOKENS, "generation_log_probs": logprobs}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content, **ids}
    more = {"tool_choice": "auto", "parallel_tool_calls": True, "tools": []}

    class Model(SimpleResponsesAPIModel):
        config: BaseResponsesAPIModelConfig

        async def responses(self, request: Request, body: dict = Body()) -> NeMoGymResponse:  # type: ignore[type-arg]  # noqa: B008
            return NeMoGymResponse(id="r", created_at=1, model="tiny", object="response", output=[item], **more)

        async def chat_completions(self, body: dict = Body()) -> Any:  # type: ignore[type-arg]  # noqa: B008
            raise NotImplementedError

    capture = {
        "enabled": True,
        "all_agents": True,
        "rebuild_response": False,
        "sink": "rlbuffer.gateway.nemo_gym:TokenSink",
        "sink_kwargs": {"config": config},
    }
    return Model(
        config=BaseResponsesAPIModelConfig(host="127.0.0.1", port=1, entrypoint="", name="policy"),
        server_client=MagicMock(spec=ServerClient, global_config_dict={"token_id_capture": capture}),
    ).setup_webserver()


def test_what_gyms_model_server_answers_is_a_rollout_and_what_gym_trains(stage: Stage, tmp_path: Path) -> None:
    from fastapi.testclient import TestClient
    from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture

    from rlbuffer.gateway.nemo_gym import TokenSource

    opened, config = stage.begin()["open_rollouts"][0], config_of(stage, tmp_path)
    rollout = opened["api_key"]
    with TestClient(capturing(config)) as client:
        path = f"/ng-rollout/{rollout}/training-token-capture/v1/responses"
        assert client.post(path, json={"input": "What is a birch?"}).status_code == 200
        unknown = "/ng-rollout/0-0/training-token-capture/v1/responses"
        with pytest.raises(Exception, match="no open rollout"):  # nothing is sampled that nobody could record
            client.post(unknown, json={"input": "a"})
    result: dict[str, Any] = {"_ng_rollout_id": rollout, "reward": 0.5, "response": {"output": []}}

    async def finalized() -> Any:
        source = TokenSource(config=config)
        built = await finalize_rollout_token_capture(result, source)
        httpx.post(opened["end_url"], json={"reward": result["reward"]}, timeout=60)
        return built, await retire_rollout_token_capture(rollout, source, built), await source.close()

    built, is_retired, _ = asyncio.run(finalized())
    assert is_retired
    (item,) = result["response"]["output"]
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == (PROMPT, TOKENS)
    assert not built["mask_sample"]
    (found,) = stage.rollouts()
    assert len(trained_samples(found)) == 1
    assert (found.tokens.tolist(), found.reward, found.failure) == ([*PROMPT, *TOKENS], 0.5, None)


def test_gyms_own_capture_tests_hold_with_open_rollouts_in_the_place_of_its_files() -> None:
    tests = Path(nemo_gym.__path__[0]).parent / "tests" / "unit_tests" / "test_token_id_capture.py"
    if not tests.exists():
        pytest.skip("this nemo_gym has no tests beside it")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "nemo_gym_store"]
    environment = {"PYTHONPATH": ":".join([str(tests.parents[2]), str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(  # a plugin of its own: it puts rollouts in the place of files before Gym's tests are read
        [*command, str(tests)], env=os.environ | environment, cwd=tests.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
