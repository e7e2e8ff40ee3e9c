"""``python stand_in.py SOCKET ARGUMENTS``: has Python with these arguments forked by a :class:`forked.Parent`.

It starts in milliseconds, passes signals on, and ends as the process ends that it stands in for.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes as long to import as all else
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": folder}
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as life:
        life.connect(sys.argv[1])
        socket.send_fds(life, [json.dumps(request).encode()], [1, 2, *spaces])
        pid = int(life.recv(100))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        code = int(life.recv(100))
    if code < 0:
        if -code in (signal.SIGTERM, signal.SIGINT):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
