"""Mistakes with TLS, in words: a wrong CA, name, date or port looks like a server that is away."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlbuffer.errors import ConfigError

TLS_PROBE_SECONDS = 2.0
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
CHECKS = frozenset({"none", "optional", "required"})
_EXPIRED, _NOT_YET, _NAMES = 10, 9, frozenset({62, 63, 64})
"""OpenSSL's codes of what a certificate fails."""


def check_options(options: Mapping[str, Any], address: str, source: str) -> str:
    """Returns the warning; "" when the server's certificate is checked, or there is none.

    Raises:
        ConfigError: a file that is not there, or a check that does not exist.
    """
    for name in FILES:
        if options.get(name) and not Path(options[name]).is_file():
            raise ConfigError(f"{name} in {address}: there is no file {options[name]}.{source}", setting="redis_url")
    checks = options.get("ssl_cert_reqs")
    if checks is not None and checks not in CHECKS:
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


def mistake(error: BaseException) -> str:
    """The certain mistake, and what to do; "" when it is nothing of TLS."""
    for below in _chain(error):
        if isinstance(below, ssl.SSLCertVerificationError):
            why = below.verify_message
            if below.verify_code in _NAMES:
                return f"its certificate is for another name ({why.rstrip('.')}). Use a name that is in it as the host"
            if below.verify_code == _EXPIRED:
                return "its certificate has expired. Renew it; or this machine's clock is wrong"
            if below.verify_code == _NOT_YET:
                return "its certificate is not valid yet. Look at this machine's clock"
            return (
                f"nobody who is trusted here has signed its certificate ({why}). Name the CA that has: "
                "?ssl_ca_certs=/path/ca.crt"
            )
        if isinstance(below, ssl.SSLError) and below.reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"):
            return "what answers there does not speak TLS. Write redis://, or the port that does"
        if isinstance(below, ssl.SSLError) and "no certificate or crl found" in str(below):
            return "the file of ssl_ca_certs holds no certificate"
    return ""


def suspicion(error: BaseException, options: Mapping[str, Any], *, is_tls: bool) -> str:
    """The likely mistake behind a connection that failed; asks the other end what it speaks. "": nothing of TLS."""
    place = (str(options.get("host", "localhost")), int(options.get("port", 6379)))
    if "path" in options:
        return ""
    if not is_tls:
        return "It speaks TLS: write rediss:// in place of redis://." if _speaks_tls(place) else ""
    if any(isinstance(below, ssl.SSLError) for below in _chain(error)):
        return "It ends the handshake: it may ask for a certificate of yours (ssl_certfile=, ssl_keyfile=)."
    return (
        "It speaks no TLS: write redis:// in place of rediss://, or the port that does." if _speaks_plain(place) else ""
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _speaks_tls(place: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent: only what it speaks is asked
    with (
        contextlib.suppress(OSError),
        socket.create_connection(place, timeout=TLS_PROBE_SECONDS) as end,
        context.wrap_socket(end, server_hostname=place[0]),
    ):
        return True
    return False


def _speaks_plain(place: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=TLS_PROBE_SECONDS) as end:
        end.settimeout(TLS_PROBE_SECONDS)
        end.sendall(b"PING\r\n")
        return end.recv(1) in (b"+", b"-")
    return False
