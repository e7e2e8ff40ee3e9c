"""The real Lua files in Lua 5.1, the version that servers embed, with ``redis.call`` leading to the modelled server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lupa import lua51
from redis.exceptions import ResponseError

if TYPE_CHECKING:
    from simulation.server import Server

# Arguments and replies cross the border as they are: bytes are Lua strings, None is false, a status is {ok = ...}.
_PRELUDE = """
local call = ...
redis = {
  call = function(...) return call(...) end,
  status_reply = function(text) return {ok = text} end,
  error_reply = function(text) return {err = text} end,
}
return function(text) return assert(loadstring(text, '@script')) end,
  function(f, keys, argv)
    KEYS, ARGV = keys, argv
    return f()
  end
"""


class Engine:
    """One Lua state of the process; scripts are compiled once."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._server: Server | None = None
        self._compile, self._enter = self._lua.execute(_PRELUDE, self._call)
        self._table = self._lua.table_from
        self._compiled: dict[str, Any] = {}

    def compiled(self, text: str) -> Any:
        """The function of a script; a first line ``#!lua`` is for the server only."""
        if text not in self._compiled:
            source = "--" + text if text.startswith("#!") else text
            try:
                self._compiled[text] = self._compile(source.encode())
            except lua51.LuaError as problem:
                raise ResponseError(f"Error compiling script: {problem}") from None
        return self._compiled[text]

    def run(self, server: Server, function: Any, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """EVALSHA: the script's reply as the client gets it."""
        self._server = server
        try:
            return self._reply(self._enter(function, self._table(keys), self._table(args)))
        except lua51.LuaError as problem:
            raise ResponseError(f"{problem} script: error") from None

    def _call(self, name: bytes, *args: Any) -> Any:
        server = self._server
        if server is None:
            raise RuntimeError("no server runs this script")
        command = [name.upper(), *(a if type(a) is bytes else _number(a) for a in args)]
        return self._value(server.call(command[0], command))

    def _value(self, reply: Any) -> Any:
        """A reply of the server, for Lua."""
        if reply is None:
            return False
        if type(reply) is list:
            return self._table([self._value(item) if type(item) is not bytes else item for item in reply])
        if type(reply) is str:
            return self._table({b"ok": reply.encode()})
        return reply

    def _reply(self, value: Any) -> Any:
        """A script's result, for the client."""
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float | int):
            return int(value)
        if type(value) is bytes:
            return value
        if (status := value[b"ok"]) is not None:
            return status
        if (problem := value[b"err"]) is not None:
            raise ResponseError(problem.decode())
        out = []
        for i in range(1, len(value) + 1):
            item = value[i]
            if item is None:
                break
            out.append(self._reply(item))
        return out


def _number(value: Any) -> bytes:
    if type(value) is int:
        return b"%d" % value
    if type(value) is float:
        return b"%.17g" % value
    raise ResponseError("Lua redis() command arguments must be strings or integers")
