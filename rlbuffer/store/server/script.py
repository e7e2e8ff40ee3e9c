"""A Lua script on the server, called by its digest and loaded again after a restart.

A script that somebody loads himself may be one that never ends, or one that writes although the memory is full. So only
an operator's user may load any (deploy/users.acl); the others wait until the leader has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import redis

LOADS = 3
"""Times that a script is loaded: the server may restart once more between loading and calling."""
Argument = bytes | str | int | float | memoryview


class Script:
    """Callable ``script(keys, args)``: EVALSHA, and SCRIPT LOAD when the server does not know it and this user may.

    A server forgets its scripts when it restarts. It answers NOSCRIPT before anything ran, so calling once more is safe
    for scripts that write, too. Errors are redis-py's: call it inside :meth:`Connection.call`.
    """

    def __init__(self, client: Callable[[], redis.Redis], text: str, *, has_flags: bool = True) -> None:
        """`client` gives the client of the moment; `has_flags`: the server knows the ``#!lua flags=...`` line."""
        if not has_flags and text.startswith("#!"):
            # A comment in its place keeps the line numbers of error messages.
            text = "--" + text
        self._client = client
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[Argument] = (), args: Sequence[Argument] = ()) -> Any:
        client = self._client()
        for _ in range(LOADS):
            try:
                return client.evalsha(self.sha, len(keys), *keys, *args)
            except redis.exceptions.NoScriptError as unknown:
                self._load(client, unknown)
        return client.evalsha(self.sha, len(keys), *keys, *args)

    def _load(self, client: redis.Redis, unknown: redis.exceptions.NoScriptError) -> None:
        """Raises `unknown` where this user may not: then the leader does."""
        try:
            client.script_load(self.text)
        except redis.exceptions.NoPermissionError:
            raise unknown from None
