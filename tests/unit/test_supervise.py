from __future__ import annotations

import contextlib
from pathlib import Path

from rlbuffer.config.settings import RunSettings
from rlbuffer.run.supervisor import Child, Supervisor


def test_a_full_disk_is_said_once_and_stops_nobody_from_being_heard(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []
    supervisor = Supervisor(RunSettings(home=tmp_path), say=lambda name, line: heard.append((name, line)))
    log = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - closing it fails, too
    supervisor._log = log
    supervisor.say("serve", "one")
    supervisor.say("serve", "two")
    with contextlib.suppress(OSError):
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


class _Alive:
    """A process that goes on."""

    pid, exitcode = 1, None
