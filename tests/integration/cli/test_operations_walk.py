"""The page docs/guide/operate.md as somebody new to it types it, where one command decides what the next one needs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import waits
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting

pytest_plugins = ("store_fixtures",)

Call = Callable[[str], tuple[int, str, str]]
CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, lookahead=0, max_age=8)


@pytest.fixture
def served(run: Run) -> Iterator[Served]:
    made = Served(run)
    yield made
    made.close()


@pytest.fixture
def call(typed: Call) -> Call:
    return lambda line: typed(*shlex.split(line.removeprefix("rlbuffer ")))


def make_two_steps(served: Served) -> None:
    """Step 1 is trained, step 2 committed, and nobody is there any more."""
    run = served.run
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 60)
    for trained in (0, 1):
        run.push(f"a.{trained}")
        run.store.report(number, epoch=run.meta.epoch, trained=trained, digest="", oldest_kept=0)
        served.wait_for(lambda step=trained + 1: run.store.meta().step == step, 60)
    served.stop()


def test_until_a_trainer_comes_back_the_batcher_says_that_none_has_come(served: Served) -> None:
    run = served.run
    make_two_steps(served)
    run.store.rewind(2, force=True)
    served.serve(CONFIG)
    gone = Waiting(kind=Wait.TRAINER_GONE, step=2, trained=1)
    served.wait_for(lambda: waits.said(run.store) == gone, 60)
    run.store.attempt(uuid="again", world_size=1, resume_step=1)
    busy = Waiting(kind=Wait.TRAINER_BUSY, step=2, trained=1)
    served.wait_for(lambda: waits.said(run.store) == busy, 60)


def test_the_checkpoints_that_void_names_are_all_that_the_trainer_may_not_take(
    run: Run, call: Call, tmp_path: Path
) -> None:
    for n in range(3):
        run.step(f"a.{n}")
    folder = tmp_path / "home" / "runs" / run.store.run / "checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}").mkdir(parents=True)
    code, out, _ = call(f"rlbuffer runs void 2 --run {run.store.run} --redis {run.url}")
    assert code == 0
    assert out.endswith(
        f"; void: 2 steps, 0 pending pushes. Move newer checkpoints away ({folder / 'step-00000002'}, "
        f"{folder / 'step-00000003'}), then "
        "start the trainer again.\n"
    )
    with pytest.raises(rlbuffer.errors.RunGone):
        run.store.attempt(uuid="t", world_size=1, resume_step=2)
    assert run.store.attempt(uuid="t", world_size=1, resume_step=1).checkpoint == 1
