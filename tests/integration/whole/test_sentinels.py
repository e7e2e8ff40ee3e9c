"""Real servers, and real sentinels that choose the primary among them: a run follows by itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from authority import Authority
from daemon_runs import Served
from looping import Looping
from own_server import free_port
from pairs import Node
from store_runs import Run
from watched import MISSING, SERVICE, Watched, sentinel

import rlbuffer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.daemon import watches
from rlbuffer.errors import RlbufferError, ServerUnreachable, ServerUnsuitable
from rlbuffer.store.server.connection import Connection
from rlbuffer_cli.main import main

pytestmark = [pytest.mark.server, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} on PATH")]
CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, max_age=1000, lookahead=1)
MORE_STEPS = 5
"""Trained between two faults."""
STEP_SECONDS = 0.05
"""Between two pushes. A replaced primary keeps a replica for a second, in which it acknowledges twenty steps."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(tmp_path_factory.mktemp("watched")) as made:
        yield made


def refusal(url: str, home: Path, patience_seconds: float = 0.0) -> RlbufferError:
    with pytest.raises(RlbufferError) as caught:
        Connection(
            url, home=home, server=ServerSettings(), name="t", origin="--redis", patience_seconds=patience_seconds
        )
    return caught.value


def test_a_connection_leads_to_the_primary_although_a_sentinel_is_away(watched: Watched, tmp_path: Path) -> None:
    url = watched.url.replace("://", "://127.0.0.1:1,127.0.0.1:2,")
    for _ in range(8):  # in a drawn order
        with Connection(url, home=tmp_path, server=ServerSettings(), name="t") as made:
            assert made.client.client_info()["laddr"] == f"127.0.0.1:{watched.primary.port}"
            assert made.address == url


def test_what_answers_and_names_no_primary_is_refused_at_once(watched: Watched, tmp_path: Path) -> None:
    asked, server = watched.sentinels[0].port, watched.primary.port
    cure = "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
    for url, words in (
        (f"redis+sentinel://127.0.0.1:{server}/{SERVICE}", ("is no sentinel", f":{server}")),
        (f"redis://127.0.0.1:{asked}/0", ("it is a sentinel", f":{asked}/0", cure, f"{SERVICE}.")),
        (f"redis://127.0.0.1:{asked}/1", ("it is a sentinel", f":{asked}/1", cure)),
    ):
        error = refusal(url, tmp_path, patience_seconds=60.0)
        assert type(error) is ServerUnsuitable
        assert [word for word in (*words, "--redis") if word not in str(error)] == []
        assert error.exit_code == 4


@pytest.mark.parametrize("place", ["127.0.0.1:1,127.0.0.1:2/math", "127.0.0.1:1,{asked}/other"])
def test_sentinels_that_name_no_primary_are_waited_for_and_all_named(
    watched: Watched, tmp_path: Path, place: str
) -> None:
    url = f"redis+sentinel://{place.format(asked=f'127.0.0.1:{watched.sentinels[0].port}')}"
    error = refusal(url, tmp_path)
    assert type(error) is ServerUnreachable
    named = ", ".join(url.partition("//")[2].partition("/")[0].split(","))
    assert f"none of its sentinels ({named}) names a primary of" in str(error)
    assert "`rlbuffer doctor`" in str(error)


def test_tls_and_the_logins_of_both_sides(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.sign("both", names="IP:127.0.0.1", end="20990101000000Z")
    tls = {
        "tls-cert-file": f"{certificate}",
        "tls-key-file": f"{key}",
        "tls-ca-cert-file": f"{authority.certificate}",
        "tls-auth-clients": "no",
        "tls-replication": "yes",  # a sentinel asks its servers so, too
    }
    ports = free_port(), free_port()
    server = {"tls-port": f"{ports[0]}", "requirepass": "data-secret"} | tls
    lines = {"tls-port": f"{ports[1]}", "requirepass": "sentinel-secret"} | tls
    lines["sentinel auth-pass"] = f"{SERVICE} data-secret"
    place, trust = f"127.0.0.1:{ports[1]}/{SERVICE}", f"ssl_ca_certs={authority.certificate}"
    with (
        Node(tmp_path / "server", program=shutil.which("redis-server"), options=server),
        sentinel(tmp_path / "sentinel", ports[0], quorum=1, down_seconds=60, lines=lines),
    ):
        url = f"rediss+sentinel://{place}?{trust}&sentinel_password=sentinel-secret"
        with Connection(url, home=tmp_path, server=ServerSettings(), name="t", password=lambda: "data-secret") as made:
            assert made.client.client_info()["laddr"] == f"127.0.0.1:{ports[0]}"
            assert made.address == url.replace("sentinel-secret", "***")
        for wrong, kind in 4 * (  # what a server of TLS 1.3 sends unasked comes before the question, or behind it
            (url, ServerUnsuitable),
            (f"rediss+sentinel://:data-secret@{place}?{trust}", ServerUnreachable),
            (f"rediss+sentinel://:data-secret@{place}?sentinel_password=sentinel-secret", ServerUnsuitable),
        ):
            error = refusal(wrong, tmp_path)
            assert type(error) is kind, error
            assert "-secret" not in str(error)


def test_the_commands_take_the_address(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLBUFFER_REDIS_URL", watched.url.replace("://", "://127.0.0.1:1,"))
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = Run(watched.url, tmp_path)
    served = Served(run)
    served.serve(CONFIG)
    served.wait_for(lambda: main(["alive", "batcher", "--run", run.store.run]) == 0)
    served.close()
    run.close()
    capsys.readouterr()
    assert main(["config", "check"]) in (0, 3)
    assert "redis_url" not in capsys.readouterr().out
    main(["doctor"])
    said = capsys.readouterr().out
    primary = f"127.0.0.1:{watched.primary.port}"
    assert f'primary of "math": {primary}, by 3 sentinels of 4' in said
    assert "127.0.0.1:1: connection refused" in said
    assert "replicas: 2, min-replicas-to-write 1" in said
    monkeypatch.setenv("RLBUFFER_REDIS_URL", f"redis://127.0.0.1:{watched.sentinels[0].port}/0")
    assert main(["inspect"]) == 4
    main(["doctor"])
    assert "holds no data: it is a sentinel" in capsys.readouterr().out


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path / "own") as made:
        yield made


def test_what_was_written_on_a_fresh_connection_is_read_from_the_same_server(own: Watched, tmp_path: Path) -> None:
    """In a planned failover: the old primary goes on as one for ten seconds."""
    with Connection(own.url, home=tmp_path, server=ServerSettings(), name="t") as made:
        made.call(lambda: made.client.get("k"))
        own.fail_over()
        losses = made.losses
        made.call(lambda: made.blocking.set("k", "v"))
        assert made.call(lambda: made.client.get("k")) == b"v"
        assert made.losses == losses + 1


def test_a_run_goes_on_through_a_planned_failover_and_the_death_of_the_primary(own: Watched, tmp_path: Path) -> None:
    run = Run(own.url, tmp_path)
    served = Served(run, word_seconds=watches.ATTEMPT_SECONDS)
    served.serve(CONFIG)
    loop = run.closes(Looping(run, STEP_SECONDS))

    def goes_on() -> None:
        enough = len(loop.trained) + MORE_STEPS
        served.wait_for(lambda: loop.errors or len(loop.trained) >= enough, 20)
        assert not loop.errors

    goes_on()
    first = own.primary
    own.fail_over()
    goes_on()
    with redis.Redis(port=first.port) as old:
        old_role = old.execute_command("ROLE")[0]
    own.settle()
    second, away = own.primary, own.sentinels.pop()
    away.kill()
    second.kill()
    own.promote()
    goes_on()
    loop.close()
    served.close()
    assert old_role == b"master", "it went on as a primary, and nobody stayed with it"
    assert own.primary is not second
    assert set(loop.uses.values()) == {1}, loop.uses
    assert served.errors == []
    report = run.store.verify()
    assert report.findings == ()
    assert run.store.connection.call(lambda: run.client.client_info()["laddr"]).endswith(f":{own.primary.port}")
    run.close()
