"""A short loop in which every role does all of its work, each under its own address."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from daemon_runs import leading

import rlbuffer
from rlbuffer.client.producer import Producer
from rlbuffer.store.member import Member
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.worker import WorkerStore

CONFIG = rlbuffer.BatcherConfig(256, step_groups=2, max_age=9)
UrlOf = Callable[[str], str]
"""Role -> the address that it uses."""


@contextlib.contextmanager
def batcher(url: str) -> Iterator[rlbuffer.Buffer]:
    """A batcher in a thread that leads by now."""
    with rlbuffer.connect(url, run="math") as buffer, leading(buffer, CONFIG):
        deadline = time.monotonic() + 30
        while not (buffer.store.runs() and buffer.store.heartbeats("batcher")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield buffer


def do_everybodys_work(url_of: UrlOf) -> None:
    """Two steps with every role under its own address, and what an operator does afterwards."""
    with batcher(url_of("operator")) as operator:
        with (
            rlbuffer.connect(url_of("trainer"), run="math") as trainer,
            rlbuffer.connect(url_of("worker"), run="math") as worker,
            rlbuffer.connect(url_of("scorer"), run="math") as scorer,
        ):
            reader = trainer.reader(timeout_seconds=60)
            reader.start()
            trainer.policy.announce(0, location="http://trainer/v0", size=1, checksum="c")
            writer = worker.writer("w")
            tickets = writer.take("a", 6, timeout_seconds=60)
            assert tickets
            writer.renew(tickets)
            for seed, ticket in enumerate(tickets[:-1]):
                writer.push(rlbuffer.testing.make_group(env="a", seed=seed, group_id=ticket.group_id))
            for seed in range(10, 16):
                writer.push(rlbuffer.testing.make_group(env="a", seed=seed))
            writer.release(tickets[-1:])
            worker.store.role(Member).heartbeat("worker", "w", {"env": "a"})
            worker.store.role(WorkerStore).count_lost(1)
            assert worker.store.role(WorkerStore).claim_evaluation("e", 0, owner="w", ttl_seconds=60)
            worker.store.role(WorkerStore).add_evaluation("e", 0, {"reward": 1.0})
            worker.store.role(WorkerStore).release_evaluation("e", 0, owner="w")
            worker.store.role(WorkerStore).note_visits("a", "p", "s")
            worker.store.role(WorkerStore).prompts_before("a", "now")
            worker.store.role(WorkerStore).note_prompts("a", "then")
            scorer.store.role(Member).heartbeat("scorer", "s", {"gives": ["ref_logprobs"]})
            waits = writer.push(rlbuffer.testing.make_group(env="a", seed=90, needs=["ref_logprobs"])).entry_id
            assert scorer.store.role(ScorerStore).claim_scoring([waits], owner="s", ttl_seconds=60)[0] == {waits}
            assert scorer.store.read_pool()
            producer = Producer(scorer.store.role(ScorerStore), "s", epoch=scorer.store.meta().epoch)
            assert producer.push([(rlbuffer.testing.make_group(env="a", seed=90), waits)])[0].entry_id
            scorer.store.role(ScorerStore).release_scoring([waits], owner="s")
            for step in reader.steps():
                assert step.rollouts == 8
                trainer.policy.announce(step.number, location="http://trainer/v", size=1, checksum="c")
                trainer.store.role(Member).heartbeat("rank", "0", {"pid": 1})
                trainer.store.role(TrainerStore).count_damaged(step.number, [])
                trainer.store.role(TrainerStore).count_damaged(step.number, ["a.0/0"])
                if step.number == 2:
                    reader.trained(step)
                    reader.checkpointed(2, oldest_kept=1)
                    break
            assert worker.policy.version == 2
        with rlbuffer.connect(url_of("viewer"), run="math") as viewer:
            assert viewer.verify().findings == ()
            assert viewer.ledger().total().trained[0] == 16
            assert viewer.step(2).header.step == 2
            assert viewer.group(viewer.groups("state=trained")[0].group_id)
            assert set(viewer.store.heartbeats("worker")) == {"w"}
            assert list(viewer.store.runs()) == ["math"]
        assert operator.store.role(OperatorStore).pause("a")
        assert operator.store.role(OperatorStore).resume("a")
    with rlbuffer.connect(url_of("operator"), run="math") as operator:
        operator.store.role(OperatorStore).rewind(2, force=True)
        assert operator.verify().findings == ()
        assert operator.store.role(OperatorStore).delete_run() > 0
        assert operator.store.runs() == {}
