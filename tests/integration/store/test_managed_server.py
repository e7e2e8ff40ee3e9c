"""A server as managed services give it: commands that operate it are not there."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from own_server import OwnServer

import rlbuffer
from rlbuffer.daemon import Daemon

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

MISSING = ("BGREWRITEAOF", "CLIENT", "CONFIG", "DEBUG", "SLOWLOG")


def test_a_run_lives_on_a_server_without_its_operators_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The embedded server's program needs no rewriting of its file; one that is not known does.
    monkeypatch.setattr("rlbuffer.store.server.append_file.REVERTS_FROM", {})
    caplog.set_level(logging.WARNING)
    options = {f"rename-command {name}": '""' for name in MISSING}
    with OwnServer(tmp_path, options=options) as server, rlbuffer.connect(server.url, run="managed") as buffer:
        stop = threading.Event()
        daemon = Daemon(buffer, rlbuffer.BatcherConfig(64, step_groups=1))
        leading = threading.Thread(target=daemon.run, args=(stop,))
        leading.start()
        try:
            buffer.writer("worker-0").push(rlbuffer.testing.make_group())
            step = next(buffer.reader(0, 1, timeout_seconds=60.0).steps())
        finally:
            stop.set()
            leading.join()
        assert step.groups == 1
    assert [record.args for record in caplog.records if "BGREWRITEAOF" in record.msg]
