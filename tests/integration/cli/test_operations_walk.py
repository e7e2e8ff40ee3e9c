"""The page docs/guide/operate.md as somebody new to it types it, where one command decides what the next one needs."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from store_runs import Run

import rlbuffer

pytest_plugins = ("store_fixtures",)

Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(typed: Call) -> Call:
    return lambda line: typed(*shlex.split(line.removeprefix("rlbuffer ")))


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
    run.store.attempt(uuid="t", world_size=1, resume_step=1)
    assert run.store.trainer().checkpoint == 1
