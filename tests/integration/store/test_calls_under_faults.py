"""The calls of every role on a connection that breaks: before the request, after the work, after the reply.

Each call is made twice, on two runs that were prepared alike: undisturbed, and with the fault at its first, second, ...
request. The answers must be the same, and so must be what the server holds afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis
from alike import held, shape
from every_role import EveryRole
from faults import MOMENTS, CuttingProxy, primaries_of
from store_call_rows import ROWS, Row, calls_of
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import RlbufferError, ServerUnreachable
from rlbuffer.store.server.address import is_cluster
from rlbuffer.store.session import open_store
from rlbuffer.store.viewer import Viewer

PREFIX = f"t{uuid.uuid4().hex[:12]}"
"""Of the names of this process's runs."""

LOOKS = calls_of(Viewer) - {"read_pool", "headers", "wait_step", "read_parts", "read_fields", "sources", "heartbeats"}
"""A viewer's calls are all made of the same few looks: some of them stand for the others."""
SETTLING = ("push", "push_many", "push_rollouts")
"""Calls that in a cluster make further requests, which keep payloads, after the one that has the effect."""


@pytest.fixture(scope="module")
def proxy(redis_url: str) -> Iterator[CuttingProxy]:
    # A script that the server does not know yet costs requests of its own: all runs shall make the same ones.
    servers = primaries_of(redis_url) if is_cluster(redis_url) else [redis_url]
    for server in servers:
        with redis.Redis.from_url(server) as client:
            for path in (resources.files("rlbuffer.store") / "scripts").iterdir():
                if path.name.endswith(".lua"):
                    client.script_load(path.read_text(encoding="utf-8"))
    with CuttingProxy(redis_url) as made:
        yield made


def prepared(row: str, url: str, home: Path) -> Run:
    """A run as the call of a row needs it. Of the same name each time: in a cluster its payloads lie on the same
    shards then, and the call makes the same requests."""
    run = Run(url, home, f"{PREFIX}-{row}")
    run.renew()
    ROWS[row].prepare(run)
    return run


def test_every_call_of_every_role_has_a_row() -> None:
    assert ROWS.keys() == calls_of(EveryRole) | {"close", "server_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """A call without a fault."""

    answer: Any
    requests: int
    holds: Any
    """Control keys with their content, and how many payloads there are."""


@pytest.fixture(scope="module")
def undisturbed(proxy: CuttingProxy, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A row's name -> its call without a fault, made once for all moments."""

    @cache
    def make(name: str) -> Undisturbed:
        home = tmp_path_factory.mktemp("home")
        run = prepared(name, redis_url, home)
        store = through(proxy, run, home)
        proxy.strike(MOMENTS[0], 0)
        answer = shape(ROWS[name].call(store, run), run)
        made = Undisturbed(answer=answer, requests=proxy.seen, holds=held(run))
        store.close()
        run.close()
        return made

    return make


@pytest.mark.parametrize("name", [name for name in ROWS if name not in LOOKS])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_call_whose_connection_breaks(
    name: str,
    moment: str,
    proxy: CuttingProxy,
    undisturbed: Callable[[str], Undisturbed],
    redis_url: str,
    tmp_path: Path,
) -> None:
    row, control = ROWS[name], undisturbed(name)
    for nth in range(1, control.requests + 1):
        run = prepared(name, redis_url, tmp_path)
        store = through(proxy, run, tmp_path)
        proxy.strike(moment, nth)
        found = shape(called(row, store, run, moment, is_last=nth == control.requests), run)
        assert proxy.seen >= nth
        wanted = [control.answer]
        if moment in row.second and (nth == control.requests or (run.is_cluster and name in SETTLING)):
            wanted = [shape(row.second[moment], run), *(wanted if run.is_cluster else ())]
        assert found in wanted, f"request {nth} of {control.requests}"
        if not (row.counts_twice and moment == MOMENTS[1]):
            assert held(run) == control.holds, f"request {nth} of {control.requests}"
        if name not in ("delete_run", "reused"):  # the rows of `reused` are no true state of a run
            assert run.store.verify().findings == ()
        if name != "close":
            assert store.now() > 0
        store.close()
        run.close()


def called(row: Row, store: EveryRole, run: Run, moment: str, *, is_last: bool) -> Any:
    """The result of a call that is repeated after ServerUnreachable, as a writer or a person does."""
    try:
        return row.call(store, run)
    except ServerUnreachable:
        assert not row.repeats
        # A request after the one whose reply came through may find the connection broken.
        assert moment != MOMENTS[2] or not is_last
    try:
        return row.call(store, run)
    except RlbufferError as error:
        return type(error).__name__


def through(proxy: CuttingProxy, run: Run, home: Path) -> EveryRole:
    """A store of the run whose connections, one for reads that block and one for the rest, are open already."""
    store = open_store(EveryRole, proxy.url, run=run.store.run, home=home, server=ServerSettings())
    store.now()
    store.token = run.token  # it goes on as the same leader, and reads nothing again
    store.stream(f"nothing-{uuid.uuid4().hex}", "0", block_seconds=0.001)
    return store
