"""The rights of the users of deploy/users.acl, compared with what a server saw each of them use.

The commands come from MONITOR, a script's own among them; whether a user may send one says ACL DRYRUN.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from everybody import ROLES, do_everybodys_work
from own_server import OwnServer, free_port

USERS = Path(__file__).parents[2] / "deploy" / "users.acl"
ADMIN = "user root on >root ~* &* +@all"
LINE = re.compile(r"[0-9.]+ \[\d+ (\S+)\] (.*)")
WORD = re.compile(r'"((?:\\.|[^"\\])*)"')
LONG = 200
"""Characters of an argument that are kept: keys are shorter."""
MAY_READ = ("viewer", "worker", "scorer", "trainer")
"""Roles whose writes are listed one by one; the operator may write every key of every run."""


TRIED = {"config|get", "rlb:runs"}
"""What roles try and do without: the server's limits for pushes, and the list of runs for people."""
BEGINS = {"+hello", "+auth", "+ping", "+client|setname", "+cluster|info", "+cluster|slots"}
"""A connection begins with them, and no MONITOR shows them, or not whose they were; the last two are of clusters."""
ELSEWHERE = {
    "viewer": set[str](),
    "worker": {
        "%R~{rlb:*}:pool",
        "%R~{rlb:*}:eval",
        "%R~{rlb:*}:ledger",
        "%R~{rlb:*}:history",
        "+zrem",
        "+hdel",
        "+del",
        "+pexpire",
    },
    "scorer": {"%R~{rlb:*}:policy", "%R~rlb:*:g:*", "+hincrby", "~{rlb:*}:ledger", "+hdel", "+exists"},
    "trainer": {"+@transaction", "~{rlb:*}:waiting", "+xadd", "~{rlb:*}:records"},
    "operator": {"+bgrewriteaof"},
}
"""Rights that this loop does not need: heartbeats and claims that are forgotten, skipped tickets, counts of what is
lost, the payloads that a scorer reads, a trainer's sentences and records, the file of a Redis."""
UNUSED = {
    *("worker: DEL evaluating:...", "worker: HDEL ends", "worker: HDEL workers", "worker: PEXPIRE evaluating:..."),
    *("worker: ZREM tickets:...", "worker: PERSIST new payload", "scorer: PERSIST new payload", "scorer: HDEL scorers"),
    *("scorer: HINCRBY ledger", "trainer: HDEL policy", "trainer: HDEL waiting", "trainer: HDEL ranks"),
    *("trainer: HSET waiting", "trainer: XADD records"),
}
"""Writes of the same, as command and key; and those that a selector gives by its product of both."""


@dataclass(frozen=True, slots=True)
class Used:
    """A command that a role has sent, or a script that it called."""

    role: str
    words: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.words[0].upper()


class Recorder:
    """Reads what a server says of every command, and whose it is."""

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self._lines: list[str] = []
        self._roles: dict[str, str] = {}
        self._client = redis.Redis(port=port, username="root", password="root", decode_responses=True)
        self._monitor: Any = redis.Redis(port=port, username="root", password="root").connection_pool.get_connection()
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._look)]

    def __enter__(self) -> Recorder:
        self._monitor.send_command("MONITOR")
        self._monitor.read_response()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(0.2)
        self._stop.set()
        self._client.ping()  # the monitor hears it, and then the end
        for thread in self._threads:
            thread.join()
        self._monitor.disconnect()
        self._client.close()

    def used(self) -> list[Used]:
        """Every command once for each role and keys, in the order in which they came."""
        found: dict[tuple[str, ...], Used] = {}
        role = ""
        for line in self._lines:
            match = LINE.match(line)
            if match is None:
                continue
            role = role if match[1] == "lua" else self._roles.get(match[1], "")
            words = tuple(word[:LONG] for word in WORD.findall(match[2]))
            if role in ROLES and words:
                found.setdefault((role, *words[:4]), Used(role, words, ()))
        with redis.Redis(port=self._port, username="root", password="root", decode_responses=True) as client:
            return [Used(used.role, used.words, keys_of(client, used.words)) for used in found.values()]

    def _listen(self) -> None:
        while not self._stop.is_set():
            self._lines.append(str(self._monitor.read_response().decode(errors="replace")))

    def _look(self) -> None:
        while not self._stop.is_set():
            for client in self._client.client_list():
                if client["user"] != "root":
                    self._roles[client["addr"]] = client["user"]
            time.sleep(0.005)


def keys_of(client: Any, words: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(client.execute_command("COMMAND GETKEYS", *words))
    except redis.ResponseError:  # it has none
        return ()


def kind_of(key: str) -> str:
    """The kind of a key, as docs/explain/protocol.md names it."""
    if key.startswith("{"):
        word, _, rest = key.partition("}:")[2].partition(":")
        return f"{word}:..." if rest else word
    if ":g:{" in key:
        return "new payload"
    return "payload" if ":g:" in key else key


def record(folder: Path, program: str | None = None) -> tuple[list[Used], list[str], Findings]:
    """Lets every role do its work on a server with the shipped users, and in a cluster of one shard. -> what they used,
    refusals that the server logged, and what is wrong with the rights."""
    folder.mkdir(parents=True, exist_ok=True)
    users = folder / "users.acl"
    users.write_text(f"{USERS.read_text().rstrip()}\n{ADMIN}\n")
    used, refused = list[Used](), list[str]()
    shard = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    for name, options in (("shard", shard), ("server", {})):
        with (
            OwnServer(folder / name, options={"aclfile": str(users)} | options, program=program) as server,
            redis.Redis(port=server.port, username="root", password="root", decode_responses=True) as client,
        ):
            address = server.url.replace("/0", "/1")  # a database of its own has to be selected
            if options:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                address = f"redis+cluster://127.0.0.1:{server.port}"
            with Recorder(server.port) as recorder:
                do_everybodys_work(lambda role, at=address: at.replace("//", f"//{role}:CHANGE-{role}@"), folder)
            used += recorder.used()
            refused += [f"{e['username']}: {e['object']}" for e in client.acl_log() if e["object"] not in TRIED]
            found = Findings(client, used)  # a server that is no cluster has all of the commands, too
    return used, refused, found


class Findings:
    """What is wrong with the rights, by asking the server itself."""

    def __init__(self, client: Any, used: Sequence[Used]) -> None:
        self.needless = [
            right for role in ROLES for right in _needless(client, role, [u for u in used if u.role == role])
        ]
        """Rights that can be taken away, and every command is allowed still."""
        self.unused = [right for role in MAY_READ for right in _unused(client, role, used)]
        """Writes that a role may do and has not done."""


def parts_of(role: str) -> list[list[str]]:
    """The rules of a role: what counts everywhere, then each selector."""
    line = next(line for line in USERS.read_text().splitlines() if line.startswith(f"user {role} "))
    rules = re.findall(r"\([^)]*\)|\S+", line.partition(" resetkeys ")[2])
    return [[rule for rule in rules if rule[0] != "("], *(rule[1:-1].split() for rule in rules if rule[0] == "(")]


def _needless(client: Any, role: str, used: Sequence[Used]) -> Iterator[str]:
    parts = parts_of(role)
    for at, part in enumerate(parts):
        for rule in part:
            if rule[0] == "-" or rule in BEGINS | ELSEWHERE[role]:
                continue
            left = [[r for r in p if r is not rule] if i == at else p for i, p in enumerate(parts)]
            _make(client, "probe", left)
            if not any(_is_denied(client, "probe", u.words) for u in used):
                yield f"{role}: {rule}" + (f" of ({' '.join(part)})" if at else "")


def _make(client: Any, name: str, parts: Sequence[Sequence[str]]) -> None:
    client.execute_command(
        *("ACL", "SETUSER", name, "reset", "on", "nopass", *parts[0]),
        *(f"({' '.join(part)})" for part in parts[1:] if any(rule[0] in "~%" for rule in part)),
    )


def _is_denied(client: Any, user: str, words: Sequence[str]) -> bool:
    try:
        return bool(client.execute_command("ACL", "DRYRUN", user, *words) != "OK")
    except redis.ResponseError:  # a subcommand of this version only
        return False


def _unused(client: Any, role: str, used: Sequence[Used]) -> Iterator[str]:
    """Writes on each kind of key that anybody has used."""
    done = {(u.name, kind_of(key)) for u in used if u.role == role for key in u.keys}
    samples = {kind_of(key): key for u in used for key in u.keys}
    names = client.execute_command("COMMAND LIST", "FILTERBY", "ACLCAT", "write")
    for name in sorted(names):
        info = client.execute_command("COMMAND INFO", name)[0]
        arity = abs(info[1])
        if info[3] != 1:  # no key where one is expected here
            continue
        for kind, key in samples.items():
            words = [name, key, *(["1"] * max(0, arity - 2))]
            right = f"{role}: {name.upper()} {kind}"
            if (name.upper(), kind) not in done and right not in UNUSED and not _is_denied(client, role, words):
                yield right


def table(used: Iterable[Used]) -> list[str]:
    """Lines of a Markdown table: command x role -> kinds of keys."""
    cells: dict[str, dict[str, set[str]]] = {}
    for u in used:
        cells.setdefault(u.name, {}).setdefault(u.role, set()).update(map(kind_of, u.keys) if u.keys else ("yes",))
    lines = [f"| command | {' | '.join(ROLES)} |", f"|---{'|---' * len(ROLES)}|"]
    for name, roles in sorted(cells.items()):
        lines.append(f"| {name} | {' | '.join(_cell(roles.get(role, set())) for role in ROLES)} |")
    return lines


def _cell(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


def shown(found: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{what}: {', '.join(rights) or 'none'}" for what, rights in found.items()]
