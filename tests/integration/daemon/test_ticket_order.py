"""A ticket is closed only when the allowance that counts with its group is published."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from daemon_runs import start_trainer
from looks import allowances
from store_runs import Run

from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon, watches

pytest_plugins = ("store_fixtures",)


def test_the_allowance_goes_out_before_the_ticket_of_a_group_that_was_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round a worker takes one more: the old allowance, and a ticket less out."""
    start_trainer(run)
    store, calls = run.again(), []
    closed, stop = threading.Event(), threading.Event()

    def heard(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            if name != "take_look":
                calls.append((name, args[-1]))
            elif result.entries:
                calls.append((name, len(result.entries)))
            if name == "close_tickets":
                closed.set()
            return result

        return wrapper

    for name in ("take_look", "set_allowances", "close_tickets"):
        monkeypatch.setattr(store, name, heard(name, getattr(store, name)))
    monkeypatch.setattr(watches, "ATTEMPT_SECONDS", 0.1)  # the trainer has nothing more to say
    daemon = Daemon(Buffer(store, settings=RunSettings()), BatcherConfig(64, step_groups=4, max_age=0, lookahead=0))
    thread = threading.Thread(target=daemon.run, args=(stop,))
    thread.start()
    try:
        while allowances(run.store).get("*") is None:
            stop.wait(0.02)
        assert run.store.take_tickets("a", 1, ttl_seconds=60.0) == [0]
        run.push("a.0")
        assert closed.wait(timeout=30)
    finally:
        stop.set()
        thread.join(timeout=30)
    after_reading = [name for name, _ in calls[calls.index(("take_look", 1)) + 1 :]]
    assert after_reading[:2] == ["set_allowances", "close_tickets"]
    assert ("close_tickets", [0]) in calls
