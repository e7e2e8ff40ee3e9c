"""The command `rlbuffer` at a TLS server and at its sentinel that do not fit: refused with the reason, exit code 4."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from authority import Authority
from own_server import free_port
from pairs import Node
from watched import MISSING, SERVICE, sentinel

pytestmark = [pytest.mark.server, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} on PATH")]
DATA, WATCH = "data-s#cr@t", "watch-s#cr@t"
VALID, PAST = "20990101000000Z", "20200201000000Z"
KINDS = ("good", "expired")
"""Servers, each with a sentinel: in order; with a certificate of the past."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[Mapping[str, tuple[int, int]]]:
    """Kind -> TLS ports of its server and of its sentinel."""
    authority = Authority(folder / "ca")
    made: dict[str, tuple[int, int]] = {}
    with ExitStack() as ends:
        for kind in KINDS:
            end = PAST if kind == "expired" else VALID
            certificate, key = authority.sign(kind, names="IP:127.0.0.1", end=end)
            tls = {
                "tls-cert-file": f"{certificate}",
                "tls-key-file": f"{key}",
                "tls-ca-cert-file": f"{authority.certificate}",
                "tls-auth-clients": "no",
                "tls-replication": "yes",  # a sentinel asks its server so, too
            }
            made[kind] = free_port(), free_port()
            server = {"tls-port": f"{made[kind][0]}", "requirepass": f'"{DATA}"'} | tls
            ends.enter_context(Node(folder / kind, program=shutil.which("redis-server"), options=server))
            lines = {"tls-port": f"{made[kind][1]}", "requirepass": f'"{WATCH}"'} | tls
            lines["sentinel auth-pass"] = f'{SERVICE} "{DATA}"'
            at = folder / f"{kind}-sentinel"
            ends.enter_context(sentinel(at, made[kind][0], quorum=1, lines=lines))
        yield made


def call(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process, with the address and the password in its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLBUFFER_")}
    environment |= {"RLBUFFER_REDIS_URL": url, "RLBUFFER_REDIS_PASSWORD": DATA, "RLBUFFER_HOME": str(folder)}
    command = [sys.executable, "-m", "rlbuffer_cli", *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def address(ports: tuple[int, int], *, trusts: Path) -> str:
    options = f"ssl_ca_certs={trusts}&sentinel_password=watch-s%23cr%40t"
    return f"rediss+sentinel://127.0.0.1:{ports[1]}/{SERVICE}/0?{options}"


def test_a_mistake_ends_the_command_with_the_reason_and_code_4(
    folder: Path, ports: Mapping[str, tuple[int, int]]
) -> None:
    """The reasons are those of tests/integration/store/test_tls_mistakes.py."""
    called = call(folder, address(ports["expired"], trusts=folder / "ca" / "ca.crt"), "runs", "list")
    assert called.returncode == 4, called.stderr
    assert "its certificate is refused: certificate has expired" in called.stderr
    assert "RLBUFFER_REDIS_URL" in called.stderr
    assert "Traceback" not in called.stderr


def test_no_password_stands_in_what_a_refused_command_prints(
    folder: Path, ports: Mapping[str, tuple[int, int]]
) -> None:
    """Tracebacks too: of a login that is refused, and of a certificate."""
    good = address(ports["good"], trusts=folder / "ca" / "ca.crt")
    wrong, typed = good.replace("watch-s", "other-s"), good.replace("://", "://:typed-s%23cr%40t@")
    debugged = [(url, ("--debug",)) for url in (wrong, typed, good.replace("127.0.0.1", "localhost"))]
    for url, debug in (*debugged, (wrong, ())):
        called = call(folder, url, "runs", "list", *debug)
        assert called.returncode != 0
        said = called.stdout + called.stderr
        assert ("Traceback" in said) == bool(debug)
        assert [part for part in ("s#cr@t", "s%23cr%40t") if part in said] == []
