"""Evaluation: how good a policy version is on envs that nothing is trained on.

One worker evaluates a version on an env, under a lease, beside its other work: a fixed set of prompts, one completion
each, the likeliest tokens (temperature 0) unless the settings say otherwise. Newer versions wait meanwhile, and the
result counts only if every token is of the version that it is about. It goes into a stream of its own: never into the
pool, the ledger or the tickets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rlbuffer.config.settings import EvaluationSettings, WorkerSettings
from rlbuffer.errors import GroupFailed, ServerRefused
from rlbuffer.process.logs import fields
from rlbuffer.process.threads import in_thread
from rlbuffer.records.group import Ticket
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import plural
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker.envs import Env, Skip, close_env, make_env
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers.base import Sampler

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

CONCURRENT = 64
"""Prompts in flight at once."""
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
        rollout_seconds: longest that one rollout may take; an evaluation, that for each of its waves of prompts.
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
        self._store = buffer.role(WorkerStore)
        self._sampler = sampler
        self._settings = settings
        self._hold = hold
        self._rollout_seconds = rollout_seconds
        self._owner = uuid.uuid4().hex
        self._is_new = asyncio.Event()
        self._looked: dict[str, int] = {}
        """Evaluation -> the last version that was looked at."""
        self._envs: dict[str, Env] = {name: make_env(s.env, **s.env_options) for name, s in settings.items()}

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
        owner, longest = self._owner, self._rollout_seconds * math.ceil(settings.prompts / CONCURRENT)
        if self._sampler.version != version:  # a newer one was loaded before it was held
            return
        start, record = time.monotonic(), None
        try:
            claim = partial(self._store.claim_evaluation, name, version, owner=owner, ttl_seconds=longest)
            if not await asyncio.to_thread(claim):
                return
            async with asyncio.timeout(longest):
                measured = await self._measured(name, settings, version, longest)
            measured["seconds"] = time.monotonic() - start
            await asyncio.to_thread(self._store.add_evaluation, name, version, measured)
            record = measured
        except TimeoutError:
            trouble = f"took longer than {longest:g} s (worker.*.rollout_timeout_seconds for each {CONCURRENT} prompts)"
        except (GroupFailed, ServerRefused) as error:
            trouble = f"does not count: {error}"
        finally:
            if record is None:
                await asyncio.to_thread(self._store.release_evaluation, name, version, owner=owner)
        if record is None:
            self._trouble(f"eval/{name} of version {version} {trouble}")  # only now: whoever hears it may take it
            return
        _log.info(
            "eval/%s/reward/mean %.3f +- %.3f  version %d  %s in %.1f s",
            name,
            record["reward/mean"],
            record["reward/error"],
            version,
            plural(int(record["rollouts"]), "rollout"),
            record["seconds"],
            extra=fields("evaluation", env=name, version=version, **record),
        )

    async def _measured(self, name: str, settings: EvaluationSettings, version: int, longest: float) -> dict[str, Any]:
        """Returns the result. Raises GroupFailed where it does not count."""
        env = self._envs[name]
        worker = WorkerSettings(
            env=settings.env,
            group_size=1,
            temperature=1.0,  # the field wants more than 0; what is sampled with stands in `sampling`
            max_new_tokens=settings.max_new_tokens,
            rollout_timeout_seconds=longest,
        )
        maker = GroupMaker(env, self._sampler, worker, worker="eval", temperature=settings.temperature)
        limit = asyncio.Semaphore(CONCURRENT)

        async def one(number: int) -> Rollout | Exception:
            ticket = Ticket(env=env.name, number=number, group_id=f"eval.{number}")
            async with limit:
                try:
                    prompt = await in_thread(lambda: maker.prompt(number))
                    return (await maker.make(ticket, prompt)).rollouts[0]
                except Skip as skip:
                    return skip
                except Exception as error:  # the env is the user's code
                    self._trouble(f"eval/{name} prompt {number}: {type(error).__name__}: {error}")
                    return error

        outcomes = await asyncio.gather(*(one(n) for n in range(settings.prompts)))
        rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
        failed = sum(not isinstance(outcome, Rollout | Skip) for outcome in outcomes)
        if failed >= len(rollouts):
            raise GroupFailed(f"{failed} of {plural(settings.prompts, 'prompt')} failed")
        if {v for r in rollouts for v in (r.min_policy_version, r.max_policy_version)} != {version}:
            raise GroupFailed("another version sampled some of it")
        return summary(rollouts, failed=failed)

    def _trouble(self, sentence: str) -> None:
        _log.warning("%s", sentence, extra=fields("trouble"))


def summary(rollouts: list[Rollout], *, failed: int) -> dict[str, Any]:
    """The result of an evaluation: means over the rollouts, with the standard error of the reward's.

    Returns:
        ``reward/mean``, ``reward/error`` (standard error; 0 for one rollout), ``reward/<name>`` and ``success/<name>``
        (means), ``truncated`` (share), ``length`` (mean of sampled tokens), ``rollouts``, ``failed``.
    """
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    n = len(rewards)
    error = stdev(rewards) / math.sqrt(n) if n > 1 else 0.0
    out: dict[str, Any] = {"reward/mean": fmean(rewards), "reward/error": error}
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        out[f"reward/{name}"] = sum(rollout.rewards.get(name, 0.0) for rollout in rollouts) / n
    for name in sorted({name for rollout in rollouts for name in rollout.successes}):
        out[f"success/{name}"] = sum(rollout.successes.get(name, False) for rollout in rollouts) / n
    out["truncated"] = sum(rollout.is_truncated for rollout in rollouts) / n
    out["length"] = sum(rollout.loss_tokens for rollout in rollouts) / n
    return {**out, "rollouts": n, "failed": failed}
