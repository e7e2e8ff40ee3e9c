"""Addresses that settings name: where weights are served, and where they are fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlbuffer.errors import ConfigError


def is_url(location: str) -> bool:
    """The announced location is to be downloaded, not a directory."""
    return location.startswith(("http://", "https://"))


def wrong_url(url: str) -> str:
    """The mistake in a URL, as the end of a sentence; "" when nothing is wrong."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return "names no host"
        return "has port 0" if parts.port == 0 else ""
    except ValueError as error:
        return f"is no URL: {error}"


def host_of(url: str) -> str:
    """The host that a URL names."""
    return urlsplit(url).hostname or ""


def parse_listen(listen: str) -> tuple[str, int]:
    """``HOST:PORT`` -> (host, port); an empty host is all interfaces.

    Raises:
        ConfigError: it is no such address.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"weights.listen = {listen!r} must be HOST:PORT, e.g. 0.0.0.0:9465", setting="weights.listen")
    return host.removeprefix("[").removesuffix("]"), int(port)
