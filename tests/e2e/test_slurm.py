"""The batch file of deploy/slurm with a whole tiny run: Slurm's own commands are stand-ins, everything else is real.

Under Slurm 22.05 itself, two nodes on one machine, it ran by hand.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from homes import Home
from own_server import free_port

from rlbuffer.store.server.binary import find_binary

FILE = Path(__file__).parents[2] / "deploy" / "slurm" / "run.sbatch"
SRUN = """#!/bin/bash
# Runs the step here: it must name one node, with options that srun has.
while [[ $1 == --* ]]; do
  case $1 in
    --overlap|--ntasks-per-node=1|--nodes=1|--nodelist=localhost) ;;
    --job-name=*) echo "$$ ${1#*=}" >> "$STEPS" ;;
    *) echo "srun: $1?" >&2; exit 2 ;;
  esac
  shift
done
echo "step: $*" >> "$STEPS.commands"
exec "$@"
"""
SQUEUE = """#!/bin/sh
[ "$*" = "--noheader --steps --jobs=7 --format=%i %j" ] && cat "$STEPS"
"""
SCANCEL = """#!/bin/sh
[ "$1" = --signal=TERM ] && kill -TERM "$2"
"""


def programs(folder: Path, stand_in: Sequence[str]) -> Path:
    """A folder with what Slurm and the nodes would have on their PATH; `stand_in` is Python's."""
    folder.mkdir()
    python = shlex.join(stand_in)
    scripts = {
        "srun": SRUN,
        "squeue": SQUEUE,
        "scancel": SCANCEL,
        "scontrol": '#!/bin/sh\n[ "$*" = "show hostnames localhost" ] && echo localhost\n',
        "rlbuffer": f'#!/bin/sh\nexec {python} -m rlbuffer_cli "$@"\n',
        "python": f'#!/bin/sh\n[ "$1" != -u ] || shift\nexec {python} "$@"\n',
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "redis-server").symlink_to(find_binary().path)
    return folder


def test_the_batch_file_trains_a_run_to_its_end_and_goes_on_with_it_when_started_again(home: Home) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    bin, steps = home.path / "bin", home.path / "steps"
    config = home.config(steps=1)
    environment = home.environment | {
        "PATH": f"{programs(bin, home.parent.stand_in)}:{os.environ['PATH']}",
        "PYTHON_EXEC": str(bin / "python"),  # of torchrun's ranks
        "STEPS": str(steps),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "RLBUFFER_CONFIG": str(config),
        "RLBUFFER_HOME": str(home.path / "shared"),
        "MAXMEMORY": "1gb",
        "PORT": str(free_port()),
        "RENDEZVOUS": str(free_port()),
        "GATEWAYS": "1",
        "RLBUFFER_GATEWAY__ENGINES": json.dumps([f"http://127.0.0.1:{free_port()}"]),  # none is there, yet
        "RLBUFFER_GATEWAY__LISTEN": f"127.0.0.1:{free_port()}",
    }
    for last, ranks in ((1, "2"), (2, "1")):
        steps.unlink(missing_ok=True)
        config.write_text(config.read_text().replace("steps = 1", f"steps = {last}"))
        environment["RANKS"] = ranks
        ran = subprocess.run(
            ["bash", FILE], env=environment, cwd=home.path, capture_output=True, text=True, timeout=600, check=False
        )
        assert (ran.returncode, f"finished at step {last}" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    metrics = (home.path / "shared" / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["resumed_from"] for line in metrics] == [0, 1]
    # Workers, batcher and gateway left before the server did.
    assert ran.stdout.count("stopped after") == 2
    assert ran.stdout.count("stopped: 0 calls") == 1
    assert "cannot reach" not in ran.stdout + ran.stderr
    password = (home.path / "shared" / "redis-password").read_text()
    begun = Path(f"{steps}.commands").read_text()
    assert (len(password), password in begun, begun.count("rlbuffer worker vcopy --replica 0")) == (32, False, 2)
    assert begun.count("rlbuffer gateway --replica 0") == 2
