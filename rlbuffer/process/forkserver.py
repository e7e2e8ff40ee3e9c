"""One forkserver for everything on this machine that needs torch.

Importing torch and transformers costs about four CPU-seconds a process; forked from a process that has them, a worker
or a rank starts in milliseconds. The server process is started once by the supervisor and preloads; workers, the
trainer's launcher and its ranks are all forked from it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

LONGEST_TMPDIR_BYTES = 60
"""Room for ``/pymp-xxxxxxxx/listener-xxxxxxxx`` behind it."""


def start(preload: Sequence[str]) -> ForkServerContext:
    """Starts the forkserver without waiting for its imports. Modules that do not exist are skipped."""
    _shorten_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlbuffer.process.preload", *preload])
    _instance().ensure_running()  # the instance's own: `share` may have replaced it
    return context


def _shorten_sockets() -> None:
    """Puts multiprocessing's sockets under /tmp where TMPDIR is too long for them, as a batch job's folder is.

    The kernel takes 108 bytes, macOS 104.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST_TMPDIR_BYTES:
        tempfile.tempdir = "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # is asked once, and kept
        finally:
            tempfile.tempdir = usual


def wait_until_loaded(context: ForkServerContext) -> None:
    """Waits until the forkserver has imported everything; called before any other process is asked of it. Earlier it
    forks nothing, and whoever asks stands still."""
    process = context.Process(target=_nothing, name="rlbuffer nothing")
    process.start()
    process.join()
    process.close()


def _nothing() -> None:
    return None


def pid() -> int | None:
    """The forkserver that this process started."""
    return getattr(_instance(), "_forkserver_pid", None)


def share() -> None:
    """Makes the children of a forked process come from the same forkserver; called inside that process.

    CPython (3.7 to at least 3.13) hands the server's address and alive-pipe to each forked process but not its pid,
    and `ensure_running` looks at the pid only: without this a grandchild pays for a second forkserver and all its
    imports. Does nothing where the address was not handed on.
    """
    server = _instance()
    handed_on = getattr(server, "_forkserver_address", None), getattr(server, "_forkserver_alive_fd", None)
    if None in handed_on or getattr(server, "_forkserver_authkey", b"") is None:
        return
    if getattr(server, "_forkserver_pid", None) is None:
        server.ensure_running = _already_running


def _already_running() -> None:
    return None


def _instance() -> Any:
    return getattr(forkserver, "_forkserver")  # noqa: B009 - private, so typeshed does not know it


def leave_terminal() -> None:
    """Moves this process into a session of its own, so that ctrl-C reaches only the supervisor, which then drains."""
    if os.getpid() != os.getsid(0):
        try:
            os.setsid()
        except PermissionError:
            return  # already the leader of a process group: then it has no terminal to leave
