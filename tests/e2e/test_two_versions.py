"""Processes of an older version and of this one, side by side on one embedded server."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
from homes import Home

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "tests" / "support" / "one_role.py"
OLDER = "38a2385eb421"
"""A version of main of schema 2."""
CONFIG = '[server]\nappendfsync = "no"\n[batcher]\nrow_tokens = 256\nstep_groups = 2\nmax_age = 4\n'


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the older version."""
    folder = tmp_path_factory.mktemp("older")
    made = subprocess.run(
        ["git", "archive", "--format=zip", OLDER, "rlbuffer", "cli", "rlbuffer.toml"],
        cwd=ROOT,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip(f"needs the history of the project: {made.stderr.decode()}")
    with zipfile.ZipFile(io.BytesIO(made.stdout)) as archive:  # tarfile's filters are later than Python 3.11.0
        archive.extractall(folder)
    return folder


def test_each_version_refuses_a_run_of_the_other_and_damages_nothing(home: Home, older: Path) -> None:
    """A schema is refused, never guessed: whoever comes with another one ends, and the run is as it was."""
    home.parent = None
    (home.path / "rlbuffer.toml").write_text(CONFIG)
    of_this = dict(home.environment)

    def start(tree: Path, role: str, run: str) -> subprocess.Popen[str]:
        home.environment = of_this | {"PYTHONPATH": f"{tree}:{tree}/cli"}
        last = ("6",) if role == "rank" else ()
        serve = ("-m", "rlbuffer_cli", "serve", "--run", run, "--display", "plain")
        return home.start_python(
            *(serve if role == "serve" else (str(ROLE), role, "", run, *last)), log=f"{role} {run}"
        )

    start(ROOT, "serve", "tiny")
    home.wait_until(lambda: "ready in" in home.printed(), seconds=30, why="the batcher's start")
    start(older, "serve", "old")
    home.wait_until(lambda: home.printed().count("ready in") == 2, seconds=30, why="the older batcher's start")
    roles = ("serve", "worker", "rank")
    refused = [start(tree, role, run) for tree, run in ((older, "tiny"), (ROOT, "old")) for role in roles]
    assert all(home.ended(process, 60) != 0 for process in refused), home.logs()
    assert home.logs().count("was written with schema") >= len(refused)
    home.environment = of_this
    start(ROOT, "worker", "tiny")
    assert home.ended(start(ROOT, "rank", "tiny"), 60) == 0, home.logs()
    with home.connect() as buffer:
        assert buffer.verify().findings == ()
        assert buffer.ledger().total().trained[0] >= 4 * 6
