"""TLS set up wrongly: the message says what is wrong and what to write, and never to start a server."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from authority import Authority
from own_server import OwnServer

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError, RlbufferError, ServerUnreachable
from rlbuffer.store.server import connection
from rlbuffer.store.server.connection import Connection


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    return Authority(tmp_path_factory.mktemp("ca") / "ca")


@contextlib.contextmanager
def endpoint(certificate: tuple[Path, Path]) -> Iterator[int]:
    """Speaks TLS on a port, and hangs up after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                with contextlib.suppress(OSError), end, context.wrap_socket(end, server_side=True):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def refusal(url: str, home: Path) -> RlbufferError:
    with pytest.raises(RlbufferError) as caught:
        Connection(url, home=home, server=ServerSettings(), name="test", origin="--redis", patience_seconds=0.0)
    assert "docker" not in str(caught.value)
    return caught.value


def test_an_address_without_tls_for_a_port_with_it_is_named(authority: Authority, home: Path) -> None:
    with endpoint(authority.sign("a", names="IP:127.0.0.1", end="20990101000000Z")) as port:
        error = refusal(f"redis://127.0.0.1:{port}", home)
    assert type(error) is ServerUnreachable
    assert "write rediss in place of redis" in str(error)


def test_an_address_with_tls_for_a_port_without_it_is_named(
    server_binary: object, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_SECONDS", 0.5)  # such a server waits for the rest of a command
    with OwnServer(tmp_path / "server") as server:
        error = refusal(f"rediss://127.0.0.1:{server.port}", home)
    assert "write redis in place of rediss" in str(error)


def test_files_and_checks_that_do_not_exist_are_named(tmp_path: Path, home: Path) -> None:
    empty = tmp_path / "empty.crt"
    empty.write_text("nothing")
    url = "rediss://127.0.0.1:1?ssl_ca_certs=/nowhere/ca.crt"
    assert "/nowhere/ca.crt" in str(refusal(url, home))
    url = "rediss://127.0.0.1:1?ssl_cert_reqs=maybe"
    error = refusal(url, home)
    assert isinstance(error, ConfigError)
    assert "ssl_cert_reqs=maybe" in str(error)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        error = refusal(f"rediss://127.0.0.1:{listener.getsockname()[1]}?ssl_ca_certs={empty}", home)
    assert "the file of ssl_ca_certs holds no certificate" in str(error)


@pytest.mark.parametrize("loose", ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=false"])
def test_a_server_that_is_not_checked_is_warned_of(
    authority: Authority, home: Path, loose: str, caplog: pytest.LogCaptureFixture
) -> None:
    with endpoint(authority.sign(loose[-5:], names="IP:127.0.0.1", end="20990101000000Z")) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.certificate}&{loose}"
        with caplog.at_level(logging.WARNING), pytest.raises(RlbufferError):  # the endpoint hangs up
            Connection(url, home=home, server=ServerSettings(), name="test", patience_seconds=0.0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rlbuffer.store.server.connection"]
    assert (url in said, f"({loose})" in said) == (True, True)
