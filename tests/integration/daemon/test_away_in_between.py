"""A leader decides on what it has read. A server that was away since may have lost that: nothing is carried out."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from daemon_runs import start_trainer
from every_role import EveryRole
from logged import Logged
from store_runs import Run

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import LeaseLost
from rlbuffer.store.leader import LeaderStore

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, lookahead=1)


def test_no_step_is_retired_and_nothing_swept_that_may_be_needed_again(run: Run) -> None:
    run.step("a.0")
    run.train(1, oldest_kept=1)
    run.store.connection.losses += 1
    with pytest.raises(LeaseLost, match="was away"):
        run.store.retire(1)
    assert (run.store.meta().retired, len(run.payload_keys())) == (0, 1)
    run.lead()
    assert run.store.retire(1) == 1


def test_a_sweep_ends_where_the_server_was_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step("a.0", "a.1")
    run.train(1, oldest_kept=1)
    monkeypatch.setattr("rlbuffer.store.leader.SWEEP", 1)
    look, asked = run.store.look, []

    def away_after_the_first_page(command: Any) -> Any:
        asked.append(command)
        if len(asked) == 4:  # page, unlink, forget; and now
            run.store.connection.losses += 1
        return look(command)

    monkeypatch.setattr(run.store, "look", away_after_the_first_page)
    with pytest.raises(LeaseLost, match="was away"):
        run.store.retire(1)
    assert len(run.payload_keys()) == 1
    monkeypatch.setattr(run.store, "look", look)
    run.lead()
    assert run.store.retire(1) == 1
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("is_loss", [True, False])
def test_a_leader_whose_server_was_away_between_pin_and_commit_reads_again_and_one_that_was_hung_up_on_does_not(
    redis_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_loss: bool
) -> None:
    run = Run(redis_url, tmp_path)
    attempt = start_trainer(run)
    store, pins = run.again(), []

    def cut_off_once(self: EveryRole, *args: Any, **options: Any) -> list[str]:
        pins.append(pin(self, *args, **options))
        if len(pins) == 1 and is_loss:
            store.connection.losses += 1
        elif len(pins) == 1:
            for client in run.client.client_list():
                if int(client["id"]) != int(run.client.client_id()):
                    run.client.client_kill_filter(_id=client["id"])
        return pins[-1]

    pin = LeaderStore.pin
    monkeypatch.setattr(LeaderStore, "pin", cut_off_once)
    logged = Logged("rlbuffer.daemon")
    stop = threading.Event()
    daemon = Daemon(Buffer(store, settings=RunSettings()), CONFIG, lease_seconds=1.0)
    thread = threading.Thread(target=daemon.run, args=(stop,))
    thread.start()
    for i in range(2):
        run.push(f"a.{i}")
    deadline = time.monotonic() + 30
    while run.store.meta().step < 1:
        run.store.report(attempt, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)
        assert time.monotonic() < deadline, logged.lines
        time.sleep(0.05)
    stop.set()
    thread.join(timeout=20)
    logged.close()
    kinds = [line["event"] for line in logged.lines]
    assert (kinds[: kinds.index("step")].count("ready") >= 2) == is_loss, kinds
    assert (len(pins) >= 2) == is_loss
    assert run.store.verify().findings == ()
    run.close()
