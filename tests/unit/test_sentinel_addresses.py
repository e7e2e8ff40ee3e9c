"""The address of sentinels: what it is read as, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from redis.connection import SSLConnection

from rlbuffer.errors import ConfigError
from rlbuffer.store.server.address import FORMS, check_place, options_of
from rlbuffer.store.server.sentinels import watchers_of


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis+sentinel://h/math", {"sentinels": (("h", 26379),), "service": "math"}),
        ("redis+sentinel://h:1,i:2/math/", {"sentinels": (("h", 1), ("i", 2)), "service": "math"}),
        ("redis+sentinel://[::1]:1,i/a%2Fb/3", {"sentinels": (("::1", 1), ("i", 26379)), "service": "a/b", "db": 3}),
        (
            "redis+sentinel://me:p%40ss@h:1/math/0",
            {"sentinels": (("h", 1),), "service": "math", "db": 0, "username": "me", "password": "p@ss"},
        ),
        (
            "rediss+sentinel://h:1/math?ssl_ca_certs=/ca.crt&sentinel_username=s&sentinel_password=a%26b",
            {
                "sentinels": (("h", 1),),
                "service": "math",
                "connection_class": SSLConnection,
                "ssl_ca_certs": "/ca.crt",
                "sentinel_username": "s",
                "sentinel_password": "a&b",
            },
        ),
    ],
)
def test_an_address_of_sentinels_is_read(url: str, options: dict[str, Any]) -> None:
    assert options_of(url, "") == options
    check_place(url, options, "")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://",
        "redis+sentinel://h:1,/math",
        "redis+sentinel://h:0/math",
        "redis+sentinel://h:99999/math",
        "redis+sentinel://h:secret/math",
        "redis+sentinel://h:1/math/db",
        "redis+sentinel://h:1/math/0/1",
        "unix+sentinel://h:1/math",
    ],
)
def test_what_is_no_address_of_sentinels_is_refused_without_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(url, "\n  The address comes from X.")
    assert str(caught.value).endswith(f" is not the address of a server.\n  The address comes from X.\n{FORMS}")
    assert "secret" not in str(caught.value)
    assert caught.value.setting == "redis_url"


@pytest.mark.parametrize("url", ["redis+sentinel://h:1,i:2", "redis+sentinel://h:1/", "rediss+sentinel://h:1//0"])
def test_an_address_without_a_service_says_where_its_name_stands(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(url, "")
    assert str(caught.value) == (
        f"{url} names no service.\n"
        "  It stands behind the sentinels, /SERVICE/DB, as in their `sentinel monitor SERVICE HOST PORT QUORUM`."
    )


@pytest.mark.parametrize("option", ["sentinels", "service", "socket_timeout"])
def test_an_option_that_is_rlbuffers_own_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"has an option that cannot be set there: {option}"):
        options_of(f"redis+sentinel://h:1/math?{option}=1", "")


def test_the_login_of_sentinels_belongs_to_their_address_alone() -> None:
    with pytest.raises(ConfigError, match="has an option that cannot be set there: sentinel_password"):
        options_of("redis://h:1/0?sentinel_password=x", "")


def test_sentinels_have_their_own_login_and_the_servers_tls() -> None:
    url = "rediss+sentinel://me:mine@h:1/math/2?ssl_ca_certs=/ca.crt&sentinel_password=theirs"
    options = options_of(url, "")
    watchers = watchers_of(options)
    assert watchers is not None
    (asked,) = (its.connection_pool for its in watchers.sentinels)
    assert (asked.connection_kwargs["password"], asked.connection_kwargs["username"]) == ("theirs", None)
    assert asked.connection_kwargs["ssl_ca_certs"] == "/ca.crt"
    assert issubclass(asked.connection_class, SSLConnection)
    assert "theirs" not in repr(watchers)


def test_the_address_of_one_server_needs_no_sentinels() -> None:
    assert watchers_of(options_of("redis://h:1/0", "")) is None
