"""What a worker does: it takes tickets, pushes, notes visits, and evaluates.

A ticket is leave to sample, by number, so that an epoch of prompts is neither skipped nor doubled. What the numbers
stand for is kept beside them, so that a run which goes on with other prompts is told. The notes on how the
groups of a prompt went decide which prompts are sampled, and nothing else. An evaluation is one per policy version and
env, whoever made it, beside the account and never in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from rlbuffer.errors import EnvDone, RunEnded, ServerRefused, WrongAnswer
from rlbuffer.store.member import TicketStore, beat_args
from rlbuffer.store.producer import ProducerStore
from rlbuffer.store.records import WorkerAnswers, policy_of
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.session import DEFAULT_PATIENCE_SECONDS, number, raise_first, text
from rlbuffer.wire import payload

LONGEST_TICKET_SECONDS = 900.0
"""Longest that a ticket may be out without being renewed."""
_LONGEST_MS = round(1000 * LONGEST_TICKET_SECONDS)
MOST_VISITS = 100_000
"""Prompts of an env that are remembered, about 100 bytes each: an env that repeats none would fill the server."""
FORGOTTEN_AT_ONCE = 1000
"""Most that one note takes out: a run of before there was a limit comes down to it note by note."""
KEPT_EVALUATIONS = 10_000
"""Results kept, about."""
KNOWN_MS = 7 * 86_400_000
"""Milliseconds that the server remembers that a version was evaluated."""
_DONE = b"done"


class WorkerStore(TicketStore, ProducerStore):
    """A run for a worker."""

    def __init__(self, connection: Connection, run: str, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        super().__init__(connection, run, patience_seconds=patience_seconds)
        self._evaluated: dict[tuple[str, int], int] = {}
        """(env, version) -> the line of versions in which this process took its evaluation."""

    # -- tickets ---------------------------------------------------------------------------------------------------

    def take_tickets(
        self,
        env: str,
        n: int,
        *,
        ttl_seconds: float,
        size: int | None = None,
        section: str = "",
        least: int = 0,
        known_end: str = "",
    ) -> list[int]:
        """TICKET take: up to `n` numbers, fewer (or none) while the allowance is out. Raises EnvDone, RunEnded.

        `size` is how many tickets the env has in all; `section` the worker's, which is not expected any more; `least`
        how many are given beyond the allowance, unless that is 0; `known_end` is :attr:`Meta.finished` when the worker
        began.
        """
        # Repeated over a lost reply all the same: numbers that were given out unheard expire and are taken again.
        ticket_keys, args = self._take(env, n, ttl_seconds, size, section, known_end, least)
        return self._numbers(env, self.move("ticket", ticket_keys, args))

    def ask(
        self,
        env: str,
        n: int,
        *,
        worker: str,
        beat: dict[str, Any],
        ttl_seconds: float,
        size: int | None,
        section: str,
        known_end: str = "",
    ) -> WorkerAnswers:
        """`take_tickets`, and in the same round trip the worker's heartbeat and looks at the newest policy version and
        at whether the run drains. The heartbeat is stored also where the tickets are refused. Raises as
        `take_tickets`."""
        telemetry, ticket = self.script("telemetry"), self.script("ticket")
        ticket_keys, args = self._take(env, n, ttl_seconds, size, section, known_end)
        keys, beats = self.declared(ticket_keys), self.declared([self.keys.heartbeats("worker")])
        note = beat_args(worker, beat)

        def send() -> list[Any]:
            with self.client.pipeline(transaction=False) as pipe:
                pipe.evalsha(telemetry.sha, len(beats), *beats, *note)
                pipe.evalsha(ticket.sha, len(keys), *keys, *args)
                pipe.hget(self.keys.policy, "")
                pipe.hexists(self.keys.meta, "draining")
                heard, *replies = pipe.execute(raise_on_error=False)
            if isinstance(replies[0], redis.exceptions.NoScriptError):
                replies[0] = ticket(keys, args)  # loads it
            raise_first(replies)
            return [not isinstance(heard, Exception), *replies]  # whatever is wrong with a heartbeat is its own trouble

        heard, reply, policy, is_draining = self.call(send, op="ticket")
        return WorkerAnswers(
            numbers=tuple(self._numbers(env, reply)),
            policy=policy_of("", policy),
            is_draining=bool(is_draining),
            is_heard=heard,
        )

    def _take(
        self, env: str, n: int, ttl_seconds: float, size: int | None, section: str, known_end: str, least: int = 0
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Keys and arguments of TICKET."""
        names = self.keys
        keys = (
            *(names.tickets(env), names.allowance, names.numbers, names.ends, names.meta),
            *(names.policy, names.taken(env)),
        )
        ttl, size_or_none = round(1000 * ttl_seconds), "" if size is None else size
        return keys, ("take", env, n, ttl, size_or_none, section, _LONGEST_MS, least, known_end)

    def _numbers(self, env: str, reply: Sequence[Any]) -> list[int]:
        if reply and not isinstance(reply[0], int) and text(reply[0]) == "OVER":
            step = text(reply[1]).partition(" ")[2]
            raise RunEnded(f"run {self.run!r} has ended: its trainer has made its last step, {step}")
        if reply and not isinstance(reply[0], int):
            raise EnvDone(f"env {env} of run {self.run!r} is done: it has given all its tickets, and none is out")
        return [int(number) for number in reply]

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None:
        """Keeps tickets out; one that was closed meanwhile stays closed."""
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (max(1, round(1000 * ttl_seconds)), *numbers))

    def release_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Gives tickets back unused: they are taken again first."""
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (0, *numbers))

    # -- prompts ---------------------------------------------------------------------------------------------------

    def prompts_before(self, env: str, now: str) -> tuple[str, int]:
        """What the worker before said that its ticket numbers stand for; the first one says `now`. -> that, and the
        next number. Of several first ones at once one is the first, and all others hear of it."""
        key = self.keys.prompts
        before, given = self.piped(lambda pipe: pipe.hget(key, env).hget(self.keys.numbers, env))
        if before is None:
            _, before = self.piped(lambda pipe: pipe.hsetnx(key, env, now).hget(key, env))
        return text(before), number(given) or 0

    def note_prompts(self, env: str, now: str) -> None:
        """Says what ticket numbers stand for from now on."""
        self.look(lambda client: client.hset(self.keys.prompts, env, now))

    # -- visits ----------------------------------------------------------------------------------------------------

    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]:
        """The last note on each prompt; "" for one not met yet."""
        if not prompt_ids:
            return []
        reply = self.look(lambda client: client.hmget(self.keys.visits(env), list(prompt_ids)))
        return ["" if value is None else text(value) for value in reply]

    def note_visits(self, env: str, prompt_id: str, marks: str) -> None:
        """Replaces the note on a prompt. Of two at once one is lost; of too many prompts some are forgotten."""
        key = self.keys.visits(env)
        _, count = self.piped(lambda pipe: pipe.hset(key, prompt_id, marks).hlen(key))
        surplus = min(count - MOST_VISITS, FORGOTTEN_AT_ONCE)
        others = self.look(lambda client: client.hrandfield(key, surplus)) if surplus > 0 else []
        if others:
            self.look(lambda client: client.hdel(key, *others))

    # -- evaluations -----------------------------------------------------------------------------------------------

    def claim_evaluation(self, env: str, version: int, *, owner: str, ttl_seconds: float) -> bool:
        """Takes the evaluation of a version on an env. -> False when it is done, or another is at it.

        A claim expires after `ttl_seconds`; asked again by the same owner, it is prolonged.
        """
        line = self._line()
        self._evaluated[env, version] = line
        return self._claimed(self.keys.evaluating(env, version, line), owner, ttl_seconds)

    def _claimed(self, key: str, owner: str, ttl_seconds: float) -> bool:
        """Sets a key to its owner for a while, unless another one has it."""
        milliseconds = max(1, round(1000 * ttl_seconds))

        def claim(client: Any) -> bool:
            if client.set(key, owner, nx=True, px=milliseconds):
                return True
            holder = client.get(key)
            if holder == owner.encode():
                return bool(client.pexpire(key, milliseconds))
            if holder not in (None, _DONE):  # a clock that was set back since lets it run for longer than it was given
                client.pexpire(key, milliseconds, lt=True)
            return False

        return self.look(claim)

    def release_evaluation(self, env: str, version: int, *, owner: str) -> None:
        """Gives a claim back: what was sampled does not count."""
        self._release_claim(self.keys.evaluating(env, version, self._evaluated.get((env, version), 0)), owner)

    def _release_claim(self, key: str, owner: str) -> None:
        def release(client: Any) -> None:
            if client.get(key) == owner.encode():
                client.delete(key)

        self.look(release)

    def add_evaluation(self, env: str, version: int, record: Mapping[str, Any]) -> None:
        """Keeps a result; the first one of a version and env counts. Raises ServerRefused when the stream is jammed."""
        # Repeated after a lost reply it may be there twice: the first one counts.
        line = self._evaluated.get((env, version)) or self._line()
        fields = {"env": env, "version": version, "line": line, "record": payload.dumps(dict(record))}

        try:
            self.look(lambda client: client.xadd(self.keys.eval, fields, maxlen=KEPT_EVALUATIONS, approximate=True))
        except WrongAnswer as error:
            raise ServerRefused(f"{self.keys.eval} takes no result: {error}") from None
        # Not before: done is what has a result.
        self.look(lambda client: client.set(self.keys.evaluating(env, version, line), _DONE, px=KNOWN_MS))
