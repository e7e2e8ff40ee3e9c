"""``memory://``: the real store code and the real Lua files over an in-process model of the server (fakeredis, lupa).

For tests and for trying things out: nothing is installed, started or kept. ``memory://NAME`` is shared by everything in
the process that names it; ``memory://`` is a fresh server for each connection. Any thread may use it, blocking reads
included; a script runs alone, as on a server.

It differs from a server, so nobody should take its word for these: nothing is persisted, and a forked child has a copy
of its own; there is no memory limit, hence no OOM, and no ACL; INFO, CONFIG and MEMORY do not exist; Lua has `cjson`
but neither `cmsgpack`, `struct`, `bit` nor ``redis.sha1hex``; the ``#!lua flags=...`` line of a script is not known
there and is left out (:class:`rlbuffer.store.server.script.Script`). Writes of a script
before it failed stay, as on a server.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

from rlbuffer.errors import ConfigError, installed_by

if TYPE_CHECKING:
    import redis

MODELLED_VERSION = (7, 0)
"""The oldest server that a run may live on."""

_servers: dict[str, Any] = {}
_lock = threading.Lock()


def memory_client(name: str = "") -> redis.Redis:
    """A client of the in-process server called `name`, or of a fresh one when the name is empty.

    Raises:
        ConfigError: fakeredis or lupa is not installed.
    """
    try:
        import fakeredis
        import lupa  # noqa: F401 - fakeredis imports it only when the first script runs
    except ImportError as error:
        raise ConfigError(
            f"memory:// needs the extra `memory` ({error.name} is not installed).\n"
            f"  Install it:  {installed_by('memory')}",
            setting="redis_url",
        ) from error
    with _lock:
        server = _servers.get(name) if name else None
        if server is None:
            server = fakeredis.FakeServer(server_type="redis", version=MODELLED_VERSION)
            server.dbs[0]  # is made by its first look: of two threads that come at once each would get one of its own
            if name:
                _servers[name] = server
    client: redis.Redis = fakeredis.FakeRedis(
        server=server, version=MODELLED_VERSION, protocol=3, retry=Retry(NoBackoff(), 0)
    )
    return client


def memory_name(url: str) -> str | None:
    """The NAME of ``memory://NAME``, "" for ``memory://``, or None for any other URL."""
    parts = urlsplit(url)
    return unquote(parts.netloc + parts.path) if parts.scheme == "memory" else None
