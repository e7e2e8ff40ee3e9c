"""The primary of a service, as its sentinels name it; they are asked at each new connection.

redis-py's `Sentinel` is not used: it has one error for a primary that is down and for a service that nobody knows, and
threads that ask together may lose one of its sentinels. Its command and its reading of the answer are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.connection import SSLConnection

from rlbuffer.store.server.address import SENTINEL_LOGIN
from rlbuffer.store.server.answers import LOGIN, NoPrimary, reason_of, words_of
from rlbuffer.store.server.asking import pool_of
from rlbuffer.store.server.gathering import Tcp

_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state
Place = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinels:
    """The sentinels of a service."""

    places: Sequence[Place]
    service: str
    options: Mapping[str, Any] = field(repr=False)
    """Login and TLS of a connection to one of them."""

    def primary(self) -> Place:
        """The primary, by the first sentinel that names one. They are asked in a drawn order: one that is away, or is
        cut off from the others and behind them, keeps nobody for long.

        Raises:
            NoPrimary: none of them names one.
        """
        failures = {}
        for place in _RANDOM.sample(self.places, len(self.places)):
            try:
                return self.ask(place)
            except NoPrimary as error:
                failures[place] = error
        weightiest = max(failures.values(), key=lambda error: (error.is_down, error.is_mistake))
        if weightiest.is_down or weightiest.is_mistake:
            raise weightiest
        reasons = "; ".join(str(failures[place]) for place in self.places)
        raise NoPrimary(f"none of its sentinels answers: {reasons}") from weightiest

    def ask(self, place: Place) -> Place:
        """The primary, by the sentinel at `place`.

        Raises:
            NoPrimary: it is away, is no sentinel, refuses the login, or knows of none that is up.
        """
        at = f"{place[0]}:{place[1]}"
        try:
            with redis.Redis.from_pool(pool_of(place, self.options)) as sentinel:
                services: Mapping[str, Any] = sentinel.sentinel_masters()
        except LOGIN as error:
            words = words_of(error).partition(".")[0]
            raise NoPrimary(
                f"the sentinel at {at} does not allow this: {words}. Its own login stands in the address as "
                "?sentinel_password=, and sentinel_username= where it has users",
                is_mistake=True,
            ) from error
        except redis.ResponseError as error:
            raise NoPrimary(
                f"what answers at {at} is no sentinel ({words_of(error).partition(',')[0]}). Name the port of the "
                "sentinels, mostly 26379; the address of one server begins with redis:// or rediss://",
                is_mistake=True,
            ) from error
        except redis.RedisError as error:
            raise NoPrimary(f"{at} {reason_of(error)}") from error
        state = services.get(self.service)
        if state is None:
            known = ", ".join(sorted(services)) or "none"
            raise NoPrimary(
                f'the sentinel at {at} knows no service "{self.service}". Those that it knows: {known}',
                is_mistake=True,
            )
        if not state["is_master"] or state["is_sdown"] or state["is_odown"]:
            raise NoPrimary(
                f'the primary of "{self.service}", {state["ip"]}:{state["port"]}, is down, and its sentinels have not '
                "put a replica in its place yet",
                is_down=True,
            )
        return str(state["ip"]), int(state["port"])


def sentinels_of(options: Mapping[str, Any]) -> Sentinels | None:
    """The sentinels among the options of an address; None for the address of one server."""
    if "sentinels" not in options:
        return None
    login = {name: options[key] for name, key in SENTINEL_LOGIN.items() if key in options}
    tls = {name: value for name, value in options.items() if name == "connection_class" or name.startswith("ssl_")}
    return Sentinels(places=options["sentinels"], service=options["service"], options=login | tls)


def following(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a pool of connections to the primary. Those of one server's address are returned as they are."""
    sentinels = sentinels_of(options)
    own = {"sentinels", "service", "nodes", *SENTINEL_LOGIN.values()}
    rest = {name: value for name, value in options.items() if name not in own}
    if sentinels is None:
        return rest
    is_tls = rest.get("connection_class") is SSLConnection
    return rest | {"connection_class": _TlsToPrimary if is_tls else _ToPrimary, "sentinels": sentinels}


class _Asking:
    """Mixed into a connection of redis-py: asks who the primary is before it is made."""

    host: str
    port: int

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.primary()
        try:
            return super()._connect()  # type: ignore[misc]
        except OSError as error:
            reason = (error.strerror or "no answer in time").lower()
            raise NoPrimary(f"the primary that its sentinels name, {self.host}:{self.port}: {reason}") from error


class _ToPrimary(_Asking, Tcp):
    pass


class _TlsToPrimary(_Asking, SSLConnection):
    pass
