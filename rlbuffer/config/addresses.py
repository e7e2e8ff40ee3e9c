"""Addresses that settings name: where weights are served, and where they are fetched from."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlbuffer.errors import ConfigError

EXAMPLES = {"weights.listen": "0.0.0.0:9465", "metrics.listen": "127.0.0.1:9464"}
"""Setting of an address to listen on -> one that fits."""


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


def parse_listen(listen: str, setting: str = "weights.listen") -> tuple[str, int]:
    """``HOST:PORT`` -> (host, port). An empty host: all interfaces for weights, this machine only for metrics.

    Raises:
        ConfigError: it is no such address.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        example = EXAMPLES[setting]
        raise ConfigError(f"{setting} = {listen!r} must be HOST:PORT, e.g. {example}", setting=setting)
    return host.removeprefix("[").removesuffix("]"), int(port)
