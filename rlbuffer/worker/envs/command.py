"""``command``: any program is an env. A ticket starts its rollouts as processes, which ask the gateway.

A process finds the addresses in its environment, where clients look for them: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``,
``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY``; and what its task is: ``TASK_ENV``, ``TASK_NUMBER`` (of the prompt),
``TASK_INDEX`` (of the rollout in its group). The last line of its output that is JSON says what it earned: a number, or
``{"reward": 1.0, "rewards": {"style": 0.5}}``, or ``{"failure": "no answer"}``. Another exit code than 0, no such line,
or more time than a rollout may take is a failed attempt.

No variable of rlbuffer reaches it. What it has started does not outlive it, nor does it outlive its worker: a keeper
(:mod:`rlbuffer.worker.envs.keeper`) stands between them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, validate_call

from rlbuffer.config.table import Names, PathText, Url
from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.records.checks import MAX_NUMBER, escaped
from rlbuffer.records.failure import Failure
from rlbuffer.store.open_rollouts import End, checked_end
from rlbuffer.worker.envs import keeper

KEPT_BYTES = 1 << 16
"""Bytes of a program's output that are kept, the last ones."""
CLOSE_SECONDS = 1.0
"""Time that the rest of an output has to arrive once its process has ended."""
LINE_ENDS = re.compile(r"[\r\n]+")
"""Between two lines of an output; no others, which may stand in a text of JSON."""
TOLD_CHARACTERS = 500
"""Of what a program has complained of, for the failure of its rollout."""


def _words(given: Any) -> Any:
    return tuple(shlex.split(given)) if isinstance(given, str) else given


class Command:
    """One program.

    Args:
        command: the program and its arguments, as a list or as a line without a shell's ways.
        name: the env's name.
        gateway: address of the gateway; "": that of the run's settings.
        tickets: prompts in all; 0: it has no end.
        directory: folder in which it works; "": the worker's.
        environment: variables that it gets beside those of the worker.

    Raises:
        ConfigError: there is no such folder.
    """

    @validate_call
    def __init__(
        self,
        *,
        command: Annotated[tuple[str, ...], BeforeValidator(_words), Field(min_length=1)],
        name: Names = "command",
        gateway: Url = "",
        tickets: Annotated[int, Field(ge=0)] = 0,
        directory: PathText = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.command, self.gateway = name, command, gateway.rstrip("/")
        self.tickets = tickets or None
        self._directory = Path(directory).expanduser() if directory else None
        if self._directory is not None and not self._directory.is_dir():
            raise ConfigError(f"env command: there is no folder {directory}", setting="env_options")
        self._environment = dict(environment or {})

    def environment_of(self, base: str, capability: str, number: int, index: int) -> dict[str, str]:
        """The variables of a process, whose rollout has this capability at the gateway `base`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLBUFFER_")}
        found = {**inherited, **self._environment}
        # A proxy would get the capability, and reach another host by the gateway's address.
        spared = [found.get("NO_PROXY", ""), found.get("no_proxy", ""), urlsplit(base).hostname or ""]
        return {
            **found,
            **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(filter(None, dict.fromkeys(spared)))),
            "OPENAI_BASE_URL": f"{base}/r/{capability}/v1",
            "OPENAI_API_KEY": capability,
            "ANTHROPIC_BASE_URL": f"{base}/r/{capability}",
            "ANTHROPIC_API_KEY": capability,
            "TASK_ENV": self.name,
            "TASK_NUMBER": str(number),
            "TASK_INDEX": str(index),
        }

    async def end_of(self, environment: Mapping[str, str], seconds: float) -> End:
        """Runs the program once, for so long at most. Cancelled, it is killed."""
        output_pipe, complained, kept = _Output(), _Output(), _Kept()
        try:
            await output_pipe.open()
            await complained.open()
            process = await kept.start(
                self.command,
                stdout=output_pipe.writing,
                stderr=complained.writing,
                cwd=self._directory,
                env=dict(environment),
            )
        except (OSError, ValueError) as error:
            await output_pipe.close()
            await complained.close()
            kept.close()
            return failed("not_started", f"{self.command[0]}: {error}")
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            return failed("timeout", f"it was killed after {seconds:g} s")
        finally:
            kept.end()
            await process.wait()
            ended = kept.close()
            output, complaint = await output_pipe.close(), await complained.close()
        how, _, value = ended.partition(" ")
        if how == "error":
            return failed("not_started", f"{self.command[0]}: {value}")
        told = complaint.strip()[-TOLD_CHARACTERS:]
        if ended == "exit 0":
            return read_end(output, told)
        return failed(f"{how}_{value}" if ended else "killed", told)


class _Kept:
    """A program and its keeper (:mod:`rlbuffer.worker.envs.keeper`), which ends with this process."""

    def __init__(self) -> None:
        self._control = self._report = -1

    async def start(self, command: Sequence[str], **how: Any) -> asyncio.subprocess.Process:
        """Starts both. Raises OSError, ValueError."""
        controlled = reporting = -1
        try:
            controlled, self._control = os.pipe()
            self._report, reporting = os.pipe()
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, str(controlled), str(reporting), *command),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(controlled, reporting),
                start_new_session=True,
                **how,
            )
        finally:
            for given in (controlled, reporting):
                if given >= 0:
                    os.close(given)

    def end(self) -> None:
        """Has the program killed, if it runs."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def close(self) -> str:
        """How the program ended, once its keeper has; "" where that was killed."""
        self.end()
        if self._report < 0:
            return ""
        try:
            return os.read(self._report, 1 << 13).decode("utf-8", "replace")
        finally:
            os.close(self._report)
            self._report = -1


class _Output:
    """What a process writes, the last of it, by a pipe of our own: asyncio would wait for whoever holds one of its."""

    def __init__(self) -> None:
        self.writing = -1
        self._kept = deque[bytes]()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """The process may be given the end `writing`."""
        reading, self.writing = os.pipe()
        stream = asyncio.StreamReader()
        file = os.fdopen(reading, "rb", 0)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
        self._task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        size = 0
        while data := await stream.read(1 << 14):
            self._kept.append(data)
            size += len(data)
            while size - len(self._kept[0]) >= KEPT_BYTES:
                size -= len(self._kept.popleft())

    async def close(self) -> str:
        """What was written, once the process has ended."""
        if self._task is None:  # it was not opened
            return ""
        os.close(self.writing)
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)  # who could not be killed may still hold it
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._transport.close()
        return b"".join(self._kept).decode("utf-8", "replace")


def read_end(output: str, complained: str = "") -> End:
    """The end that a program's output tells of: its last line that is JSON.

    Example:
        >>> read_end("thinking\\n0.5\\n").reward
        0.5
        >>> read_end("done").failure.kind
        'no_reward'
    """
    for line in reversed(LINE_ENDS.split(output)):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            return checked_end(_end(found))
        except (InvalidRollout, ValueError, OverflowError, RecursionError) as error:
            return failed("no_reward", f"its last line of JSON says what is no reward: {error}")
    return failed("no_reward", complained or "no line of its output is JSON")


def failed(kind: str, told: str) -> End:
    """The end of a failed attempt."""
    return End(failure=Failure(kind, escaped(told)[:TOLD_CHARACTERS]))


def _end(found: Any) -> End:
    given = found if isinstance(found, dict) else {"reward": found}
    failure, reward, rewards = given.get("failure"), given.get("reward"), given.get("rewards") or {}
    if failure is not None:
        return failed("failed", str(failure))
    if not isinstance(rewards, dict) or not all(map(_is_number, rewards.values())):
        rewards, reward = {}, None
    if reward is None and len(rewards) == 1:
        reward = next(iter(rewards.values()))
    if reward is None or not _is_number(reward):
        return failed("no_reward", 'its last line of JSON is neither a number nor {"reward": ...}')
    return End(reward=float(reward), rewards={escaped(name)[:64]: float(value) for name, value in rewards.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
