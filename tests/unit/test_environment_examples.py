"""The examples of docs/guide/environments.md, as a reader would run them."""

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
from tiny_tokenizer import save_tokenizer
from transformers import AutoTokenizer

from rlbuffer.checks.check import Context
from rlbuffer.checks.settings import gpus
from rlbuffer.config.imports import target
from rlbuffer.config.loading import Loaded
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import PromptTooLong
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.spans import VersionSpan
from rlbuffer.state.text import no_such_option
from rlbuffer.worker.envs import ADAPTERS, make_env
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Completion, Sampling

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide"
TEXT = (GUIDE / "environments.md").read_text()


@pytest.fixture
def my_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python of the page, as one module."""
    module = types.ModuleType("my_envs")
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "environments.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_envs", module)


class Says:
    """A sampler that says the same turns in every rollout."""

    version, vocab_size, context = 0, 13, 0

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
    settings = WorkerSettings(env=f"my_envs:{name}", group_size=1)
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


@pytest.mark.usefixtures("my_envs")
def test_the_example_of_several_sequences_rewards_all_of_them_as_one_rollout() -> None:
    first, second = make_env("my_envs:Helpers").prompt(3).answer
    rollout = made("Helpers", [first, 12], [second, 12], [first, second, 12], number=3).rollouts[0]
    assert [s.tokens.tolist() for s in rollout.sequences] == [
        [first, second, 11, first, second, 12],
        [first, 11, first, 12],
        [second, 11, second, 12],
    ]
    assert [(s.name, int(s.loss_mask.sum())) for s in rollout.sequences] == [("", 3), ("helper", 2), ("helper", 2)]
    assert rollout.reward == 1.0
    right, wrong = (
        made("Helpers", [first, 12], said, [first, said[0], 12], number=3).rollouts[0].reward
        for said in ([second, 12], [(second + 1) % 10, 12])
    )
    assert (right, wrong) == (1.0, pytest.approx(1 / 3))


def test_the_text_example_asks_in_the_chat_template_and_scores_what_was_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    folder = str(save_tokenizer(tmp_path))
    env = make_env("sums:Sums", tokenizer=folder)
    prompt = env.prompt(3)
    a, b = map(int, prompt.prompt_id.split("+"))
    assert env.render(prompt.tokens) == (
        "<|im_start|>system\nAnswer with the number alone.<|im_end|>\n"
        f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert env.prompt(3).tokens.tolist() == prompt.tokens.tolist()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for said, reward in ((str(a + b), 1.0), (str(a + b + 1), 0.0)):
        turn = [*tokenizer.encode(said), tokenizer.eos_token_id]
        settings = WorkerSettings(env="sums:Sums", group_size=1)
        sampler = Says(turn)
        sampler.vocab_size = env.vocab_size
        maker = GroupMaker(env, sampler, settings, worker="w")  # type: ignore[arg-type]
        group = asyncio.run(maker.make(Ticket(env="sums", number=3, group_id="sums.3"), maker.prompt(3)))
        assert group.rollouts[0].reward == reward
        assert group.rollouts[0].tokens.tolist() == [*prompt.tokens.tolist(), *turn]
        assert group.rollouts[0].metadata == {"said": said}


def test_the_example_of_short_answers_earns_more_the_fewer_words_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    folder = str(save_tokenizer(tmp_path))
    env, encode = make_env("capitals:Capitals", tokenizer=folder), AutoTokenizer.from_pretrained(folder).encode
    prompt = env.prompt(15)
    assert (prompt.prompt_id, prompt.answer) == ("Spain", "Madrid")
    assert "user\nWhat is the capital of Spain?" in env.render(prompt.tokens)
    for said, reason, reward in (
        ("Madrid", "stop", 0.95),
        ("The capital of Spain is Madrid", "stop", 0.7),
        ("The capital of Spain is Madrid", "length", 0.0),
        ("Paris", "stop", 0.0),
    ):
        score = env.score(prompt, np.array(encode(said), np.int32), finish_reason=reason)
        assert score.reward == pytest.approx(reward)


def test_the_example_of_a_whole_file_scores_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "examples"))
    env = make_env("parity:Parity")
    assert env.score(env.prompt(7), np.array([11, 12], np.int32), finish_reason="stop").reward == 1.0
    assert env.score(env.prompt(7), np.array([10, 3], np.int32), finish_reason="length").reward == 0.0
    assert env.render(np.array([7, 11, 12])) == "7 odd ."


@pytest.mark.parametrize("page", ["environments.md", "gpu_box.md"])
def test_the_configs_on_a_page_load(page: str) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        settings = RunSettings(**tomllib.loads(block))
        assert [*gpus(Context(loaded=Loaded(settings=settings, sources={})))] == []
        for worker in settings.worker.values():
            if ":" not in worker.env:
                known = inspect.signature(target(ADAPTERS[worker.env])).parameters
                assert no_such_option("", worker.env_options, known) == ""
