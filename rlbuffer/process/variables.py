"""Texts from outside, as whoever wrote them meant them: variables of the environment, passwords and tokens.

A line's end comes along from ``echo secret > file``, from Kubernetes' Secrets and from editors of another system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from rlbuffer.errors import ConfigError

_MARK = "\ufeff"
"""Byte order mark that some editors put before a text."""
_ADDRESS = re.compile(r"_PORT(?:_\d+_(?:TCP|UDP|SCTP))?$")
"""End of the name of a link that holds an address, ``tcp://10.0.0.1:6379``."""
_PART = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(?:_[A-Z0-9_]+)?$|_PORT_\d+_(?:TCP|UDP|SCTP)_(?:PROTO|PORT|ADDR)$")
"""End of the name of a link that holds a part of one."""


def variable(name: str, environ: Mapping[str, str] | None = None) -> str:
    """A variable's text without blanks and line's ends around it; "" where it is not set. None: the process's own
    environment."""
    return bare((os.environ if environ is None else environ).get(name, ""))


def bare(text: str) -> str:
    """`text` without a byte order mark, and without blanks and line's ends around it.

    Example:
        >>> bare("redis://host:6379\\r\\n")
        'redis://host:6379'
    """
    return text.strip().removeprefix(_MARK).strip()


def secret(text: str, source: str, setting: str = "") -> str:
    """A password or a token without the line's end behind it; "" for none.

    Args:
        source: where it comes from, as the beginning of a sentence.
        setting: the one that names it.

    Raises:
        ConfigError: it begins or ends with a blank, or holds a character that no password has. The message does not
            quote it.

    Example:
        >>> secret("secret\\n", "RLBUFFER_REDIS_PASSWORD")
        'secret'
    """
    found = text.removeprefix(_MARK).rstrip("\r\n")
    if re.search(r"[\x00-\x1f\x7f]", found):
        raise ConfigError(f"{source} holds several lines or a control character, not one password", setting=setting)
    if found != found.strip():
        raise ConfigError(
            f"{source} begins or ends with a blank: take it away. One that belongs to a password can stand in the "
            "address, as %20",
            setting=setting,
        )
    return found


def is_service_link(name: str, text: str) -> bool:
    """True for a variable by which Kubernetes tells a pod of a Service called ``rlbuffer`` or ``rlbuffer-...`` in its
    namespace (`enableServiceLinks`).

    Example:
        >>> is_service_link("RLBUFFER_REDIS_PORT", "tcp://10.0.0.1:6379"), is_service_link("RLBUFFER_PORT", "6379")
        (True, False)
    """
    if not name.startswith("RLBUFFER_") or "__" in name:  # no Service has two dashes in a row: it is a setting's name
        return False
    ending = _ADDRESS if re.match(r"(?:tcp|udp|sctp)://", text) else _PART
    return ending.search(name) is not None
