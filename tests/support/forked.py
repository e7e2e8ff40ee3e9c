"""Processes of Python that need not import torch: forked from one that has, as `rlbuffer run` forks its own.

Importing torch and transformers costs five CPU seconds a process, and a test starts up to a dozen. A process that is
forked here has the arguments, environment, folder, session and output of a started one, and ends as that ends. Its
forkserver, should it start one, is forked from it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import IO, Any

MODULES = (
    "rlbuffer.process.preload",
    "rlbuffer.trainer.launch.rank",
    "transformers.models.qwen3.modeling_qwen3",
    "rlbuffer.run.supervisor",
    "rlbuffer.daemon.loop",
    "rlbuffer_cli.main",
)
READ_AT_IMPORT = ("HF_", "TOKENIZERS_", "OMP_", "MKL_", "TORCH", "CUDA_", "LD_", "PYTHON")
"""Variables that modules and the interpreter read once: where they differ, a process is started as usual."""
REQUEST_BYTES = 150_000


def clean_environment() -> dict[str, str]:
    """The environment of a test's processes, except what concerns the test."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RLBUFFER_")}
    return ours | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class Parent:
    """The process that the others are forked from. Make it once; `close` ends it, and so does the end of its maker.

    `stand_in`, in place of the path of Python, has one forked for those that start processes by themselves, also in
    other namespaces of the network and of mounts: it is asked with the rest of a command, passes signals on, and ends
    as its process ends.

    On Linux; elsewhere every process is started as usual.
    """

    def __init__(self) -> None:
        self.environment = clean_environment()
        self.stand_in = (sys.executable,)
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.TemporaryDirectory(prefix="f")
        place = f"{self._folder.name}/s"
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(place)
        door.listen()
        self.stand_in = (sys.executable, "-IS", str(Path(__file__).with_name("stand_in.py")), place)
        alone = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(door.fileno())],
            env=alone | self.environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), door.fileno()],
            start_new_session=True,
        )
        theirs.close()
        door.close()

    def start(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], folder: Path, log: Path | None = None
    ) -> Any:
        """Starts a process as :func:`start` does, forked if that makes the same process. Returns a `Forked`, or a
        `subprocess.Popen`."""
        if self._process is None or _read_at_import(environment) != _read_at_import(self.environment):
            return start(arguments, environment=environment, folder=folder, log=log)
        output = [log.open("ab")] * 2 if log else [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        request = json.dumps({"arguments": arguments, "environment": dict(environment), "folder": str(folder)})
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._channel, [request.encode()], [f.fileno() for f in (theirs, *output)])
        if log:
            output[0].close()
        return Forked(arguments, ours, output)

    def close(self) -> None:
        """Ends it. Forked processes live on."""
        if self._process is not None:
            self._channel.close()
            self._process.wait()
            self._folder.cleanup()


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    log: Path | None = None,
    program: Sequence[str] = (sys.executable,),
) -> subprocess.Popen[str]:
    """Python with `arguments` (-m MODULE ..., -c CODE ... or FILE ...) in a session of its own.

    Its output is added to `log`; without one, `communicate` returns it. `program`: Python, and what is put before it.
    """
    with (log or Path(os.devnull)).open("a") as out:
        return subprocess.Popen(
            [*program, *arguments],
            env=environment,
            cwd=folder,
            stdout=out if log else subprocess.PIPE,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k != "PYTHONPATH"}


class Forked:
    """Stand-in for `subprocess.Popen`, for a process whose parent is another one."""

    def __init__(self, arguments: Sequence[str], life: socket.socket, output: Sequence[IO[bytes]]) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._output = output
        self._life = life
        self._lock = threading.Lock()
        self._said = b""
        while b"\n" not in self._said:
            self._hear()
        pid, _, self._said = self._said.partition(b"\n")
        self.pid = int(pid)

    def _hear(self) -> None:
        heard = self._life.recv(100)
        if not heard:
            raise RuntimeError(f"the process that {self.args} was forked from has ended")
        self._said += heard

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        with self._lock:
            while self.returncode is None and select.select([self._life], [], [], 0)[0]:
                self._hear()
                if self._said.endswith(b"\n"):
                    self.returncode = int(self._said)
                    self._life.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended, and returns what :meth:`poll` returns."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end. -> its output and its errors."""
        self.wait(timeout)
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Nothing once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


# -- the process that the others are forked from -----------------------------------------------------------------------
def _serve(channel: socket.socket, door: socket.socket) -> None:
    """Forks until nobody is left who could ask; then ends as a child does that was forked here.

    Whoever comes to the `door` is a stand-in, with which its process ends.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing)
    lives: dict[int, socket.socket] = {}
    ended: dict[int, socket.socket] = {}
    stand_ins: dict[int, socket.socket] = {}
    while True:
        stand_ins = {pid: life for pid, life in stand_ins.items() if pid in lives}
        ready, _, _ = select.select([channel, door, reading, *ended.values(), *stand_ins.values()], [], [])
        if reading in ready:
            os.read(reading, 1000)
        for pid in [pid for pid, life in ended.items() if life in ready]:
            os.waitpid(pid, 0)
            ended.pop(pid).close()
        for pid in [pid for pid, life in lives.items() if _has_ended(pid, life)]:
            ended[pid] = lives.pop(pid)
        for pid in [pid for pid, life in stand_ins.items() if pid in lives and life in ready]:
            os.killpg(pid, signal.SIGKILL)
            del stand_ins[pid]
        asks = [each for each in (channel, door) if each in ready]
        if not asks:
            continue
        asked = asks[0] if asks[0] is channel else door.accept()[0]
        text, descriptors, _, _ = socket.recv_fds(asked, REQUEST_BYTES, 5)
        if not text:
            return
        if asked is not channel:
            descriptors.insert(0, asked.detach())
        life, *others = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for each in (channel, door, *lives.values(), *ended.values()):
                each.detach()  # their numbers will be other files' here
            _become(json.loads(text), life, *others)
            return
        for descriptor in others:
            os.close(descriptor)
        lives[pid] = socket.socket(fileno=life)
        if asked is not channel:
            stand_ins[pid] = lives[pid]


def _has_ended(pid: int, life: socket.socket) -> bool:
    """Tells whoever asked for it; until they have heard that, its number is nobody else's."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return False
    with contextlib.suppress(OSError):  # they may not want to know
        life.sendall(b"%d\n" % (end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))
    return True


def _become(request: Mapping[str, Any], life: int, out: int, err: int, *spaces: int) -> None:
    """Everything that a process has from its start."""
    os.setsid()
    for space, name in zip(spaces, ("net", "mnt"), strict=False):
        if os.fstat(space).st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino and _SET_SPACE(space, 0):
            raise OSError(ctypes.get_errno(), f"the {name} namespace of its stand-in")
    os.write(life, b"%d\n" % os.getpid())
    null = os.open(os.devnull, os.O_RDONLY)
    for place, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _reset_signals()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    util.spawnv_passfds = _fork_forkserver
    first, *rest = request["arguments"]
    main = Path(first)
    added = [request["folder"] if first.startswith("-") else str(main.parent)]
    added += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*added, *_SYS_PATH]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(rest[0], module.__dict__)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_SET_SPACE = ctypes.CDLL(None, use_errno=True).setns if sys.platform == "linux" else None
_SPAWN = util.spawnv_passfds
_SYS_PATH: list[str] = []
"""Entries of ``sys.path`` that follow the program's own folder and PYTHONPATH."""


def _fork_forkserver(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: a forkserver that has imported already what it would.

    Whoever starts one has threads by then, which print and which follow metrics; no lock of theirs is used in it.
    """
    code = os.fsdecode(arguments[-1])
    if "multiprocessing.forkserver" not in code:
        return _SPAWN(path, arguments, descriptors)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 gives one where there are threads
        pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        kept = sorted(descriptors)
        for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        _reset_signals()
        for instance in (resource_tracker._resource_tracker, forkserver._forkserver):
            instance.__init__()  # those of the process that it was forked from, one of them locked
        from rlbuffer.process.forkserver import leave_terminal

        leave_terminal()
        exec(code, {})
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    _given = os.environ.get("PYTHONPATH", "")
    _SYS_PATH += sys.path[1 + len([_p for _p in _given.split(os.pathsep) if _p]) :]
    _channel, _door = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    gc.disable()
    for _name in MODULES:
        importlib.import_module(_name)
    gc.freeze()
    gc.enable()
    _serve(_channel, _door)
