"""Episodes and groups: what is sampled stays as it was sampled, and a rollout that fails costs itself only."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import Aborted, ConfigError, GroupFailed, PromptTooLong, SamplerUnavailable
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.worker import group_maker
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Completion, SamplerTraits, Sampling
from rlbuffer.worker.samplers.transformers import Batched

PROMPT = Prompt(prompt_id="p", tokens=np.array([1, 2, 11], np.int32), answer="12")
TICKET = Ticket(env="tools", number=7, group_id="tools.7")


def completion(tokens: list[int], *, reason: str = "stop", spans: tuple[tuple[int, int, int], ...] = ()) -> Completion:
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.linspace(-0.5, -0.1, len(tokens), dtype=np.float32),
        finish_reason=reason,
        version_spans=tuple(VersionSpan(*span) for span in spans) or (VersionSpan(4, 0, len(tokens)),),
    )


class Scripted:
    """A sampler that answers from a script and remembers what it was given."""

    traits = SamplerTraits(is_exact=True)
    version = 4
    vocab_size = 13
    context = 0

    def __init__(self, *script: Completion | Exception) -> None:
        self.script = list(script)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def load(self, policy: PolicyVersion) -> None: ...

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        self.prompts.append(prompt.tolist())
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        answers = [self.script.pop(0) if len(self.script) > 1 else self.script[0] for _ in range(n)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers  # type: ignore[return-value]

    async def close(self) -> None: ...


class Tools:
    """Asks, answers with a tool's tokens, asks again."""

    name, vocab_size, eos_token_ids, max_new_tokens = "tools", 13, (12,), 4

    def __init__(self, *outcomes: float | Exception) -> None:
        self.outcomes = list(outcomes) or [1.0]

    def prompt(self, number: int) -> Prompt:
        return PROMPT

    def render(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    async def play(self, prompt: Prompt, episode: Episode) -> Score:
        await episode.sample(max_new_tokens=2, stop_token_ids=[10])
        episode.extend([7, 8], role="tool")
        await episode.sample()
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Score(reward=outcome, rewards={"right": outcome}, metadata={"calls": 1})


def made(env: Any, sampler: Any, *, retries: int = 1, **settings: Any) -> Group:
    options = WorkerSettings(**{"env": "tools", "group_size": 3, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_maker, "RETRIES", retries)
        return asyncio.run(GroupMaker(env, sampler, options, worker="w").make(TICKET, PROMPT))


def test_a_multi_turn_rollout_trains_exactly_what_was_sampled() -> None:
    sampler = Scripted(completion([3, 10], spans=((4, 0, 1), (5, 1, 2))), completion([9, 12], spans=((5, 0, 2),)))
    group = made(Tools(), sampler, group_size=1, temperature=0.5)
    rollout = group.rollouts[0]
    assert rollout.tokens.tolist() == [1, 2, 11, 3, 10, 7, 8, 9, 12]
    assert rollout.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert rollout.logprobs.tolist() == pytest.approx([0, 0, 0, -0.5, -0.1, 0, 0, -0.5, -0.1])
    assert rollout.version_spans == (VersionSpan(4, 3, 4), VersionSpan(5, 4, 5), VersionSpan(5, 7, 9))
    assert rollout.turns == (
        Turn("user", 0, 3),
        Turn("assistant", 3, 5),
        Turn("tool", 5, 7),
        Turn("assistant", 7, 9),
    )
    assert rollout.columns["temperatures"].tolist() == [0.5] * 9
    assert (rollout.reward, rollout.metadata, rollout.text) == (1.0, {"calls": 1}, "1 2 11 3 10 7 8 9 12")
    assert sampler.prompts == [[1, 2, 11], [1, 2, 11, 3, 10, 7, 8]]
    assert [(s.max_new_tokens, s.stop_token_ids) for s in sampler.samplings] == [(2, (12, 10)), (4, (12,))]


@pytest.mark.parametrize(("own", "trainers", "is_said"), [(1.0, 1.0, False), (1.0, 0.7, True), (0.7, 0.7, True)])
def test_a_rollout_says_its_temperature_unless_it_is_1_and_the_trainers_too(
    own: float, trainers: float, is_said: bool
) -> None:
    options = WorkerSettings(env="tools", group_size=1, temperature=own)
    sampler: Any = Scripted(completion([3]))
    maker = GroupMaker(Tools(), sampler, options, worker="w", assumed_temperature=trainers)
    (rollout,) = asyncio.run(maker.make(TICKET, PROMPT)).rollouts
    said = rollout.columns.get("temperatures")
    assert (None if said is None else said.tolist()) == ([np.float32(own)] * rollout.length if is_said else None)


@pytest.mark.parametrize("token", [13, -1])
def test_tokens_that_the_model_does_not_have_never_reach_the_sampler(token: int) -> None:
    sampler: Any = Scripted(completion([3]))
    prompt = Prompt(prompt_id="p", tokens=np.array([1, token], np.int32))
    maker = GroupMaker(Tools(), sampler, WorkerSettings(env="tools", group_size=1), worker="w")
    with pytest.raises(GroupFailed, match=f"token 1 of a prompt is {token}, .* 13 ids"):
        asyncio.run(maker.make(TICKET, prompt))
    assert sampler.prompts == []


def test_adjoining_tokens_of_one_version_are_one_span() -> None:
    episode = Episode(PROMPT.tokens, Scripted().sample, Sampling(max_new_tokens=4))  # type: ignore[arg-type]
    episode.add(completion([3, 4]))
    episode.add(completion([5]))
    assert episode.rollout(Score(reward=0.0)).version_spans == (VersionSpan(4, 3, 6),)


def test_a_rollout_that_failed_is_tried_again() -> None:
    group = made(Tools(ValueError("tool is down"), 0.5), Scripted(completion([3])))
    assert [r.reward for r in group.rollouts] == [0.5] * 3
    assert group.metadata == {}


def test_a_group_of_more_than_half_of_its_rollouts_has_the_others_as_failed_attempts() -> None:
    env = Tools(ValueError("tool is down"), 0.5)
    group = made(env, Scripted(completion([3])), retries=0)
    assert (group.planned_size, [rollout.reward for rollout in group.rollouts]) == (3, [0.5, 0.5, None])
    failed = group.rollouts[2]
    assert failed.failure == Failure("ValueError", "tool is down")
    assert failed.tokens.tolist() == group.rollouts[0].tokens.tolist()  # what was sampled until then


def test_a_failure_says_the_text_of_its_error_under_a_kind_that_may_be_counted() -> None:
    error = type("Größe", (ValueError,), {})("too large")
    group = made(Tools(error, 0.5), Scripted(completion([3])), retries=0)
    assert group.rollouts[2].failure == Failure("Gr--e", "too large")


def test_attempts_that_failed_with_one_error_object_have_their_own_tokens() -> None:
    error = ValueError("tool is down")
    script = [completion([token]) for pair in ((3, 4), (5, 6)) for token in pair]
    group = made(Tools(error, error, 0.5), Scripted(*script, completion([9])), retries=0, group_size=5)
    failed = [rollout.tokens.tolist() for rollout in group.rollouts if rollout.failure]
    assert len(failed) == 2
    assert failed[0] != failed[1]


@pytest.mark.parametrize("longest", [0, -1])
def test_an_env_that_leaves_a_completion_no_token_is_refused_unless_the_settings_do(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tools, "max_new_tokens", longest)
    with pytest.raises(ConfigError, match=f"max_new_tokens = {longest} must be at least 1"):
        made(Tools(), Scripted(completion([3])))
    assert made(Tools(), Scripted(completion([3])), max_new_tokens=2).rollouts


def test_what_failed_needs_no_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_maker, "RETRIES", 0)
    options = WorkerSettings(env="tools", group_size=3)
    sampler: Any = Scripted(completion([3]))
    maker = GroupMaker(Tools(ValueError("no"), 0.5), sampler, options, worker="w", needs=("reward", "rewards.right"))
    assert asyncio.run(maker.make(TICKET, PROMPT)).needs == ()


def test_an_attempt_that_failed_before_anything_was_sampled_has_its_prompt() -> None:
    class Early(Tools):
        async def play(self, prompt: Prompt, episode: Episode) -> Score:
            if isinstance(self.outcomes[0], Exception):
                raise self.outcomes.pop(0)  # type: ignore[misc]
            return await super().play(prompt, episode)

    group = made(Early(ValueError("no sandbox"), 0.5), Scripted(completion([3])), retries=0)
    failed = group.rollouts[2]
    assert (failed.failure, failed.tokens.tolist(), failed.loss_tokens) == (
        Failure("ValueError", "no sandbox"),
        PROMPT.tokens.tolist(),
        0,
    )


def test_an_env_may_say_itself_that_an_attempt_failed() -> None:
    class Whole(Tools):
        play = None

        async def rollout(self, prompt: Prompt, policy: Any) -> Rollout:
            failure = Failure("sandbox", "gone") if len(self.outcomes) > 1 else None
            return Rollout.from_turns(
                [{"role": "user", "tokens": prompt.tokens}, {"role": "assistant", "tokens": [3], "logprobs": [-0.5]}],
                reward=self.outcomes.pop() if len(self.outcomes) > 1 else 1.0,  # type: ignore[arg-type]
                policy_version=4,
                failure=failure,
            )

    group = made(Whole(0.0, 0.0), Scripted(completion([3])), retries=0)
    assert [(r.reward, r.failure) for r in group.rollouts] == [
        (None, Failure("sandbox", "gone")),
        (1.0, None),
        (1.0, None),
    ]
    with pytest.raises(GroupFailed, match=r"^sandbox: gone$"):
        made(Whole(0.0, 0.0, 0.0), Scripted(completion([3])), retries=0)


def test_a_group_of_half_of_its_rollouts_is_given_up_with_the_first_reason() -> None:
    with pytest.raises(GroupFailed, match="ValueError: tool is down"):
        made(Tools(ValueError("tool is down"), ValueError("no"), 0.5), Scripted(completion([3])), retries=0)


def test_a_full_context_ends_an_episode_as_truncated_when_the_env_goes_on_from_there() -> None:
    class Careful(Tools):
        async def play(self, prompt: Prompt, episode: Episode) -> Score:
            await episode.sample()
            episode.extend([7])
            try:
                await episode.sample()
            except PromptTooLong:
                return Score(reward=0.25)
            return Score(reward=1.0)

    sampler = Scripted(completion([3]), PromptTooLong("no room"))
    rollout = made(Careful(), sampler, group_size=1).rollouts[0]
    assert (rollout.reward, rollout.is_truncated, rollout.finish_reason) == (0.25, True, "length")


@pytest.mark.parametrize("trouble", [SamplerUnavailable("the server is away"), Aborted("stopped")])
def test_a_sampler_that_is_away_costs_no_retry_and_reaches_the_worker(trouble: Exception) -> None:
    with pytest.raises(type(trouble)):
        made(Tools(), Scripted(trouble))


def test_an_episode_without_a_sampled_token_is_a_failure() -> None:
    class Silent(Tools):
        async def play(self, prompt: Prompt, episode: Episode) -> Score:
            return Score(reward=1.0)

    with pytest.raises(GroupFailed, match="the episode ended before the policy sampled a token"):
        made(Silent(), Scripted(completion([3])))


class Judged:
    """A single-turn env whose score is a coroutine."""

    name, vocab_size, eos_token_ids, max_new_tokens = "tools", 13, (12,), 4
    seconds = 0.0

    def prompt(self, number: int) -> Prompt:
        return PROMPT

    def render(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    async def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        await asyncio.sleep(self.seconds)
        return Score(reward=1.0)


def test_scoring_may_be_a_coroutine_with_a_limit_on_its_time() -> None:
    env = Judged()
    assert [r.reward for r in made(env, Scripted(completion([3, 12]))).rollouts] == [1.0] * 3
    env.seconds = 600.0
    with pytest.raises(GroupFailed, match=r"not finished within rollout_timeout_seconds = 0\.05"):
        made(env, Scripted(completion([3, 12])), rollout_timeout_seconds=0.05)


@pytest.mark.parametrize("way", ["score", "play"])
def test_a_time_limit_of_the_envs_own_is_not_called_the_workers(way: str) -> None:
    async def impatient(*_: Any, **__: Any) -> Score:
        await asyncio.wait_for(asyncio.sleep(600.0), 0.01)
        raise AssertionError

    env = Judged() if way == "score" else Tools()
    setattr(env, way, impatient)
    with pytest.raises(GroupFailed, match=r"^TimeoutError: $"):
        made(env, Scripted(completion([3, 12])), rollout_timeout_seconds=600.0)


def test_an_env_that_makes_something_else_than_a_rollout_fails_its_group() -> None:
    class Odd(Tools):
        async def rollout(self, prompt: Prompt, policy: Any) -> Any:
            return {"reward": 1.0}

    with pytest.raises(GroupFailed, match="GroupFailed: the env made a dict instead of a Rollout"):
        made(Odd(), Scripted(completion([3, 12])), retries=0)


def test_each_sequence_of_a_rollout_gets_its_temperature_and_what_is_needed_of_each() -> None:
    """The first trains nothing and has both columns, the second has none of them."""
    own = {name: np.full(3, -0.25, np.float32) for name in ("temperatures", "ref_logprobs")}

    class Branching(Tools):
        async def rollout(self, prompt: Prompt, policy: Any) -> Rollout:
            main, further = (
                TokenSequence(
                    tokens=prompt.tokens,
                    loss_mask=np.array([False, False, trains]),
                    logprobs=np.array([0, 0, -0.5 * trains], np.float32),
                    version_spans=(VersionSpan(4, 2, 3),),
                    columns=columns,
                )
                for trains, columns in ((False, own), (True, {}))
            )
            return Rollout.from_sequences([main, further], reward=1.0)

    options = WorkerSettings(env="tools", group_size=1, temperature=0.5)
    maker = GroupMaker(Branching(), Scripted(completion([12])), options, worker="w", needs=["ref_logprobs"])
    group = asyncio.run(maker.make(TICKET, PROMPT))
    assert [s.columns["temperatures"].tolist() for s in group.sequences()] == [[-0.25] * 3, [0.5] * 3]
    assert group.needs == ("ref_logprobs",)


def test_what_is_asked_for_together_is_one_batch_and_a_failure_reaches_all_who_asked() -> None:
    class Batch:
        version, vocab_size, context = 4, 13, 0

        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.error: Exception | None = None

        def load(self, policy: PolicyVersion) -> None: ...

        def sample(self, prompts: Any, *, n: int, sampling: Sampling, stopped: Any) -> list[list[Completion]]:
            self.sizes.append(len(prompts))
            if self.error is not None:
                raise self.error
            return [[completion([int(prompt[0])])] * n for prompt in prompts]

    batch = Batch()

    async def ask() -> list[Any]:
        sampler = Batched(batch)
        sampling = Sampling(max_new_tokens=1)
        try:
            return await asyncio.gather(
                *(sampler.sample(np.array([i], np.int32), n=2, sampling=sampling) for i in range(5)),
                return_exceptions=True,
            )
        finally:
            await sampler.close()

    answers = asyncio.run(ask())
    assert batch.sizes == [5]
    assert [[int(c.tokens[0]) for c in answer] for answer in answers] == [[i, i] for i in range(5)]
    batch.error = RuntimeError("out of memory")
    assert [str(answer) for answer in asyncio.run(ask())] == ["out of memory"] * 5


def test_a_rollout_has_the_experts_of_its_completions_and_none_of_what_came_after() -> None:
    def routed(length: int, first: int) -> np.ndarray:
        """An engine's record, of all but the last token."""
        return np.stack([[[first + i, first + i + 1]] for i in range(length - 1)])

    turns = [
        replace(completion([5, 6]), routed_experts=routed(5, 0)),  # three tokens of the prompt, two of its own
        replace(completion([7]), routed_experts=routed(7, 100)),
        completion([8]),  # without
    ]
    sampler = Scripted(*turns)

    async def play() -> Rollout:
        async def ask(tokens: np.ndarray, sampling: Sampling) -> Completion:
            return (await sampler.sample(tokens, n=1, sampling=sampling))[0]

        episode = Episode(PROMPT.tokens, ask, Sampling(max_new_tokens=4))
        await episode.sample()
        episode.extend([9])
        await episode.sample()
        episode.extend([9])
        await episode.sample()
        return episode.rollout(Score(reward=1.0))

    rows = asyncio.run(play()).columns["routed_experts"]
    assert rows.dtype == np.uint8
    assert rows[:, 0].tolist() == [*[[100 + i, 101 + i] for i in range(6)], [0, 0], [0, 0], [0, 0]]
