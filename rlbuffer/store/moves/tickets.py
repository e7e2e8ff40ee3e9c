"""TICKET: leave to sample, by number, so that an epoch of prompts is neither skipped nor doubled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis

from rlbuffer.errors import EnvDone
from rlbuffer.store.moves.operator import WISH_FIELDS
from rlbuffer.store.moves.telemetry import beat_args
from rlbuffer.store.records import Asked, Sources, policy_of
from rlbuffer.store.session import Session, raise_first, text

LONGEST_TICKET_SECONDS = 900.0
"""Longest that a ticket may be out without being renewed."""
_END = re.compile(r"=?([0-9]{1,15})\Z")
"""Number of tickets of an env: as its workers say, or with ``=`` as an operator said."""


_LONGEST_MS = round(1000 * LONGEST_TICKET_SECONDS)


class TicketMoves(Session):
    """Tickets, which workers take and the batcher closes."""

    def take_tickets(
        self, env: str, n: int, *, ttl_seconds: float, size: int | None = None, section: str = ""
    ) -> list[int]:
        # Repeated over a lost reply all the same: numbers that were given out unheard expire and are taken again.
        return self._numbers(env, self.move("ticket", *self._take(env, n, ttl_seconds, size, section)))

    def ask(
        self, env: str, n: int, *, worker: str, beat: dict[str, Any], ttl_seconds: float, size: int | None, section: str
    ) -> Asked:
        telemetry, ticket = self.script("telemetry"), self.script("ticket")
        keys, args = self._take(env, n, ttl_seconds, size, section)
        note = beat_args(worker, beat)

        def send() -> list[Any]:
            with self.client.pipeline(transaction=False) as pipe:
                pipe.evalsha(telemetry.sha, 1, self.keys.heartbeats("worker"), *note)
                pipe.evalsha(ticket.sha, len(keys), *keys, *args)
                pipe.hget(self.keys.policy, "")
                pipe.hmget(self.keys.meta, WISH_FIELDS)
                heard, *replies = pipe.execute(raise_on_error=False)
            if isinstance(replies[0], redis.exceptions.NoScriptError):
                replies[0] = ticket(keys, args)  # loads it
            raise_first(replies)
            return [not isinstance(heard, Exception), *replies]  # whatever is wrong with a heartbeat is its own trouble

        heard, reply, policy, (_, draining) = self.connection.call(
            send, patience_seconds=self.patience_seconds, op="ticket"
        )
        return Asked(
            numbers=tuple(self._numbers(env, reply)),
            policy=policy_of("", policy),
            is_draining=draining is not None,
            is_heard=heard,
        )

    def _take(
        self, env: str, n: int, ttl_seconds: float, size: int | None, section: str
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Keys and arguments of TICKET."""
        keys = (self.keys.tickets(env), self.keys.allowance, self.keys.numbers, self.keys.ends)
        return keys, ("take", env, n, round(1000 * ttl_seconds), "" if size is None else size, section, _LONGEST_MS)

    def _numbers(self, env: str, reply: Sequence[Any]) -> list[int]:
        if reply and not isinstance(reply[0], int):
            raise EnvDone(f"env {env} of run {self.run!r} is done: it has given all its tickets, and none is out")
        return [int(number) for number in reply]

    def say_done(self, env: str, *, epoch: int) -> None:
        reply = self._say_done("done", epoch, env)
        if text(reply[0]) == "GONE":
            raise self.gone(reply, epoch)

    def forget_end(self, env: str) -> bool:
        return text(self._say_done("resume", env)[0]) == "OK"

    def expect(self, sections: Iterable[str]) -> None:
        self._say_done("expect", *sorted(sections))

    def _say_done(self, action: str, *args: Any) -> list[Any]:
        return self.move("done", (self.keys.ends, self.keys.numbers, self.keys.meta), (action, *args))

    def sources(self) -> Sources:

        def look(client: Any) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                pipe.hgetall(self.keys.ends)
                pipe.hgetall(self.keys.numbers)
                return list(pipe.execute())

        written, taken = self.look(look)
        given, numbers = ({text(k): text(v) for k, v in fields.items()} for fields in (written, taken))
        ends = {env: int(match[1]) for env, end in given.items() if (match := _END.match(end))}
        over = [env for env, end in ends.items() if _number(numbers.get(env, "0")) >= end]

        def count(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for env in over:
                    pipe.zcard(self.keys.tickets(env))
                return list(pipe.execute())

        # Numbers are given before they are out, and none is given any more: that order makes the answer certain.
        done = frozenset(env for env, out in zip(over, self.look(count) if over else (), strict=True) if not out)
        expected = frozenset(name[8:-1] for name in given if name.startswith("[worker."))
        known = {env for env in (*given, *numbers) if not env.startswith("[")}
        said = frozenset(env for env in done if given[env].startswith("="))
        others = frozenset(known - done)
        return Sources(done=done, said=said, open=others, expected=expected, ends=ends, written=written)

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None:
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (max(1, round(1000 * ttl_seconds)), *numbers))

    def release_tickets(self, env: str, numbers: Sequence[int]) -> None:
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (0, *numbers))

    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        if numbers:
            # A plain ZREM, because it passes at the memory limit where TICKET is refused.
            self.look(lambda client: client.zrem(self.keys.tickets(env), *numbers))

    def pause(self, env: str) -> bool:

        def add(client: Any) -> Any:
            seconds, _ = client.time()
            return client.zadd(self.keys.paused, {env: int(seconds)}, nx=True)

        return bool(self.look(add))

    def resume(self, env: str) -> bool:
        return bool(self.look(lambda client: client.zrem(self.keys.paused, env)))

    def paused(self) -> frozenset[str]:
        return frozenset(text(env) for env in self.look(lambda client: client.zrange(self.keys.paused, 0, -1)))

    def allowances(self) -> Mapping[str, int]:
        reply = self.look(lambda client: client.hgetall(self.keys.allowance))
        return {text(env): int(n) for env, n in reply.items()}


def _number(value: str) -> float:
    """A ticket number; what is none is below every end."""
    return int(value) if value.isdecimal() else float("-inf")
