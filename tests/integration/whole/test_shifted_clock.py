"""The server's clock is set forward and back under a run: nothing is lost, doubled or stuck."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import own_server
import pytest
import waits
from daemon_runs import Served
from own_server import OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=1000)
HALF_AN_HOUR = 1800.0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preloaded library; made here, because no package of Python's holds one."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("shifting a server's clock needs a C compiler and Linux")  # which no bare machine has to have
    library = tmp_path_factory.mktemp("clock") / "clock_shift.so"
    source = Path(own_server.__file__).with_name("clock_shift.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def shifted(shim: Path, tmp_path: Path) -> Iterator[tuple[Run, Callable[[float], None]]]:
    """A run on a server of its own, and what sets the server's clock: seconds ahead of this machine's."""
    file = tmp_path / "shift"
    file.write_bytes(bytes(8))
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), 8) as memory:
        environment = {"LD_PRELOAD": str(shim), "CLOCK_SHIFT": str(file)}
        with OwnServer(tmp_path / "server", environment=environment) as server:
            run = Run(server.url, tmp_path)

            def shift(seconds: float) -> None:
                memory[:8] = struct.pack("q", round(seconds * 1e6))
                # The server looks at its clock when it sees fit, and measures in between.
                while abs(run.store.now() - time.time() - seconds) > 5:
                    time.sleep(0.001)

            yield run, shift
            run.close()


def test_a_run_goes_on_over_a_shifted_clock(shifted: tuple[Run, Callable[[float], None]]) -> None:
    run, shift = shifted
    served = Served(run)
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=60)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    served.serve(CONFIG)
    pushed = 0
    steps = reader.steps()
    seen: list[str] = []

    def train(count: int) -> None:
        nonlocal pushed
        for _ in range(count):
            for _ in range(2):
                writer.push(make_group(env="a", size=2, version=0, seed=pushed))
                pushed += 1
            step = next(steps)
            seen.extend(sample.rollout_id for mb in step for sample in mb.samples if sample.rollout_id)
            reader.trained(step)
            reader.announce(PolicyVersion(version=step.number))

    train(3)
    for seconds in (HALF_AN_HOUR, -HALF_AN_HOUR, 0.0):
        shift(seconds)
        train(3)
    total = run.store.ledger().total()
    assert total.pushed[0] == 2 * pushed == len(seen) == len(set(seen))
    assert (total.trained, total.dropped) == (total.pushed, {})
    assert run.store.verify().findings == ()
    assert served.errors == []
    steps.close()
    reader.close()
    served.close()


def test_a_dead_leader_s_lease_expires_though_the_clock_was_set_back(
    shifted: tuple[Run, Callable[[float], None]],
) -> None:
    run, shift = shifted
    dead = run.store.lease("dead", ttl_seconds=30.0)
    assert not run.store.lease("other", ttl_seconds=5.0).held
    shift(-HALF_AN_HOUR)
    lease = run.store.lease("other", ttl_seconds=5.0)
    assert lease.held
    assert lease.token > dead.token


def test_a_leader_that_lives_through_a_clock_set_back_knows_that_its_lease_had_expired(
    shifted: tuple[Run, Callable[[float], None]],
) -> None:
    run, shift = shifted
    first = run.store.lease("one", ttl_seconds=5.0)
    assert run.store.renew(ttl_seconds=5.0).token == first.token
    shift(-HALF_AN_HOUR)
    again = run.store.renew(ttl_seconds=5.0)
    assert again.held
    assert again.token > first.token


def test_what_is_pending_and_who_pushed_it_outlive_eight_days(shifted: tuple[Run, Callable[[float], None]]) -> None:
    """Only a payload that never became pending has a time to live."""
    run, shift = shifted
    for i in range(3):
        run.push(f"a.{i}")
    attempt = run.store.attempt(uuid="trainer", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0))
    shift(8 * 86_400)
    run.push("a.3")  # its producer is remembered: no gap, and nothing comes twice
    served = Served(run)
    served.serve(CONFIG)
    served.wait_for(lambda: run.store.meta().step >= 2, seconds=60)
    assert not served.said("drop")
    assert run.store.verify().findings == ()
    served.close()


def until(what: Callable[[], bool]) -> None:
    """Waits for it: things that were given for a second expire after one."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_the_dead_hold_expires_though_the_clock_was_set_back(
    shifted: tuple[Run, Callable[[float], None]],
) -> None:
    run, shift = shifted
    store = run.store
    shift(HALF_AN_HOUR)
    run.step("a.9")
    run.push("a.8")
    (entry,) = run.pool()
    attempt = store.attempt(uuid="dead", world_size=1, resume_step=0)
    store.report(attempt.number, epoch=run.meta.epoch, trained=1, digest="", oldest_kept=1)
    store.heartbeat("worker", "dead", {})
    store.set_allowances({"a": 2})
    assert store.take_tickets("a", 2, ttl_seconds=1.0) == [0, 1]
    assert store.claim_scoring([entry.entry_id], owner="dead", ttl_seconds=1.0)[0] == {entry.entry_id}
    assert store.claim_evaluation("a", 1, owner="dead", ttl_seconds=1.0)
    shift(0.0)
    assert (store.trainer().seen_seconds_ago or 0.0) > HALF_AN_HOUR / 2
    assert store.heartbeats("worker")["dead"]["seconds_ago"] > HALF_AN_HOUR / 2
    until(lambda: store.take_tickets("a", 2, ttl_seconds=1.0) == [0, 1])
    until(lambda: bool(store.claim_scoring([entry.entry_id], owner="other", ttl_seconds=1.0)[0]))
    until(lambda: store.claim_evaluation("a", 1, owner="other", ttl_seconds=1.0))
    run.lead()
    assert store.retire(1) == 1  # its payload is swept


@pytest.mark.parametrize("leads_before", [True, False])
def test_a_group_that_is_not_full_closes_in_time_though_the_clock_was_set_back(
    shifted: tuple[Run, Callable[[float], None]], leads_before: bool
) -> None:
    """The ids that say when it was pushed lie ahead of the clock until that is there again."""
    run, shift = shifted
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    config = rlbuffer.BatcherConfig(64, step_groups=2, group_timeout_seconds=0.5, min_group_size=1)
    served = Served(run)
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)

    def push(seed: int) -> None:
        group = make_group(env="a", size=2, version=0, seed=seed)
        writer.push(replace(group, rollouts=group.rollouts[:1]))

    if leads_before:
        served.serve(config)
        served.wait_for(lambda: served.said("ready"), seconds=60)
    shift(HALF_AN_HOUR)
    push(0)
    shift(0.0)
    push(1)
    assert all(entry.pushed_ms / 1000 > run.store.now() for entry in run.pool())
    if not leads_before:
        served.serve(config)
    served.wait_for(lambda: run.store.meta().step == 1, seconds=60)
    served.close()


def test_a_trainer_is_heard_though_the_clock_was_set_back_since_the_takeover(
    shifted: tuple[Run, Callable[[float], None]],
) -> None:
    run, shift = shifted
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    run.push("a.0")
    run.push("a.1")
    shift(HALF_AN_HOUR)
    served = Served(run, word_seconds=1e9)
    served.serve(CONFIG)
    served.wait_for(lambda: waits.said(run.store))
    assert run.store.meta().step == 0
    shift(0.0)

    def is_heard() -> bool:
        run.store.report(number, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)
        return run.store.meta().step == 1

    served.wait_for(is_heard)
    served.close()
