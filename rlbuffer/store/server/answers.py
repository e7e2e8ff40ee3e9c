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

import errno
import re
import socket
import ssl
from dataclasses import dataclass
from enum import Enum, auto

import redis

from rlbuffer.errors import (
    RlbufferError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    WrongAnswer,
    WrongType,
    causes,
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


class ConnectionFault(Enum):
    """Why no connection can be had."""

    NOTHING_THERE = auto()
    NO_PRIMARY = auto()
    """Those who name the primary name none."""
    NO_SUCH_HOST = auto()
    NO_WAY = auto()
    FULL = auto()
    """Of connections."""
    NO_RIGHTS = auto()
    OWN_FILES = auto()
    """This process has no file number left."""
    OWN_PORTS = auto()
    STRANGER = auto()
    """Something else than a server listens there."""
    HANGS_UP = auto()
    SILENT = auto()


_PLAIN = "It may speak TLS: then write rediss in place of redis."
_TLS = (
    "It may speak no TLS: then write redis in place of rediss, or the port that does. Or it asks for a certificate of "
    "yours (ssl_certfile=, ssl_keyfile=)."
)
REMEDIES = {
    ConnectionFault.NO_SUCH_HOST: "This host does not know that name: correct it, or look at this host's DNS.",
    ConnectionFault.NO_WAY: "Is the address right, does that host run, does a firewall stand between?",
    ConnectionFault.FULL: "A server is there, and has as many connections as it takes (maxclients). `redis-cli client "
    "list` shows who holds them: close some, or raise it (redis-cli config set maxclients 10000).",
    ConnectionFault.NO_RIGHTS: "This process's user may not use it: of a unix socket see `ls -l` and the server's "
    "unixsocketperm; else a firewall of this host.",
    ConnectionFault.OWN_FILES: "This process has as many files open as it may: raise that limit (ulimit -n), or close "
    "some.",
    ConnectionFault.OWN_PORTS: "This host has no port left for a connection (`ss -s` counts them): close some.",
    ConnectionFault.STRANGER: "Another program listens there, which does not speak Redis' protocol: correct the port.",
}
"""What helps where it is the same for every address."""
OF_A_KNOWN_SERVER = {
    ConnectionFault.HANGS_UP: "It closes a connection that has worked before: its log may say why. A "
    "client-output-buffer-limit for normal clients must be above 64 MiB.",
    ConnectionFault.SILENT: "It has answered before: it is halted or busy now, or the network between is gone.",
}
OF_A_NEW_ONE = {
    ConnectionFault.HANGS_UP: "Else its log may say why it hangs up.",
    ConnectionFault.SILENT: "Or it is halted, or busy: look at that host.",
}
"""What is said behind a doubt about TLS, which a server that has answered cannot give."""
_OF_SOCKET = {
    errno.ECONNREFUSED: ConnectionFault.NOTHING_THERE,
    errno.ENOENT: ConnectionFault.NOTHING_THERE,
    errno.EHOSTUNREACH: ConnectionFault.NO_WAY,
    errno.ENETUNREACH: ConnectionFault.NO_WAY,
    errno.EHOSTDOWN: ConnectionFault.NO_WAY,
    errno.ETIMEDOUT: ConnectionFault.NO_WAY,
    errno.EACCES: ConnectionFault.NO_RIGHTS,
    errno.EPERM: ConnectionFault.NO_RIGHTS,
    errno.EMFILE: ConnectionFault.OWN_FILES,
    errno.ENFILE: ConnectionFault.OWN_FILES,
    errno.EADDRNOTAVAIL: ConnectionFault.OWN_PORTS,
}
"""Error of the socket -> its cause."""


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
    if code == "DENIED":
        return Understood(
            ServerUnsuitable(
                f"the server at {address} is in protected mode: without a password it takes connections from its own "
                f"host alone.{source}\n"
                "  Give it one (requirepass), and set RLBUFFER_REDIS_PASSWORD; where nobody else reaches it: redis-cli "
                "config set protected-mode no."
            )
        )
    is_denied = isinstance(error, redis.exceptions.NoPermissionError) or any(d in words for d in DENIED_INSIDE)
    if isinstance(error, LOGIN) or is_denied:
        lacks_password = words.startswith(("HELLO must be called with", "Authentication required"))
        why = "it asks for a password, and none was given" if lacks_password else clause(words)
        look = (
            "Look at the server's ACL for the user in the address (deploy/users.acl has what each role needs)."
            if is_denied
            else "Look at the user in the address, and at its password: there, in RLBUFFER_REDIS_PASSWORD or in "
            "redis_password_file."
        )
        return Understood(ServerUnsuitable(f"the server at {address} does not allow this: {why}.{source}\n  {look}"))
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
    for below in causes(error):
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


def cause_of(error: redis.RedisError) -> ConnectionFault:
    """Why no connection can be had."""
    if isinstance(error, NoPrimary):
        return ConnectionFault.NO_PRIMARY
    if TOO_MANY_CLIENTS in words_of(error):
        return ConnectionFault.FULL
    if isinstance(error, redis.InvalidResponse):
        return ConnectionFault.STRANGER
    for below in causes(error):
        if isinstance(below, socket.gaierror):
            return ConnectionFault.NO_SUCH_HOST
        if isinstance(below, OSError) and below.errno in _OF_SOCKET:
            return _OF_SOCKET[below.errno]
    if isinstance(error, redis.TimeoutError):
        return ConnectionFault.NO_WAY if str(error).startswith("Timeout connecting") else ConnectionFault.SILENT
    return ConnectionFault.HANGS_UP


def remedy(error: redis.RedisError, *, url: str, origin: str, is_known: bool) -> str:
    """The lines below a message that no connection can be had to `url`: what helps.

    `origin` says where the address comes from; `is_known`: the server has answered before.
    """
    cause = cause_of(error)
    is_tls = url.lower().startswith("rediss")
    if cause in REMEDIES:
        # A handshake that is not answered looks like a way that leads nowhere.
        return f"  {REMEDIES[cause]}{f' {_TLS}' if is_tls and cause is ConnectionFault.NO_WAY else ''}"
    if cause in OF_A_NEW_ONE:
        doubt = _TLS if is_tls else "" if url.startswith("unix") else _PLAIN
        return f"  {OF_A_KNOWN_SERVER[cause] if is_known else f'{doubt} {OF_A_NEW_ONE[cause]}'.strip()}"
    if cause is ConnectionFault.NO_PRIMARY:
        return f"  {_start_one(url)}"
    instead = "leave redis_url out"
    if origin.startswith("--"):
        instead = f"leave {origin.split()[0]} out"
    elif re.fullmatch(r"[A-Z0-9_]+", origin):
        instead = f"unset {origin}"
    return f"  {_start_one(url)}\n  Or use the embedded one: {instead}."


def _start_one(url: str) -> str:
    """The way to start the server that is not there, or to see what its sentinels or nodes think."""
    if is_sentinel(url) or is_cluster(url):
        return "Ask each of them what it knows of the others: `rlbuffer doctor`."
    return "Start one there: valkey-server, or redis-server" + (", with TLS." if url.startswith("rediss:") else ".")
