"""A rolling upgrade: processes of an older version and of this one, side by side in a run, on one embedded server."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
from homes import Home

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "tests" / "support" / "one_role.py"
BEFORE_LENGTHS = "38a2385eb421"
"""The last version of main that counted nothing by length."""
CONFIG = '[server]\nappendfsync = "no"\n[batcher]\nrow_tokens = 256\nstep_groups = 2\nmax_age = 4\n'


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the older version."""
    folder = tmp_path_factory.mktemp("older")
    made = subprocess.run(
        ["git", "archive", "--format=zip", BEFORE_LENGTHS, "rlbuffer", "cli", "rlbuffer.toml"],
        cwd=ROOT,
        capture_output=True,
    )
    if made.returncode:
        pytest.skip(f"needs the history of the project: {made.stderr.decode()}")
    with zipfile.ZipFile(io.BytesIO(made.stdout)) as archive:  # tarfile's filters are later than Python 3.11.0
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("old", ["serve worker", "serve rank", "worker rank", "serve", "worker", "rank"])
def test_an_older_version_works_beside_this_one(home: Home, older: Path, old: str) -> None:
    """In whatever order a run's processes are upgraded, its steps flow and its account is exact, by length, too."""
    home.parent = None
    (home.path / "rlbuffer.toml").write_text(CONFIG)
    of_this = dict(home.environment)

    def start(role: str, *arguments: str) -> subprocess.Popen[str]:
        tree = older if role in old.split() else ROOT
        home.environment = of_this | {"PYTHONPATH": f"{tree}:{tree}/cli"}
        return home.start_python(*arguments, log=role)

    start("serve", "-m", "rlbuffer_cli", "serve", "--run", "tiny", "--display", "plain")
    home.wait_until(lambda: "ready in" in home.printed(), seconds=30, why="the batcher's start")
    start("worker", str(ROLE), "worker", "", "tiny")
    assert home.ended(start("rank", str(ROLE), "rank", "", "tiny", "6"), 60) == 0, home.logs()
    home.environment = of_this
    with home.connect() as buffer:
        assert buffer.verify().findings == ()
        account = buffer.ledger().total()
    assert account.trained[0] >= 4 * 6
    assert all(amount >= 0 for parts in account.lengths.values() for pair in parts.values() for amount in pair)
    # Counted by length: what a leader and a rank of this version have packed and trained.
    assert (set(account.lengths.get("trained", {})) == {0}) == ("serve" in old or "rank" in old)
