"""Every refusal of weights and their servers that no other test of them shows."""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from weights_places import make_version

from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.weights import cache as cache_module
from rlbuffer.weights import download
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.serving import FileServer
from rlbuffer_cli.main import main

NAME = "v00000005-31432484b569"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_PAUSE_SECONDS", 0.01)


def refused(tmp_path: Path, url: str, **options: Any) -> str:
    """Message about a place."""
    policy = make_version(tmp_path / "trainer", 5)
    with pytest.raises(WeightsError) as caught:
        VersionCache(tmp_path / "cache", **options).localized(replace(policy, location=f"{url}/{NAME}"))
    return str(caught.value)


def answering(answer: web.Response) -> Iterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=answer.status, headers=answer.headers, body=answer.body)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    with FileServer(app, "127.0.0.1:0") as server:
        yield server.url


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (web.Response(status=401), "it wants another token: set RLBUFFER_WEIGHTS_TOKEN as at the trainer"),
        (web.Response(status=404, text="<html>"), "it does not have it"),
        (web.Response(status=404, text="gone"), "it does not have it (gone)"),
        (web.Response(status=500, text="<html>"), "HTTP 500"),
        (web.Response(status=302, headers={"Location": "http://elsewhere"}), "HTTP 302"),
        (web.Response(text=" " * (2**20 + 1)), "files.json is longer than 1048576 bytes"),
    ],
)
def test_a_place_that_gives_no_list_is_named_with_its_reason(tmp_path: Path, answer: web.Response, reason: str) -> None:
    for url in answering(answer):
        assert f"  {url}: {reason}\n" in refused(tmp_path, url)


def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weights_places import place

    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with place(tmp_path / "trainer") as trainer:
        said = refused(tmp_path, trainer.url)
        assert trainer.starts() == []
    total = sum(p.stat().st_size for p in (tmp_path / "trainer" / NAME).iterdir() if p.name != "files.json")
    assert (
        f"  {trainer.url}: {tmp_path / 'cache'} has 1000 bytes free, {total} are needed: choose another home\n"
    ) in said


def test_without_the_packages_for_it_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "rlbuffer.weights.download" or (name == "rlbuffer.weights" and "serving" in (rest[2] or ())):
            raise ImportError("no module of that name")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    policy = make_version(tmp_path / "trainer", 5)
    with pytest.raises(ConfigError) as caught:
        VersionCache(tmp_path / "cache").localized(replace(policy, location=f"http://127.0.0.1:9/{NAME}"))
    assert ".[weights]" in str(caught.value)
    assert main(["weights", "serve", "--listen", "127.0.0.1:0", "--home", str(tmp_path)]) == 3
    assert ".[weights]" in capsys.readouterr().err


def test_who_waits_for_another_processs_download_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    cache = VersionCache(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    stop.set()
    with cache._lock():
        assert refused(tmp_path, "http://127.0.0.1:9", stop=stop) == (
            "stopped while another process of this host was downloading"
        )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["weights", "serve"], 3, "Error: where should it listen? Give --listen HOST:PORT, or set weights.listen\n"),
        (
            ["weights", "serve", "--listen", "nowhere"],
            3,
            "Error: --listen weights.listen = 'nowhere': must be HOST:PORT, e.g. 127.0.0.1:9465\n",
        ),
    ],
)
def test_a_server_that_cannot_be_started_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--home", str(tmp_path)]) == code
    assert capsys.readouterr().err.endswith(message)
