"""A cluster of three shards: payloads on all of them, and a run that goes on through what befalls one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from daemon_runs import Served
from own_server import OwnServer
from shards import Cluster
from store_call_rows import ROWS
from store_runs import Run, plan_of
from worker_stage import eventually

import rlbuffer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import LeaseLost, RlbufferError, ServerRefused, ServerUnreachable, ServerUnsuitable
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server.binary import ServerBinary
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.shards import slot_of_key
from rlbuffer_cli.main import main

pytestmark = pytest.mark.server
CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, max_age=1000, lookahead=1)


@pytest.fixture(scope="module")
def cluster(server_binary: ServerBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Iterator[Run]:
    made = Run(cluster.url, tmp_path)
    yield made
    made.close()


def refusal(url: str, home: Path) -> RlbufferError:
    with pytest.raises(RlbufferError) as caught:
        Connection(url, home=home, server=ServerSettings(), name="t", origin="--redis", patience_seconds=0)
    return caught.value


# -- address -----------------------------------------------------------------------------------------------------------
def test_any_node_of_the_address_leads_to_all_shards(cluster: Cluster, tmp_path: Path) -> None:
    for _ in range(4):  # in a drawn order
        url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[2].port}"
        with Connection(url, home=tmp_path, server=ServerSettings(), name="t") as made:
            ports = {server.connection_pool.connection_kwargs["port"] for server in made.servers()}
            assert ports == {node.port for node in cluster.nodes}
            assert made.address == url


def test_a_cluster_is_refused_by_the_address_of_one_of_its_servers(cluster: Cluster, tmp_path: Path) -> None:
    error = refusal(f"redis://127.0.0.1:{cluster.nodes[0].port}", tmp_path)
    assert type(error) is ServerUnsuitable
    assert "is a cluster of 3 shards. Write redis+cluster://HOST:PORT,HOST:PORT" in str(error)


def test_a_server_that_is_no_cluster_is_named(tmp_path: Path, server_binary: ServerBinary) -> None:
    with OwnServer(tmp_path / "one") as server:
        error = refusal(f"redis+cluster://127.0.0.1:{server.port}", tmp_path)
    assert type(error) is ServerUnreachable
    assert "is no node of a cluster (" in str(error)
    assert "The address of one server begins with redis:// or rediss://" in str(error)


def test_nodes_that_are_away_are_all_named(tmp_path: Path) -> None:
    error = refusal("redis+cluster://127.0.0.1:1,127.0.0.1:2", tmp_path)
    assert type(error) is ServerUnreachable
    assert "redis+cluster://127.0.0.1:1,127.0.0.1:2 (none of its nodes answers: connection refused)" in str(error)


# -- where things lie --------------------------------------------------------------------------------------------------
def test_payloads_lie_on_all_shards_and_control_keys_on_one(cluster: Cluster, run: Run) -> None:
    for n in range(30):
        run.push(f"a.{n}")
    run.step()
    names = [sorted(key.decode() for key in node.ask("KEYS", f"*rlb:{run.store.run}*")) for node in cluster.nodes]
    assert all(any(":g:" in name for name in its) for its in names)
    homes = [n for n, its in enumerate(names) if any(name.startswith("{") for name in its)]
    assert homes == [cluster.nodes.index(cluster.owner(run.store.keys.meta))]
    assert run.store.verify().findings == ()


def test_an_ask_for_everything_goes_to_the_shard_of_the_control_keys(run: Run) -> None:
    run.store.heartbeat("worker", "w", {})
    run.lead()
    run.store.set_allowances({"a": 1})
    asked = run.store.ask("a", 2, worker="w", beat={"version": 4}, ttl_seconds=60, size=None, section="")
    assert (asked.numbers, asked.is_heard) == ((0,), True)
    assert run.store.heartbeats("worker")["w"]["version"] == 4


def test_the_commands_work_on_a_cluster(
    cluster: Cluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLBUFFER_REDIS_URL", cluster.url)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = ["--run", run.store.run]
    run.step("a.0", "a.1")
    run.step("a.2")
    run.train(1)
    assert main(["config", "check"]) in (0, 3)
    assert main(["inspect", *name]) == 0
    assert main(["verify", *name]) == 0
    run.store.release_lease()
    assert main(["runs", "rewind", "1", *name, "--force", "--yes"]) == 0
    assert main(["verify", *name]) == 0
    assert main(["runs", "reset", run.store.run, "--yes"]) == 0
    assert run.payload_keys() == []
    capsys.readouterr()
    main(["doctor"])
    assert "replicas: 0, 0, 0" in capsys.readouterr().out


# -- a push in two halves on two shards --------------------------------------------------------------------------------
def test_the_leader_keeps_the_payload_of_a_producer_that_died_between_its_halves(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.store, "_make_permanent", lambda source, batch, replies: None)
    run.push("a.0")
    (entry,) = run.pool()
    assert run.client.pttl(entry.payload_key) > 0
    assert run.store.verify().findings == ()
    run.store.take_look()
    assert run.client.pttl(entry.payload_key) == -1


def test_a_sweep_passes_every_shard_and_leaves_what_became_pending_meanwhile(run: Run) -> None:
    for n in range(10):
        run.push(f"a.{n}")
    run.lead()
    strays = [run.store.keys.payload(f"b.{n}", "u.1") for n in range(20)]
    for key in strays:
        run.client.hset(key, "0", "nobody's")
        run.client.pexpire(key, 600_000)
    place, seen = run.store.payload_page(run.store.FIRST_PAGE)
    while place != run.store.FIRST_PAGE:
        place, more = run.store.payload_page(place)
        seen += more
    assert set(seen) == set(run.payload_keys()) >= set(strays)
    run.client.persist(strays[0])  # its push is pending now
    run.store.shorten_lives(strays, 1)
    run.client.persist(strays[1])  # gone, or just pending: never both
    eventually(lambda: all(run.client.pttl(key) < 0 for key in strays))
    there = [key for key in strays if run.client.exists(key)]
    assert strays[0] in there
    assert all(run.client.pttl(key) == -1 for key in there)
    assert run.store.expired(strays) == len(strays) - len(there) >= 18


def test_a_payload_that_was_swept_between_the_halves_is_stored_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = run.store._store_payloads, list[object]()

    def swept_at_first(pushes: list[object]) -> None:
        store(pushes)  # type: ignore[arg-type]
        for key in () if calls else run.payload_keys():
            run.client.delete(key)
        calls.append(pushes)

    monkeypatch.setattr(run.store, "_store_payloads", swept_at_first)
    run.push("a.0")
    assert run.payload_keys() == [entry.payload_key for entry in run.pool()]
    run.step("a.1")
    assert run.client.pttl(run.payload_keys()[0]) == -1
    assert run.store.verify().findings == ()


def test_a_payload_that_was_lost_between_the_halves_is_found_before_the_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run.store._store_payloads

    def lost(pushes: list[object]) -> None:
        store(pushes)  # type: ignore[arg-type]
        for key in run.payload_keys():
            run.client.delete(key)

    monkeypatch.setattr(run.store, "_store_payloads", lost)
    run.push("a.0")
    (entry,) = run.pool()
    reader = run.closes(rlbuffer.Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    served = Served(run)
    served.serve(CONFIG)
    served.wait_for(lambda: run.pool() == [])
    served.close()
    dropped = run.store.ledger().envs["a"].dropped
    assert {reason: amounts[0] for reason, amounts in dropped.items()} == {"invalid": entry.rollouts}
    assert run.store.meta().step == 0


# -- shards that fail --------------------------------------------------------------------------------------------------


def elsewhere(cluster: Cluster, run: Run) -> OwnServer:
    """A primary that has payloads and not the control keys."""
    home = cluster.owner(run.store.keys.meta)
    return next(node for node in map(cluster.owner, "abcdefghijkl") if node is not home)


def test_a_push_whose_shard_is_away_waits_for_it_however_often_it_has_to_ask(
    server_binary: ServerBinary, tmp_path: Path
) -> None:
    with Cluster(tmp_path / "c", options={"cluster-require-full-coverage": "no"}) as cluster:
        run = Run(cluster.url, tmp_path)
        home = cluster.owner(run.store.keys.meta)
        others = [node for node in cluster.nodes if node is not home]
        tries: list[RlbufferError] = []

        def retried(error: RlbufferError) -> None:
            tries.append(error)
            if len(tries) == 7:
                for node in others:
                    node.start()

        with rlbuffer.connect(run.url, run=run.store.run) as buffer:
            writer = buffer.writer("w", on_retry=retried)
            for node in others:  # the shard of the control keys answers all the while
                node.kill()
            groups = 0
            while not tries:  # a third of them lie with the control keys
                assert writer.push(rlbuffer.testing.make_group(env="a", group_id=f"a.{groups}")).status == "stored"
                groups += 1
        assert len(tries) >= 7
        assert len(run.pool()) == groups
        assert run.store.verify().findings == ()
        run.close()


@contextmanager
def moving(cluster: Cluster, key: str) -> Iterator[OwnServer]:
    """The slot of a key is about to move, and nothing of it has yet. -> the node that has it."""
    source = cluster.owner(key)
    target = next(node for node in cluster.nodes if node is not source)
    slot, (its, others) = slot_of_key(key), (node.ask("CLUSTER", "MYID").decode() for node in (source, target))
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", its)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", others)
    try:
        yield source
    finally:
        for node in (source, target):
            node.ask("CLUSTER", "SETSLOT", slot, "STABLE")


def test_a_slot_that_moves_is_waited_for_and_is_no_loss(cluster: Cluster, run: Run) -> None:
    connection, key = run.store.connection, "waited for"
    losses = connection.losses
    with moving(cluster, key), pytest.raises(ServerRefused, match="the cluster is moving the slot to another node"):
        connection.call(lambda: connection.client.get(key), patience_seconds=0.2)
    assert connection.call(lambda: connection.client.get(key)) is None
    assert connection.losses == losses


@pytest.mark.parametrize("name", ROWS)
def test_no_script_runs_while_the_slot_of_its_keys_moves(name: str, cluster: Cluster, tmp_path: Path) -> None:
    # A server lets one run whose keys are all there, and ends it at the first key that it has itself removed before.
    run = Run(cluster.url, tmp_path)
    ROWS[name].prepare(run)
    run.store.patience_seconds = 0.0
    before = run.control_keys()
    with moving(cluster, run.store.keys.meta) as node:
        node.ask("CONFIG", "RESETSTAT")
        with suppress(RlbufferError):
            ROWS[name].call(run.store, run)
        scripts = node.ask("INFO", "commandstats").get("cmdstat_evalsha")
    assert scripts is None or scripts["calls"] == 0
    assert scripts is None or run.control_keys() == before
    run.close()


def test_a_shard_of_payloads_that_comes_back_empty_loses_what_is_said_and_counted(
    server_binary: ServerBinary, tmp_path: Path
) -> None:
    with Cluster(tmp_path / "c", options={"appendonly": "no"}) as cluster:
        run = Run(cluster.url, tmp_path)
        groups = [f"a.{n}" for n in range(60)]  # a third of them on each shard, about
        run.step(*groups[:30])
        for group_id in groups[30:]:
            run.push(group_id)
        shard = elsewhere(cluster, run)
        lost = [entry for entry in run.pool() if cluster.owner(entry.payload_key) is shard]
        used = [ref for part in run.store.read_parts(1) for ref in part.rollouts]
        damaged = [ref for ref in used if cluster.owner(ref.payload_key) is shard]
        shard.kill()
        shard.start()
        cluster.wait_until_well()
        assert lost
        assert damaged
        reader = run.closes(rlbuffer.Reader(run.again(), rank=0, world_size=1, timeout_seconds=60))
        reader.start(0)
        step = next(iter(reader.steps()))
        assert sorted(step.damaged) == sorted(ref.info.rollout_id for ref in damaged)
        assert run.store.ledger().damaged == len(damaged)
        pending = run.pool()
        entries = {entry.entry_id: entry for entry in pending}
        with suppress(LeaseLost):  # the first word to the shard that was away
            run.store.pin(plan_of(pending, 2).rollouts, entries)
        run.lead()
        broken = run.store.pin(plan_of(pending, 2).rollouts, entries)
        assert broken == [entry.entry_id for entry in lost]
        run.close()
