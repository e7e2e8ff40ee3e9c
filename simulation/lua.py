"""The real Lua files in Lua 5.1, the version that servers embed, with ``redis.call`` leading to the modelled server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import ResponseError

from simulation.branches import MARKS, marked

# Arguments and replies cross the border as they are: bytes are Lua strings, None is false, a status is {ok = ...}.
Call = Callable[[bytes, Sequence[bytes]], Any]
"""Runs one command of a script: (name, the whole command) -> its reply."""

_PRELUDE = """
local call, pcalled = ...
redis = {
  call = function(...) return call(...) end,
  pcall = function(...) return pcalled(...) end,
  status_reply = function(text) return {ok = text} end,
  error_reply = function(text) return {err = text} end,
}
-- A flat list of strings and numbers goes back as several values: no border is crossed for each of them.
local function is_flat(reply)
  local n = #reply
  if n > 200 or reply.ok or reply.err then return false end
  for i = 1, n do
    local kind = type(reply[i])
    if kind ~= 'string' and kind ~= 'number' then return false end
  end
  return true
end
return function(text) return assert(loadstring(text, '@script')) end,
  function(f, keys, argv)
    KEYS, ARGV = keys, argv
    local reply = f()
    if type(reply) == 'table' and is_flat(reply) then return true, unpack(reply) end
    return false, reply
  end
"""


class Engine:
    """One Lua state of the process; scripts are compiled once."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._command: Call | None = None
        self._compile, self._enter = self._lua.execute(_PRELUDE, self._call, self._pcall)
        self._table = self._lua.table_from
        self._marks = self._lua.globals()[MARKS.encode()] = self._lua.table()
        self._compiled: dict[str, Any] = {}

    def compiled(self, text: str) -> Any:
        """The function of a script; a first line ``#!lua`` is for the server only."""
        if text not in self._compiled:
            source = marked(text)
            source = "--" + source if source.startswith("#!") else source
            try:
                self._compiled[text] = self._compile(source.encode())
            except lua51.LuaError as problem:
                raise ResponseError(f"Error compiling script: {problem}") from None
        return self._compiled[text]

    def entered(self) -> frozenset[int]:
        """The branches (:mod:`simulation.branches`) that scripts have entered since this was asked last."""
        marks = frozenset(self._marks)
        for mark in marks:
            self._marks[mark] = None
        return marks

    def run(self, call: Call, function: Any, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """EVALSHA: the script's reply as the client gets it."""
        self._command = call
        try:
            reply = self._enter(function, self._table(keys), self._table(args))
            # Several values come as a tuple, a single one as it is: the flag of an empty list.
            if type(reply) is not tuple:
                return []
            is_flat, *values = reply
            if not is_flat:
                result = self._reply(values[0] if values else None)
                if isinstance(result, ResponseError):
                    raise result
                return result
            return [value if type(value) is bytes else int(value) for value in values]
        except lua51.LuaError as problem:
            raise ResponseError(f"{problem} script: error") from None

    def _call(self, name: bytes, *args: Any) -> Any:
        run = self._command
        if run is None:
            raise RuntimeError("no server runs this script")
        command = [name, *args]
        for i, arg in enumerate(args, 1):
            if type(arg) is not bytes:
                command[i] = _number(arg)
        reply = run(name, command)
        return reply if type(reply) is bytes or type(reply) is int else self._value(reply)

    def _pcall(self, name: bytes, *args: Any) -> Any:
        try:
            return self._call(name, *args)
        except ResponseError as error:
            return self._table({b"err": str(error).encode()})

    def _value(self, reply: Any) -> Any:
        """A reply of the server, for Lua."""
        if reply is None:
            return False
        if type(reply) is list:
            return self._table([item if type(item) is bytes else self._value(item) for item in reply])
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
            return ResponseError(problem.decode())  # among other values it is one of them
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
