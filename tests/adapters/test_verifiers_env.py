"""Environments of verifiers, played by verifiers, sampled by a script or by a real tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import ConfigError, PromptTooLong, SamplerUnavailable
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.envs import PolicyAccess, make_env
from rlbuffer.worker.samplers import Completion, Sampling

RENDERER = {"name": "qwen3", "enable_thinking": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Script:
    """Says what it was given, one turn after the other; the last is said again and again."""

    def __init__(self, tokenizer: Path, *turns: str | Exception) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.said: list[Completion] = []

    async def __call__(self, prompt: np.ndarray, sampling: Sampling) -> Completion:
        self.prompts.append(prompt.tolist())
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, Exception):
            raise turn
        ids = np.asarray(self.tokenizer.encode(turn + "<|im_end|>", add_special_tokens=False), np.int32)
        self.said.append(
            Completion(
                tokens=ids,
                logprobs=np.linspace(-1.23456789, -0.1, len(ids)).astype(np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, len(ids))),
            )
        )
        return self.said[-1]


def rollouts(env: Any, ask: Any, *, number: int = 0, n: int = 1) -> list[Any]:
    sampling = Sampling(max_new_tokens=64, stop_token_ids=env.eos_token_ids)
    policy = PolicyAccess(ask=ask, sampling=sampling)

    async def play() -> list[Any]:
        try:
            prompt = env.prompt(number)
            return list(await asyncio.gather(*(env.rollout(prompt, policy) for _ in range(n)), return_exceptions=True))
        finally:
            await env.close()

    return asyncio.run(play())


def sampled(rollout: Rollout, start: int, end: int) -> list[int]:
    return rollout.tokens[start:end][rollout.loss_mask[start:end]].tolist()


def test_a_single_turn_task_is_a_rollout_with_every_functions_reward(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_taskset", tokenizer=str(tokenizer), renderer=RENDERER, shuffle=False)
    script = Script(tokenizer, "4")
    assert [env.prompt(n).prompt_id for n in range(5)] == [f"add-{i}" for i in range(5)]
    (rollout,) = rollouts(env, script, number=2)
    assert isinstance(rollout, Rollout), rollout
    assert rollout.tokens.tolist() == script.prompts[0] + script.said[0].tokens.tolist()
    assert rollout.tokens[rollout.loss_mask].tolist() == script.said[0].tokens.tolist()
    assert rollout.logprobs[rollout.loss_mask].tolist() == script.said[0].logprobs.tolist()
    first = len(script.prompts[0])
    assert rollout.version_spans == (VersionSpan(3, first, first + 1), VersionSpan(4, first + 1, rollout.length))
    assert (rollout.reward, dict(rollout.rewards)) == (1.25, {"exact": 1.0, "has_digit": 1.0})
    assert rollout.metadata["metrics"]["reply_length"] == 1.0
    assert rollout.text is not None
    assert "2+2=" in rollout.text


def test_a_tools_answer_is_masked_out_and_the_next_turn_continues_the_very_tokens(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_tools", tokenizer=str(tokenizer), renderer=RENDERER)
    script = Script(tokenizer, CALL, "3")
    (rollout,) = rollouts(env, script)
    assert isinstance(rollout, Rollout), rollout
    assert [c.tokens.tolist() for c in script.said] == [
        sampled(rollout, t.start, t.end) for t in rollout.turns if t.role == "assistant"
    ]
    assert script.prompts[1][: len(script.prompts[0])] == script.prompts[0]
    assert script.prompts[1] == rollout.tokens[: len(script.prompts[1])].tolist()
    tool = [t for t in rollout.turns if t.role == "tool"]
    assert [env.render(rollout.tokens[t.start : t.end]).count("3") for t in tool] == [1]
    assert sampled(rollout, tool[0].start, tool[0].end) == []
    assert (rollout.reward, dict(rollout.rewards)) == (1.5, {"used_tool": 1.0, "tool_right": 1.0})


def test_an_environment_whose_agent_has_another_name_is_played_turn_by_turn(tokenizer: Path) -> None:
    options = {"taskset": "tiny_game", "tasks": 4, "agent": {"max_turns": 8}, "renderer": RENDERER}
    env: Any = make_env("verifiers", tokenizer=str(tokenizer), **options)
    script = Script(tokenizer, "4", "5", "4")
    (rollout,) = rollouts(env, script)
    assert isinstance(rollout, Rollout), rollout
    said = [t for t in rollout.turns if t.role == "assistant"]
    assert [c.tokens.tolist() for c in script.said] == [sampled(rollout, t.start, t.end) for t in said]
    assert script.prompts[2][: len(script.prompts[1])] == script.prompts[1]
    assert (rollout.reward, dict(rollout.rewards)) == (2.0, {"game_reward": 2.0})


def test_an_agent_that_the_environment_does_not_have_is_refused_with_those_that_it_has(tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"agents: plaier is not an option\. Did you mean player\?"):
        make_env("verifiers", tokenizer=str(tokenizer), taskset="tiny_game", tasks=1, agents={"plaier": {}})


def test_rollouts_of_a_prompt_are_played_at_once_and_each_keeps_its_own_tokens(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_taskset", tokenizer=str(tokenizer), renderer=RENDERER)
    made = rollouts(env, Script(tokenizer, "1", "22", "333", "4444"), n=4)
    assert sorted(int(r.loss_mask.sum()) for r in made) == [2, 3, 4, 5]


def test_trouble_of_the_sampler_reaches_the_worker_as_it_is(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_taskset", tokenizer=str(tokenizer), renderer=RENDERER)
    (error,) = rollouts(env, Script(tokenizer, SamplerUnavailable("the server is away")))
    assert isinstance(error, SamplerUnavailable)


def test_a_context_that_is_full_at_the_first_turn_leaves_nothing_to_train(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_taskset", tokenizer=str(tokenizer), renderer=RENDERER)
    (error,) = rollouts(env, Script(tokenizer, PromptTooLong("no room")))
    assert isinstance(error, Exception)
    assert type(error).__name__ == "TraceUnusable"


def test_a_context_that_is_full_later_ends_the_rollout_as_truncated_and_scored(tokenizer: Path) -> None:
    env: Any = make_env("verifiers", taskset="tiny_tools", tokenizer=str(tokenizer), renderer=RENDERER)
    (rollout,) = rollouts(env, Script(tokenizer, CALL, PromptTooLong("no room")))
    assert isinstance(rollout, Rollout), rollout
    assert (rollout.is_truncated, rollout.metadata["stop"]) == (True, "max_total_tokens")
    assert env.render(rollout.tokens[rollout.loss_mask]) == f"{CALL}<|im_end|>"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taskset": "nowhere_at_all"}, "verifiers: ModuleNotFoundError: taskset 'nowhere_at_all' not found"),
        ({"taskset": "tiny_taskset", "agent": {"max_turn": 3}}, "verifiers: "),
    ],
)
def test_settings_that_verifiers_refuses_are_config_errors(
    tokenizer: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_env("verifiers", tokenizer=str(tokenizer), **options)
    assert str(error.value).startswith(message)
