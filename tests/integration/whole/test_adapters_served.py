"""LoRA adapters through a daemon and a trainer of the user's own: on a real server and in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import AdapterConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.store.verify.verify import verify
from rlbuffer.wire.checksum import sealed

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(
    64, step_groups=2, max_age=1, adapters={"x": AdapterConfig(batch_size=4), "y": AdapterConfig(batch_size=8)}
)


class Trainer:
    """Trains adapters: one optimizer each, which steps when the step's header says so."""

    def __init__(self, run: Run) -> None:
        self.buffer = Buffer(run.again(), settings=RunSettings())
        self.reader = run.closes(self.buffer.reader(timeout_seconds=20.0))
        self.reader.start(run.store.trainer().trained)
        self.optimizer_steps = Counter[str]()

    def announce(self, adapter: str, version: int) -> None:
        self.buffer.policy.announce(version, location="", size=0, checksum="", adapter=adapter)

    def train(self, steps: Iterator[rlbuffer.Step]) -> rlbuffer.Step:
        step = next(steps)
        for adapter, progress in step.adapters.items():
            if progress.ready_to_update:
                self.optimizer_steps[adapter] += 1
                self.announce(adapter, progress.step)
        self.reader.trained(step)
        return step


def push(run: Run, name: str, adapter: str = "", version: int = 0) -> None:
    run.push(f"a.{name}", version=version, adapter=adapter, lengths=(8, 8))


def told(step: rlbuffer.Step) -> dict[str, tuple[int, int, int, bool]]:
    return {a: (p.samples, p.tokens, p.step, p.ready_to_update) for a, p in step.adapters.items()}


def started(served: Served) -> tuple[Run, Trainer, Iterator[rlbuffer.Step]]:
    run = served.run
    trainer = Trainer(run)
    for adapter in ("x", "y"):
        trainer.announce(adapter, 0)
    served.serve(CONFIG)
    return run, trainer, trainer.reader.steps()


def test_a_trainer_of_ones_own_steps_each_optimizer_when_its_adapter_is_ready(served: Served) -> None:
    run, trainer, steps = started(served)
    for adapter in ("x", "y"):
        push(run, f"{adapter}0", adapter)
    first = trainer.train(steps)
    assert told(first) == {"x": (2, 16, 0, False), "y": (2, 16, 0, False)}
    samples = [sample for micro_batch in first for sample in micro_batch.samples]
    assert Counter(sample.adapter for sample in samples) == {"x": 2, "y": 2}
    for adapter in ("x", "y"):
        push(run, f"{adapter}1", adapter)
    second = trainer.train(steps)
    assert told(second) == {"x": (4, 32, 1, True), "y": (4, 32, 0, False)}
    assert trainer.optimizer_steps == {"x": 1}
    assert trainer.buffer.policy.current("x").version == 1
    assert trainer.buffer.policy.wait(1, timeout_seconds=5, adapter="x").adapter == "x"
    push(run, "x2", "x", version=0)
    push(run, "all", version=2)
    third = trainer.train(steps)
    assert told(third)["x"] == (6, 48, 1, False)
    assert told(third)[""] == (2, 16, 3, True)
    # Version 0 of x is one own step old there, though two steps of the run have passed since it was published.
    header = run.store.wait_step(3, block_seconds=0)
    assert header is not None
    assert header.max_age == 1
    assert {view.group_id: view.age for view in trainer.buffer.groups(where="adapter:x")} == {
        "a.x0": 0,
        "a.x1": 0,
        "a.x2": 1,
    }
    assert trainer.buffer.step(3).header.adapters["x"].gathered == 2
    assert verify(run.store).findings == ()


def test_verify_judges_an_adapter_by_its_own_age(served: Served) -> None:
    run, trainer, steps = started(served)
    for n in range(8):
        push(run, f"y{n}", "y")
    for _ in range(4):
        trainer.train(steps)
    # Step 4 trains version 0 of y, or 1: by the run's own count it would be 3 versions old.
    assert verify(run.store).findings == ()
    entry_id, fields = run.client.xrange(run.store.keys.steps, "4-0", "4-0")[0]
    older = sealed(fields[b"header"][:-4].replace(b"\xa7version\x01", b"\xa7version\x05"))
    assert older != fields[b"header"]
    run.client.xdel(run.store.keys.steps, entry_id)
    rest = run.client.xrange(run.store.keys.steps, "4-1", "4-9")
    for part, _ in rest:
        run.client.xdel(run.store.keys.steps, part)
    served.close()
    entries = run.client.xrange(run.store.keys.steps)
    run.client.delete(run.store.keys.steps)
    for other, its in [*entries, (entry_id, {**fields, b"header": older}), *rest]:
        run.client.xadd(run.store.keys.steps, its, id=other)
    found = [f.message for f in verify(run.store).findings if f.invariant == "I5"]
    assert found[0] == "step 4: rollout a.y6/0 has age 5, max_age of a was 1"


def test_a_takeover_and_a_step_taken_back_leave_every_adapter_where_its_last_step_has_it(served: Served) -> None:
    run, trainer, steps = started(served)
    for n in range(4):
        push(run, f"x{n}", "x")
        push(run, f"y{n}", "y")
        trainer.train(steps)
        if n == 1:
            served.stop()
            served.serve(CONFIG)
    assert {a: (p.samples, p.step) for a, p in trainer.buffer.step(4).header.adapters.items()} == {
        "x": (8, 2),
        "y": (8, 1),
    }
    run.store.void_from(2, force=True)
    assert [run.store.policy(adapter).version for adapter in ("x", "y")] == [-1, -1]
    again = Trainer(run)
    for adapter in ("x", "y"):
        again.announce(adapter, 0)
    again.announce("", 1)
    run.meta = run.store.meta()  # pushes are of the new epoch
    for n in range(4, 6):
        push(run, f"x{n}", "x")
        push(run, f"y{n}", "y")
    assert told(again.train(again.reader.steps())) == {"x": (4, 32, 1, True), "y": (4, 32, 0, False)}
