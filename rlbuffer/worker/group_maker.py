"""From a ticket to a group: its rollouts sampled, played and scored, whatever single ones of them do."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import Aborted, ConfigError, GroupFailed, InvalidRollout, PromptTooLong
from rlbuffer.process.threads import in_thread
from rlbuffer.records.checks import shown
from rlbuffer.records.failure import Failure, kind_of
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import Rollout, with_column
from rlbuffer.worker.envs.base import Env, MultiTurnEnv, PolicyAccess, SingleTurnEnv, WholeRolloutEnv
from rlbuffer.worker.envs.episode import Ask, Episode
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.failures import EnvCall, RunningCalls, exited
from rlbuffer.worker.faults import Fault, fault_of
from rlbuffer.worker.samplers.base import Completion, Sampler, Sampling

T = TypeVar("T")


def check_prompt(tokens: NDArray[np.int32], vocabulary: int) -> None:
    """Checks a prompt before a sampler is asked: a token that its model does not have would fail all that is sampled
    beside it.

    Raises:
        InvalidRollout: no token ids, none at all, or one outside of the vocabulary.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise InvalidRollout(f"a prompt's tokens must be an array of token ids, got {shown(tokens)}")
    outside = (ids < 0) | (ids >= (vocabulary or 2**31))  # 0: the sampler does not know it
    if outside.any():
        at = int(outside.argmax())
        raise InvalidRollout(
            f"token {at} of a prompt is {ids[at]}, and the model's vocabulary has {vocabulary} ids: is it of another "
            "tokenizer?"
        )


def in_words(error: BaseException) -> str:
    """Kind and text of an error."""
    return f"{type(error).__name__}: {error}"


@asynccontextmanager
async def rollout_limit(settings: WorkerSettings, seconds: float | None = None) -> AsyncIterator[None]:
    """Inside, a TimeoutError says which limit it was, unless it is of the env's own: after `seconds`, what is left of
    it, or all of it."""
    whole = settings.rollout_timeout_seconds
    limit = asyncio.timeout(whole if seconds is None else seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"not finished within rollout_timeout_seconds = {whole:g}") from error


RETRIES = 1
"""Times that a rollout of several turns that failed is tried again."""


class Failed(NamedTuple):
    """A rollout that was not made, and what was sampled for it."""

    error: BaseException
    episode: Episode | None = None


class GroupMaker:
    """Makes groups of one env with one sampler.

    Args:
        env: single-turn, multi-turn, or one that makes rollouts itself.
        sampler: has loaded a version.
        settings: group size, sampling, timeouts.
        worker: the producer's name.
        temperature: instead of the settings'; 0 takes the likeliest token.
        assumed_temperature: what the trainer takes where a rollout does not say.
        row_tokens: of a longer rollout nothing trains; 0: no limit.
        needs: what scorers add where the env does not.
        retries: times that a rollout of several turns that failed is tried again; None: as often as usual.

    Raises:
        ConfigError: neither the env nor the settings leave a completion a token.
    """

    def __init__(
        self,
        env: Env,
        sampler: Sampler,
        settings: WorkerSettings,
        *,
        worker: str,
        temperature: float | None = None,
        assumed_temperature: float = 1.0,
        row_tokens: int = 0,
        needs: Sequence[str] = (),
        retries: int | None = None,
    ) -> None:
        self._env = env
        self._sampler = sampler
        self._settings = settings
        self._worker = worker
        self._assumed = assumed_temperature
        self._row_tokens, self._needs = row_tokens, needs
        self._retries = RETRIES if retries is None else retries
        longest = settings.max_new_tokens or env.max_new_tokens
        if longest < 1:
            raise ConfigError(f"env {env.name}: its max_new_tokens = {longest} must be at least 1", setting="env")
        self.sampling = Sampling(
            max_new_tokens=longest,
            temperature=settings.temperature if temperature is None else temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            stop_token_ids=tuple(env.eos_token_ids),
        )
        """How every completion is drawn, unless an episode says otherwise."""
        self._most = getattr(env, "max_concurrent", 0)
        self._slots: AbstractAsyncContextManager[Any] = asyncio.Semaphore(self._most) if self._most else nullcontext()
        """Held while a rollout is played, or scored: waiting for one is no part of a rollout's time."""
        self._ending = asyncio.Event()
        self.calls = RunningCalls()
        """What of the env runs at this moment."""
        self.way = next(way for way in ("rollout", "play", "score") if hasattr(env, way))
        """The env's function that makes, plays or scores a rollout."""

    def prompt(self, number: int) -> Prompt:
        """The env's prompt of ticket `number`. Raises what the env raises, TypeError, InvalidRollout and
        PromptTooLong: it leaves no room for a completion."""
        with self.calls.running("prompt"):
            prompt = self._env.prompt(number)
        if not isinstance(prompt, Prompt):
            raise TypeError(f"prompt() gave a {type(prompt).__name__} in place of a Prompt")
        check_prompt(prompt.tokens, self._sampler.vocab_size)
        length = len(prompt.tokens)
        for limit, what in ((self._sampler.context, "the model's context"), (self._row_tokens, "batcher.row_tokens")):
            if 0 < limit <= length:
                raise PromptTooLong(
                    f"prompt {prompt.name} of {length} tokens leaves no room for a completion: {what} is {limit}"
                )
        return prompt

    def end(self) -> None:
        """Ends the wait for unfinished rollouts: a group is made of the rollouts that are there, or not."""
        self._ending.set()

    async def make(self, ticket: Ticket, prompt: Prompt) -> Group:
        """Samples and scores the group of a ticket.

        A group is made when more than half of its rollouts are: the others are in it as failed attempts. Those that are
        unfinished when the worker ends are not: `planned_size` is then what there is.

        Raises:
            GroupFailed: half of the rollouts, or more, failed; the message has the first reason. Or none has a reward,
                and no scorer adds one.
            Aborted: sampling was stopped.
            SamplerUnavailable: the sampler is away.
            Exception: of the sampler, or of the env; :func:`rlbuffer.worker.faults.fault_of` says whose fault it is.
        """
        size = self._settings.group_size
        outcomes = await self.attempts(prompt)
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        for error, _ in failed:
            if not isinstance(error, Exception) or fault_of(error) is Fault.SETTINGS:
                raise error
        unfinished = [one.error for one in failed if fault_of(one.error) is Fault.SERVER]
        sound = [rollout for rollout in rollouts if not rollout.failure]
        is_enough = 2 * len(sound) > size
        if unfinished and not (is_enough and self._ending.is_set()):
            raise unfinished[0]
        if not is_enough and failed:
            raise GroupFailed(in_words(failed[0].error)) from failed[0].error
        if not is_enough:
            raise GroupFailed(next(str(rollout.failure) for rollout in rollouts if rollout.failure))
        if "reward" not in self._needs and all(rollout.reward is None for rollout in sound):
            raise GroupFailed(
                f"{self.way}() gave no reward, and no scorer adds one: give a number, or add a [score.NAME]"
            )
        version = sound[0].max_policy_version
        rollouts += [self._failed(prompt, one, version) for one in failed if fault_of(one.error) is not Fault.SERVER]
        return self._group(ticket, prompt, rollouts, len(unfinished))

    async def attempts(self, prompt: Prompt) -> list[Rollout | Failed]:
        """Samples and scores the rollouts of a group, whatever becomes of single ones.

        Raises:
            Exception: of what makes them all at once, the sampler that is asked for all completions of a group.
        """
        if self.way != "score":
            return await self._until_the_end([self._tried(prompt) for _ in range(self._settings.group_size)])
        (scored,) = await self._until_the_end([self._scored(prompt)])
        if isinstance(scored, Failed):
            raise scored.error
        return scored

    async def _until_the_end(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T | Failed]:
        """Does all of it, or what is finished when the worker ends; the rest has failed with Aborted."""
        tasks = [asyncio.ensure_future(one) for one in work]
        ending = asyncio.ensure_future(self._ending.wait())
        left: set[asyncio.Future[Any]] = set(tasks)
        try:
            while left and not ending.done():
                done, _ = await asyncio.wait({*left, ending}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
        finally:
            for task in (*tasks, ending):
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        ended = Failed(Aborted("the worker ends"))
        return [
            ended if isinstance(one, asyncio.CancelledError) else Failed(one) if isinstance(one, BaseException) else one
            for one in outcomes
        ]

    # -- one completion per rollout ------------------------------------------------------------------------------------
    async def _scored(self, prompt: Prompt) -> list[Rollout | Failed]:
        env = cast(SingleTurnEnv, self._env)
        deadline = time.monotonic() + self._settings.rollout_timeout_seconds
        async with rollout_limit(self._settings):
            completions = await self._sampler.sample(prompt.tokens, n=self._settings.group_size, sampling=self.sampling)
        if any(completion.finish_reason == "abort" for completion in completions):
            raise Aborted("sampling was stopped")
        left = max(0.0, deadline - time.monotonic())
        if inspect.iscoroutinefunction(env.score):
            scores = await asyncio.gather(
                *(self._within(left, env.score(prompt, c.tokens, finish_reason=c.finish_reason)) for c in completions),
                return_exceptions=True,
            )
        else:
            scores = await self._in_thread(left, env, prompt, completions)
        return [self._finished(prompt, c, score) for c, score in zip(completions, scores, strict=True)]

    async def _in_thread(
        self, seconds: float, env: SingleTurnEnv, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Any]:
        """Scores a group in one thread: it may be slow, and the other groups must not wait for it."""

        def score_all() -> list[Any]:
            out: list[Any] = []
            with self.calls.running("score"):
                for completion in completions:
                    try:
                        out.append(env.score(prompt, completion.tokens, finish_reason=completion.finish_reason))
                    except Exception as error:  # the env is the user's code: whatever it raises costs this rollout only
                        out.append(error)
                    except (SystemExit, asyncio.CancelledError) as error:
                        out.append(exited(error))
            return out

        async with self._slots, rollout_limit(self._settings, seconds):
            return await in_thread(score_all)

    async def _within(self, seconds: float, scoring: Any) -> Any:
        async with self._slots, rollout_limit(self._settings, seconds):
            with self.calls.running("score", asyncio.current_task()):
                return await scoring

    def _finished(self, prompt: Prompt, completion: Completion, score: Any) -> Rollout | Failed:
        episode = Episode(prompt.tokens, partial(self._ask, None), self.sampling)
        episode.add(completion)
        try:
            if isinstance(score, Exception):
                raise score
            return self._rollout(episode, score)
        except Exception as error:
            return Failed(error, episode)

    # -- several completions per rollout -------------------------------------------------------------------------------
    async def _tried(self, prompt: Prompt) -> Rollout | Failed:
        """One rollout, tried again as often as it may be."""
        tries = self._retries
        while True:
            episode = None
            try:
                async with self._slots, rollout_limit(self._settings):
                    with self.calls.running(self.way, asyncio.current_task()) as call:
                        ask = partial(self._ask, call)
                        if self.way == "rollout":
                            return await self._made(prompt, ask)
                        episode = Episode(prompt.tokens, ask, self.sampling)
                        return self._rollout(episode, await cast(MultiTurnEnv, self._env).play(prompt, episode))
            except Exception as error:  # the env is the user's code
                if fault_of(error) is not Fault.REQUEST:
                    raise
                if tries == 0:
                    return Failed(error, episode)
                tries -= 1

    async def _made(self, prompt: Prompt, ask: Ask) -> Rollout:
        env = cast(WholeRolloutEnv, self._env)
        rollout = await env.rollout(prompt, PolicyAccess(ask=ask, sampling=self.sampling))
        if not isinstance(rollout, Rollout):
            raise GroupFailed(f"the env made a {type(rollout).__name__} instead of a Rollout")
        if not rollout.loss_tokens and not rollout.failure:
            raise GroupFailed("the env made a rollout of which no token is trained")
        return rollout

    async def _ask(self, call: EnvCall | None, tokens: NDArray[np.int32], sampling: Sampling) -> Completion:
        """Samples for `call` of the env, or for none."""
        check_prompt(tokens, self._sampler.vocab_size)
        with call.paused() if call else nullcontext():
            completion = (await self._sampler.sample(tokens, n=1, sampling=sampling))[0]
        if completion.finish_reason == "abort":
            raise Aborted("sampling was stopped")
        return completion

    # -- records -------------------------------------------------------------------------------------------------------
    def _rollout(self, episode: Episode, score: Any) -> Rollout:
        if not isinstance(score, Score):
            raise TypeError(f"{self.way}() gave a {type(score).__name__} in place of a Score")
        if not episode.sampled_tokens:
            raise GroupFailed("the episode ended before the policy sampled a token")
        return episode.rollout(score, text=self._env.render(episode.tokens))

    def _failed(self, prompt: Prompt, failed: Failed, version: int) -> Rollout:
        """An attempt that failed, with what was sampled until then, for people; `version` sampled beside it."""
        error, episode = failed
        failure = Failure(kind_of(type(error).__name__), str(error))
        if episode is not None and episode.sampled_tokens:
            with suppress(InvalidRollout):  # that may be why it failed
                return replace(episode.rollout(Score(reward=0.0)), failure=failure)
        turns = [{"role": "user", "tokens": prompt.tokens}]
        return Rollout.from_turns(turns, reward=None, policy_version=version, failure=failure)

    def _group(self, ticket: Ticket, prompt: Prompt, rollouts: Sequence[Rollout], unfinished: int) -> Group:
        metadata = {**prompt.metadata, **({"unfinished_rollouts": unfinished} if unfinished else {})}
        if self.sampling.top_k:
            metadata["top_k"] = self.sampling.top_k
        if self.sampling.top_p != 1:
            metadata["top_p"] = self.sampling.top_p
        if self.sampling.min_p:
            metadata["min_p"] = self.sampling.min_p
        return Group(
            group_id=ticket.group_id,
            env=ticket.env,
            prompt_id=prompt.prompt_id,
            rollouts=tuple(map(self._saying_its_temperature, rollouts)),
            planned_size=len(rollouts),
            answer=prompt.answer,
            metadata=metadata,
            needs=tuple(need for need in self._needs if not _has_all([r for r in rollouts if not r.failure], need)),
            worker=self._worker,
            created=time.time(),
        )

    def _saying_its_temperature(self, rollout: Rollout) -> Rollout:
        """With a column of it where a sequence has none, unless the trainer takes this very one for granted, wherever
        it stands: 1."""
        temperature = self.sampling.temperature
        if (
            rollout.failure
            or _have_all(rollout, "temperatures")
            or not temperature
            or temperature == self._assumed == 1
        ):
            return rollout
        columns = [
            sequence.columns.get("temperatures", np.full(len(sequence.tokens), temperature, np.float32))
            for sequence in rollout.sequences
        ]
        return with_column(rollout, "temperatures", columns)


def _has_all(rollouts: Sequence[Rollout], need: str) -> bool:
    """The env gave what the need is."""
    if need == "reward":
        return all(rollout.reward is not None for rollout in rollouts)
    name = need.removeprefix("rewards.")
    return all(_have_all(rollout, name) if name == need else name in rollout.rewards for rollout in rollouts)


def _have_all(rollout: Rollout, column: str) -> bool:
    """Each of its sequences has the column."""
    return all(column in sequence.columns for sequence in rollout.sequences)
