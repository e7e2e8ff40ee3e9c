"""The installed files: the wheel, and nothing else in site-packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    # --no-isolation: the build backend is part of the development set, so nothing is fetched here.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_two_packages_and_no_generic_name(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"rlbuffer", "rlbuffer_cli"}


def test_the_wheel_carries_the_scripts_and_the_demo(names: list[str]) -> None:
    scripts = {Path(name).stem for name in names if name.startswith("rlbuffer/store/scripts/")}
    assert {
        "open",
        "push",
        "ticket",
        "keep",
        "drop",
        "commit",
        "lease",
        "attempt",
        "report",
        "announce",
        "retire",
        "recover",
        "void",
        "telemetry",
        "ask",
    } <= scripts
    assert "rlbuffer/run/demo.toml" in names
    assert "rlbuffer/py.typed" in names


def test_the_wheel_carries_no_tests_and_no_caches(names: list[str]) -> None:
    assert [n for n in names if "test_" in n or "__pycache__" in n or n.startswith(("tests", "benchmarks"))] == []
