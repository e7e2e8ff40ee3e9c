"""The examples of docs/environments.md, as a reader would run them."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import PromptTooLong
from rlbuffer.records import Group, Ticket
from rlbuffer.settings import WorkerSettings
from rlbuffer.spans import VersionSpan
from rlbuffer.worker.envs import ADAPTERS, BUILT_IN, make_env
from rlbuffer.worker.envs.lookup import no_such_option, target
from rlbuffer.worker.groups import GroupMaker
from rlbuffer.worker.samplers import Completion, Sampling

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


@pytest.fixture
def my_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python of the page, as one module."""
    module = types.ModuleType("my_envs")
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "environments.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_envs", module)


class Says:
    """A sampler that says the same turns in every rollout."""

    wants_batches, is_ours, version, vocab_size = False, True, 0, 13

    def __init__(self, *turns: list[int] | Exception) -> None:
        self.turns = turns
        self.asked = 0

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        turn = self.turns[self.asked % len(self.turns)]
        self.asked += 1
        if isinstance(turn, Exception):
            raise turn
        tokens = np.array(turn, np.int32)
        spans = (VersionSpan(0, 0, len(tokens)),)
        completion = Completion(
            tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), finish_reason="stop", version_spans=spans
        )
        return [completion] * n


def made(name: str, *turns: list[int] | Exception, number: int = 0, **options: Any) -> Group:
    env = make_env(f"my_envs:{name}", **options)
    settings = WorkerSettings(env=f"my_envs:{name}", group_size=1, rollout_retries=0)
    maker = GroupMaker(env, Says(*turns), settings, worker="w")  # type: ignore[arg-type]
    ticket = Ticket(env=env.name, number=number, group_id=f"{env.name}.{number}")
    return asyncio.run(maker.make(ticket, env.prompt(number)))


@pytest.mark.usefixtures("my_envs")
def test_the_single_turn_example_scores_one_answer() -> None:
    assert made("Parity", [11, 12], number=7).rollouts[0].reward == 1.0
    assert made("Parity", [10, 12], number=7).rollouts[0].successes == {"right": False}


@pytest.mark.usefixtures("my_envs")
def test_the_multi_turn_example_answers_guesses() -> None:
    secret = make_env("my_envs:Guess").prompt(3).answer
    rollout = made("Guess", [(secret + 1) % 10, 12], [secret, 12], number=3).rollouts[0]
    assert (rollout.reward, [turn.role for turn in rollout.turns]) == (0.5, ["user", "assistant", "user", "assistant"])
    rollout = made("Guess", [(secret + 1) % 10, 12], PromptTooLong("full"), number=3).rollouts[0]
    assert (rollout.reward, rollout.is_truncated) == (0.0, True)


@pytest.mark.usefixtures("my_envs")
def test_the_tool_example_masks_out_what_the_tool_says_and_keeps_both_rewards() -> None:
    rollout = made("Lookup", [5, 11], [2, 5, 12], number=5).rollouts[0]
    assert rollout.tokens.tolist() == [5, 5, 11, 2, 5, 2, 5, 12]
    assert rollout.loss_mask.tolist() == [False, True, True, False, False, True, True, True]
    assert rollout.rewards == pytest.approx({"right": 1.0, "short": 1 / 3})
    assert rollout.reward == pytest.approx(1 + 0.1 / 3)


def test_the_settings_on_the_page_are_settings() -> None:
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)]
    workers = [worker for block in blocks for worker in block["worker"].values()]
    for worker in workers:
        options = dict(worker)
        settings = WorkerSettings(**{"env": "jsonl", **options})
        if settings.env in ADAPTERS:
            known = inspect.signature(target(ADAPTERS[settings.env], what="env")).parameters
            assert no_such_option("", settings.env_options, known) == ""
    assert {w["env"] for w in workers if "env" in w} >= set(ADAPTERS)
    for name in [*BUILT_IN, *ADAPTERS]:
        assert f"`{name}`" in TEXT
