"""What a dead embedded server left behind is found, whatever it does meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlbuffer.store.server.embedded_process import left_behind

HOLDS_IT_AND_CLOSES_OTHERS = """
import os, sys, time
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
lock = os.open(sys.argv[1], os.O_RDWR)
print("holds it", flush=True)
while True:
    time.sleep(0)
    for file in files:
        os.close(file)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in files]
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc here")
def test_it_is_found_while_it_closes_other_files(tmp_path):
    (tmp_path / "alive.lock").touch()
    command = [sys.executable, "-c", HOLDS_IT_AND_CLOSES_OTHERS, str(tmp_path / "alive.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as holder:
        try:
            assert holder.stdout.readline() == b"holds it\n"
            for _ in range(50):
                assert left_behind(tmp_path, holder.pid) == [holder.pid]
        finally:
            holder.kill()
