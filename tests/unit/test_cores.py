"""Threads of a process: what the user has set, else its share of the cores that it may use, not of the host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlbuffer.process.environment import cores, share_cores, threads_of_one


@pytest.fixture(autouse=True)
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # taken away again after the test, whoever sets it
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_threads_are_shared_out_of_the_cores_of_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(tmp_path, tmp_path / "none") == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    share_cores(2)
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("quotas", "count"),
    [
        ({"a/b": "200000 100000"}, 2),
        ({"a/b": "max 100000", "a": "350000 100000"}, 3),
        ({"a/b": "50000 100000"}, 1),
        ({".": "max 100000"}, 8),
    ],
)
def test_the_quota_of_a_control_group_counts_where_it_is_less(
    quotas: dict[str, str], count: int, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    for group, quota in quotas.items():
        (tmp_path / group / "cpu.max").write_text(quota + "\n")
    assert cores(tmp_path, own) == count


@pytest.mark.parametrize("given", ["3", "3,2"])
def test_what_the_user_has_set_wins(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_of_one(8) == 3
    share_cores(8)
    assert os.environ["OMP_NUM_THREADS"] == given
