"""The command `rlbuffer` at sentinels over TLS that refuse it: no password stands in what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from authority import Authority
from own_server import free_port
from pairs import Node
from watched import MISSING, SERVICE, sentinel

pytestmark = [pytest.mark.server, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} on PATH")]
DATA, WATCH = "data-s#cr@t", "watch-s#cr@t"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of a sentinel with passwords, which the command can use."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.sign("good", names="IP:127.0.0.1", end="20990101000000Z")
    tls = {
        "tls-cert-file": f"{certificate}",
        "tls-key-file": f"{key}",
        "tls-ca-cert-file": f"{authority.certificate}",
        "tls-auth-clients": "no",
        "tls-replication": "yes",  # a sentinel asks its server so, too
    }
    server, asked = free_port(), free_port()
    options = {"tls-port": f"{server}", "requirepass": f'"{DATA}"'} | tls
    lines = {"tls-port": f"{asked}", "requirepass": f'"{WATCH}"'} | tls
    lines["sentinel auth-pass"] = f'{SERVICE} "{DATA}"'
    with (
        Node(tmp_path / "server", program=shutil.which("redis-server"), options=options),
        sentinel(tmp_path / "sentinel", server, quorum=1, lines=lines),
    ):
        trust = f"ssl_ca_certs={authority.certificate}&sentinel_password=watch-s%23cr%40t"
        yield f"rediss+sentinel://127.0.0.1:{asked}/{SERVICE}/0?{trust}"


def test_no_password_stands_in_what_a_refused_command_prints(tmp_path: Path, url: str) -> None:
    """Tracebacks too: of a login that is refused, and of a certificate."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLBUFFER_")}
    environment |= {"RLBUFFER_REDIS_PASSWORD": DATA, "RLBUFFER_HOME": str(tmp_path)}
    wrong, typed = url.replace("watch-s", "other-s"), url.replace("://", "://:typed-s%23cr%40t@")
    for at, debug in ((wrong, ("--debug",)), (url.replace("127.0.0.1", "localhost"), ("--debug",)), (typed, ())):
        called = subprocess.run(
            [sys.executable, "-m", "rlbuffer_cli", "runs", "list", *debug],
            env=environment | {"RLBUFFER_REDIS_URL": at},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert called.returncode != 0
        said = called.stdout + called.stderr
        assert ("Traceback" in said) == bool(debug)
        assert [part for part in ("s#cr@t", "s%23cr%40t") if part in said] == []
