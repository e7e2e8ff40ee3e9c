"""The address of a cluster, and the slots of commands."""

from __future__ import annotations

from typing import Any

import pytest
from redis.connection import SSLConnection

from rlbuffer.errors import ConfigError
from rlbuffer.store.keys import Keys
from rlbuffer.store.server.address import FORMS, check_place, options_of
from rlbuffer.store.server.shards import shards_of, slot_of, slot_of_key


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis+cluster://h", {"nodes": (("h", 6379),)}),
        ("redis+cluster://h:1,[::1]:2/0", {"nodes": (("h", 1), ("::1", 2))}),
        (
            "rediss+cluster://me:p%40ss@h:1,i?ssl_ca_certs=/ca.crt",
            {
                "nodes": (("h", 1), ("i", 6379)),
                "username": "me",
                "password": "p@ss",
                "connection_class": SSLConnection,
                "ssl_ca_certs": "/ca.crt",
            },
        ),
    ],
)
def test_an_address_of_a_cluster_is_read(url: str, options: dict[str, Any]) -> None:
    assert options_of(url, "") == options
    check_place(url, options, "")
    assert shards_of(options) is not None


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://h:1,", "redis+cluster://h:0", "redis+cluster://h:1/math"]
)
def test_what_is_no_address_of_a_cluster_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(url, "\n  The address comes from X.")
    assert str(caught.value).endswith(f" is not the address of a server.\n  The address comes from X.\n{FORMS}")


def test_a_cluster_has_one_database() -> None:
    with pytest.raises(ConfigError) as caught:
        options_of("redis+cluster://h:1/3", "")
    assert str(caught.value) == "redis+cluster://h:1/3 names a database, and a cluster has none but 0."


def test_the_address_of_one_server_names_no_cluster() -> None:
    assert shards_of(options_of("redis://h", "")) is None


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


def test_a_payload_that_is_not_pending_yet_lies_in_the_slot_of_its_name() -> None:
    keys = Keys("math")
    assert slot_of_key(keys.unnamed_payload("a.1", "u.1")) == slot_of_key(keys.payload("a.1", "u.1"))
