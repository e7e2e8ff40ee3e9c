"""A server that holds little for a client (``client-output-buffer-limit``): pulls ask for less at once, or say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from own_server import OwnServer
from redis.backoff import NoBackoff
from redis.retry import Retry
from store_runs import Run, plan_of

from rlbuffer.client.step_pull import StepPull
from rlbuffer.errors import ServerUnsuitable
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.store import viewer
from rlbuffer.store.payloads import Trainable, read_rollouts

TOKENS, ROLLOUTS = 120_000, 12
"""13 MB on the wire, and a rollout takes 1.08 of them."""
pytestmark = pytest.mark.usefixtures("server_binary")


@contextmanager
def committed(folder: Path, limit: str) -> Iterator[Run]:
    """A run with one step, on a server that holds as much as `limit` for a client."""
    with OwnServer(folder / "server", options={"client-output-buffer-limit": f"normal {limit} 0 0"}) as server:
        run = Run(server.url, folder)
        run.lead()
        run.push("a.0", lengths=[TOKENS] * ROLLOUTS)
        plan = plan_of(run.pool(), 1, world_size=1)
        run.commit(world_size=1, plan=replace(plan.plan, row_tokens=TOKENS))
        yield run
        run.close()


def pulled(run: Run) -> Step:
    store = run.again()
    source = StepPull(store, 0, 1, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
    header = store.wait_step(1, block_seconds=0.0)
    assert header is not None
    step, damaged = source.step(header, source.part(header))
    assert not damaged
    return step


def test_a_step_of_three_times_what_the_server_holds_is_pulled(tmp_path: Path) -> None:
    with committed(tmp_path, "4mb") as run:
        in_place = [np.asarray(micro_batch.input_ids) for micro_batch in pulled(run)]
        store = run.again()
        (part,) = store.read_parts(1, [0])
        whole = [read for _, read in read_rollouts(store, part.rollouts, {}, Trainable())]
    assert len(in_place) == len(whole) == ROLLOUTS
    for read in whole:
        assert isinstance(read, Rollout)
        assert any(np.array_equal(read.tokens, tokens) for tokens in in_place)


def test_a_window_stays_narrow_so_that_the_next_step_breaks_nothing(tmp_path: Path) -> None:
    with committed(tmp_path, "4mb") as run:
        (part,) = run.store.read_parts(1, [0])
        first = run.store.read_payloads(part.rollouts)
        losses = run.store.connection.losses
        assert losses
        assert run.store.read_payloads(part.rollouts) == first
        assert run.store.connection.losses == losses


def test_a_rollout_above_what_the_server_holds_is_said_with_the_servers_setting(tmp_path: Path) -> None:
    with committed(tmp_path, "512kb") as run, pytest.raises(ServerUnsuitable) as error:
        pulled(run)
    assert "client-output-buffer-limit" in str(error.value)
    assert str(9 * TOKENS)[:3] in str(error.value)  # its size


def test_a_shard_that_nobody_listens_at_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that is asked who it is answers all along, as another shard does."""
    asked, away = viewer._asked, iter(range(8))

    def refused(*args: Any) -> list[Any]:
        if next(away, None) is not None:
            redis.Redis(port=1, retry=Retry(NoBackoff(), 0)).ping()
        return asked(*args)

    with committed(tmp_path, "0") as run:
        monkeypatch.setattr(viewer, "_asked", refused)
        assert len(pulled(run)) == ROLLOUTS
    assert next(away, None) is None
