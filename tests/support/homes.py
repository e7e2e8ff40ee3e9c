"""A home folder with its own embedded server, and the commands that a test runs in it as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Parent, clean_environment, start

import rlbuffer
from rlbuffer.config.settings import RunSettings

TINY = """
run = "{run}"

[server]
appendfsync = "no"

[batcher]
row_tokens = 1024
step_groups = 0
micro_batches_per_rank = {micro_batches}
max_age = 4
order = "oldest_first"
advantage = "grpo"
budgets = {{ vcopy = 0.7, repeat = 0.3 }}

[model]
dtype = "{dtype}"

[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 16
initializer_range = 0.1
tie_word_embeddings = true
max_position_embeddings = 64

[trainer]
world_size = {world_size}
steps = {steps}
timeout_seconds = 120.0

[trainer.checkpoint]
every = {checkpoint_every}
keep = {keep_checkpoints}

[trainer.reports]
check_ranks = true

[worker.vcopy]
env = "vcopy"
group_size = 8
groups_in_flight = 4

[worker.repeat]
env = "repeat"
group_size = 8
groups_in_flight = 4
"""

MODEL: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


def model_section(**changes: Any) -> str:
    """`[model.config]` of the smallest model that trains; its settings may be overridden."""
    return "[model.config]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in (MODEL | changes).items())


class Home:
    """A home folder with its embedded server, and the commands run in it."""

    def __init__(self, path: Path, parent: Parent | None = None) -> None:
        self.path = path
        self.parent = parent
        """What commands are forked from; None: every one is started as usual."""
        self.url: str | None = None
        """Of a server of the test's own, for :meth:`connect`; None: the home's embedded one."""
        self.processes: list[subprocess.Popen[str]] = []
        self.prefix: tuple[str, ...] = ()
        """Put before every command: what runs it on another "host"."""
        self.environment = clean_environment() | {"RLBUFFER_HOME": str(path)}

    def config(self, **values: Any) -> Path:
        """Writes an rlbuffer.toml of a tiny run; the defaults may be overridden."""
        defaults = {
            "run": "tiny",
            "world_size": 2,
            "steps": 8,
            "checkpoint_every": 50,
            "keep_checkpoints": 2,
            "micro_batches": 1,
            "dtype": "float32",
        }
        path = self.path / f"{values.get('run', 'tiny')}.toml"
        path.write_text(TINY.format(**(defaults | values)))
        return path

    def start(self, *arguments: str | Path, log: str = "") -> subprocess.Popen[str]:
        """Starts a command that keeps running; its output goes to `<home>/<log>.log`."""
        name = log or f"{arguments[0]}-{len(self.processes)}"
        return self.start_python("-m", "rlbuffer_cli", *map(str, arguments), log=name)

    def start_python(self, *arguments: str, log: str = "") -> Any:
        """Starts Python in a session of its own; its output goes to `<home>/<log>.log`, or to who asks for it."""
        place = {"environment": self.environment, "folder": self.path, "log": self.path / f"{log}.log" if log else None}
        if self.parent is None:
            process = start(arguments, **place)
        elif self.prefix:
            process = start(arguments, **place, program=(*self.prefix, *self.parent.stand_in))
        else:
            process = self.parent.start(arguments, **place)
        self.processes.append(process)
        return process

    def start_sources(self, config: Path) -> list[Any]:
        """The batcher and one worker per env, each in a process of its own, as in separate terminals. -> the
        workers."""
        self.start("serve", "--config", config, log="serve")
        return self.start_workers(config)

    def start_workers(self, config: Path) -> list[Any]:
        """One worker per env."""
        return [self.start("worker", env, "--config", config, log=f"worker-{env}") for env in ("vcopy", "repeat")]

    def call(self, *arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        process = self.start_python("-m", "rlbuffer_cli", *map(str, arguments))
        out, errors = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def connect(self, run: str = "tiny") -> rlbuffer.Buffer:
        """A buffer on the run's server, for looking."""
        return rlbuffer.connect(self.url, run=run, config=RunSettings(home=self.path))

    def metrics(self, run: str = "tiny", folder: Path | None = None) -> list[dict[str, Any]]:
        """Records of the trainer so far, one object per trained step."""
        path = (folder or self.path / "runs" / run) / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [record for record in map(parsed, lines) if record is not None and "step" in record]

    def pids(self, run: str = "tiny") -> Mapping[str, int]:
        """name -> pid of what `rlbuffer run` supervises."""
        return json.loads((self.path / "runs" / run / "pids.json").read_text())

    def printed(self) -> str:
        """Everything that was printed, by commands that keep running."""
        return "".join(path.read_text() for path in sorted(self.path.glob("*.log")))

    def logs(self) -> str:
        """The end of every log, for a failing test."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(self.path.glob("*.log")))

    def wait_until(self, what: Callable[[], Any], *, seconds: float, why: str) -> Any:
        """Polls until `what` is true; fails with every log when it never is.

        `seconds` are an idle machine's: a busy one has three times as long.
        """
        deadline = time.monotonic() + 3 * seconds
        while time.monotonic() < deadline:
            value = what()
            if value:
                return value
            time.sleep(0.1)
        pytest.fail(f"{why} did not happen within {seconds:g} s\n{self.logs()}")

    def ended(self, process: subprocess.Popen[str], seconds: float) -> int:
        """Its exit code; fails with what its processes are doing, and every log, when it does not end in time."""
        try:
            return process.wait(timeout=3 * seconds)
        except subprocess.TimeoutExpired:
            doing = "\n".join(map(_doing, _tree(process.pid)))
            pytest.fail(f"{process.args} did not end within {seconds:g} s\n{doing}\n{self.logs()}")

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:  # the number of one that has ended may be another process's by now
                for each in reversed(_tree(process.pid)):  # itself first: it would start its server again
                    _signal(each, signal.SIGKILL)
                process.wait()
        # Not by its record: whoever started it last may have been killed before it wrote that.
        for pid in psutil.pids() if (self.path / "server").exists() else ():
            if _works_in(pid, self.path / "server"):
                _signal(pid, signal.SIGKILL)


@contextmanager
def a_home(parent: Parent | None = None) -> Iterator[Home]:
    """A home of a test's own, which leaves nothing running and nothing behind."""
    # A short path: the server's unix socket must fit 108 bytes.
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    place = Home(path, parent)
    try:
        yield place
    finally:
        place.stop()
        shutil.rmtree(path, ignore_errors=True)


def parsed(line: str) -> dict[str, Any] | None:
    """A JSON object of a file that somebody writes; None of half of one."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None  # the writer is in the middle of it


def _works_in(pid: int, folder: Path) -> bool:
    """True when there is such a process, and it is the one that works there."""
    try:
        return Path(psutil.Process(pid).cwd()).samefile(folder)
    except (psutil.Error, OSError):
        return False


def _tree(pid: int) -> Sequence[int]:
    try:
        return [*(c.pid for c in psutil.Process(pid).children(recursive=True)), pid]
    except psutil.NoSuchProcess:
        return []


def _doing(pid: int) -> str:
    """A process in a few lines: its state, its CPU seconds and, where py-spy can tell, the stacks of its threads."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        head = f"{pid} {process.status()}, {used.user + used.system:.1f} s of CPU: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{pid} is gone"
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        return head
    return f"{head}\n{subprocess.run([spy, 'dump', '--pid', str(pid)], capture_output=True, text=True).stdout}"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
