"""The worker: takes tickets, samples them with the newest policy version, scores, pushes.

    wait for a version -> load -> take tickets -> newer version? load -> sample -> score -> push
                            ^---- watch for newer versions: loaded while groups are in flight ----'

Many groups are in flight at once, each in a task of its own. A version is looked for after tickets are taken, too: what
is sampled then is as fresh as it can be, and with ``max_age = 0`` it must be. Troubles end a group or are waited out;
these end the worker: a server that stays away, and settings that cannot work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlbuffer.client.asking import SOON_SECONDS, pauses_between_asks, together
from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.imports import defined_at, place_of
from rlbuffer.config.settings import EvaluationSettings, RunSettings, WorkerSettings
from rlbuffer.errors import (
    ConfigError,
    EnvDone,
    RlbufferError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    WeightsError,
    WrongAnswer,
    WrongLogprobs,
    WrongType,
)
from rlbuffer.process.heartbeat import BEAT_SECONDS
from rlbuffer.process.logs import fields
from rlbuffer.process.serving import serve_until_stopped
from rlbuffer.process.signals import Stopped
from rlbuffer.process.threads import in_thread
from rlbuffer.records.group import Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.store.worker import WorkerStore
from rlbuffer.weights.cache import VersionCache
from rlbuffer.worker.envs import Env, Prompt, Skip, close_env, make_env, with_tokenizer
from rlbuffer.worker.evaluation import Evaluator
from rlbuffer.worker.faults import Fault, fault_of
from rlbuffer.worker.group_maker import GroupMaker, in_words, rollout_limit
from rlbuffer.worker.groups_in_flight import WORKER_POLL_SECONDS, GroupsInFlight
from rlbuffer.worker.heartbeat import WORKER_TICKET_SECONDS, WorkerHeartbeat, telling_start, telling_why
from rlbuffer.worker.place import changes, identity_of
from rlbuffer.worker.samplers import Sampler, make_sampler
from rlbuffer.worker.versions import Versions

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.writer import Writer

T = TypeVar("T")

PROGRAMS = "command"
"""The env of programs that sample by the gateway."""
CHECKED_PROMPTS = 64
"""Prompts that are looked at for one to check the sampler with."""
CHECKED_LOADS = 2
"""Versions that a sampler is compared with: the one that an engine starts with, and the first to take the place of
another, which is another way through the engine (vLLM 0.32 on the CPU goes on with the old experts there)."""
LOOKED_AGAIN_EVERY = 8
"""Loads from one later comparison to the next: an engine may stop to follow, and go on under the new numbers. Sampling
takes a moment, and the comparison, on a host's cores and seconds to a minute long, goes on beside the work."""
_log = logging.getLogger(__name__)
DRAIN_LOOK_SECONDS = 5.0
"""Seconds between two looks whether a run that gives no ticket drains, and gives this env a share."""


def _seed_of(settings: RunSettings, name: str) -> int:
    """The seed of one life of a worker: with the same one after a restart it would draw the same random numbers again,
    and the same completions of prompts that it has sampled before. A deterministic run wants just that.

    32 bits: vLLM gives it to numpy.
    """
    life = name if settings.deterministic else f"{name} {uuid.uuid4().hex}"
    return int.from_bytes(hashlib.blake2b(f"{settings.seed} {life}".encode(), digest_size=4).digest())


def run_worker(
    buffer: Buffer,
    name: str,
    settings: WorkerSettings,
    *,
    stop: threading.Event,
    env: Env | None = None,
    sampler: Sampler | None = None,
    evaluations: Mapping[str, EvaluationSettings] | None = None,
    section: str = "",
) -> bool:
    """Runs one worker until `stop` is set, or its env is done; tickets it still holds then are given back.

    Args:
        name: the producer's name; the same after a restart.
        env, sampler: used instead of those that `settings` name.
        evaluations: what this worker measures versions on beside its work, by name.
        section: the ``[worker.NAME]`` that it was started for, if it was.

    Returns:
        True when the env is done: all its tickets were given, and their groups made.

    Raises:
        ConfigError: the env or sampler cannot be made, the env does not fit the model, or none of the first
            groups could be made.
        SchemaMismatch: the run was written by an incompatible version; nothing is written there.
        ServerUnreachable: for longer than the writer's patience.
    """
    if settings.env == PROGRAMS and env is None:  # programs ask the gateway: nothing is sampled here
        from rlbuffer.worker.programs import run_programs

        return run_programs(buffer, name, settings, stop=stop, section=section)
    # First what may be refused: a worker that cannot work begins no run.
    store = buffer.store.role(WorkerStore)
    with telling_why(store, name, settings), telling_start(store, name, settings):
        worker = _Worker(
            buffer=buffer,
            name=name,
            settings=settings,
            env=env
            or make_env(settings.env, **with_tokenizer(settings.env, settings.env_options, buffer.settings.model.path)),
            sampler=sampler or make_sampler(settings, seed=_seed_of(buffer.settings, name)),
            stop=stop,
            evaluations=evaluations or {},
            section=section,
        )
    store.open_run()
    return asyncio.run(worker.run())


@dataclass(kw_only=True)
class _Worker:
    """One worker: what it was started with, and what it is made of."""

    buffer: Buffer
    name: str
    settings: WorkerSettings
    env: Env
    sampler: Sampler
    stop: threading.Event
    """Set: what is in flight lands, then the worker ends."""
    evaluations: Mapping[str, EvaluationSettings]
    section: str

    def __post_init__(self) -> None:
        run = self.buffer.settings
        self._is_draining = False
        # Where another worker changes the weights, nobody knows here which version answers.
        self._is_alone = bool(self.settings.sampler_options.get("updates_weights", True))
        self._unchecked = CHECKED_LOADS if self._is_alone else 1
        """Versions that the sampler is still to be compared with before they serve."""
        self._loads = 0
        """Loads after those."""
        self._right = -1
        """The newest version that it was compared with, and was right."""
        self._look: tuple[int, asyncio.Task[float]] | None = None
        """The later version that it is being compared with."""
        self._ended: Waiting | None = None
        """The trainer had made its last step when this worker began, and no other one has come yet."""
        self._shares: Mapping[str, float] = {}
        """env -> its share of a step, by the run's budgets."""
        self._looked_at = float("-inf")
        self._asks_for_all = False
        """The last ask for tickets brought the newest version along, and the next one will."""
        self._maker = GroupMaker(
            self.env,
            self.sampler,
            self.settings,
            worker=self.name,
            assumed_temperature=run.trainer.temperature,
            row_tokens=run.batcher.row_tokens,
            needs=run.needs_of(self.env.name),
        )
        self._heartbeat = WorkerHeartbeat(
            self.buffer.store.role(WorkerStore), self.name, self.env.name, self._maker.calls
        )
        self._versions = Versions(
            self.buffer.policy,
            self.sampler,
            self.env,
            self._heartbeat,
            check=self._check,
            on_load=lambda: self._evaluator.wake(),
            cache=VersionCache.of(run, stop=self.stop),
            max_age=run.batcher.for_env(self.env.name).max_age,
        )
        self._evaluator = Evaluator(
            self.buffer,
            self.sampler,
            self.evaluations,
            hold=self._versions.held,
            rollout_seconds=self.settings.rollout_timeout_seconds,
        )
        self._groups = GroupsInFlight(
            self.buffer,
            self.env,
            self.settings,
            self._maker,
            self._heartbeat,
            self._versions,
            stop=self.stop,
        )

    async def run(self) -> bool:
        self._heartbeat.start()
        try:
            return await serve_until_stopped(
                self._serve_run, stop=self.stop, forget=self._run_gone, refused=self._refused
            )
        finally:
            if self._look is not None:  # whatever it finds, nobody asks any more
                self._look[1].cancel()
                await asyncio.gather(self._look[1], return_exceptions=True)
            await self.sampler.close()
            await close_env(self.env)
            await self._evaluator.close()
            self._groups.close()
            self._heartbeat.close()
            self._heartbeat.stopped()

    def _run_gone(self, error: RunGone) -> None:
        """Another epoch, or another run under the name: version numbers and tickets mean something else."""
        self._heartbeat.error = str(error)
        self._look = None
        self._versions.forget()
        self._evaluator.forget()
        self._groups.forget()
        _log.warning("%s", error, extra=fields("restart"))

    def _refused(self, error: ServerRefused) -> None:
        """The server takes no writes for now. Tickets expire, groups are pushed as soon as it does."""
        self._heartbeat.waits(Waiting(kind=Wait.SERVER, detail=str(error)))

    def _no_ticket(self) -> Waiting:
        """The reason why there is no ticket."""
        now = time.monotonic()
        if now - self._looked_at >= DRAIN_LOOK_SECONDS:
            meta = self.buffer.store.meta()
            self._is_draining, self._looked_at = meta.draining_ms > 0, now
            self._shares = budgets_at(meta.config.get("budgets", {}), meta.step + 1)
            # Before this worker began: it waits for the next trainer.
            self._ended = Waiting(kind=Wait.ENDED, step=meta.finished_step) if meta.finished else None
        if self._ended:
            return self._ended
        if self._is_draining:
            return Waiting(kind=Wait.DRAINING)
        if self.env.name not in self._shares and sum(self._shares.values()) > 1 - 1e-9:
            return Waiting(kind=Wait.NO_SHARE, env=self.env.name, detail=", ".join(self._shares))
        return Waiting(kind=Wait.TICKET, env=self.env.name)

    async def _serve_run(self) -> bool:
        """Serves one epoch of the run. Returns when told to stop, or (True) when its env is done; whatever is in flight
        then is abandoned."""
        writer = self.buffer.writer(
            self.name,
            on_retry=self._groups.held_up,
            ticket_seconds=WORKER_TICKET_SECONDS,
            section=self.section,
        )
        groups, sampler, pauses = self._groups, self.sampler, pauses_between_asks()
        await self._compare_prompts()
        watch = asyncio.create_task(self._watch())
        groups.begin(writer)
        try:
            while not self.stop.is_set():
                await groups.take_finished(watch)
                if not self._versions.is_serving:
                    await asyncio.sleep(WORKER_POLL_SECONDS)
                    continue
                room = self.settings.groups_in_flight - len(groups)
                if room <= 0 or (len(groups) and sampler.traits.takes_batches):
                    await groups.wait(watch)
                    continue
                groups.refusal, pause = None, next(pauses)
                tickets = await self._asked(writer, room, pause)
                if not tickets:
                    if pause >= SOON_SECONDS:
                        await self._say_waiting(groups.refusal)
                    if self._asks_for_all:
                        pause = together(pause, time.time())
                    await asyncio.to_thread(self.stop.wait, pause)
                    continue
                pauses = pauses_between_asks()
                self._heartbeat.add(tickets)
                # A version that was announced while this worker waited for its tickets.
                if not self.stop.is_set() and await self._refreshed():
                    await groups.start(tickets)
                else:
                    await groups.release(tickets)
        except EnvDone as error:
            # Another worker has made the groups in flight here: they were its own before their tickets expired.
            _log.info("%s", error, extra=fields("done", env=self.env.name))
            return True
        except (RunGone, ServerUnreachable, ServerRefused):
            self._heartbeat.drop_tickets()  # the tickets mean nothing any more, or cannot be given back: they expire
            raise
        finally:
            await groups.land(watch)
        return False

    async def _compare_prompts(self) -> None:
        """Tells where the env has other prompts than those that the run's tickets have counted."""
        store, env = self.buffer.store.role(WorkerStore), self.env.name
        try:
            async with rollout_limit(self.settings):
                now = await self._unless_stopped(in_thread(lambda: identity_of(self.env, self._maker.calls)))
        except TimeoutError:  # its tickets will meet it, and say it
            now = ""
        except Stopped:
            raise
        except Exception as error:  # the env is the user's code
            _log.warning("the prompts of %s are not compared, its identity fails: %s", env, in_words(error))
            now = ""
        if not now:
            return
        try:
            before, number = await asyncio.to_thread(store.prompts_before, env, now)
            if differing := changes(before, now):
                self._heartbeat.has_other_prompts(Problem(kind=Trouble.OTHER_PROMPTS, count=number, detail=differing))
                # From now on these are those of before: it is said again where workers have different ones by turns.
                await asyncio.to_thread(store.note_prompts, env, now)
            elif not number:  # another run under the name
                self._heartbeat.other_prompts = None
        except (ServerUnsuitable, WrongType, WrongAnswer) as error:  # no reason to sample nothing
            _log.warning("the prompts of %s are not compared with those of before: %s", env, error)

    async def _say_waiting(self, refusal: Waiting | None) -> None:
        self._heartbeat.waits(await asyncio.to_thread(self._no_ticket) if refusal is None else refusal)

    async def _asked(self, writer: Writer, room: int, pause: float) -> list[Ticket]:
        """Asks for tickets. An idle worker whose next ask is after a long `pause` asks for all it waits for, and tells
        of itself, in one round trip: that is what a server with a thousand of them notices."""
        env, size = self.env.name, self._groups.tickets
        is_idle = pause >= BEAT_SECONDS and not len(self._groups)
        beat = self._heartbeat.to_carry() if is_idle else None
        if beat is None:
            self._asks_for_all = False
            return await asyncio.to_thread(writer.take, env, room, timeout_seconds=0.0, size=size)
        answer = await asyncio.to_thread(writer.ask, env, room, beat=beat, size=size)
        self._asks_for_all = answer is not None
        if answer is None:
            return []
        tickets, asked = answer
        if asked.is_heard:
            self._heartbeat.carried(pause)
        self._is_draining = asked.is_draining
        if not tickets and not self._versions.serves(asked.policy):
            await self._refreshed()
        return tickets

    async def _refreshed(self) -> bool:
        """Loads the current version; whether any can be sampled from. Raises Stopped when the worker is asked to end
        meanwhile: an evaluation may hold the version for minutes."""
        return await self._unless_stopped(self._versions.refresh())

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that may take long. Raises Stopped when the worker is asked to end meanwhile."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=WORKER_POLL_SECONDS))[0]:
                if self.stop.is_set():
                    raise Stopped
            return task.result()
        finally:
            task.cancel()

    async def _watch(self) -> None:
        """Loads newer versions, at once while groups are in flight, and evaluates those that are due.

        While the asks of an idle worker say which version is the newest, it is not looked for here.
        """
        evaluating = asyncio.create_task(self._evaluator.run())
        pauses = pauses_between_asks()
        try:
            while True:
                is_busy = len(self._groups) or self.evaluations
                asks_suffice = self._asks_for_all and self._versions.is_serving and not is_busy
                self._judge()
                if not asks_suffice:
                    await self._versions.refresh()
                if asks_suffice or is_busy:
                    pauses = pauses_between_asks()
                await asyncio.sleep(BEAT_SECONDS if asks_suffice else max(WORKER_POLL_SECONDS, next(pauses)))
                if evaluating.done():
                    evaluating.result()
        finally:
            evaluating.cancel()
            await asyncio.gather(evaluating, return_exceptions=True)

    async def _check(self, policy: PolicyVersion) -> None:
        """The sampler must say the truth before anything of it is pushed, and is looked at again now and then."""
        choice, sampler = self.settings.self_check, self.sampler
        if choice == "never" or (choice == "auto" and sampler.traits.is_exact):
            return
        if not self._unchecked:
            self._loads += 1
            if not self._is_alone or self._look is not None or self._loads % LOOKED_AGAIN_EVERY:
                return
        from rlbuffer.worker.samplers import selfcheck  # imports torch

        prompt = await asyncio.to_thread(self._first_prompt)
        try:
            if not self._unchecked:
                sample = await selfcheck.drawn(sampler, prompt.tokens, self._maker.sampling)
                look = asyncio.create_task(asyncio.to_thread(selfcheck.compared, policy, sample))
                look.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may come to ask
                self._look = policy.version, look
                return
            difference = await selfcheck.check_sampler(sampler, policy, prompt.tokens, self._maker.sampling)
        except WeightsError:  # the version's, which is tried again or followed by another one
            raise
        except Exception as error:
            name = self.settings.sampler
            if ":" not in name or fault_of(error) is not Fault.REQUEST:
                raise
            what = str(error) if isinstance(error, RlbufferError) else f"{type(error).__name__}: {error}"
            place = place_of(error) or defined_at(type(sampler))
            raise WrongLogprobs(f"sampler {name} fails its check: {what}{place}") from error
        self._unchecked -= 1
        self._passed(policy.version, difference)

    def _judge(self) -> None:
        """Takes what a later comparison has found, once it has ended.

        Raises:
            WrongLogprobs: the sampler was right, and is not any more.
        """
        if self._look is None or not self._look[1].done():
            return
        (version, look), self._look = self._look, None
        try:
            self._passed(version, look.result())
        except WeightsError:
            return  # its files were removed meanwhile: the next look is at other ones
        except WrongLogprobs as error:
            raise WrongLogprobs(
                f"the sampler was right at version {self._right} and is not at version {version}, so what it sampled "
                f"in between may be of older weights than it says: {error}"
            ) from error

    def _passed(self, version: int, difference: float) -> None:
        self._right = version
        text = "the sampler's logprobs are those of the published weights (to %.1g)"
        _log.info(text, difference, extra=fields("checked", version=version, difference=difference))

    def _first_prompt(self) -> Prompt:
        """The prompt of the first ticket that has one."""
        why: Exception | None = None
        for number in range(CHECKED_PROMPTS):
            try:
                return self.env.prompt(number)
            except Exception as error:  # the env is the user's code: it costs the ticket's group, if that
                why = error
        if why is not None and not isinstance(why, Skip):  # what it asks may be away for now: the worker starts again
            raise why
        raise ConfigError(f"env {self.env.name} skips its first {CHECKED_PROMPTS} prompts", setting="env")
