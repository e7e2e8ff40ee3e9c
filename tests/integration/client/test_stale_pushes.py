"""A push of rollouts that are too old to train: its outcome says by how much, and the writer warns of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from store_runs import Run

import rlbuffer
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def buffer(run: Run) -> Iterator[rlbuffer.Buffer]:
    """A run at step 3, whose next step takes versions from 2 on, and of env old from 0 on."""
    config = rlbuffer.BatcherConfig(64, max_age=1, envs={"old": rlbuffer.config.EnvConfig(max_age=3)})
    run.lead()
    run.store.set_config(config.as_dict(), "digest")
    for number in range(3):
        run.push(f"a.{number}")
        run.step()
    with rlbuffer.connect(run.url, run=run.store.run) as made:
        yield made


@pytest.mark.parametrize(
    ("env", "version", "stale_by"), [("a", 3, 0), ("a", 2, 0), ("a", 1, 1), ("a", 0, 2), ("old", 0, 0)]
)
def test_the_outcome_says_how_many_versions_too_old_a_group_is(
    buffer: rlbuffer.Buffer, env: str, version: int, stale_by: int
) -> None:
    writer = buffer.writer("w")
    group = make_group(env=env, seed=7, version=version)
    pushed = writer.push(group)
    assert (pushed.status, pushed.stale_by) == ("stored", stale_by)
    (again,) = writer.push_many([make_group(env=env, seed=8, version=version)])
    assert again.stale_by == stale_by


def test_the_writer_warns_of_it_and_not_at_each_push(buffer: rlbuffer.Buffer, caplog: pytest.LogCaptureFixture) -> None:
    writer = buffer.writer("w")
    with caplog.at_level(logging.WARNING, logger="rlbuffer.client.writer"):
        writer.push(make_group(env="a", seed=6, version=3))
        assert caplog.messages == []
        for seed in (7, 8, 9):
            writer.push(make_group(env="a", seed=seed, version=0))
    (said,) = caplog.messages
    assert said.startswith(
        "group a.7 of env a is too old to train, by 2 versions: policy version 0 sampled it, and step 4"
    )


def test_what_an_adapter_has_sampled_counts_steps_of_its_own(buffer: rlbuffer.Buffer) -> None:
    assert buffer.writer("w").push(make_group(env="a", seed=7, version=0, adapter="x")).stale_by == 0
