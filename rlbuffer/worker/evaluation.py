"""Evaluation: how good a policy version is on envs that nothing is trained on.

One worker evaluates a version on an env, under a lease, beside its other work: a fixed set of prompts, one rollout
each, the likeliest tokens (temperature 0) unless the settings say otherwise. Newer versions wait meanwhile, and the
result counts only if every token is of the version that it is about. It goes into a stream of its own: never into the
pool, the ledger or the tickets.

A rollout that runs out of time, or of context, is wrong: left out, a policy that never comes to an end would look as
good as the few answers that it does give. One that failed by something else (the env, the engine) says nothing of the
policy and is left out. Both are counted. No rollout is tried again, which would be a second chance.

Random numbers of a temperature above 0 are new in each evaluation: the standard error has that part of the noise.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rlbuffer.config.settings import EvaluationSettings, WorkerSettings
from rlbuffer.errors import GroupFailed, PromptTooLong, ServerRefused
from rlbuffer.process.logs import fields
from rlbuffer.process.threads import in_thread
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.evaluations import counts_of, mean_of
from rlbuffer.state.text import plural
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker.envs import Env, Skip, close_env, make_env, with_tokenizer
from rlbuffer.worker.group_maker import Failed, GroupMaker, in_words
from rlbuffer.worker.samplers.base import Sampler

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

CONCURRENT = 64
"""Rollouts in flight at once, unless a prompt has more."""
SLACK_SECONDS = 10.0
"""Seconds that an evaluation may take beyond what its rollouts may."""
TIMED_OUT, TOO_LONG = "timed_out", "too_long"
"""Limits that a rollout ran into: it is wrong, and counted under this name."""
ROUNDING = 1e-6
"""What a reward of 1 may lack: weights such as 0.7, 0.2 and 0.1 do not add up to it exactly."""
EVALUATION_POLL_SECONDS = 0.5
"""Seconds between two looks whether a version is due; one that is loaded is looked at then."""
_log = logging.getLogger(__name__)


class Evaluator:
    """Evaluates the versions that are due on the envs that the settings name.

    Args:
        buffer: the run.
        sampler: samples; what it serves is what can be evaluated.
        settings: name -> what to evaluate.
        hold: an async context manager factory: while it is entered, no newer version is loaded.
        rollout_seconds: longest that one rollout may take; an evaluation, that for each of its waves of rollouts.
    """

    def __init__(
        self,
        buffer: Buffer,
        sampler: Sampler,
        settings: Mapping[str, EvaluationSettings],
        *,
        hold: Callable[[], Any],
        rollout_seconds: float,
    ) -> None:
        self._store = buffer.store.role(WorkerStore)
        self._sampler = sampler
        self._settings = settings
        self._hold = hold
        self._rollout_seconds = rollout_seconds
        self._owner = uuid.uuid4().hex
        self._is_new = asyncio.Event()
        self._looked: dict[str, int] = {}
        """Evaluation -> the last version that was looked at."""
        model_path = buffer.settings.model.path
        self._envs: dict[str, Env] = {
            name: make_env(s.env, **with_tokenizer(s.env, s.env_options, model_path)) for name, s in settings.items()
        }

    async def run(self) -> None:
        """Evaluates until it is cancelled."""
        while True:
            self._is_new.clear()
            version = self._sampler.version
            due = [
                (name, settings)
                for name, settings in self._settings.items()
                if version >= 0 and version % settings.every == 0 and self._looked.get(name) != version
            ]
            if due:
                # Held over all of them: between two, a newer version would take the place of the one that is due.
                async with self._hold():
                    for name, settings in due:
                        self._looked[name] = version
                        await self._evaluate(name, settings, version)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_new.wait(), EVALUATION_POLL_SECONDS if self._settings else None)

    def forget(self) -> None:
        """Version numbers mean something else from now on."""
        self._looked.clear()

    def wake(self) -> None:
        """A version has just been loaded. Looked for only now and then, one that does not serve for long is missed."""
        self._is_new.set()

    async def close(self) -> None:
        """Frees what the envs hold."""
        for env in self._envs.values():
            await close_env(env)

    async def _evaluate(self, name: str, settings: EvaluationSettings, version: int) -> None:
        at_once = max(1, CONCURRENT // settings.samples)
        most = getattr(self._envs[name], "max_concurrent", 0) or CONCURRENT
        waves = math.ceil(settings.prompts / at_once) * math.ceil(at_once * settings.samples / most)
        owner, longest = self._owner, self._rollout_seconds * waves + SLACK_SECONDS
        if self._sampler.version != version:  # a newer one was loaded before it was held
            return
        start, record = time.monotonic(), None
        try:
            claim = partial(self._store.claim_evaluation, name, version, owner=owner, ttl_seconds=longest)
            if not await asyncio.to_thread(claim):
                return
            async with asyncio.timeout(longest):
                measured = await self._measured(name, settings, version, at_once)
            measured["seconds"] = time.monotonic() - start
            await asyncio.to_thread(self._store.add_evaluation, name, version, measured)
            record = measured
        except TimeoutError:
            trouble = (
                f"took longer than {longest:g} s ({waves} times worker.*.rollout_timeout_seconds, and "
                f"{SLACK_SECONDS:g} s)"
            )
        except (GroupFailed, ServerRefused) as error:
            trouble = f"does not count: {error}"
        finally:
            if record is None:
                await asyncio.to_thread(self._store.release_evaluation, name, version, owner=owner)
        if record is None:
            self._trouble(f"eval/{name} of version {version} {trouble}")  # only now: whoever hears it may take it
            return
        _log.info(
            "eval/%s/reward/%s  version %d  over %s in %.1f s",
            name,
            mean_of(record),
            version,
            counts_of(record),
            record["seconds"],
            extra=fields("evaluation", env=name, version=version, **record),
        )

    async def _measured(self, name: str, settings: EvaluationSettings, version: int, at_once: int) -> dict[str, Any]:
        """Returns the result. Raises GroupFailed where it does not count."""
        env = self._envs[name]
        worker = WorkerSettings(
            env=settings.env,
            group_size=settings.samples,
            temperature=1.0,  # the field wants more than 0; what is sampled with stands in `sampling`
            max_new_tokens=settings.max_new_tokens,
            rollout_timeout_seconds=self._rollout_seconds,
        )
        maker = GroupMaker(env, self._sampler, worker, worker="eval", temperature=settings.temperature, retries=0)
        limit = asyncio.Semaphore(at_once)

        async def attempts_of(number: int) -> list[Rollout | BaseException]:
            async with limit:
                try:
                    prompt = await in_thread(lambda: maker.prompt(number))
                except Skip:
                    return []
                except Exception as error:  # the env is the user's code
                    return [GroupFailed(f"prompt failed: {in_words(error)}")] * settings.samples
                try:
                    outcomes = await maker.attempts(prompt)
                except PromptTooLong as error:  # nothing was sampled
                    return [GroupFailed(in_words(error))] * settings.samples
                except Exception as error:
                    return [error] * settings.samples
                return [outcome.error if isinstance(outcome, Failed) else outcome for outcome in outcomes]

        attempts = await asyncio.gather(*(attempts_of(n) for n in range(settings.prompts)))
        if not any(attempts):
            raise GroupFailed(f"its env skips all prompts ({settings.prompts})")
        results = [[result_of(attempt) for attempt in of_prompt] for of_prompt in attempts]
        for number, of_prompt in enumerate(results):
            for why in {str(result) for result in of_prompt if isinstance(result, GroupFailed)}:
                self._trouble(f"eval/{name} prompt {number}: {why}")
        return summary(results, samples=settings.samples, version=version)

    def _trouble(self, sentence: str) -> None:
        _log.warning("%s", sentence, extra=fields("trouble"))


def result_of(attempt: Rollout | BaseException) -> Rollout | str | GroupFailed:
    """What counts of an attempt: a scored rollout, the name of the limit that it ran into, or that nothing does."""
    failure = attempt.failure if isinstance(attempt, Rollout) else None
    if isinstance(attempt, TimeoutError) or (failure and "timeout" in failure.kind.lower()):
        return TIMED_OUT
    if isinstance(attempt, PromptTooLong):
        return TOO_LONG
    if not isinstance(attempt, Rollout):
        return attempt if isinstance(attempt, GroupFailed) else GroupFailed(in_words(attempt))
    if failure:
        return GroupFailed(str(failure))
    if attempt.reward is None:
        return GroupFailed("it has no reward: an evaluation asks no scorer, so its env must give one")
    return attempt


def summary(results: Sequence[Sequence[Rollout | str | GroupFailed]], *, samples: int, version: int) -> dict[str, Any]:
    """The result of an evaluation, of the results of each prompt's rollouts.

    Each prompt weighs alike, by the mean of its rollouts: their mean over prompts is mean@k. The standard error is that
    of the prompts' means, since rollouts of one prompt are not independent. A rollout that ran into a limit has no
    success, and the least reward of those that ended, at most 0: no wrong answer is worth less. An env may judge its
    prompts by different names (mathematics by one, code by another): what stands under a name is over the prompts that
    are judged by it.

    Returns:
        ``reward/mean``, ``reward/error`` (standard error; not for a single prompt), ``reward/<name>`` and
        ``success/<name>`` (means), ``pass@<k>/<name>`` (see :func:`pass_at`; k 1, 2, 4, ... and `samples`; where the
        env names no success: `reward`, one of at least 1), ``truncated`` (share) and ``length`` (mean of sampled
        tokens) of those that ended, ``prompts`` and ``rollouts`` that count, ``samples``, and of ``rollouts``
        ``timed_out`` and ``too_long``; ``failed``: those that do not count.

    Raises:
        GroupFailed: at least as many failed as count, or another version sampled some of it.
    """
    counted = [[r for r in of_prompt if not isinstance(r, GroupFailed)] for of_prompt in results]
    counted = [of_prompt for of_prompt in counted if of_prompt]
    rollouts = sum(map(len, counted))
    failed = sum(map(len, results)) - rollouts
    if failed >= rollouts:
        raise GroupFailed(f"{failed} of {plural(rollouts + failed, 'rollout')} failed")
    ended = [r for of_prompt in counted for r in of_prompt if isinstance(r, Rollout)]
    if {v for r in ended for v in (r.min_policy_version, r.max_policy_version)} - {version}:
        raise GroupFailed("another version sampled some of it")

    def means(value: Callable[[Rollout], float], prompts: Sequence[Sequence[Rollout | str]]) -> list[float]:
        """The mean of each prompt."""
        least = min([0.0, *(value(r) for r in ended)])
        return [fmean(value(r) if isinstance(r, Rollout) else least for r in of_prompt) for of_prompt in prompts]

    rewards = means(lambda r: r.reward or 0.0, counted)
    out: dict[str, Any] = {"reward/mean": fmean(rewards)}
    if len(rewards) > 1:
        out["reward/error"] = stdev(rewards) / math.sqrt(len(rewards))
    for name in sorted({name for r in ended for name in r.rewards}):
        out[f"reward/{name}"] = fmean(means(partial(_reward, name), _concerned(counted, name, lambda r: r.rewards)))
    verdicts = sorted({name for r in ended for name in r.successes})
    for name in verdicts or [""]:
        prompts: Sequence[Sequence[Rollout | str]] = counted
        if name:
            prompts = _concerned(counted, name, lambda r: r.successes)
            out[f"success/{name}"] = fmean(means(partial(_is_right, name), prompts))
        right = [(len(rs), sum(isinstance(r, Rollout) and _is_right(name, r) for r in rs)) for rs in prompts]
        for k in sorted({samples, *(2**i for i in range(samples.bit_length()))}):
            if passes := [pass_at(k, n, of_them) for n, of_them in right if n >= k]:
                out[f"pass@{k}/{name or 'reward'}"] = fmean(passes)
    if ended:
        out["truncated"] = fmean(r.is_truncated for r in ended)
        out["length"] = fmean(r.loss_tokens for r in ended)
    limits = Counter(r for of_prompt in counted for r in of_prompt if isinstance(r, str))
    out |= {"prompts": len(counted), "samples": samples, "rollouts": rollouts, "failed": failed}
    return out | {limit: limits[limit] for limit in (TIMED_OUT, TOO_LONG)}


def _concerned(
    counted: Sequence[Sequence[Rollout | str]], name: str, named: Callable[[Rollout], Mapping[str, Any]]
) -> list[Sequence[Rollout | str]]:
    """The prompts whose rollouts are judged under `name`, and those of which none ended, so that nobody knows."""

    def is_one(of_prompt: Sequence[Rollout | str]) -> bool:
        ended = [r for r in of_prompt if isinstance(r, Rollout)]
        return not ended or any(name in named(r) for r in ended)

    return [of_prompt for of_prompt in counted if is_one(of_prompt)]


def _reward(name: str, rollout: Rollout) -> float:
    return rollout.rewards.get(name, 0.0)


def _is_right(name: str, rollout: Rollout) -> bool:
    """The verdict of that name; "": by the reward."""
    return rollout.successes.get(name, False) if name else (rollout.reward or 0.0) >= 1 - ROUNDING


def pass_at(k: int, n: int, right: int) -> float:
    """The chance that one of k rollouts is right, of which `right` of n were: 1 - C(n - right, k) / C(n, k), unbiased.

    Source: Chen and others 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Example:
        >>> pass_at(1, 4, 1), pass_at(2, 4, 1), pass_at(4, 4, 1), pass_at(2, 4, 0)
        (0.25, 0.5, 1.0, 0.0)
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
