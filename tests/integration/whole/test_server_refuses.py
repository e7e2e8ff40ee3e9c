"""A server that takes no writes for now ends nobody: workers, scorers, ranks and the batcher wait and say so.

Here the reason is that it misses a replica, which can be had and taken away at once; test_full_disk.py has the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import scorer_stage
import worker_stage
from daemon_runs import Served
from own_server import OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.errors import BatchTimeout
from rlbuffer.process import serving
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]

CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, max_age=1000)
REASON = "it has too few replicas (min-replicas-to-write)"


class Moody(OwnServer):
    """Takes writes or does not."""

    def refuses(self, does: bool) -> None:
        with redis.Redis(port=self.port) as client:
            client.config_set("min-replicas-to-write", int(does))

    def refused(self) -> int:
        """Commands that it has refused so far."""
        with redis.Redis(port=self.port) as client:
            return int(client.info("errorstats").get("errorstat_NOREPLICAS", {"count": 0})["count"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Moody]:
    with Moody(tmp_path / "server") as made:
        yield made


@pytest.fixture
def run(server: Moody, tmp_path: Path) -> Iterator[Run]:
    made = Run(server.url, tmp_path)
    yield made
    made.close()


def test_what_a_rank_says_meanwhile_is_said_when_the_server_takes_it(
    server: Moody, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.lead(ttl_seconds=600)
    run.step("a.0", world_size=1)
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
    step = reader.pull(1)
    server.refuses(True)
    with caplog.at_level(logging.WARNING):
        reader.trained(step)
        reader.checkpointed(step)
        assert reader.announce(PolicyVersion(version=1, location="here", size=1))
        waiting = threading.Thread(target=reader.pull, args=(2,), daemon=True)
        waiting.start()
        before = server.refused()
        worker_stage.eventually(lambda: server.refused() > before + 5)
        assert waiting.is_alive()
    told = [record.getMessage() for record in caplog.records if "rank 0 waits" in record.getMessage()]
    assert len(told) == 1, "once, and then every minute"
    assert REASON in told[0]
    server.refuses(False)
    worker_stage.eventually(lambda: run.store.trainer().trained == 1)
    worker_stage.eventually(lambda: run.store.trainer().checkpoint == 1)
    worker_stage.eventually(lambda: run.store.policy().version == 1)
    run.step("a.1", world_size=1)
    waiting.join(worker_stage.PATIENCE_SECONDS)
    assert not waiting.is_alive()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_waits_for_a_server_that_refuses_as_long_as_its_time_allows(server: Moody, run: Run, rank: int) -> None:
    server.refuses(True)
    starting = run.closes(Reader(run.again(), rank=rank, world_size=2, timeout_seconds=0.2))
    with pytest.raises(BatchTimeout) as caught:
        starting.start()
    assert REASON in str(caught.value)
    server.refuses(False)
    reader = run.closes(Reader(run.again(), rank=rank, world_size=2, timeout_seconds=2))
    reader.start()
    server.refuses(True)
    with pytest.raises(BatchTimeout) as caught:
        reader.pull(1)
    assert REASON in str(caught.value)


def test_the_batcher_says_it_once_and_leads_again(server: Moody, run: Run) -> None:
    served = Served(run)
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    for round_ in (1, 2):
        server.refuses(True)
        served.wait_for(lambda n=round_: len(served.said("leader", state="lost")) >= n)
        before = server.refused()
        # The batcher asks for the lease again and again, and the reader's heart beats.
        served.wait_for(lambda n=before: server.refused() > n + 4, 30)
        told = served.said("leader", state="lost")
        assert len(told) == round_, "once as long as it lasts"
        assert REASON in told[-1]["reason"]
        server.refuses(False)
        run.push(f"a.{round_}")
        reader.trained(reader.pull(round_))
    served.close()
    assert served.errors == []
    assert run.store.verify().findings == ()


def test_a_worker_waits_and_goes_on(server: Moody, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_stage.hurry(monkeypatch)
    monkeypatch.setattr(serving, "PAUSE_SECONDS", 0.05)
    stage = worker_stage.Stage(server.url)
    stage.allow(2)
    stage.announce(0)
    stage.sampler.gate.clear()
    stage.start()
    worker_stage.eventually(stage.sampler.sampling.is_set)
    server.refuses(True)
    stage.sampler.gate.set()
    # A sampled group is pushed until it is taken, and no ticket can be taken, kept or given back meanwhile.
    worker_stage.eventually(lambda: any(REASON in e.text for e in stage.told("waiting")))
    before = server.refused()
    worker_stage.eventually(lambda: server.refused() > before + 20)
    assert stage.thread is not None
    assert stage.thread.is_alive()
    server.refuses(False)
    worker_stage.eventually(lambda: len(stage.groups()) == 2)
    stage.finish()
    assert stage.raised is None
    stage.buffer.close()


def test_a_scorer_waits_and_goes_on(server: Moody) -> None:
    stage = scorer_stage.Stage(server.url, score={"one": {"reward": "scorer_stage:share_of_zeros"}})
    stage.writer.push(make_group(env="a", rewards=[None, None], needs=("reward",)))
    server.refuses(True)
    before = server.refused()
    stage.start()
    worker_stage.eventually(lambda: server.refused() > before + 2)
    assert all(thread.is_alive() for thread in stage.threads)
    server.refuses(False)
    worker_stage.eventually(lambda: stage.told("scored"))
    stage.finish()
    assert stage.raised is None
    stage.buffer.close()
