"""An opening of a group, whose asker may hang up at any moment: what was begun and nobody has heard of ends at once.

Threads are not stopped when a request is. So an opening looks, before it begins a group and after, whether anybody
still waits for it. A group whose key its caller has given stays: the caller finds it again by that key.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlbuffer.errors import ServerRefused, ServerUnreachable, TicketGone
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Ticket
from rlbuffer.store.gateway import ABANDONED, GRACE_SECONDS, GatewayStore
from rlbuffer.store.open_rollouts import Begun

HUNG_UP = Failure(ABANDONED, "whoever began it hung up before it heard of it")


class Opening:
    """Begins one group of open rollouts.

    Args:
        store: the run.
        env: env whose ticket is taken.
        size: rollouts of the group.
        key: of the caller; "" draws one.
        about: what the group's push needs of it.
        tickets: how many tickets the env has in all; None: no end.
        idle_seconds: silence after which a rollout counts as abandoned.
    """

    def __init__(
        self,
        store: GatewayStore,
        env: str,
        *,
        size: int,
        key: str,
        about: Mapping[str, Any],
        tickets: int | None,
        idle_seconds: float,
    ) -> None:
        self._store, self._env, self._size, self._about = store, env, size, about
        self._key, self._is_drawn = key or secrets.token_urlsafe(32), not key
        self._tickets, self._idle_seconds = tickets, idle_seconds
        self._lock = threading.Lock()
        self._is_left = False
        self._begun: Begun | None = None

    def take(self) -> Begun | None:
        """What was begun with this key, else new rollouts of a ticket; None while none is out, or once nobody waits.

        Raises:
            TicketGone: the group of this key is lost: no other one can be begun with it.
            RunGone, EnvDone, ServerRefused, ServerUnreachable.
        """
        begun = self._store.begun(self._key)
        if begun is not None:
            return begun
        numbers = self._store.take_tickets(self._env, 1, ttl_seconds=GRACE_SECONDS, size=self._tickets)
        if not numbers:
            return None
        try:
            begun = self._of_ticket(Ticket(env=self._env, number=numbers[0], group_id=f"{self._env}.{numbers[0]}"))
        except TicketGone as error:
            if not error.is_out:  # another one has its group, or it is not out: giving it back would give it again
                return None
            self._store.release_tickets(self._env, numbers)
            raise
        except BaseException:
            self._store.release_tickets(self._env, numbers)
            raise
        if begun is None or begun.number != numbers[0]:
            self._store.release_tickets(self._env, numbers)
        return begun

    def _of_ticket(self, ticket: Ticket) -> Begun | None:
        if self._wait_is_over(None):
            return None
        begun = self._store.begin(
            self._key, ticket, size=self._size, about=self._about, idle_seconds=self._idle_seconds
        )
        if self._wait_is_over(begun):
            self._end()
        return begun

    def _wait_is_over(self, begun: Begun | None) -> bool:
        """Nobody waits any more for what is begun."""
        with self._lock:
            self._begun = begun
            return self._is_left

    def leave(self) -> None:
        """Nobody waits any more: nothing is begun from now on, and what was is ended."""
        with self._lock:
            self._is_left, is_begun = True, self._begun is not None
        if is_begun:
            self._end()

    def _end(self) -> None:
        if self._begun is None or not self._is_drawn:
            return
        with suppress(ServerRefused, ServerUnreachable):  # else it ends by its deadline
            for name in self._begun.names:
                self._store.fail(name, HUNG_UP)
