from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbuffer.config.settings import RunSettings
from rlbuffer.process.identity import may_live, visible_from
from rlbuffer.run.child import Child
from rlbuffer.run.run_log import RunLog
from rlbuffer.run.supervisor import Supervisor


def test_a_full_disk_is_said_once_and_stops_nobody_from_being_heard() -> None:
    heard: list[tuple[str, str]] = []
    log = RunLog(Path("/dev/full"), lambda name, line: heard.append((name, line)))
    log.open()
    log.write_line("serve", "one")
    log.write_line("serve", "two")
    log.close()
    assert [line for name, line in heard if name == "serve"] == ["one", "two"]
    assert [line.split(":")[1] for name, line in heard if name == "run"] == [
        " No space left on device. Lines are missing there"
    ]


def test_what_needs_no_torch_starts_while_the_forkserver_still_loads_it(tmp_path: Path) -> None:
    supervisor = Supervisor(RunSettings(home=tmp_path), say=lambda name, line: None)
    started: list[str] = []
    children = [
        Child(name=name, start=lambda name=name: started.append(name) or _Alive(), is_forked=forked)  # type: ignore[misc]
        for name, forked in (("worker a", True), ("serve", False))
    ]
    for child in children:
        supervisor._look_after(child, None)  # type: ignore[arg-type]
    assert started == ["serve"]
    supervisor._is_warm.set()
    for child in children:
        supervisor._look_after(child, None)  # type: ignore[arg-type]
    assert started == ["serve", "worker a"]


def test_a_process_whose_python_is_gone_is_started_again_later(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(RunSettings(home=tmp_path), say=lambda name, line: said.append(line))
    programs = [lambda: subprocess.Popen([tmp_path / "python"]), _Alive]
    child = Child(name="worker a", start=lambda: programs.pop(0)(), is_forked=False)
    assert supervisor._look_after(child, None) is None  # type: ignore[arg-type]
    assert "worker a cannot be started" in said[0]
    child.restart_at = 0.0
    supervisor._look_after(child, None)  # type: ignore[arg-type]
    assert child.process is not None


def test_a_trainer_has_longer_to_end_than_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.run.supervisor.DRAIN_SECONDS", 0.2)
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    children, processes = [], []
    for name in ("serve", "worker a", "train"):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline()
        processes.append(process)
        children.append(Child(name=name, start=_Alive, process=process))
    Supervisor(RunSettings(home=tmp_path), say=lambda name, line: None)._drain(children)
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [-signal.SIGKILL, -signal.SIGKILL, 7]


def test_who_the_server_is_is_said_whenever_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.run.supervisor.OBSERVE_SECONDS", 0.0)
    said: list[str] = []
    pids, ended = [11, 11, 12], threading.Event()

    class Store:
        def heartbeats(self, kind: str) -> dict[str, Any]:
            self.connection = SimpleNamespace(embedded=SimpleNamespace(pid=pids.pop(0)))
            if not pids:
                ended.set()
            return {}

    supervisor = Supervisor(RunSettings(home=tmp_path), say=lambda name, line: said.append(line))
    supervisor._observe(SimpleNamespace(store=Store()), ended)  # type: ignore[arg-type]
    assert [line.split()[-1] for line in said] == ["11", "12"]


class _Alive:
    """A process that goes on."""

    pid, exitcode = 1, None


@pytest.mark.parametrize("pid", [0, -1, 2**40, 2**70, "12", None])
def test_a_heartbeat_with_a_strange_number_is_nobodys(pid: Any) -> None:
    assert not may_live({"pid": pid, "space": visible_from(), "seconds_ago": 0.1})


REFUSAL = (
    "the trainer resumes after step 8, but run 'math' ends at step 4: the checkpoint belongs to another run or to "
    "steps that were taken back. The trainer takes its newest checkpoint: move later ones away, or use another run name"
)


@pytest.mark.parametrize(("code", "is_final"), [(1, False), (4, False), (5, False), (2, True), (3, True), (6, True)])
@pytest.mark.parametrize("name", ["train", "serve", "worker math"])
def test_what_would_be_refused_again_ends_the_run_at_once_with_the_whole_sentence(
    tmp_path: Path, name: str, code: int, is_final: bool
) -> None:
    said: list[tuple[str, str]] = []
    supervisor = Supervisor(RunSettings(home=tmp_path), say=lambda who, line: said.append((who, line)))
    supervisor.log.path.parent.mkdir(parents=True)
    supervisor.log.open()
    program = f"import sys\nprint('working')\nprint('Error: ' + {REFUSAL!r} + '\\n  rows behind it')\nsys.exit({code})"

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        supervisor.log.follow(name, process.stdout)
        return process

    child = Child(name=name, start=start, is_forked=False)
    supervisor._look_after(child, None)  # type: ignore[arg-type]
    child.process.wait()
    buffer: Any = SimpleNamespace(store=SimpleNamespace(has_ended=lambda: False))
    assert supervisor._look_after(child, buffer) == (code if is_final else None)
    supervisor.log.close()
    assert supervisor.reason == (f"Error: {REFUSAL}\n  rows behind it" if is_final else "")
    assert supervisor.restarts == (not is_final)
    given_up = f"{name} ended with exit code {code}, it would be refused again: giving up"
    assert any(who == "run" and line.startswith(given_up) for who, line in said) == is_final
