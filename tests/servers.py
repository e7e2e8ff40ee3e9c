"""``python tests/servers.py``: the integration tests on every server that can be had. ``make servers`` calls it.

    python tests/servers.py                     all tests, on the bundled server and those on PATH
    python tests/servers.py --more DIR          and on Redis 8.0 and Valkey 8.1, which ``.ci/servers DIR`` unpacks
    python tests/servers.py store client        two folders of tests/integration alone
    python tests/servers.py --sample            a server other than the bundled one, drawn
    python tests/servers.py --on "one shard"    that server alone

The last servers are clusters of one and of three shards, for the files whose tests share a server; those of the others
start their own.
Prints a line per server and folder; exit code 1 when a test failed, or a server could not be had.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUNDLED = "bundled"
TESTS = ROOT / "tests" / "integration"
SHARING = re.compile(r'redis_url[:,]|"redis_url"\)|"store_fixtures"')
"""Fixture and plugin of the files whose tests share the server that RLBUFFER_TEST_REDIS_URL names."""
sys.path.insert(0, str(ROOT / "tests" / "support"))

from own_server import OwnServer, free_port  # noqa: E402
from shards import Cluster  # noqa: E402

from rlbuffer.errors import ServerUnreachable  # noqa: E402
from rlbuffer.store.server.binary import SERVER_BIN, ServerBinary, find_binary  # noqa: E402


def programs(more: Path | None) -> Iterator[tuple[str, ServerBinary | str]]:
    """Names of servers, each with its program or the reason why there is none."""
    paths: dict[str, str | None] = {BUNDLED: None}
    paths |= {name: shutil.which(name) or "" for name in ("redis-server", "valkey-server")}
    if more is not None:
        paths |= {path.name: str(path) for path in sorted(more.glob("*-server-*"))}
    for name, path in paths.items():
        if path == "":
            yield name, "not on PATH"
            continue
        try:
            yield name, find_binary({} if path is None else {SERVER_BIN: path})
        except ServerUnreachable as error:
            yield name, str(error).splitlines()[0]


@contextmanager
def one_shard(folder: Path) -> Iterator[str]:
    """The address of a cluster of one node that has all slots."""
    options = {"cluster-enabled": "yes", "cluster-port": str(free_port())}
    with OwnServer(folder, options=options) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        server.wait_for(lambda ask: ask("CLUSTER INFO")["cluster_state"] == "ok")
        yield server.url


@contextmanager
def three_shards(folder: Path) -> Iterator[str]:
    """The address of a cluster of three primaries."""
    with Cluster(folder) as cluster:
        yield cluster.url


CLUSTERS = {"one shard": one_shard, "three shards": three_shards}


def chosen_of(names: list[str], *, only: str | None, sample: bool) -> list[str]:
    """The servers to try, of those that there are."""
    if only is not None:
        return [only]
    return [random.choice([name for name in names if name != BUNDLED])] if sample else names


def sharing(folder: str) -> Iterator[Path]:
    """The files of a folder whose tests share a server."""
    for file in sorted((TESTS / folder).glob("test_*.py")):
        if SHARING.search(file.read_text()):
            yield file


def tried(environment: Mapping[str, str], chosen: Iterable[Path], jobs: int) -> dict[str, Counter[str]]:
    """Folder of tests/integration -> outcome -> tests. Failures are printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile", f"--junitxml={report}"]
        ran = subprocess.run(
            [*command, "-p", "no:cacheprovider", *chosen],
            cwd=ROOT,
            env=os.environ | {"CI": "true", "RLBUFFER_HOME": folder} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise SystemExit(ran.stdout + ran.stderr)
        outcomes: dict[str, Counter[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            # A file that is left out as a whole has no classes, and goes by its own name.
            place = (case.get("classname") or case.get("name", "")).split(".")[2]
            outcomes.setdefault(place, Counter())[kinds[0] if kinds else "passed"] += 1
            if kinds and kinds[0] != "skipped":
                print(f"  {case.get('classname')}::{case.get('name')}\n{case[0].text}", flush=True)
        if ran.returncode not in (0, 1):
            raise SystemExit(ran.stdout + ran.stderr)
        return outcomes


def printed(name: str, outcomes: Mapping[str, Counter[str]]) -> bool:
    """Prints a server's lines. -> no test failed."""
    for place, counts in sorted(outcomes.items()):
        words = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        print(f"{name:<28} {place:<10} {words}", flush=True)
    return not any(counts["failure"] + counts["error"] for counts in outcomes.values())


def main() -> int:
    """See the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(description="the integration tests on every server that can be had")
    parser.add_argument("folders", nargs="*", help="folders of tests/integration (default: all)")
    parser.add_argument("--more", type=Path, help="folder of .ci/servers, with programs NAME-server-VERSION")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at once (default: %(default)s)")
    parser.add_argument("--sample", action="store_true", help="one of the servers, drawn")
    parser.add_argument("--on", metavar="SERVER", help="one alone: its name as in the table")
    given = parser.parse_args()
    places = sorted(path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py")))
    folders = given.folders or places
    if unknown := set(folders) - set(places):
        parser.error(f"{', '.join(unknown)}: not among {', '.join(places)}")
    shared = [file for place in folders for file in sharing(place)]
    found = dict(programs(given.more))
    there = [name for name, program in found.items() if not isinstance(program, str)]
    servers = chosen_of([*there, *CLUSTERS], only=given.on, sample=given.sample)
    if given.on is not None and given.on not in (*found, *CLUSTERS):
        parser.error(f"--on {given.on}: not among {', '.join((*found, *CLUSTERS))}")
    good = True
    for name, program in found.items():
        if isinstance(program, str):
            if name == given.on or not (given.on or given.sample):
                print(f"{name:<28} skipped: {program}", flush=True)
        elif name in servers:
            label = f"{program.name} {program.version} ({name})"
            good &= printed(label, tried({SERVER_BIN: str(program.path)}, map(TESTS.joinpath, folders), given.jobs))
    for name, begun in CLUSTERS.items():
        if shared and name in servers:
            with tempfile.TemporaryDirectory() as folder, begun(Path(folder)) as url:
                good &= printed(f"cluster of {name}", tried({"RLBUFFER_TEST_REDIS_URL": url}, shared, given.jobs))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
