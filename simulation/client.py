"""redis-py's own commands and reply shapes over the modelled server: only sockets and packing are left out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from redis._parsers.helpers import _RedisCallbacks, _RedisCallbacksRESP3
from redis.commands.core import CoreCommands
from redis.exceptions import ResponseError


class Wire(Protocol):
    """Receiver of commands."""

    def round_trip(self, commands: Sequence[Sequence[bytes]], *, is_transaction: bool) -> list[Any]:
        """Returns the replies, RESP2; errors among them."""

    def round_trip_blocking(self, command: Sequence[bytes], key: bytes, seconds: float) -> Any:
        """The same as above for one XREAD, waiting for an entry."""


CALLBACKS: dict[bytes, Any] = {k.encode(): v for k, v in {**_RedisCallbacks, **_RedisCallbacksRESP3}.items()}


class SimulatedClient(CoreCommands):
    """Stand-in for redis.Redis in the store."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def execute_command(self, *args: Any, **options: Any) -> Any:
        command = encoded(args)
        if command[0] == b"XREAD" and b"BLOCK" in command:
            reply = wait(self._wire, command)
        else:
            reply = self._wire.round_trip((command,), is_transaction=False)[0]
        if isinstance(reply, Exception):
            raise reply
        return shaped(command, reply, options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> SimulatedPipeline:
        return SimulatedPipeline(self._wire, is_transaction=transaction)

    def get_connection_kwargs(self) -> dict[str, Any]:
        return {"protocol": 3}

    def close(self) -> None:
        """Nothing is open."""


class SimulatedPipeline(CoreCommands):
    """Stand-in for redis.client.Pipeline in the store."""

    def __init__(self, wire: Wire, *, is_transaction: bool) -> None:
        self._wire = wire
        self._is_transaction = is_transaction
        self._commands: list[tuple[list[bytes], dict[str, Any]]] = []
        self._is_watching = False

    def __enter__(self) -> SimulatedPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commands.clear()

    def watch(self, *names: Any) -> None:
        """Until :meth:`multi` commands are carried out at once. Nobody else writes what is watched here."""
        self._is_watching = True

    def multi(self) -> None:
        self._is_watching = False

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self._is_watching:
            command = encoded(args)
            return shaped(command, self._wire.round_trip((command,), is_transaction=False)[0], options)
        self._commands.append((encoded(args), options))
        return self

    def get_connection_kwargs(self) -> dict[str, Any]:
        return {"protocol": 3}

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        if not commands:
            return []
        blocking = next((at for at, (command, _) in enumerate(commands) if b"BLOCK" in command[:6]), None)
        if blocking is None:
            replies = self._wire.round_trip([c for c, _ in commands], is_transaction=self._is_transaction)
        else:  # what stands before the read is carried out before it, and the rest when it has its answer
            replies = [
                *self._wire.round_trip([c for c, _ in commands[:blocking]], is_transaction=False),
                wait(self._wire, commands[blocking][0]),
                *self._wire.round_trip([c for c, _ in commands[blocking + 1 :]], is_transaction=False),
            ]
        for reply in replies:
            if isinstance(reply, Exception) and raise_on_error:
                raise reply
        return [
            reply if isinstance(reply, Exception) else shaped(c, reply, options)
            for (c, options), reply in zip(commands, replies, strict=True)
        ]


def wait(wire: Wire, command: Sequence[bytes]) -> Any:
    """The reply of an XREAD that blocks."""
    at = command.index(b"BLOCK")
    plain = [*command[:at], *command[at + 2 :]]
    return wire.round_trip_blocking(plain, plain[plain.index(b"STREAMS") + 1], int(command[at + 1]) / 1000)


def encoded(args: Sequence[Any]) -> list[bytes]:
    """A command as it goes over the wire; several words in the first argument are several."""
    words = [arg.encode() if isinstance(arg, str) else arg if type(arg) is bytes else _number(arg) for arg in args]
    if b" " in words[0]:
        words[:1] = words[0].split(b" ")
    words[0] = words[0].upper()
    return words


def _number(value: Any) -> bytes:
    if type(value) is int:
        return b"%d" % value
    if type(value) is float:
        return repr(value).encode()
    raise ResponseError(f"the simulation does not send {type(value).__name__}")


def shaped(command: Sequence[bytes], reply: Any, options: dict[str, Any]) -> Any:
    """A RESP2 reply as RESP3, then as redis-py gives it to the caller."""
    name = command[0]
    if name == b"HGETALL":
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    elif name in (b"ZRANGE", b"ZREVRANGE", b"ZRANGEBYSCORE") and b"WITHSCORES" in command:
        reply = [[m, float(s)] for m, s in zip(reply[::2], reply[1::2], strict=True)]
    elif name == b"ZSCORE" and reply is not None:
        reply = float(reply)
    elif name == b"XREAD" and reply is not None:
        reply = dict(reply)
    elif name == b"SCRIPT":
        return reply if isinstance(reply, list) else reply.decode()
    elif type(reply) is str:
        reply = reply.encode()
    callback = CALLBACKS.get(name)
    if callback is None:
        return reply
    return callback(reply, **{k: v for k, v in options.items() if k != "keys"}) if options else callback(reply)
