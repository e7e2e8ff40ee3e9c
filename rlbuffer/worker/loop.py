"""The worker: takes tickets, samples them with the newest policy version, scores, pushes.

    wait for a version -> load -> take tickets -> newer version? load -> sample -> score -> push
                            ^---- watch for newer versions: loaded while groups are in flight ----'

Many groups are in flight at once, each in a task of its own. A version is looked for after tickets are taken, too: what
is sampled then is as fresh as it can be, and with ``max_age = 0`` it must be. Troubles end a group or are waited out;
these end the worker: a server that stays away, and settings that cannot work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from rlbuffer.config.settings import EvaluationSettings, WorkerSettings
from rlbuffer.errors import (
    ConfigError,
    EnvDone,
    InvalidRollout,
    RlbufferError,
    RunDamaged,
    RunGone,
    SamplerUnavailable,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.events.event import RunChanged, Trouble
from rlbuffer.events.worker import (
    EnvFinished,
    GroupGivenUp,
    GroupPushed,
    SamplerChecked,
    VersionLoaded,
    WorkerEvent,
    WorkerStopped,
    WorkerWaits,
)
from rlbuffer.narration.waiting import draining
from rlbuffer.process.threads import in_thread
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.worker.difficulty import Difficulty
from rlbuffer.worker.envs import Env, Prompt, Skip, close_env, make_env
from rlbuffer.worker.evaluation import Evaluator
from rlbuffer.worker.failures import place_of, traceback_of
from rlbuffer.worker.group_maker import Aborted, GroupFailed, GroupMaker, in_words
from rlbuffer.worker.heartbeat import WITHOUT_A_WORD, WORKER_TICKET_SECONDS, Pulse, telling_why
from rlbuffer.worker.samplers import Sampler, make_sampler
from rlbuffer.worker.versions import Versions

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.writer import Writer

TAKE_SECONDS = 0.5
"""Seconds to wait for tickets before looking whether to stop."""
SAY_WAITING_SECONDS = 5.0
"""Waiting is normal; for this long it is worth a sentence."""
WORKER_POLL_SECONDS = 0.1
"""Between two looks for a newer version, and for the wish to stop."""
SKIPS_AT_ONCE = 256
"""Tickets skipped one after the other before each further look for one that is not waits a little."""
LAND_SECONDS = 2.0
"""The time that groups in flight have to end, as a group or as none, once the worker is asked to stop."""
CHECKED_PROMPTS = 64
"""Prompts that are looked at for one to check the sampler with."""
LAST_FAILURE = 3
"""Times in a row that a group of an env with an end fails before its prompt is left out."""
AWAY_SECONDS = 1.0
"""Before a sampler that was away, or a server that refused, is asked again."""

_log = logging.getLogger(__name__)


def run_worker(
    buffer: Buffer,
    name: str,
    settings: WorkerSettings,
    *,
    stop: threading.Event,
    on_event: Callable[[WorkerEvent], None] | None = None,
    env: Env | None = None,
    sampler: Sampler | None = None,
    evaluations: Mapping[str, EvaluationSettings] | None = None,
    section: str = "",
) -> bool:
    """Runs one worker until `stop` is set, or its env is done; tickets it still holds then are given back.

    `on_event` is called with each event (:mod:`rlbuffer.events.worker`).

    Args:
        name: the producer's name; the same after a restart.
        env, sampler: used instead of those that `settings` name.
        evaluations: what this worker measures versions on beside its work, by name.
        section: the ``[worker.NAME]`` that it was started for, if it was.

    Returns:
        True when the env is done: all its tickets were given, and their groups made.

    Raises:
        ConfigError: the env or sampler cannot be made, the env does not fit the model, or none of `max_failures` groups
            could be made.
        SchemaMismatch: the run was written by an incompatible version; nothing is written there.
        ServerUnreachable: for longer than the writer's patience.
    """
    # First what may be refused: a worker that cannot work begins no run.
    with telling_why(buffer, name, settings):
        env, sampler = env or make_env(settings.env, **settings.env_options), sampler or make_sampler(settings)
    buffer.store.open_run()
    worker = _Worker(
        buffer, name, settings, stop, on_event or (lambda event: None), env, sampler, evaluations or {}, section
    )
    return asyncio.run(worker.run())


class _Stopped(Exception):
    """Told to stop while the writer waited for the server."""


class _Worker:
    def __init__(
        self,
        buffer: Buffer,
        name: str,
        settings: WorkerSettings,
        stop: threading.Event,
        on_event: Callable[[WorkerEvent], None],
        env: Env,
        sampler: Sampler,
        evaluations: Mapping[str, EvaluationSettings],
        section: str,
    ) -> None:
        self._buffer, self._name, self._settings, self._stop = buffer, name, settings, stop
        self._on_event, self._env, self._sampler = on_event, env, sampler
        self._section = section
        self._tickets: int | None = getattr(env, "tickets", None)
        self._is_done = False
        assumed = buffer.settings.trainer.temperature
        self._maker = GroupMaker(env, sampler, settings, worker=name, assumed_temperature=assumed)
        self._pulse = Pulse(buffer, name, env.name, self._maker.work)
        self._versions = Versions(
            buffer.policy(),
            sampler,
            env,
            loaded=self._loaded,
            trouble=lambda sentence: self._trouble(Trouble(error=sentence)),
            wait=self._wait,
            cache=VersionCache.of(buffer.settings, stop=stop),
            max_age=buffer.settings.batcher.for_env(env.name).max_age,
            check=self._check,
        )
        self._evaluator = Evaluator(buffer, sampler, evaluations, hold=self._versions.held, on_event=on_event)
        self._difficulty = Difficulty(buffer.store, env.name, settings)
        self._skips = 0
        """Tickets in a row that were skipped."""
        self._failures: Counter[int] = Counter()
        """Ticket number -> times in a row that its group could not be made."""
        # One thread for all pushes: a writer has one in flight at a time, and this keeps them in order.
        self._pusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._pushes: set[asyncio.Task[None]] = set()
        """Pushes under way: a group that may be stored is not given up."""
        self._waiting_since: float | None = None
        self._said_waiting = 0.0
        self._refusal = ""
        """What the writer last waited for."""

    async def run(self) -> bool:
        with suppress(RlbufferError):
            for sentence in self._pulse.look_back(self._buffer.store.heartbeats("worker")):
                self._trouble(GroupGivenUp(error=sentence, kind=WITHOUT_A_WORD, traceback=""))
        self._pulse.start()
        try:
            while not self._stop.is_set() and not self._is_done:
                try:
                    await self._serve_run(
                        self._buffer.writer(
                            self._name,
                            on_retry=self._held_up,
                            ticket_seconds=WORKER_TICKET_SECONDS,
                            section=self._section,
                        )
                    )
                except _Stopped:
                    break
                except RunGone as error:
                    # Another epoch, or another run under the name: version numbers and tickets mean something else.
                    self._pulse.error = str(error)
                    self._versions.forget()
                    self._evaluator.forget()
                    self._failures.clear()
                    self._on_event(RunChanged(error=str(error)))
                    if isinstance(error, RunDamaged):  # until a person has mended it
                        await asyncio.sleep(AWAY_SECONDS)
                except ServerRefused as error:
                    # It takes no writes for now. Tickets lapse, groups are pushed as soon as it does.
                    self._wait(str(error))
                    await asyncio.sleep(AWAY_SECONDS)
        finally:
            await self._sampler.close()
            await close_env(self._env)
            await self._evaluator.close()
            self._pusher.shutdown()
            self._pulse.close()
            pulse = self._pulse
            self._on_event(
                WorkerStopped(groups=pulse.groups, rollouts=pulse.rollouts, failed_groups=pulse.failed_groups)
            )
        return self._is_done

    def _no_ticket(self) -> str:
        """The reason why there is no ticket."""
        _, is_draining = self._buffer.store.asked()
        if is_draining:
            return draining()
        lapsing = " (tickets of groups that failed lapse first)" if self._failures else ""
        return f"no ticket for {self._env.name}: what may be sampled now is out or in the pool{lapsing}"

    async def _serve_run(self, writer: Writer) -> None:
        """Serves one epoch of the run. Returns when told to stop; whatever is in flight then is given up."""
        flights: set[asyncio.Task[None]] = set()
        watch = asyncio.create_task(self._watch())
        self._pulse.hold(writer)
        try:
            while not self._stop.is_set():
                await self._settle(flights, watch)
                if not self._versions.is_serving:
                    await asyncio.sleep(WORKER_POLL_SECONDS)
                    continue
                room = self._settings.groups_per_batch - len(flights)
                if room <= 0 or (flights and self._sampler.wants_batches):
                    await asyncio.wait(
                        {*flights, watch}, timeout=WORKER_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    continue
                self._refusal = ""
                tickets = await asyncio.to_thread(
                    writer.take, self._env.name, room, timeout_seconds=TAKE_SECONDS, size=self._tickets
                )
                if not tickets:
                    self._wait(self._refusal or await asyncio.to_thread(self._no_ticket))
                    continue
                self._pulse.add(tickets)
                # A version that was announced while this worker waited for its tickets.
                is_serving = not self._stop.is_set() and await self._versions.refresh()
                if not is_serving:
                    await self._release(writer, tickets)
                    continue
                prompts = await self._prompts_of(tickets)
                skipped = [t for t, p in zip(tickets, prompts, strict=True) if isinstance(p, Skip)]
                await self._skip(writer, skipped, prompts)
                if len(skipped) == len(tickets):
                    continue
                self._work()
                # Made together, so that a batch sampler is asked for all of them at once.
                flights |= {
                    asyncio.create_task(self._fly(writer, t, p))
                    for t, p in zip(tickets, prompts, strict=True)
                    if not isinstance(p, Skip)
                }
        except EnvDone as error:
            # What is in flight here was made by another worker, whose tickets these were before they lapsed.
            self._is_done = True
            self._on_event(EnvFinished(env=self._env.name, sentence=str(error)))
        except (RunGone, ServerUnreachable, ServerRefused):
            self._pulse.let_go()  # the tickets mean nothing any more, or cannot be given back: they lapse
            raise
        finally:
            await self._land(writer, flights, watch)

    async def _settle(self, flights: set[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
        """Takes finished groups out; what ends the worker, or this epoch, comes out here."""
        await asyncio.sleep(0)
        finished = {task for task in flights if task.done()}
        flights -= finished
        for task in finished:
            task.result()
        if watch.done():
            watch.result()

    async def _land(self, writer: Writer, flights: set[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
        """Ends what is in flight, lets what is made of it arrive, and gives the other tickets back."""
        if self._stop.is_set() and flights:
            # Groups of which more than half is there are pushed without the rest.
            self._maker.end()
            await asyncio.wait(flights, timeout=LAND_SECONDS)
        for task in (*flights, watch):
            task.cancel()
        outcomes = await asyncio.gather(*flights, watch, *self._pushes, return_exceptions=True)
        tickets = self._pulse.let_go()
        if tickets and not any(isinstance(o, RunGone | ServerUnreachable | ServerRefused) for o in outcomes):
            with suppress(ServerRefused):  # not given back, they lapse
                await asyncio.to_thread(self._settled, writer.release, tickets)

    async def _watch(self) -> None:
        """Loads newer versions while groups are in flight, and evaluates those that are due."""
        evaluating = asyncio.create_task(self._evaluator.run())
        try:
            while True:
                await self._versions.refresh()
                await asyncio.sleep(WORKER_POLL_SECONDS)
                if evaluating.done():
                    evaluating.result()
        finally:
            evaluating.cancel()
            await asyncio.gather(evaluating, return_exceptions=True)

    # -- one group ---------------------------------------------------------------------------------------------------
    async def _prompts_of(self, tickets: list[Ticket]) -> list[Prompt | Exception]:
        try:
            async with asyncio.timeout(self._settings.rollout_timeout_seconds):
                return await in_thread(lambda: self._prompts(tickets))
        except TimeoutError as error:
            return [error] * len(tickets)

    def _prompts(self, tickets: list[Ticket]) -> list[Prompt | Exception]:
        prompts: list[Prompt | Exception] = []
        for ticket in tickets:
            try:
                prompts.append(self._maker.prompt(ticket.number))
            except Exception as error:  # the env is the user's code: whatever it raises costs this group only
                prompts.append(error)
        kept = [i for i, prompt in enumerate(prompts) if isinstance(prompt, Prompt)]
        reasons = self._difficulty.reasons([tickets[i] for i in kept], [cast(Prompt, prompts[i]) for i in kept])
        for i, reason in zip(kept, reasons, strict=True):
            if reason:
                prompts[i] = Skip(reason)
        return prompts

    async def _skip(self, writer: Writer, tickets: list[Ticket], prompts: list[Prompt | Exception]) -> None:
        """Closes tickets for which nothing is sampled; the reasons are among `prompts`."""
        self._skips = self._skips + len(tickets) if len(tickets) == len(prompts) else 0
        if not tickets:
            return
        self._pulse.remove(tickets)
        self._pulse.skipped += len(tickets)
        await asyncio.to_thread(self._settled, writer.skip, tickets)
        if self._skips:
            self._wait(f"a prompt of {self._env.name} to sample: the last {self._skips} were skipped ({prompts[-1]})")
        if self._skips >= SKIPS_AT_ONCE:
            await asyncio.sleep(WORKER_POLL_SECONDS)

    async def _fly(self, writer: Writer, ticket: Ticket, prompt: Prompt | Exception) -> None:
        """Samples, scores and pushes the group of one ticket."""
        start = time.monotonic()
        function = self._maker.way
        try:
            if isinstance(prompt, Exception):
                function = "prompt"
                raise GroupFailed(f"prompt failed: {in_words(prompt, self._settings)}") from prompt
            group = await self._maker.make(ticket, prompt)
            push = asyncio.create_task(self._push(writer, ticket, group, start))
            self._pushes.add(push)
            push.add_done_callback(self._pushes.discard)
            await asyncio.shield(push)
        except Aborted:
            if not self._stop.is_set():  # else it goes back together with all that this worker still holds
                await self._release(writer, [ticket])
        except SamplerUnavailable as error:
            await self._release(writer, [ticket])
            self._trouble(Trouble(error=f"{error}; asked again in {AWAY_SECONDS:g} s"))
            await asyncio.sleep(AWAY_SECONDS)
        except (GroupFailed, InvalidRollout) as error:
            reason = str(error) if isinstance(error, GroupFailed) else in_words(error, self._settings)
            await self._give_up(writer, ticket, reason, error.__cause__ or error, function)

    async def _push(self, writer: Writer, ticket: Ticket, group: Group, start: float) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pusher, self._store, writer, group)
        self._pulse.remove([ticket])
        self._failures.pop(ticket.number, None)
        self._pulse.groups += 1
        self._pulse.rollouts += len(group.rollouts)
        self._pulse.tokens += sum(rollout.length for rollout in group.rollouts)
        self._tell(group, time.monotonic() - start)
        if not self._failures and self._versions.is_current:
            self._pulse.error = ""

    def _store(self, writer: Writer, group: Group) -> None:
        """Waits as long as the server refuses: that passes when steps retire, or a person makes room."""
        while True:
            try:
                writer.push(group)
            except ServerRefused as error:
                self._held_up(error)
                continue
            if self._refusal:
                self._refusal = ""
                self._work()
            break
        self._difficulty.note(group)

    def _held_up(self, error: RlbufferError) -> None:
        """The writer waits for the server. Raises _Stopped when there is no time for that."""
        self._refusal = str(error)
        self._wait(self._refusal)
        if self._stop.is_set():
            raise _Stopped

    async def _give_up(self, writer: Writer, ticket: Ticket, reason: str, error: BaseException, function: str) -> None:
        """Counts a group that cannot be made, and gives its ticket back once.

        Raises:
            ConfigError: so many in a row cannot be made, and none could.
        """
        _log.debug("group %s given up", ticket.group_id, exc_info=error)
        self._pulse.failed_groups += 1
        self._failures[ticket.number] += 1
        place, kind = place_of(error, self._env, function), type(error).__name__
        what = f"{reason} ({place})" if place else reason
        sentence = f"group {ticket.group_id} given up: {what}"
        if self._tickets is not None and self._failures[ticket.number] >= LAST_FAILURE:
            # One prompt that can never be sampled must not keep the run from its end.
            self._pulse.remove([ticket])
            await asyncio.to_thread(self._settled, writer.skip, [ticket])
            sentence += f" ({self._failures[ticket.number]} times; its prompt is left out)"
        elif self._failures[ticket.number] > 1:
            # Given back, it would be the next one taken, again and again. Not given back, it lapses by its own time.
            self._pulse.remove([ticket])
            sentence += f" ({self._failures[ticket.number]} times; its ticket is left to lapse)"
        else:
            await self._release(writer, [ticket])
        is_first = self._pulse.failures.note(kind, what)
        self._trouble(GroupGivenUp(error=sentence, kind=kind, traceback=traceback_of(error) if is_first else ""))
        tries = self._settings.max_failures
        if tries and not self._pulse.groups and self._pulse.failed_groups >= tries:
            raise self._pulse.failures.all_of(self._env.name)

    async def _release(self, writer: Writer, tickets: list[Ticket]) -> None:
        self._pulse.remove(tickets)
        with suppress(ServerRefused):  # not given back, they lapse
            await asyncio.to_thread(self._settled, writer.release, tickets)

    def _settled(self, give_back: Callable[[list[Ticket]], None], tickets: list[Ticket]) -> None:
        self._pulse.settle()
        give_back(tickets)

    async def _check(self, policy: PolicyVersion) -> None:
        """The sampler must say the truth before anything of it is pushed."""
        if self._settings.self_check == "never" or (self._settings.self_check == "auto" and self._sampler.is_ours):
            return
        from rlbuffer.worker.selfcheck import check_sampler  # imports torch

        prompt = await asyncio.to_thread(self._first_prompt)
        difference = await check_sampler(self._sampler, policy, prompt.tokens, self._maker.sampling)
        self._on_event(SamplerChecked(version=policy.version, difference=difference))

    def _first_prompt(self) -> Prompt:
        """The prompt of the first ticket that is not skipped."""
        for number in range(CHECKED_PROMPTS):
            with suppress(Skip):
                return self._env.prompt(number)
        raise ConfigError(f"env {self._env.name} skips its first {CHECKED_PROMPTS} prompts", setting="env")

    # -- telling -----------------------------------------------------------------------------------------------------
    def _loaded(self, version: int, seconds: float) -> None:
        self._pulse.version = version
        if version >= 0:
            self._evaluator.wake()
            self._on_event(VersionLoaded(version=version, seconds=seconds))

    def _tell(self, group: Group, seconds: float) -> None:
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        self._on_event(
            GroupPushed(
                group_id=group.group_id,
                version=self._pulse.version,
                rollouts=len(group.rollouts),
                tokens=sum(rollout.length for rollout in group.rollouts),
                reward=sum(rewards) / len(rewards) if rewards else 0.0,
                seconds=seconds,
            )
        )

    def _trouble(self, event: Trouble | GroupGivenUp) -> None:
        self._pulse.error = event.error
        self._on_event(event)

    def _wait(self, what: str) -> None:
        """Notes what is waited for, and says it once it has lasted."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting = now
        self._pulse.waiting = f"waiting for {now - self._waiting_since:.0f} s: {what}"
        if now - self._said_waiting >= SAY_WAITING_SECONDS:
            self._said_waiting = now
            self._on_event(WorkerWaits(waiting=self._pulse.waiting))

    def _work(self) -> None:
        self._waiting_since = None
        self._pulse.waiting = ""
