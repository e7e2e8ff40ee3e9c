"""The address of a server, and how it is shown: never with its password."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rlbuffer.errors import ConfigError

HIDDEN = "***"
_OPTIONS = re.compile(r"connection_class|path|host|port|db|username|password|ssl_\w+")
_SCHEME = re.compile(r"(?:(?:rediss?(?:\+(?:sentinel|cluster))?|unix|memory)://)?", re.IGNORECASE)
_NAMES = "connection_class|path|host|port|db|(?:sentinel_)?(?:username|password)|ssl_[A-Za-z0-9_]*"
_SECRET = re.compile(rf"([?&][^=&?]*pass[^=&?]*=)(?:(?!&(?:{_NAMES})=).)*", re.DOTALL | re.IGNORECASE)
"""A password among the options. It ends where an option follows of an address: any other ``&`` is its own."""
SENTINEL_PORT, SERVER_PORT = 26379, 6379
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_CHECKS = frozenset({"none", "optional", "required"})
SENTINEL_LOGIN = {"username": "sentinel_username", "password": "sentinel_password"}
"""Part of a sentinel's own login -> the option of an address that has it."""
FORMS = (
    "  Write redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH?db=DB or memory://.\n"
    "  Where sentinels name the primary: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.\n"
    "  A cluster of several shards, by some of its nodes: redis+cluster://HOST:PORT,HOST:PORT."
)


@lru_cache(maxsize=16)
def redacted(url: str) -> str:
    """`url` without its password.

    The password may be written as it should not be: with ``@``, ``#``, ``/`` or ``&`` unquoted, or without a scheme or
    a host. Where it is not certain what belongs to it, more is hidden.

    Example:
        >>> redacted("redis://user:secret@host:6379/0")
        'redis://user:***@host:6379/0'
    """
    scheme = _SCHEME.match(url)[0]  # type: ignore[index]
    rest = url[len(scheme) :]
    option = _SECRET.search(rest)
    if option is not None and "@" in rest[option.start() :] and not rest.startswith("/"):
        return f"{scheme}{HIDDEN}"  # which @ ends the user's password, if any does?
    rest = _SECRET.sub(rf"\g<1>{HIDDEN}", rest)
    if rest.startswith("/"):  # a socket has no user before it
        return scheme + rest
    user, at, host = rest.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        return f"{scheme}{name}:{HIDDEN}@{host}" if colon else scheme + rest
    places = re.split(r"[/?]", rest, maxsplit=1)[0]
    for place in places.split(",") if _names_several(scheme) else [places]:
        name, colon, port = place.rpartition(":") if place.startswith("[") else place.partition(":")
        if colon and re.fullmatch(r"[0-9]{0,5}", port) is None:
            return f"{scheme}{name}:{HIDDEN}"  # no port: a password whose host is missing
    return scheme + rest


def has_password(url: str) -> bool:
    """True when `url` holds what :func:`redacted` hides."""
    return redacted(url) != url


def check_quoted(url: str, source: str) -> None:
    """Raises ConfigError for a password that ends the address too early: the rest would be taken for something else."""
    scheme, _, rest = url.partition("://")
    if (
        scheme.partition("+")[0] in ("redis", "rediss")
        and "@" in rest
        and "@" not in re.split(r"[/?#]", rest, maxsplit=1)[0]
    ):
        user = rest.rpartition("@")[0]
        if ":" in user and "?" not in user.partition("/")[2]:
            raise ConfigError(
                f"the password in {redacted(url)} has a character that ends an address.{source}\n"
                "  Write %2F for /, %3F for ? and %23 for #, or leave it out and set RLBUFFER_REDIS_PASSWORD.",
                setting="redis_url",
            )


def options_of(url: str, source: str) -> dict[str, Any]:
    """Options that redis-py makes of a server's address, ``redis://``, ``rediss://`` or ``unix://``.

    One of sentinels, ``redis+sentinel://`` or ``rediss+sentinel://``, has `sentinels`, a host and a port of each, and
    `service` in place of a host and a port; one of a cluster, ``redis+cluster://`` or ``rediss+cluster://``, has
    `nodes`.

    Args:
        source: where it came from, as a sentence on a line of its own; "" when nobody knows.

    Raises:
        ConfigError: it is no such address, or has an option that is rlbuffer's own.
    """
    from redis.connection import parse_url

    check_quoted(url, source)
    try:
        plain, places, service = _split(url) if _names_several(url) else (url, (), "")
        options: dict[str, Any] = parse_url(plain)  # type: ignore[no-untyped-call]
    except ValueError:
        # It may quote the password as a port.
        text = f"{redacted(url)} is not the address of a server.{source}\n{FORMS}"
        raise ConfigError(text, setting="redis_url") from None
    login_options = frozenset(SENTINEL_LOGIN.values()) if is_sentinel(url) else frozenset()
    for option in options:
        if option not in login_options and _OPTIONS.fullmatch(option) is None:
            raise ConfigError(
                f"the address {redacted(url)} has an option that cannot be set there: {option}.{source}",
                setting="redis_url",
            )
    if not places:
        database = urlsplit(url).path.strip("/")
        if database and not database.isdecimal() and not url.startswith("unix:"):
            text = f"{redacted(url)} ends with {database!r}, which is no number of a database.{source}"
            raise ConfigError(text, setting="redis_url")
        return options
    if is_cluster(url):
        if options.pop("db", 0):
            raise ConfigError(
                f"{redacted(url)} names a database, and a cluster has none but 0.{source}", setting="redis_url"
            )
        del options["host"]
        return options | {"nodes": places}
    if not service:
        raise ConfigError(
            f"{redacted(url)} names no service.{source}\n"
            "  It stands behind the sentinels, /SERVICE/DB, as in their `sentinel monitor SERVICE HOST PORT QUORUM`.",
            setting="redis_url",
        )
    del options["host"]
    return options | {"sentinels": places, "service": service}


def _split(url: str) -> tuple[str, tuple[tuple[str, int], ...], str]:
    """The same address with one host in place of all and of the service; the hosts; the service, "" of a cluster.

    Raises:
        ValueError: no hosts stand there, or no number of a database.
    """
    kind, usual = ("cluster", SERVER_PORT) if is_cluster(url) else ("sentinel", SENTINEL_PORT)
    scheme, _, rest = url.partition(f"+{kind}://")
    front, mark, query = rest.partition("?")
    user, at, after = front.rpartition("@")
    named, _, path = after.partition("/")
    service, _, db = ("", "", path) if kind == "cluster" else path.partition("/")
    if db and not db.isdecimal():
        raise ValueError
    places = []
    for each in named.split(","):
        place = urlsplit(f"//{each}")
        port = usual if place.port is None else place.port
        if not place.hostname or not port:
            raise ValueError
        places.append((place.hostname, port))
    return f"{scheme}://{user}{at}service/{db}{mark}{query}", tuple(places), unquote(service)


def check_tls(options: Mapping[str, Any], address: str, source: str) -> str:
    """Returns the warning; "" when the server's certificate is checked, or there is none.

    Raises:
        ConfigError: a file that is not there, or a check that does not exist.
    """
    for name in TLS_FILES:
        if options.get(name) and not Path(options[name]).is_file():
            raise ConfigError(f"{name} in {address}: there is no file {options[name]}.{source}", setting="redis_url")
    checks = options.get("ssl_cert_reqs")
    if checks is not None and checks not in TLS_CHECKS:
        raise ConfigError(
            f"ssl_cert_reqs={checks} in {address} must be none, optional or required.{source}", setting="redis_url"
        )
    loose = [f"ssl_cert_reqs={checks}"] if checks in ("none", "optional") else []
    if str(options.get("ssl_check_hostname", True)).lower() in ("false", "0", "no", "f", "n"):
        loose.append("ssl_check_hostname=false")
    if not loose:
        return ""
    return (
        f"the server at {address} is taken without a check of who it is ({', '.join(loose)}): whoever stands between "
        "reads the password and writes what is trained. Leave that out, and name a certificate that is its own or its "
        "CA's: ssl_ca_certs=/path/ca.crt"
    )


def is_sentinel(url: str) -> bool:
    """``redis+sentinel://`` and ``rediss+sentinel://``: the primary that sentinels name."""
    return url.lower().startswith(("redis+sentinel:", "rediss+sentinel:"))


def is_cluster(url: str) -> bool:
    """``redis+cluster://`` and ``rediss+cluster://``: the shards of a cluster."""
    return url.lower().startswith(("redis+cluster:", "rediss+cluster:"))


def _names_several(url: str) -> bool:
    return is_sentinel(url) or is_cluster(url)


def is_memory(url: str) -> bool:
    """``memory://``: the in-process model in place of a server."""
    return url.startswith("memory:")


def source_of(origin: str) -> str:
    """The sentence, on a line of its own, that says where an address came from; "" when nobody knows."""
    return f"\n  The address comes from {origin}." if origin else ""
