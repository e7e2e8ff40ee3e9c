"""The record of a run in a server's append-only file: every push and every step that there ever was.

An account from this file owes nothing to the ledger, to the scripts that keep it, or to `verify`: a push is an XADD to
the pool, a step is an XADD per part, whatever was counted beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rlbuffer.store.keys import Keys
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.step_format import decode_part

Steps = dict[tuple[int, str], list[str]]
"""(step, digest) -> its rollouts."""
KEPT = "kept"
"""Folder of a server in which its append-only files stay."""
EMPTY_BASE_BYTES = 512
"""An append-only file begins with a snapshot of an empty server, about 90 bytes; a larger one means a rewrite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One entry of the pool, as it was pushed."""

    env: str
    payload_key: str
    rollouts: int
    tokens: int


@dataclass(slots=True)
class Step:
    """One committed step."""

    digest: str = ""
    parts: list[StepPart] = field(default_factory=list)


@dataclass(slots=True)
class Written:
    """All writes of a run, from its first command to the last."""

    pushes: dict[str, Push] = field(default_factory=dict)
    """Entry id -> push."""
    steps: dict[int, Step] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    """Steps that were written twice."""


def read_written(server_directory: Path, run: str) -> Written:
    """Reads ``appendonlydir/`` of a server that has ended, or answers no more writes of the run.

    Raises:
        ValueError: the file was rewritten, so that its beginning is gone.
    """
    folder = server_directory / "appendonlydir"
    bases = [path for path in folder.glob("*.base.*") if path.stat().st_size > EMPTY_BASE_BYTES]
    if bases:
        raise ValueError(f"the append-only file was rewritten ({bases[0].name}): its beginning is gone")
    keys, written = Keys(run), Written()
    pool, steps = keys.pool.encode(), keys.steps.encode()
    for path in sorted(folder.glob("*.incr.aof"), key=lambda p: int(p.name.split(".")[-3])):
        for command in commands(path.read_bytes()):
            if command[0].upper() == b"XADD" and command[1] in (pool, steps):
                # XADD key id field value ...: neither stream is capped, so no option stands in between.
                values = {k.decode(): v for k, v in zip(command[3::2], command[4::2], strict=True)}
                if command[1] == pool:
                    _note_push(written, keys, command[2].decode(), values)
                else:
                    _note_step(written, keys, command[2].decode(), values)
    return written


def keep_files(server_directory: Path) -> None:
    """Links the append-only files: a server that loads what another one has starts new ones and removes these."""
    kept = server_directory / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    for path in (server_directory / "appendonlydir").glob("*.incr.aof"):
        with suppress(FileExistsError, FileNotFoundError):
            (kept / f"{path.stat().st_ino}-{path.name}").hardlink_to(path)


def read_steps(server_directory: Path, run: str) -> Steps:
    """(step, digest) -> its rollouts, for every step in a server's files, as far as :func:`keep_files` was in time."""
    steps: Steps = {}
    keep_files(server_directory)
    for path in sorted((server_directory / KEPT).glob("*.incr.aof"), key=lambda p: int(p.name.split(".")[-3])):
        steps |= _steps_in(path, path.stat().st_size, run)
    return steps


@cache
def _steps_in(path: Path, size: int, run: str) -> Steps:
    """The steps of one file, read again only once it has grown: a run of forty failovers keeps 120 of them.

    A step is written by one script, so no two files share it.
    """
    steps_key, prefix = Keys(run).steps.encode(), Keys(run).payload_prefix
    steps: Steps = {}
    digests: dict[int, str] = {}
    for command in commands(path.read_bytes()[:size]):
        if command[0].upper() != b"XADD" or command[1] != steps_key:
            continue
        number, rank = map(int, command[2].decode().split("-"))
        values = dict(zip(command[3::2], command[4::2], strict=True))
        if rank == 0:
            digests[number] = values[b"digest"].decode()
            steps[number, digests[number]] = []
        else:
            part = decode_part(values[b"part"], prefix)
            steps[number, digests[number]] += [member.info.rollout_id for member in part.rollouts]
    return steps


def commands(data: bytes) -> Iterator[list[bytes]]:
    """The commands of an append-only file; what a kill cut short at its end is left out, as the server does."""
    place = 0
    while place < len(data):
        end = data.find(b"\r\n", place)
        if end < 0:
            return
        count, place = int(data[place + 1 : end]), end + 2
        command = []
        for _ in range(count):
            end = data.find(b"\r\n", place)
            if end < 0:
                return
            length = int(data[place + 1 : end])
            command.append(data[end + 2 : end + 2 + length])
            place = end + 2 + length + 2
        if place > len(data):
            return
        yield command


def _note_push(written: Written, keys: Keys, entry_id: str, values: dict[str, bytes]) -> None:
    written.pushes[entry_id] = Push(
        env=values["env"].decode(),
        payload_key=keys.payload(values["group"].decode(), values["key"].decode()),
        rollouts=int(values["rollouts"]),
        tokens=int(values["tokens"]),
    )


def _note_step(written: Written, keys: Keys, entry_id: str, values: dict[str, bytes]) -> None:
    number, rank = map(int, entry_id.split("-"))
    if rank == 0 and number in written.steps:
        written.contradictions.append(f"step {number} was committed twice")
    if rank == 0:
        written.steps[number] = Step(digest=values["digest"].decode())
    else:
        written.steps[number].parts.append(decode_part(values["part"], keys.payload_prefix))
