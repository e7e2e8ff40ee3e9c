"""The worker: takes tickets, samples them with the newest policy version, scores, pushes.

    wait for a version -> load -> take tickets -> newer version? load -> sample -> score -> push -> take ...

A version is looked for after the tickets are taken: what is sampled then is as fresh as it can be, and with
``max_age = 0`` it must be. Troubles end a group or are waited out; these end the worker: a server that stays away, and
settings that cannot work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlbuffer.errors import ConfigError, InvalidRollout, RunGone, ServerRefused, ServerUnreachable, WeightsError
from rlbuffer.records import Group, PolicyVersion, Ticket
from rlbuffer.settings import WorkerSettings
from rlbuffer.worker.envs import Env, Prompt, make_env
from rlbuffer.worker.groups import build_group
from rlbuffer.worker.pulse import Pulse
from rlbuffer.worker.samplers import Sampler, make_sampler

if TYPE_CHECKING:
    from rlbuffer.client import Buffer
    from rlbuffer.writer import Writer

TAKE_SECONDS = 0.5
"""How long to wait for tickets before looking for a newer version and for the wish to stop."""
SAY_WAITING_SECONDS = 5.0
"""Waiting is normal; for this long it is worth a sentence."""
POLL_SECONDS = 0.1
"""Between two looks for the first version."""
RELOAD_SECONDS = 5.0
"""Before weights that could not be loaded are tried again."""

_log = logging.getLogger(__name__)

Event = dict[str, Any]


def run_worker(
    buffer: Buffer,
    name: str,
    settings: WorkerSettings,
    *,
    stop: threading.Event,
    on_event: Callable[[Event], None] | None = None,
    env: Env | None = None,
    sampler: Sampler | None = None,
) -> None:
    """Runs one worker until `stop` is set; tickets it still holds then are given back.

    Events, each a dict with ``event``: ``version`` (version, seconds), ``batch`` (version, groups, rollouts, tokens,
    reward, seconds), ``waiting`` (waiting), ``trouble`` (error), ``restart`` (error), ``stopped`` (groups, rollouts,
    failed_groups).

    Args:
        name: the producer's name; the same after a restart.
        env, sampler: used instead of those that `settings` name.

    Raises:
        ConfigError: the env or sampler cannot be made, or the env does not fit the model.
        ServerUnreachable, ServerRefused: for longer than the writer's patience.
    """
    _Worker(
        buffer,
        name,
        settings,
        stop,
        on_event or (lambda event: None),
        env or make_env(settings.env, **settings.env_options),
        sampler or make_sampler(settings.sampler, seed=settings.seed, device=settings.device),
    ).run()


class _Worker:
    def __init__(
        self,
        buffer: Buffer,
        name: str,
        settings: WorkerSettings,
        stop: threading.Event,
        on_event: Callable[[Event], None],
        env: Env,
        sampler: Sampler,
    ) -> None:
        self._buffer, self._name, self._settings, self._stop = buffer, name, settings, stop
        self._on_event, self._env, self._sampler = on_event, env, sampler
        self._max_new_tokens = settings.max_new_tokens or env.max_new_tokens
        self._policy = buffer.policy()
        self._served: PolicyVersion | None = None
        self._refused: tuple[PolicyVersion, float] | None = None
        """Weights that could not be loaded, and when (monotonic) they may be tried again."""
        self._failures: Counter[int] = Counter()
        """Ticket number -> times in a row that its group could not be made."""
        self._waiting_since: float | None = None
        self._said_waiting = 0.0
        self._pulse = Pulse(buffer, name, env.name)

    def run(self) -> None:
        self._pulse.start()
        try:
            while not self._stop.is_set():
                try:
                    self._serve_run(self._buffer.writer(self._name))
                except RunGone as error:
                    # Another epoch, or another run under the name: version numbers and tickets mean something else.
                    self._pulse.error = str(error)
                    self._served = self._refused = None
                    self._failures.clear()
                    self._on_event({"event": "restart", "error": str(error)})
        finally:
            self._pulse.close()
            pulse = self._pulse
            self._on_event(
                {
                    "event": "stopped",
                    "groups": pulse.groups,
                    "rollouts": pulse.rollouts,
                    "failed_groups": pulse.failed_groups,
                }
            )

    def _serve_run(self, writer: Writer) -> None:
        """Serves one epoch of the run. Returns when told to stop."""
        while not self._stop.is_set():
            if not self._refresh():
                self._stop.wait(POLL_SECONDS)
                continue
            tickets = writer.take(self._env.name, self._settings.groups_per_batch, timeout_seconds=TAKE_SECONDS)
            if not tickets:
                self._wait(f"no ticket for {self._env.name}: what may be sampled now is out or in the pool")
                continue
            held = {ticket.number: ticket for ticket in tickets}
            self._pulse.hold(writer, tickets)
            try:
                # A version that was announced while this worker waited for its tickets.
                if not self._stop.is_set() and self._refresh():
                    self._work()
                    self._sample(writer, held)
            except (RunGone, ServerUnreachable, ServerRefused):
                held.clear()  # the tickets mean nothing any more, or cannot be given back: they lapse
                raise
            finally:
                self._pulse.let_go()
                if held:
                    writer.release(list(held.values()))

    # -- policy versions ---------------------------------------------------------------------------------------------
    def _refresh(self) -> bool:
        """Loads the current version unless it serves already. -> whether any version can be sampled from."""
        current = self._policy.current()
        if current.version < 0:
            self._served = None  # the run was reset: what served belongs to no version of it
            self._pulse.version = -1
            self._wait("the first policy version: no trainer has announced one")
            return False
        if current != self._served and not self._is_refused(current):
            self._load(current)
        if self._served is None:
            self._wait(f"weights of policy version {current.version} that can be loaded")
        return self._served is not None

    def _is_refused(self, current: PolicyVersion) -> bool:
        return self._refused is not None and self._refused[0] == current and time.monotonic() < self._refused[1]

    def _load(self, current: PolicyVersion) -> None:
        start = time.monotonic()
        try:
            self._sampler.load(current)
        except WeightsError as error:
            self._refused = (current, time.monotonic() + RELOAD_SECONDS)
            going_on = f"version {self._served.version} goes on sampling" if self._served else "nothing to sample with"
            self._trouble(f"{error}; {going_on}")
            return
        if self._sampler.vocab_size < self._env.vocab_size:
            raise ConfigError(
                f"env {self._env.name} uses {self._env.vocab_size} token ids, "
                f"the model of version {current.version} knows {self._sampler.vocab_size}",
                setting="model",
            )
        self._served, self._refused = current, None
        self._pulse.version = current.version
        self._on_event({"event": "version", "version": current.version, "seconds": time.monotonic() - start})

    # -- one batch ---------------------------------------------------------------------------------------------------
    def _sample(self, writer: Writer, held: dict[int, Ticket]) -> None:
        """Samples the held tickets as one batch and pushes a group each; what is left in `held` was not pushed."""
        settings, failed_before = self._settings, self._pulse.failed_groups
        prompts: list[tuple[Ticket, Prompt]] = []
        for ticket in tuple(held.values()):
            try:
                prompts.append((ticket, self._env.prompt(ticket.number)))
            except Exception as error:
                self._give_up(held, ticket, "prompt", error)
        if not prompts:
            return
        start = time.monotonic()
        sampled = self._sampler.sample(
            [prompt.tokens for _, prompt in prompts],
            group_size=settings.group_size,
            max_new_tokens=self._max_new_tokens,
            temperature=settings.temperature,
            eos_token_ids=self._env.eos_token_ids,
            stopped=self._stop.is_set,
        )
        seconds = time.monotonic() - start
        pushed = []
        for (ticket, prompt), completions in zip(prompts, sampled, strict=True):
            if any(completion.finish_reason == "abort" for completion in completions):
                continue
            try:
                group = build_group(
                    self._env, ticket, prompt, completions, worker=self._name, temperature=settings.temperature
                )
            except Exception as error:  # the env is the user's code: whatever it raises costs this group only
                self._give_up(held, ticket, "score", error)
                continue
            try:
                writer.push(group)
            except InvalidRollout as error:
                self._give_up(held, ticket, "push", error)
                continue
            del held[ticket.number]
            self._failures.pop(ticket.number, None)
            self._pulse.groups += 1
            self._pulse.rollouts += len(group.rollouts)
            pushed.append(group)
        if pushed:
            self._tell(pushed, seconds)
            if self._pulse.failed_groups == failed_before and self._refused is None:
                self._pulse.error = ""

    def _give_up(self, held: dict[int, Ticket], ticket: Ticket, what: str, error: Exception) -> None:
        """Counts a group that cannot be made; `held` keeps its ticket when it shall be given back at once."""
        _log.debug("group %s given up", ticket.group_id, exc_info=error)
        self._pulse.failed_groups += 1
        self._failures[ticket.number] += 1
        sentence = f"group {ticket.group_id} given up: {what} failed: {type(error).__name__}: {error}"
        if self._failures[ticket.number] > 1:
            # Given back, it would be the next one taken, again and again. Not given back, it lapses by its own time.
            del held[ticket.number]
            sentence += f" ({self._failures[ticket.number]} times; its ticket is left to lapse)"
        self._trouble(sentence)

    # -- telling -----------------------------------------------------------------------------------------------------
    def _tell(self, pushed: Sequence[Group], seconds: float) -> None:
        rollouts = [rollout for group in pushed for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        self._on_event(
            {
                "event": "batch",
                "version": self._pulse.version,
                "groups": len(pushed),
                "rollouts": len(rollouts),
                "tokens": sum(rollout.length for rollout in rollouts),
                "reward": sum(rewards) / len(rewards),
                "seconds": seconds,
            }
        )

    def _trouble(self, sentence: str) -> None:
        self._pulse.error = sentence
        self._on_event({"event": "trouble", "error": sentence})

    def _wait(self, what: str) -> None:
        """Notes what is waited for, and says it once it has lasted."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting = now
        self._pulse.waiting = f"waiting for {now - self._waiting_since:.0f} s: {what}"
        if now - self._said_waiting >= SAY_WAITING_SECONDS:
            self._said_waiting = now
            self._on_event({"event": "waiting", "waiting": self._pulse.waiting})

    def _work(self) -> None:
        self._waiting_since = None
        self._pulse.waiting = ""
