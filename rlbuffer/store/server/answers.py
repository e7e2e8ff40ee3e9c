"""The meaning of the server's refusals and errors: as errors of ours, and what a caller can do about them.

=============  ===================================================================================================
lost           no answer, or none of the protocol: whether the command was carried out is unknown
elsewhere      this server is not the one to talk to (any more): demoted, still loading, not the owner of the slot
for now        it would be the right one and does not want to, for a reason that passes
wrong          the command, the login or the key is wrong; sending it again gives the same answer
=============  ===================================================================================================

The first two are losses: the server that is reached next may lack what was acknowledged before.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from rlbuffer.errors import (
    RlbufferError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    WrongAnswer,
    WrongType,
    clause,
)
from rlbuffer.store.server.address import is_cluster, is_sentinel

ELSEWHERE = {
    "LOADING": "it is still loading its data",
    "READONLY": "it is a replica. Use an address that follows the primary, or wait for the failover to end",
    "MASTERDOWN": "it is a replica without its primary",
    "UNBLOCKED": "it has just become a replica",
    "MOVED": "another node of its cluster has the run. Use an address that follows the primary",
    "CLUSTERDOWN": "the cluster has no owner for a part of its slots",
}
"""Code of the server's error -> what it means and what to do. Connections are made again, so that an address that leads
to another server by then is followed."""
FOR_NOW = {
    "OOM": "it is at its memory limit (maxmemory). It takes pushes again when steps retire; or raise the limit",
    "MISCONF": "it cannot write to its disk. Free space where its data are, then look at its log",
    "NOREPLICAS": "it has too few replicas (min-replicas-to-write)",
    "ASK": "the cluster is moving the slot to another node",
    "TRYAGAIN": "the cluster is moving the slot",
    "BUSY": "a script has kept it busy for seconds. See SLOWLOG; SCRIPT KILL ends one that has written nothing",
    "NOSCRIPT": "it has not the script of this move. The leading batcher (`rlbuffer serve`) loads them all",
}
ACT = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
"""Refusals on which the caller must act (spool, throttle, wait and say so): it hears them at once."""
WRONG = frozenset({"ERR", "CROSSSLOT", "BUSYGROUP", "NOGROUP", "NOPROTO", "INVALIDOBJ"})
"""Codes that say that the command does not fit the server or the key. A code that stands nowhere here is of a server or
a proxy that this version does not know, and is taken for a refusal that passes."""
IS_SENTINEL = "it is a sentinel. Write redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
TOO_MANY_CLIENTS = "max number of clients"
PLAIN_DOUBT = "It may speak TLS: then write rediss in place of redis."
TLS_DOUBT = (
    "It may speak no TLS: then write redis in place of rediss, or the port that does. Or it asks for a certificate of "
    "yours (ssl_certfile=, ssl_keyfile=)."
)
"""What is said where something is there that hangs up, or that does not answer."""
_ABSENT = (ConnectionRefusedError, socket.gaierror)
"""Nothing listens there, or the host does not exist."""


class BrokenUnused(redis.ConnectionError):
    """A connection of the pool was closed between two commands, or leads elsewhere by now: nothing was sent on it."""


class NoPrimary(redis.ConnectionError):
    """The sentinels of a service, or the nodes of a cluster, name no primary, for this reason, part of a sentence."""


@dataclass(frozen=True, slots=True)
class Understood:
    """An error of redis-py as it is to be taken."""

    failure: RlbufferError
    may_pass: bool = False
    """Calling again may help, within the caller's patience."""
    is_loss: bool = False
    """The server that answers next may be another one, or the same without its newest writes."""


def understand(
    error: redis.RedisError, *, address: str, source: str, is_embedded: bool, is_watched: bool, is_known: bool
) -> Understood:
    """Translates an error of redis-py.

    Args:
        address: of the server, without its password.
        source: a sentence that says where the address comes from; may be empty.
        is_watched: sentinels name the server. A primary that they have replaced loses its replicas first, and is told
            of it some ten seconds later.
        is_known: the server has taken this process's login before.
    """
    code, words = code_of(error), words_of(error)
    refusal = f"the server at {address} refused: "
    if code == "OOM":
        return Understood(ServerFull(refusal + FOR_NOW[code]))
    if code in ELSEWHERE:
        return Understood(ServerRefused(f"{refusal}{ELSEWHERE[code]} ({words})"), may_pass=True, is_loss=True)
    if code in FOR_NOW:
        return Understood(
            ServerRefused(f"{refusal}{FOR_NOW[code]} ({words})"),
            may_pass=code not in ACT,
            is_loss=is_watched and code == "NOREPLICAS",
        )
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError) and is_known:
        # Somebody changes users at this moment, or a new primary does not have them yet.
        return Understood(
            ServerRefused(f"{refusal}it does not take this process's login any more: {words.rstrip('.')}.{source}"),
            may_pass=True,
            is_loss=True,
        )
    if code == "WRONGTYPE":
        return Understood(
            WrongType(
                f"{refusal}a key of the run holds another type than rlbuffer puts there. `rlbuffer verify` names it"
            )
        )
    if words.startswith("unknown command 'SENTINEL'"):
        return Understood(
            ServerUnsuitable(
                f"what {address} names is no sentinel. Name the port of the sentinels, mostly 26379; the address of "
                f"one server begins with redis:// or rediss://.{source}"
            )
        )
    if words.startswith("unknown command 'SELECT'"):
        return Understood(ServerUnsuitable(f"what answers at {address} has no databases: {IS_SENTINEL}.{source}"))
    if re.match("unknown command .HELLO", words):
        needed = "a run needs Redis 7.0 or Valkey 7.2, or newer"
        return Understood(ServerUnsuitable(f"the server at {address} is too old, it has no HELLO: {needed}.{source}"))
    if isinstance(error, LOGIN) or any(denial in words for denial in DENIED_INSIDE):
        lacks_password = words.startswith(("HELLO must be called with", "Authentication required"))
        why = "it asks for a password, and none was given" if lacks_password else clause(words)
        return Understood(
            ServerUnsuitable(
                f"the server at {address} does not allow this: {why}.{source}\n"
                "  Look at the user in the address, at its password (there, in RLBUFFER_REDIS_PASSWORD or in "
                "redis_password_file), and at the server's ACL for that user."
            )
        )
    wrong = tls_mistake(error)
    if wrong and not is_known:
        return Understood(ServerUnsuitable(f"no TLS connection to the server at {address}: {clause(wrong)}.{source}"))
    if isinstance(error, _LOST) or TOO_MANY_CLIENTS in words:
        what = "the embedded server" if is_embedded else "Redis"
        failure = ServerUnreachable(f"cannot reach {what} at {address} ({reason_of(error)}).")
        # EAGAIN: a unix socket whose queue is full. A server listens there, and nothing was sent to it.
        return Understood(failure, may_pass=True, is_loss=not isinstance(_below(error), BlockingIOError))
    if isinstance(error, redis.DataError):
        return Understood(WrongAnswer(f"the client cannot send this to the server at {address}: {words}"))
    if code in WRONG or not re.fullmatch(r"[A-Z][A-Z0-9_]+", code):
        return Understood(
            WrongAnswer(f"the server at {address} answered with an error: {f'{code} ' if code == 'ERR' else ''}{words}")
        )
    strange = ServerRefused(f"{refusal}{words}")
    strange.is_known = False
    return Understood(strange, may_pass=True)


DENIED_INSIDE = ("ACL failure in script", "The user executing the script")
"""A command that the user's ACL denies inside a script comes as an error of the script."""
LOGIN = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
)
_LOST = (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse)
ABORTED = "Transaction discarded because of: "
"""Begins the answer to an EXEC that a server refuses as it refuses a single command; the reason follows."""


def code_of(error: redis.RedisError) -> str:
    """The code that a server's error begins with; of a transaction that was discarded, the code of the reason."""
    words = words_of(error)
    return (not _is_aborted(error) and error.status_code) or words.partition(" ")[0]


def words_of(error: redis.RedisError) -> str:
    """The server's own words. A pipeline puts the whole command in front, a payload's bytes with it."""
    return str(error).rpartition("caused error: ")[2].removeprefix(ABORTED)


def _is_aborted(error: redis.RedisError) -> bool:
    return ABORTED in str(error)


def _below(error: redis.RedisError) -> BaseException | None:
    """The error of the socket that redis-py has made its own error of."""
    return error.__cause__ or error.__context__


def reason_of(error: redis.RedisError) -> str:
    """The reason of a lost connection, as part of a sentence."""
    if isinstance(error, NoPrimary):
        return str(error)
    below = _below(error)
    if isinstance(below, OSError) and below.strerror:
        return below.strerror.lower()
    if isinstance(error, redis.TimeoutError):
        return "no answer in time"
    if isinstance(error, redis.InvalidResponse):
        return "what answers there does not speak the protocol"
    return clause(error).lower()


def tls_mistake(error: BaseException) -> str:
    """The certain mistake, and what to do; "" when it is nothing of TLS."""
    for below in _chain(error):
        if isinstance(below, ssl.SSLCertVerificationError):
            return (
                f"its certificate is refused: {clause(below.verify_message)}. It must be valid by this machine's "
                "clock, name the host of the address, and be signed by a CA that is trusted here: "
                "?ssl_ca_certs=/path/ca.crt"
            )
        if isinstance(below, ssl.SSLError) and below.reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG"):
            return "what answers there does not speak TLS. Write redis://, or the port that does"
        if isinstance(below, ssl.SSLError) and "no certificate or crl found" in str(below):
            return "the file of ssl_ca_certs holds no certificate"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def remedy(error: redis.RedisError, *, url: str, options: Mapping[str, Any], origin: str, is_known: bool) -> str:
    """The lines below a message that nothing answers at `url`: look at TLS, start one, or change the address.

    `options` are those of the url, `origin` says where it comes from; `is_known`: the server has answered before.
    """
    if is_known and type(error) is redis.ConnectionError and not isinstance(_below(error), OSError):
        return (
            "  It closes a connection that has worked before: its log may say why. "
            "A client-output-buffer-limit for normal clients must be above 64 MiB."
        )
    doubt = ""
    if not is_known and "path" not in options and not isinstance(_below(error), _ABSENT):
        doubt = f"  {TLS_DOUBT if url.startswith('rediss') else PLAIN_DOUBT}\n"
    instead = "leave redis_url out"
    if origin.startswith("--"):
        instead = f"leave {origin.split()[0]} out"
    elif re.fullmatch(r"[A-Z0-9_]+", origin):
        instead = f"unset {origin}"
    return f"{doubt}  {_start_one(url)}\n  Or use the embedded one: {instead}."


def _start_one(url: str) -> str:
    """The way to start the server that is not there, or to see what its sentinels or nodes think."""
    if is_sentinel(url) or is_cluster(url):
        return "Ask each of them what it knows of the others: `rlbuffer doctor`."
    return "Start one there: valkey-server, or redis-server" + (", with TLS." if url.startswith("rediss:") else ".")
