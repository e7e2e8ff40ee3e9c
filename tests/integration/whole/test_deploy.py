"""The page docs/guide/deploy.md with real runs: users of deploy/users.acl, TLS, clusters of one and three shards."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from shards import Cluster

import rlbuffer
from rlbuffer.daemon import Daemon
from rlbuffer.errors import ServerUnsuitable
from rlbuffer.store.backup.backup import write_backup
from rlbuffer.store.backup.restore import restore_backup
from rlbuffer.store.server.binary import ServerBinary

ROOT = Path(__file__).parents[3]
ROLES = ("operator", "worker", "scorer", "trainer", "viewer")
CONFIG = rlbuffer.BatcherConfig(256, step_groups=2, max_age=9)

UrlOf = Callable[[str], str]
"""Role -> the address that it uses."""


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


@contextlib.contextmanager
def batcher(url: str) -> Iterator[rlbuffer.Buffer]:
    """A leading batcher in a thread; what it raised is raised at the end."""
    stop, errors = threading.Event(), []
    with rlbuffer.connect(url, run="math") as buffer:

        def lead() -> None:
            try:
                Daemon(buffer, CONFIG, lease_seconds=2.0).run(stop)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=lead)
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not (buffer.store.runs() and buffer.store.heartbeats("batcher")):
                assert not errors, errors
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield buffer
        finally:
            stop.set()
            thread.join(timeout=30)
            assert errors == []


def do_everybodys_work(url_of: UrlOf, folder: Path) -> None:
    """Two steps with every role under its own address, and what an operator does afterwards."""
    with batcher(url_of("operator")) as operator:
        with (
            rlbuffer.connect(url_of("trainer"), run="math") as trainer,
            rlbuffer.connect(url_of("worker"), run="math") as worker,
            rlbuffer.connect(url_of("scorer"), run="math") as scorer,
        ):
            reader = trainer.reader(timeout_seconds=60)
            reader.start()
            trainer.policy().announce(0, location="http://trainer/v0", size=1, checksum="c")
            writer = worker.writer("w")
            tickets = writer.take("a", 6, timeout_seconds=60)
            assert tickets
            writer.renew(tickets)
            for seed, ticket in enumerate(tickets[:-1]):
                writer.push(rlbuffer.make_group(env="a", seed=seed, group_id=ticket.group_id))
            for seed in range(10, 16):
                writer.push(rlbuffer.make_group(env="a", seed=seed))
            writer.release(tickets[-1:])
            worker.heartbeat("worker", "w", {"env": "a"})
            worker.store.count_lost(1)
            assert worker.store.claim_evaluation("e", 0, owner="w", ttl_seconds=60)
            worker.store.add_evaluation("e", 0, {"reward": 1.0})
            worker.store.release_evaluation("e", 0, owner="w")
            worker.store.note_visits("a", "p", "s")
            scorer.heartbeat("scorer", "s", {"gives": ["ref_logprobs"]})
            waits = writer.push(rlbuffer.make_group(env="a", seed=90, needs=["ref_logprobs"])).entry_id
            assert scorer.store.claim_scoring([waits], owner="s", ttl_seconds=60)[0] == {waits}
            assert scorer.store.read_pool()
            assert scorer.writer("s").replace(rlbuffer.make_group(env="a", seed=90), waits).entry_id
            scorer.store.release_scoring([waits], owner="s")
            for step in reader.steps():
                assert step.rollouts == 8
                trainer.policy().announce(step.number, location="http://trainer/v", size=1, checksum="c")
                trainer.heartbeat("rank", "0", {"pid": 1})
                trainer.store.count_damaged(step.number, [])
                trainer.store.count_damaged(step.number, ["a.0/0"])
                if step.number == 2:
                    reader.trained(step)
                    reader.checkpointed(2, oldest_kept=1)
                    break
            assert worker.policy().current().version == 2
        with rlbuffer.connect(url_of("viewer"), run="math") as viewer:
            assert viewer.verify().findings == ()
            assert viewer.ledger().total().trained[0] == 16
            assert viewer.step(2).header.step == 2
            assert viewer.group(viewer.groups("state=trained")[0].group_id)
            assert set(viewer.store.heartbeats("worker")) == {"w"}
            assert list(viewer.store.runs()) == ["math"]
        assert operator.store.pause("a")
        assert operator.store.resume("a")
    with rlbuffer.connect(url_of("operator"), run="math") as operator:
        write_backup(operator.store, folder / "math.backup")
        with rlbuffer.connect(url_of("operator"), run="copy") as copy:
            restore_backup(copy.store, folder / "math.backup")
            assert copy.verify().findings == ()
            assert copy.store.delete_run() > 0
        operator.store.rewind(2, force=True)
        assert operator.verify().findings == ()
        assert operator.store.delete_run() > 0
        assert operator.store.runs() == {}


@pytest.mark.server
def test_every_role_can_do_its_work_with_the_users_of_the_deploy_folder(secured: UrlOf, home: Path) -> None:
    do_everybodys_work(secured, home)


FORBIDDEN = [
    ("viewer", lambda b: b.writer("w").push(rlbuffer.make_group())),
    ("viewer", lambda b: b.store.pause("a")),
    ("viewer", lambda b: b.store.connection.client.set("rlb:math:g:x", 1)),
    ("viewer", lambda b: b.store.connection.client.evalsha("0" * 40, 0)),
    ("worker", lambda b: b.store.connection.client.hset(b.store.keys.meta, "step", 0)),
    ("worker", lambda b: b.store.connection.client.delete(b.store.keys.pool)),
    ("worker", lambda b: b.store.connection.client.zadd(b.store.keys.garbage, {"x": 0})),
    ("worker", lambda b: b.store.connection.client.hgetall("rlb:math:g:x")),
    ("worker", lambda b: b.store.pause("a")),
    ("worker", lambda b: b.store.lease("thief", ttl_seconds=1)),
    ("worker", lambda b: b.store.announce(1, rlbuffer.PolicyVersion(version=9))),
    ("worker", lambda b: b.store.rewind(0, force=True)),
    ("trainer", lambda b: b.store.pause("a")),
    ("trainer", lambda b: b.store.lease("thief", ttl_seconds=1)),
    ("trainer", lambda b: b.store.push(rlbuffer.make_group(), producer="w", incarnation="u", sequence=1, epoch=1)),
    *((role, lambda b: b.store.connection.client.get("somebody-elses")) for role in ROLES),
    *((role, lambda b: b.store.connection.client.keys("*")) for role in ROLES),
    *((role, lambda b: b.store.connection.client.flushall()) for role in ROLES),
    *((role, lambda b: b.store.connection.client.config_set("maxmemory", 1)) for role in ROLES),
    *((role, lambda b: b.store.connection.client.acl_list()) for role in ROLES),
]


@pytest.mark.server
def test_nobody_can_do_what_is_not_its_work(secured: UrlOf) -> None:
    with rlbuffer.connect(secured("operator"), run="math") as operator:
        operator.store.open_run()
        before = operator.store.meta()
        for role, act in FORBIDDEN:
            with (
                rlbuffer.connect(secured(role), run="math") as buffer,
                pytest.raises(
                    (ServerUnsuitable, redis.exceptions.NoPermissionError),
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
        operator.store.open_run()
        with rlbuffer.connect(secured("viewer"), run="math") as buffer:
            for _ in range(3):
                buffer.heartbeat("worker", "w", {})
                buffer.store.set_waiting("rank 0", "a step")
                buffer.store.count_damaged(1, ["a/0"])
                buffer.store.count_lost(1)
        refused = [record.getMessage().split(",")[0] for record in caplog.records if record.levelname == "WARNING"]
        assert refused == [f"not written to {{rlb:math}}:{key}" for key in ("workers", "waiting", "ledger")]
        assert operator.store.heartbeats("worker") == {}


@pytest.mark.server
def test_a_whole_run_lives_on_a_cluster_of_one_shard(home: Path, server_binary: ServerBinary) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        arguments.append(str(probe.getsockname()[1]))
    with (
        served(server_binary.path, home, *arguments) as path,
        redis.Redis(unix_socket_path=str(path), protocol=3) as admin,
    ):
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + 30
        while admin.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        do_everybodys_work(lambda role: f"redis://127.0.0.1:{port}/0", home)


@pytest.mark.server
def test_every_role_can_do_its_work_on_a_cluster_of_three_shards(
    tmp_path: Path, server_binary: ServerBinary, users_file: Path
) -> None:
    with Cluster(tmp_path / "c", options={"aclfile": str(users_file)}) as cluster:
        users_file.write_text((ROOT / "deploy" / "users.acl").read_text())
        for node in cluster.nodes:
            node.ask("ACL", "LOAD")
        do_everybodys_work(lambda role: cluster.url.replace("://", f"://{role}:CHANGE-{role}@"), tmp_path)


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    """A file of users, empty still: everybody may do everything."""
    path = tmp_path / "users.acl"
    path.touch()
    return path


# -- TLS: the bundled server is built without, so a TLS endpoint stands before it, as stunnel or a load balancer would -


@contextlib.contextmanager
def tls_endpoint(target: Path, certificate: Path, key: Path) -> Iterator[int]:
    """Takes TLS connections and forwards them to a unix socket. -> its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(target)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(forward, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(end(), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def certificate(home: Path) -> tuple[Path, Path]:
    """A self-signed certificate of localhost, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl program to make a certificate")
    files = home / "server.crt", home / "server.key"
    names, out = ("-addext", "subjectAltName=DNS:localhost"), ("-out", files[0], "-keyout", files[1])
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            *names,
            *out,
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.mark.server
def test_a_run_over_tls_checks_the_servers_certificate(
    home: Path, server_binary: ServerBinary, certificate: tuple[Path, Path]
) -> None:
    with (
        served(server_binary.path, home, "--port", "0") as path,
        tls_endpoint(path, *certificate) as port,
    ):
        trusting = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate[0]}"
        do_everybodys_work(lambda role: trusting, home)
        for url, why in (
            (f"rediss://localhost:{port}/0", "self-signed certificate"),
            (trusting.replace("localhost", "127.0.0.1"), "IP address mismatch"),
        ):
            config = rlbuffer.BatcherConfig(256)
            with pytest.raises(ServerUnsuitable, match=f"(?i){why}"):
                rlbuffer.connect(url, config=config)
