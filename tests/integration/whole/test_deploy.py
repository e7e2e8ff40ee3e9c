"""The page docs/guide/deploy.md with real runs: users of deploy/users.acl, TLS, clusters of one and three shards."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from authority import Authority
from everybody import UrlOf, do_everybodys_work
from own_server import OwnServer, free_port
from shards import Cluster

import rlbuffer
from rlbuffer.errors import PushRefused, ServerUnsuitable
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.member import Member
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.server.binary import ServerBinary
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.worker import WorkerStore
from rlbuffer.testing import make_group

ROOT = Path(__file__).parents[3]
ROLES = ("operator", "worker", "scorer", "trainer", "viewer")


@contextlib.contextmanager
def served(program: str | Path, folder: Path, *arguments: str | Path) -> Iterator[Path]:
    """A server of the test's own. -> its unix socket."""
    path = folder / "s.sock"
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [program, "--unixsocket", path, "--save", "", *arguments],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield path
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["embedded", "redis-server"])
def secured(request: pytest.FixtureRequest, home: Path, server_binary: ServerBinary) -> Iterator[UrlOf]:
    """A server with the project's own file of users: the embedded one, and the Redis of this machine (Debian: 7.0)."""
    program = server_binary.path if request.param == "embedded" else shutil.which(request.param)
    if program is None:
        pytest.skip(f"needs {request.param} on PATH")
    users = home / "users.acl"
    shutil.copy(ROOT / "deploy" / "users.acl", users)
    with served(program, home, "--port", "0", "--aclfile", users) as path:
        yield lambda role: f"unix://{role}:CHANGE-{role}@{path}?db=0"


@pytest.mark.server
def test_every_role_can_do_its_work_with_the_users_of_the_deploy_folder(secured: UrlOf, home: Path) -> None:
    do_everybodys_work(secured)


@pytest.mark.server
def test_who_may_load_no_script_goes_on_when_the_leader_has_loaded_them(secured: UrlOf) -> None:
    """A server that starts again has none of them."""
    with rlbuffer.connect(secured("operator"), run="math") as operator:
        operator.store.role(Member).open_run()
        with rlbuffer.connect(secured("worker"), run="math") as worker:
            client = worker.store.connection.client
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.script_load("while true do end")
            said: list[str] = []
            writer = worker.writer("w", on_retry=lambda error: said.append(str(error)))
            leader = threading.Timer(1.0, operator.store.role(LeaderStore).load_scripts)
            leader.start()
            assert writer.push(make_group(env="a")).entry_id
            leader.join()  # the push needs but two of the scripts that it loads
    assert (
        "refused: it has not the script of this move. The leading batcher (`rlbuffer serve`) loads them all" in said[0]
    )


FORBIDDEN = [
    ("viewer", lambda b: b.writer("w").push(make_group())),
    ("viewer", lambda b: b.store.role(OperatorStore).pause("a")),
    ("viewer", lambda b: b.store.connection.client.set("rlb:math:g:x", 1)),
    ("viewer", lambda b: b.store.connection.client.evalsha("0" * 40, 0)),
    ("worker", lambda b: b.store.connection.client.hset(b.store.keys.meta, "step", 0)),
    ("worker", lambda b: b.store.connection.client.delete(b.store.keys.pool)),
    ("worker", lambda b: b.store.connection.client.zadd(b.store.keys.garbage, {"x": 0})),
    ("worker", lambda b: b.store.connection.client.hgetall("rlb:math:g:x")),
    ("worker", lambda b: b.store.role(OperatorStore).pause("a")),
    ("worker", lambda b: b.store.role(LeaderStore).lease("thief", ttl_seconds=1)),
    ("worker", lambda b: b.store.role(TrainerStore).announce(1, rlbuffer.PolicyVersion(version=9))),
    ("worker", lambda b: b.store.role(OperatorStore).rewind(0, force=True)),
    ("trainer", lambda b: b.store.role(OperatorStore).pause("a")),
    ("trainer", lambda b: b.store.role(LeaderStore).lease("thief", ttl_seconds=1)),
    (
        "trainer",
        lambda b: b.store.role(WorkerStore).push(make_group(), producer="w", incarnation="u", sequence=1, epoch=1),
    ),
    *((role, lambda b: b.store.connection.client.get("somebody-elses")) for role in ROLES),
    *((role, lambda b: b.store.connection.client.keys("*")) for role in ROLES),
    *((role, lambda b: b.store.connection.client.flushall()) for role in ROLES),
    *((role, lambda b: b.store.connection.client.config_set("maxmemory", 1)) for role in ROLES),
    *((role, lambda b: b.store.connection.client.acl_list()) for role in ROLES),
]


@pytest.mark.server
def test_nobody_can_do_what_is_not_its_work(secured: UrlOf) -> None:
    with rlbuffer.connect(secured("operator"), run="math") as operator:
        operator.store.role(Member).open_run()
        operator.store.role(LeaderStore).load_scripts()
        before = operator.store.meta()
        for role, act in FORBIDDEN:
            with (
                rlbuffer.connect(secured(role), run="math") as buffer,
                pytest.raises(
                    (ServerUnsuitable, PushRefused, redis.exceptions.NoPermissionError),
                    match=r"(?i)no permissions|The user executing the script can't",
                ),
            ):
                act(buffer)
        assert operator.store.meta() == before
    wrong = secured("worker").replace("CHANGE-worker", "CHANGE-viewer")
    for url in (wrong, secured("worker").replace("worker:CHANGE-worker@", "")):
        with pytest.raises(ServerUnsuitable, match=r"does not allow this: "):
            rlbuffer.connect(url)


@pytest.mark.server
def test_telemetry_that_a_user_may_not_write_is_a_warning_and_ends_nobody(
    secured: UrlOf, caplog: pytest.LogCaptureFixture
) -> None:
    with rlbuffer.connect(secured("operator"), run="math") as operator:
        operator.store.role(Member).open_run()
        with rlbuffer.connect(secured("viewer"), run="math") as buffer:
            for _ in range(3):
                buffer.store.role(Member).heartbeat("worker", "w", {})
                buffer.store.role(TrainerStore).count_damaged(1, ["a/0"])
                buffer.store.role(WorkerStore).count_lost(1)
        refused = [record.getMessage().split(",")[0] for record in caplog.records if record.levelname == "WARNING"]
        assert refused == [
            f"not written to {{rlb:math}}:{key}" for key in ("workers", "ledger", "ledger")
        ]  # once by each role
        assert operator.store.heartbeats("worker") == {}


@pytest.mark.server
def test_every_role_can_do_its_work_on_a_cluster_of_three_shards(
    tmp_path: Path, server_binary: ServerBinary, users_file: Path
) -> None:
    with Cluster(tmp_path / "c", options={"aclfile": str(users_file)}) as cluster:
        users_file.write_text((ROOT / "deploy" / "users.acl").read_text())
        for node in cluster.nodes:
            node.ask("ACL", "LOAD")
        do_everybodys_work(lambda role: cluster.url.replace("://", f"://{role}:CHANGE-{role}@"))


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    """A file of users, empty still: everybody may do everything."""
    path = tmp_path / "users.acl"
    path.touch()
    return path


@pytest.mark.server
@pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("openssl")),
    reason="needs redis-server on PATH, for the bundled server has no TLS, and openssl to make certificates",
)
def test_a_run_over_tls_checks_the_servers_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.sign("server", names="DNS:localhost", end="20990101000000Z")
    port = free_port()
    options = {"tls-port": f"{port}", "tls-cert-file": f"{certificate}", "tls-key-file": f"{key}"}
    options |= {"tls-ca-cert-file": f"{authority.certificate}", "tls-auth-clients": "no"}
    with OwnServer(tmp_path / "server", program=shutil.which("redis-server"), options=options):
        trusting = f"rediss://localhost:{port}/0?ssl_ca_certs={authority.certificate}"
        do_everybodys_work(lambda role: trusting)
        for url, why in (
            (f"rediss://localhost:{port}/0", "self-signed certificate"),
            (trusting.replace("localhost", "127.0.0.1"), "IP address mismatch"),
        ):
            with pytest.raises(ServerUnsuitable, match=f"(?i){why}"):
                rlbuffer.connect(url, config=rlbuffer.BatcherConfig(256))
