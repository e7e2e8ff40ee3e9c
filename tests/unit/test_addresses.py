"""Addresses that name several servers, and the slots of commands."""

from __future__ import annotations

from typing import Any

import pytest
from redis.connection import SSLConnection

from rlbuffer.errors import ConfigError
from rlbuffer.store.keys import Keys
from rlbuffer.store.server.address import options_of
from rlbuffer.store.server.sentinels import watchers_of
from rlbuffer.store.server.shards import shards_of, slot_of, slot_of_key

LOGIN = {"username": "me", "password": "p@ss"}
TLS = {"connection_class": SSLConnection, "ssl_ca_certs": "/ca.crt"}
READ: dict[str, dict[str, Any]] = {
    "redis+sentinel://h/math": {"sentinels": (("h", 26379),), "service": "math"},
    "redis+sentinel://h:1,i:2/math/": {"sentinels": (("h", 1), ("i", 2)), "service": "math"},
    "redis+sentinel://[::1]:1,i/a%2Fb/3": {"sentinels": (("::1", 1), ("i", 26379)), "service": "a/b", "db": 3},
    "redis+sentinel://me:p%40ss@h:1/math/0": {"sentinels": (("h", 1),), "service": "math", "db": 0} | LOGIN,
    "rediss+sentinel://h:1/math?ssl_ca_certs=/ca.crt&sentinel_username=s&sentinel_password=a%26b": {
        "sentinels": (("h", 1),),
        "service": "math",
        "sentinel_username": "s",
        "sentinel_password": "a&b",
    }
    | TLS,
    "redis+cluster://h": {"nodes": (("h", 6379),)},
    "redis+cluster://h:1,[::1]:2/0": {"nodes": (("h", 1), ("::1", 2))},
    "rediss+cluster://me:p%40ss@h:1,i?ssl_ca_certs=/ca.crt": {"nodes": (("h", 1), ("i", 6379))} | LOGIN | TLS,
}
REFUSED = {
    **dict.fromkeys(
        [
            *("redis+sentinel://", "redis+sentinel://h:1,/math", "redis+sentinel://h:0/math"),
            *("redis+sentinel://h:99999/math", "redis+sentinel://h:secret/math", "redis+sentinel://h:1/math/db"),
            *("redis+sentinel://h:1/math/0/1", "unix+sentinel://h:1/math"),
            *("redis+cluster://", "redis+cluster://h:1,", "redis+cluster://h:0", "redis+cluster://h:1/math"),
        ],
        "is not the address of a server",
    ),
    **dict.fromkeys(["redis+sentinel://h:1,i:2", "redis+sentinel://h:1/", "rediss+sentinel://h:1//0"], "no service"),
    "redis+cluster://h:1/3": "a cluster has none but 0",
    "redis+sentinel://h:1/math?sentinels=1": "cannot be set there: sentinels",
    "redis+sentinel://h:1/math?service=1": "cannot be set there: service",
    "redis+sentinel://h:1/math?socket_timeout=1": "cannot be set there: socket_timeout",
    "redis://h?protocol=2": "cannot be set there: protocol",
    "redis://h:1/math": "no number of a database",
    "redis://h:1/0?sentinel_password=x": "cannot be set there: sentinel_password",
}


@pytest.mark.parametrize("url", READ)
def test_an_address_of_several_servers_is_read(url: str) -> None:
    assert options_of(url, "") == READ[url]
    assert (shards_of(READ[url]) is not None) == ("cluster" in url)
    assert (watchers_of(READ[url]) is not None) == ("sentinel" in url)


@pytest.mark.parametrize("url", REFUSED)
def test_what_is_no_address_is_refused_with_the_reason_and_without_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(url, "\n  The address comes from X.")
    assert REFUSED[url] in str(caught.value)
    assert "The address comes from X." in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.setting == "redis_url"


def test_the_address_of_one_server_names_no_others() -> None:
    options = options_of("redis://h:1/0", "")
    assert (shards_of(options), watchers_of(options)) == (None, None)


def test_sentinels_have_their_own_login_and_the_servers_tls() -> None:
    url = "rediss+sentinel://me:mine@h:1/math/2?ssl_ca_certs=/ca.crt&sentinel_password=theirs"
    watchers = watchers_of(options_of(url, ""))
    assert watchers is not None
    (asked,) = (its.connection_pool for its in watchers.sentinels)
    assert (asked.connection_kwargs["password"], asked.connection_kwargs["username"]) == ("theirs", None)
    assert asked.connection_kwargs["ssl_ca_certs"] == "/ca.crt"
    assert issubclass(asked.connection_class, SSLConnection)
    assert "theirs" not in repr(watchers)


def test_a_command_goes_by_its_first_key() -> None:
    keys = Keys("math")
    home = slot_of_key(keys.meta)
    for args in (
        ("HGET", keys.ledger, "f"),
        ("EVALSHA", "digest", 2, keys.pool, keys.meta, "argument"),
        ("XREAD", b"COUNT", "1", b"BLOCK", "5", b"STREAMS", keys.steps, "0-0"),
        ("XINFO STREAM", keys.history),
        ("WATCH", keys.meta.encode()),
    ):
        assert slot_of(args) == home
    for words in (("INFO",), ("CONFIG GET", "save"), ("SCRIPT LOAD", "text"), ("MULTI",), ("TIME",)):
        assert slot_of(words) is None
    # A payload that is not pending yet lies in the slot of its name.
    assert slot_of_key(keys.unnamed_payload("a.1", "u.1")) == slot_of_key(keys.payload("a.1", "u.1"))
