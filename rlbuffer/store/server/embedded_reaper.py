"""Ends an embedded server that nobody uses any more, however its users died. A process beside the server.

A user that is killed stops nothing, and a server cannot know that it was the last one. The kernel drops its lock, and
here somebody looks: no lock and no client for a while, and the server ends as after a clean leave. Its data stay, and
whoever comes later starts it again.

Usage: python -I -S embedded_reaper.py FOLDER PID SOCKET SECONDS. It needs the standard library alone, and so takes
about 8 MB; it ends with the server.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import sys
import time

LOOK_SECONDS = 5.0
"""Seconds between two looks, fewer where the server has less time."""
ANSWER_SECONDS = 2.0
"""A server that answers later than this is at work."""


def main(folder: str, pid: int, address: str, seconds: float) -> None:
    """Watches the server `pid`, and ends it when nobody has used it for so many seconds."""
    users, start = (os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT, 0o600) for name in LOCKS)
    server = Server(pid)
    unused_since = None
    while not server.has_ended(min(LOOK_SECONDS, seconds / 4)):
        # As a user does that leaves: nobody joins, starts or stops the server meanwhile.
        if not locked(start):
            unused_since = None
            continue
        try:
            if not locked(users) or has_clients(address):
                unused_since = None
            elif unused_since is None:
                unused_since = time.monotonic()
            elif time.monotonic() - unused_since >= seconds:
                server.terminate()
                while not server.has_ended(LOOK_SECONDS):
                    pass
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            fcntl.flock(start, fcntl.LOCK_UN)


LOCKS = ("users.lock", "start.lock")


def locked(descriptor: int) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Server:
    """A process that is nobody's child here. Linux names it by a descriptor, which no later process can have."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it has ended already
                self.descriptor = os.pidfd_open(pid)

    def has_ended(self, seconds: float) -> bool:
        """Waits for so long. -> True as soon as the process has ended."""
        if self.descriptor >= 0:
            return bool(select.select([self.descriptor], [], [], seconds)[0])
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(seconds)
        return False

    def terminate(self) -> None:
        """Asks it to end: it writes what is left, and syncs its files."""
        if self.descriptor >= 0:
            signal.pidfd_send_signal(self.descriptor, signal.SIGTERM)
        else:
            os.kill(self.pid, signal.SIGTERM)


def has_clients(address: str) -> bool:
    """Somebody is connected, with a lock or without one; also said of a server that does not answer."""
    answer = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(ANSWER_SECONDS)
        asker.connect(address)
        asker.sendall(b"INFO clients\r\n")
        while not (found := re.search(rb"connected_clients:(\d+)\r\n", answer)):
            answer += asker.recv(4096) or b"connected_clients:2\r\n"
        return int(found[1]) > 1
    return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
