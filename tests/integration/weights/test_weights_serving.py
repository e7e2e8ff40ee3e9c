"""The server of weights and its relays: read-only, complete versions only, fetched once for everybody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from weights_places import content, make_version, place

from rlbuffer.config.settings import RunSettings, WeightsSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.process import web_servers
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights import serving
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.files import load_state, open_weights, publish
from rlbuffer.weights.places import announced
from rlbuffer.weights.serving import FileServer, make_app, serve_beside

ANY = "127.0.0.1:0"


def at(policy: PolicyVersion, url: str) -> PolicyVersion:
    return replace(policy, location=f"{url}/{Path(policy.location).name}")


@contextmanager
def relay(folder: Path, upstream: str, token: str = "") -> Iterator[FileServer]:
    cache = VersionCache(folder, token=token)
    with FileServer(make_app(folder, upstream=upstream, cache=cache, token=token), ANY) as server:
        yield server


def test_what_a_trainer_publishes_is_loaded_from_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(home=tmp_path / "a", weights=WeightsSettings(listen=ANY, url="http://to.be.set/"))
    state = {"a.weight": torch.arange(6.0).reshape(2, 3)}
    policy = publish(settings.output_dir / "weights", 3, state=state, config={"model_type": "qwen3"}, keep=2)
    name = Path(policy.location).name
    assert announced(settings, policy.location) == f"http://to.be.set/{name}"
    assert announced(RunSettings(), policy.location) == policy.location
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "b"))
    with serve_beside(settings) as server:
        directory = open_weights(at(policy, server.url))
        assert httpx.get(server.url).json() == {"versions": [name], "relay": False}
    assert directory == tmp_path / "b" / "weights-cache" / name
    assert load_state(directory)["a.weight"].tolist() == state["a.weight"].tolist()


def test_a_file_is_given_in_ranges(tmp_path: Path) -> None:
    policy = make_version(tmp_path, 4)
    with FileServer(make_app(tmp_path), ANY) as server:
        url = f"{at(policy, server.url).location}/model.safetensors"
        answer = httpx.get(url, headers={"Range": "bytes=1000-"})
        assert (answer.status_code, answer.headers["Content-Range"]) == (206, "bytes 1000-2999999/3000000")
        assert answer.content == content(4)[1000:]
        assert httpx.get(url).content == content(4)
        assert httpx.get(url, headers={"Range": "bytes=3000000-"}).status_code == 416


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/../secret.txt",
        "/{name}/../../secret.txt",
        "/{name}/%2e%2e%2fsecret.txt",
        "/{name}/..%2f..%2fsecret.txt",
        "/{name}/link.txt",
        "/{name}/.hidden",
        "/{name}/folder",
        "/{name}/",
        "/.tmp-{name}/model.safetensors",
        "/v00000009-0123456789ab/model.safetensors",
        "/v00000008-0123456789ab/secret.txt",
    ],
)
def test_nothing_but_the_files_of_complete_versions_is_given(tmp_path: Path, path: str) -> None:
    policy = make_version(tmp_path / "weights", 4)
    directory = Path(policy.location)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "weights" / "secret.txt").write_text("secret")
    (directory / "link.txt").symlink_to(tmp_path / "secret.txt")
    (directory / ".hidden").write_text("secret")
    (directory / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.txt").write_text("secret")
    (tmp_path / "weights" / "v00000008-0123456789ab").symlink_to(tmp_path / "elsewhere")
    half = tmp_path / "weights" / f".tmp-{directory.name}"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with FileServer(make_app(tmp_path / "weights"), ANY) as server:
        answer = httpx.get(server.url + path.format(name=directory.name))
        assert answer.status_code == 404
        assert httpx.get(server.url).json()["versions"] == [directory.name]
        assert b"secret" not in answer.content.replace(b"secret.txt", b"")
        for method in ("PUT", "POST", "DELETE"):
            assert httpx.request(method, f"{server.url}/{directory.name}/config.json").status_code == 405


def test_with_a_token_nobody_reads_without_it(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 4)
    with FileServer(make_app(tmp_path / "trainer", token="s3cret"), ANY) as server:
        told = at(policy, server.url)
        for token in ("", "other"):
            with pytest.raises(WeightsError, match="it wants another token: set RLBUFFER_WEIGHTS_TOKEN as at the trai"):
                VersionCache(tmp_path / f"cache{token}", token=token).localized(told)
        assert httpx.get(server.url).status_code == 401
        local = VersionCache(tmp_path / "cache", token="s3cret").localized(told)
    assert open_weights(local) == Path(local.location)


def test_a_relay_asks_the_trainer_once_for_all_its_clients(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 4)
    with place(tmp_path / "trainer") as trainer, relay(tmp_path / "relay", trainer.url) as middle:
        trainer.gate = threading.Event()
        caches = [VersionCache(tmp_path / f"host-{n}", relay=middle.url) for n in range(3)]
        found: list[PolicyVersion] = []
        threads = [
            threading.Thread(target=lambda c=c: found.append(c.localized(at(policy, trainer.url)))) for c in caches
        ]
        for thread in threads:
            thread.start()
        trainer.gate.wait(0.5)
        trainer.gate.set()
        for thread in threads:
            thread.join()
        assert trainer.starts() == [0]
        assert httpx.get(middle.url).json() == {"versions": [Path(policy.location).name], "relay": True}
    assert [(Path(p.location) / "model.safetensors").read_bytes() == content(4) for p in found] == [True] * 3


def test_a_relay_of_a_relay_gives_the_same_bytes_with_the_same_token(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 4)
    with (
        FileServer(make_app(tmp_path / "trainer", token="t"), ANY) as trainer,
        relay(tmp_path / "first", trainer.url, "t") as first,
        relay(tmp_path / "second", first.url, "t") as second,
    ):
        cache = VersionCache(tmp_path / "host", relay=second.url, token="t")
        local = cache.localized(at(policy, "http://127.0.0.1:9"))  # the trainer itself is out of reach
    assert open_weights(local) == Path(local.location)


def test_a_relay_without_a_trainer_says_so_and_the_trainer_is_asked_directly(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 4)
    with place(tmp_path / "nothing") as empty, relay(tmp_path / "relay", empty.url) as middle:
        with pytest.raises(WeightsError) as caught:
            VersionCache(tmp_path / "a").localized(at(policy, middle.url))
        assert f"  {middle.url}: HTTP 502: the relay has not got it: " in str(caught.value)
        assert f"  {empty.url}: it does not have it" in str(caught.value)
        with FileServer(make_app(tmp_path / "trainer"), ANY) as trainer:
            local = VersionCache(tmp_path / "b", relay=middle.url).localized(at(policy, trainer.url))
    assert open_weights(local) == Path(local.location)


def test_an_address_that_is_taken_is_said_with_its_setting(tmp_path: Path) -> None:
    with FileServer(make_app(tmp_path), ANY) as server:
        listen = server.url.removeprefix("http://")
        with pytest.raises(ConfigError) as caught:
            FileServer(make_app(tmp_path), listen)
    assert caught.value.setting == "weights.listen"
    reason = f"error while attempting to bind on address ('127.0.0.1', {listen.rpartition(':')[2]}): "
    assert str(caught.value).lower() == (
        f"weights.listen = '{listen}' cannot be listened on ({reason}address already in use): choose another port, or "
        "stop what has it"
    )


def asking(server: FileServer, head: bytes) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=30)
    end.sendall(head)
    return end


def is_hung_up(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("head", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_request_that_does_not_come_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(web_servers, "REQUEST_SECONDS", 0.2)
    with FileServer(make_app(tmp_path), ANY) as server, asking(server, head) as end:
        assert is_hung_up(end)


def test_a_connection_is_kept_for_the_next_request_and_then_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_servers, "REQUEST_SECONDS", 0.5)
    with (
        FileServer(make_app(tmp_path), ANY) as server,
        asking(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as end,
    ):
        assert end.recv(4096).startswith(b"HTTP/1.1 200")
        end.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = end.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200")
        while answer:
            answer = end.recv(4096)


@pytest.mark.parametrize("limit", ["MOST_CONNECTIONS", "MOST_OF_A_HOST"])
def test_slow_clients_hold_a_bounded_number_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(web_servers, "REQUEST_SECONDS", 30.0)
    monkeypatch.setattr(serving, limit, 4)
    with FileServer(make_app(tmp_path), ANY) as server:
        slow = [asking(server, b"GET ") for _ in range(20)]
        assert sum(is_hung_up(end) for end in slow[4:]) == 16
        for end in slow:
            end.close()
        deadline = time.monotonic() + 30
        while True:  # the server hears that they went
            try:
                assert httpx.get(server.url).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
