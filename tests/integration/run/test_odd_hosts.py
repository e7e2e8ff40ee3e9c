"""Hosts that refuse what others give: another user's home, no home, a long TMPDIR, a /dev/shm that cannot be written.

Each is one message with the place and the cure, and no defect.
"""

from __future__ import annotations

import multiprocessing.context
import os
import pwd
from pathlib import Path

import pytest
from forked import Parent

from rlbuffer.checks.check import Context
from rlbuffer.checks.host import home as home_check
from rlbuffer.checks.host import shared_locks
from rlbuffer.config.loading import Loaded
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.store.server.embedded import ensure
from rlbuffer_cli.main import cli, main

SOMEBODY = 12345


def context(part: str) -> Context:
    return Context(loaded=Loaded(settings=RunSettings(), sources={}), parts=frozenset({part}))


@pytest.mark.server
@pytest.mark.usefixtures("server_binary")
@pytest.mark.skipif(os.geteuid() != 0, reason="another user is root's to be")
def test_another_users_home_names_both_users(home: Path) -> None:
    ensure(home, ServerSettings()).release()
    home.chmod(0o755)
    for folder in home.resolve().parents[:-1]:
        folder.chmod(folder.stat().st_mode | 0o011)
    os.seteuid(SOMEBODY)
    try:
        with pytest.raises(ConfigError) as caught:
            ensure(home, ServerSettings())
    finally:
        os.seteuid(0)
    assert caught.value.setting == "home"
    assert {str(SOMEBODY), "root"} <= {*str(caught.value).replace(")", " ").replace(",", " ").split()}


def test_a_user_without_a_folder_is_asked_for_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError) as caught:
        _ = RunSettings().run_dir
    assert caught.value.setting == "home"
    (finding,) = home_check(context("run"))
    assert finding.settings == ("home",)


def test_processes_share_a_forkserver_under_a_long_tmpdir(parent: Parent, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = "from rlbuffer.process import forkserver; forkserver.wait_until_loaded(forkserver.start([]))"
    asked = parent.start(["-c", code], environment=parent.environment | {"TMPDIR": str(folder)}, folder=tmp_path)
    _, said = asked.communicate(timeout=120)
    assert asked.returncode == 0, said


def test_ranks_that_cannot_share_locks_are_a_mistake_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Lock", refused)
    assert [finding.level for finding in shared_locks(context("train"))] == ["failure"]


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/etc/shadow"), OSError(28, "No space left")]
)
def test_what_the_host_refuses_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError
) -> None:
    def fails(**options: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fails)
    assert main(["runs", "list"]) == 1
    said = capsys.readouterr().err
    assert "defect" not in said
    assert error.filename is None or error.filename in said
