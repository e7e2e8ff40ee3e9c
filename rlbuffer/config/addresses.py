"""Addresses that settings name: where weights are served, and where they are fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

NOWHERE = ("0.0.0.0", "::")
"""Addresses to listen at, and not to ask."""


def is_url(location: str) -> bool:
    """The announced location is to be downloaded, not a directory."""
    return location.startswith(("http://", "https://"))


def wrong_url(url: str) -> str:
    """The mistake in the address of a server, as the end of a sentence; "" when nothing is wrong."""
    if not is_url(url):
        return "must begin with http:// or https://"
    try:
        parts = urlsplit(url)
        if not parts.hostname or parts.hostname in NOWHERE:
            return "names no host that others can reach"
        return "has port 0" if parts.port == 0 else ""
    except ValueError as error:
        return f"is no URL: {error}"


def parse_listen(listen: str) -> tuple[str, int]:
    """``HOST:PORT`` -> (host, port). An empty host: all interfaces for weights, this machine only for metrics.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be HOST:PORT, e.g. 127.0.0.1:9465")
    return host.removeprefix("[").removesuffix("]"), int(port)
