"""The token of whoever begins and ends open rollouts. An agent has none: its address, or key, is its right."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from rlbuffer.config.addresses import parse_listen
from rlbuffer.errors import ConfigError
from rlbuffer.process.files import write_whole
from rlbuffer.process.variables import secret, variable
from rlbuffer.process.web_servers import is_own

TOKEN_VARIABLE = "RLBUFFER_GATEWAY_TOKEN"
TOKEN_FILE_VARIABLE = "RLBUFFER_GATEWAY_TOKEN_FILE"
TOKEN_FILE = "gateway.token"
"""File in a run's folder with the token that `rlbuffer run` has drawn."""


def gateway_token() -> str:
    """The token of the environment, else of the file that it names; "" for neither. Raises ConfigError, without it."""
    given = secret(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)
    file = variable(TOKEN_FILE_VARIABLE)
    if given or not file:
        return given
    try:
        found = secret(Path(file).expanduser().read_text(encoding="utf-8"), f"the token file {file}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the token file {file} ({TOKEN_FILE_VARIABLE}): {reason}") from None
    if not found:
        raise ConfigError(f"the token file {file} ({TOKEN_FILE_VARIABLE}) is empty")
    return found


def drawn_token(folder: Path) -> Path | None:
    """The file in a run's folder with a token for its gateways, drawn at the first call; None where one is set.

    Raises:
        ConfigError: it cannot be written or read.
    """
    if gateway_token():
        return None
    file = folder / TOKEN_FILE
    try:
        if not file.exists():
            write_whole(file, secrets.token_urlsafe(32) + "\n", is_private=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}, the token of whoever begins rollouts ({error.strerror}): make room there, or set "
            f"{TOKEN_VARIABLE}"
        ) from error
    return file


def token_for(listen: str) -> str:
    """The token that is asked for at this address; "" for none.

    Raises:
        ConfigError: others reach it, and none is set.
    """
    token, (host, _) = gateway_token(), parse_listen(listen)
    if not token and not is_own(f"[{host}]" if ":" in host else host):
        raise ConfigError(
            f"gateway.listen = {listen!r} can be reached from other machines: set {TOKEN_VARIABLE} (or "
            f"{TOKEN_FILE_VARIABLE}) to a secret, for whoever begins and ends rollouts; or listen at 127.0.0.1",
            setting="gateway.listen",
        )
    return token


def bearer_of(header: str) -> str:
    """The key or token in an ``Authorization`` header."""
    scheme, _, held = header.strip().partition(" ")
    return held.strip() if scheme.lower() == "bearer" else header.strip()


def is_authorized(header: str, token: str) -> bool:
    """An ``Authorization`` header holds the token, or none is asked for."""
    return not token or hmac.compare_digest(bearer_of(header).encode("utf-8", "surrogateescape"), token.encode())
