"""The groups in flight: the group of each ticket, from its prompt to its push, or its ticket given back.

    TAKEN --start--> SAMPLED --push--> READY --> STORED
      |                 |                |
      |                 +----------------+--> FAILED: the ticket goes back, and is closed the third time
      +--> SKIPPED

`begin` names the writer that pushes; it comes first, and again in each epoch.
`start` takes tickets. Each becomes a task (SAMPLED), or is closed at once (SKIPPED).
The task samples and scores, and leaves its group in the queue of pushes (READY). One thread pushes all that is there
in one call; the group is STORED, and its ticket is no longer renewed.
`wait` and `take_finished` take out tasks that have ended. `take_finished` raises what ends the worker, or this epoch.
`land` ends every task: READY groups still arrive, the other tickets go back. Nothing is left in flight then.
`release` gives back tickets that were never started. `forget` follows a new epoch, `close` the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from rlbuffer.batcher.teaching import Teaching
from rlbuffer.client.writer import Writer
from rlbuffer.config.losses import needs_advantage
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import (
    Aborted,
    GroupFailed,
    InvalidRollout,
    PromptTooLong,
    PushFailed,
    RequestFailed,
    RlbufferError,
    RunGone,
    SamplerBusy,
    SamplerUnavailable,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    clause,
)
from rlbuffer.process.signals import Stopped
from rlbuffer.process.threads import in_thread
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.state.text import plural
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker.difficulty import Difficulty
from rlbuffer.worker.envs import Env, Prompt, Skip
from rlbuffer.worker.failures import place_of, traceback_of
from rlbuffer.worker.faults import FIRST_PAUSE_SECONDS, Backoff, Fault, fault_of
from rlbuffer.worker.group_maker import GroupMaker, in_words, rollout_limit
from rlbuffer.worker.heartbeat import WorkerHeartbeat
from rlbuffer.worker.versions import Versions

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

WORKER_POLL_SECONDS = 0.1
"""Seconds between two looks for a newer version, and for the wish to stop."""
SKIPS_AT_ONCE = 256
"""Tickets skipped one after the other before each further look for one that is not waits a little."""
LAND_SECONDS = 2.0
"""The time that groups in flight have to end, as a group or as none, once the worker is asked to stop."""
MOST_FAILURES = 50
"""Groups that cannot be made, with none made before, after which the worker ends."""
LAST_FAILURE = 3
"""Times that a group fails before its prompt is left out."""

_log = logging.getLogger(__name__)


class GroupsInFlight:
    """The groups that one worker makes at once, each in a task of its own.

    Args:
        buffer, env, settings: the worker's.
        maker: makes a group of a ticket and its prompt.
        heartbeat: renews the tickets, and takes what happens.
        versions: what is sampled with.
        stop: set: nothing that waits is waited for any more.
    """

    def __init__(
        self,
        buffer: Buffer,
        env: Env,
        settings: WorkerSettings,
        maker: GroupMaker,
        heartbeat: WorkerHeartbeat,
        versions: Versions,
        *,
        stop: threading.Event,
    ) -> None:
        self._env, self._settings, self._stop = env, settings, stop
        self._maker, self._heartbeat, self._versions = maker, heartbeat, versions
        self.tickets: int | None = getattr(env, "tickets", None)
        """Tickets of an env with an end."""
        self.refusal: Waiting | None = None
        """What the writer last waited for."""
        self._writer: Writer
        self._tasks: set[asyncio.Task[None]] = set()
        run = buffer.settings
        teaching = Teaching(run.batcher, needs_advantage=needs_advantage(run.trainer.loss))
        self._difficulty = Difficulty(buffer.store.role(WorkerStore), env.name, settings.skip_after, teaching)
        self._skips = 0
        """Tickets in a row that were skipped."""
        self._failures: Counter[int] = Counter()
        """Ticket number -> times in a row that its group could not be made."""
        self._refusals: dict[int, tuple[int, int]] = {}
        """Ticket number -> times that the sampler turned it away, counted where groups were made in between, and the
        groups that were made by then."""
        self._backoff = Backoff()
        self._ready: deque[tuple[Group, Future[None]]] = deque()
        """Groups that wait to be pushed: all of them go in one call."""
        # One thread for all pushes: a writer has one call in flight at a time, and this keeps them in order.
        self._pusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._pushes: set[asyncio.Task[None]] = set()
        """Pushes under way: a group that may be stored is not abandoned."""

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, writer: Writer) -> None:
        """Pushes groups through this writer from now on: another epoch, or the same one again."""
        self._writer = writer
        self._heartbeat.hold(writer)

    def forget(self) -> None:
        """Ticket numbers mean something else from now on."""
        self._failures.clear()
        self._refusals.clear()

    def close(self) -> None:
        """Ends the thread that pushes."""
        self._pusher.shutdown()

    async def start(self, tickets: list[Ticket]) -> None:
        """Asks for the tickets' prompts, closes those for which nothing is sampled, and sends the others off."""
        prompts = dict(zip(tickets, await self._prompts_of(tickets), strict=True))
        skipped = {t: p for t, p in prompts.items() if isinstance(p, Skip | PromptTooLong)}
        self._skips = self._skips + len(skipped) if len(skipped) == len(prompts) else 0
        if skipped:
            await self._skip(skipped)
        if not self._skips:
            self._heartbeat.works()
        # Made together, so that a batch sampler is asked for all of them at once.
        self._tasks |= {asyncio.create_task(self._fly(t, p)) for t, p in prompts.items() if t not in skipped}

    async def wait(self, watch: asyncio.Task[None]) -> None:
        """Waits until one of them has ended, or the watch has, but not for long."""
        await asyncio.wait({*self._tasks, watch}, timeout=WORKER_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def take_finished(self, watch: asyncio.Task[None]) -> None:
        """Takes finished groups out; what ends the worker, or this epoch, comes out here."""
        await asyncio.sleep(0)
        finished = {task for task in self._tasks if task.done()}
        self._tasks -= finished
        for task in finished:
            task.result()
        if watch.done():
            watch.result()

    async def land(self, watch: asyncio.Task[None]) -> None:
        """Ends what is in flight, lets what is made of it arrive, and gives the other tickets back."""
        flights, self._tasks = self._tasks, set()
        if self._stop.is_set() and flights:
            # Groups of which more than half is there are pushed without the rest.
            self._maker.end()
            await asyncio.wait(flights, timeout=LAND_SECONDS)
        for task in (*flights, watch):
            task.cancel()
        outcomes = await asyncio.gather(*flights, watch, *self._pushes, return_exceptions=True)
        tickets = self._heartbeat.drop_tickets()
        if tickets and not any(isinstance(o, RunGone | ServerUnreachable | ServerRefused) for o in outcomes):
            with suppress(ServerRefused, Stopped):  # not given back, they expire
                await asyncio.to_thread(self._settled, self._writer.release, tickets)

    def held_up(self, error: RlbufferError) -> None:
        """The writer waits for the server. Raises Stopped when there is no time for that."""
        self.refusal = Waiting(kind=Wait.SERVER, detail=str(error))
        self._heartbeat.waits(self.refusal)
        if self._stop.is_set():
            raise Stopped

    async def release(self, tickets: list[Ticket]) -> None:
        """Gives tickets back."""
        self._heartbeat.remove(tickets)
        with suppress(ServerRefused):  # not given back, they expire
            await asyncio.to_thread(self._settled, self._writer.release, tickets)

    # -- one group ---------------------------------------------------------------------------------------------------
    async def _prompts_of(self, tickets: list[Ticket]) -> list[Prompt | Exception]:
        try:
            async with rollout_limit(self._settings):
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

    async def _skip(self, skipped: Mapping[Ticket, Skip | PromptTooLong]) -> None:
        """Closes tickets for which nothing is sampled."""
        tickets = list(skipped)
        self._heartbeat.remove(tickets)
        self._heartbeat.skipped += len(tickets)
        for error in skipped.values():
            if isinstance(error, PromptTooLong):
                self._heartbeat.failure(type(error).__name__, f"{clause(error)}; such prompts are skipped and counted")
        await asyncio.to_thread(self._settled, self._writer.skip, tickets)
        if self._skips:
            why = str(skipped[tickets[-1]])
            self._heartbeat.waits(Waiting(kind=Wait.PROMPT, env=self._env.name, groups=self._skips, detail=why))
        if self._skips >= SKIPS_AT_ONCE:
            await asyncio.sleep(WORKER_POLL_SECONDS)

    async def _fly(self, ticket: Ticket, prompt: Prompt | Exception) -> None:
        """Samples, scores and pushes the group of one ticket."""
        start = time.monotonic()
        function = self._maker.way
        try:
            if isinstance(prompt, Exception):
                function = "prompt"
                raise GroupFailed(f"prompt failed: {in_words(prompt)}") from prompt
            group = await self._maker.make(ticket, prompt)
        except Exception as error:
            await self._not_made(ticket, prompt, error, function)
            return
        try:
            push = asyncio.create_task(self._push(ticket, group, start))
            self._pushes.add(push)
            push.add_done_callback(self._pushes.discard)
            await asyncio.shield(push)
        except (InvalidRollout, PushFailed) as error:
            if isinstance(error.__cause__, ServerUnsuitable) and not self._heartbeat.groups:
                raise error.__cause__ from None  # this user may push nothing: no group is the reason
            await self._give_up(ticket, prompt, in_words(error), error.__cause__ or error, function)

    async def _not_made(self, ticket: Ticket, prompt: Prompt | Exception, error: Exception, function: str) -> None:
        """Does what the one whose fault it is calls for."""
        fault = fault_of(error)
        if fault is Fault.SETTINGS:
            raise error
        if fault is Fault.REQUEST or self._is_turned_away(ticket, error):
            reason = str(error) if isinstance(error, GroupFailed) else in_words(error)
            cause = error.__cause__ if isinstance(error, GroupFailed) and error.__cause__ else error
            # The env has no part in what a sampler refuses.
            if isinstance(cause, RequestFailed | SamplerUnavailable | Aborted | PromptTooLong):
                function = ""
            await self._give_up(ticket, prompt, reason, cause, function)
        elif not self._stop.is_set():  # else it goes back together with all that this worker still holds
            seconds = self._backoff.pause(error)
            self._heartbeat.failures.note(type(error).__name__, f"{clause(error)}; it was waited for")
            passes = not isinstance(error, SamplerBusy | Aborted)  # those come again and again while others are served
            self._heartbeat.trouble(
                f"{clause(error)}; asked again in {seconds:g} s", kind=type(error).__name__, passes=passes
            )
            await asyncio.sleep(seconds)
            await self.release([ticket])

    def _is_turned_away(self, ticket: Ticket, error: Exception) -> bool:
        """The sampler has turned this ticket away time and again, and served others in between: it is the request's
        fault."""
        if not isinstance(error, SamplerUnavailable | Aborted) or self._stop.is_set():
            return False
        times, groups = self._refusals.get(ticket.number, (0, -1))
        self._refusals[ticket.number] = times, groups = (
            times + (self._heartbeat.groups > groups),
            self._heartbeat.groups,
        )
        if times < LAST_FAILURE:
            return False
        del self._refusals[ticket.number]
        return True

    async def _push(self, ticket: Ticket, group: Group, start: float) -> None:
        stored: Future[None] = Future()
        self._ready.append((group, stored))
        self._pusher.submit(self._store_ready)
        await asyncio.wrap_future(stored)
        self._heartbeat.remove([ticket])
        self._failures.pop(ticket.number, None)
        self._refusals.pop(ticket.number, None)
        self._backoff.works()
        self._heartbeat.pushed(group, time.monotonic() - start)
        if self._versions.is_current:
            self._heartbeat.error = ""

    def _store_ready(self) -> None:
        """Pushes all groups that are ready, in one call. One that cannot be pushed costs its own group alone."""
        waiting = [self._ready.popleft() for _ in range(len(self._ready))]
        calls = deque([[(group, stored) for group, stored in waiting if stored.set_running_or_notify_cancel()]])
        while calls:
            if not (together := calls.popleft()):
                continue
            try:
                self._push_all([group for group, _ in together])
            except PushFailed as error:
                for group, stored in together:
                    if group is error.group:
                        stored.set_exception(error)
                calls.appendleft([one for one in together if one[0] is not error.group])
            except BaseException as error:
                if isinstance(error, InvalidRollout) and len(together) > 1:  # none is stored: each goes alone
                    calls.extendleft([one] for one in reversed(together))
                    continue
                for _, stored in together:
                    stored.set_exception(error)
            else:
                self._stored(together)

    def _stored(self, groups: list[tuple[Group, Future[None]]]) -> None:
        """Tells those who wait for these groups that they are there."""
        for group, stored in groups:
            try:
                self._difficulty.note(group)
                stored.set_result(None)
            except BaseException as error:
                stored.set_exception(error)

    def _push_all(self, groups: list[Group]) -> None:
        """Waits as long as the server refuses: that passes when steps retire, or a person makes room."""
        while True:
            try:
                self._writer.push_many(groups)
            except ServerRefused as error:
                self.held_up(error)
                continue
            if self.refusal:
                self.refusal = None
                self._heartbeat.works()
            return

    async def _give_up(
        self, ticket: Ticket, prompt: Prompt | Exception, reason: str, error: BaseException, function: str
    ) -> None:
        """Counts a group that cannot be made. Its ticket goes back after a pause, and is closed the last time.

        Raises:
            ConfigError: so many in a row cannot be made, and none could.
        """
        _log.debug("group %s abandoned", ticket.group_id, exc_info=error)
        self._heartbeat.failed_groups += 1
        self._failures[ticket.number] += 1
        place, kind = place_of(error, self._env, function), type(error).__name__
        whose = f"prompt {prompt.name}: " if isinstance(prompt, Prompt) else ""
        what = whose + (f"{reason} ({place})" if place else reason)
        sentence = f"group {ticket.group_id} abandoned: {what}"
        is_last = self._failures[ticket.number] >= LAST_FAILURE
        if is_last:
            sentence += f" ({plural(self._failures.pop(ticket.number), 'time')}; its prompt is left out)"
        self._heartbeat.failure(kind, what, sentence, traceback_of(error))
        if not self._heartbeat.groups and self._heartbeat.failed_groups >= MOST_FAILURES:
            raise self._heartbeat.failures.all_of(self._env.name)
        if is_last:  # one prompt that can never be sampled must not keep the run from its end
            self._heartbeat.remove([ticket])
            await asyncio.to_thread(self._settled, self._writer.skip, [ticket])
        else:  # given back at once, it would be the next one taken, again and again
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            await self.release([ticket])

    def _settled(self, give_back: Callable[[list[Ticket]], None], tickets: list[Ticket]) -> None:
        self._heartbeat.wait_for_renewal()
        give_back(tickets)
