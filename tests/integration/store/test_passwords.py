"""A password reaches the server and nobody else: no command line, no output, no error message."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
import redis
from own_server import OwnServer

import rlbuffer
from rlbuffer.config.loading import load
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, ServerUnsuitable
from rlbuffer_cli.main import main

SECRET = "s#3/cr@t?&:%41"
CONFIG = """
[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 64

[worker.repeat]
env = "repeat"
"""
PROGRAM = [sys.executable, "-m", "rlbuffer_cli"]


@pytest.fixture(scope="module")
def server(server_binary: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    options = {"maxmemory": "256mb", "maxmemory-policy": "noeviction"}
    with OwnServer(tmp_path_factory.mktemp("server"), options=options) as made:
        with redis.Redis(port=made.port) as client:
            client.config_set("requirepass", SECRET)
        yield made


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RLBUFFER_REDIS")]:
        monkeypatch.delenv(name)


def test_a_password_comes_from_the_address_a_variable_or_a_file(
    server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = server.url.replace("redis://", f"redis://:{quote(SECRET, safe='')}@")
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    with rlbuffer.connect(quoted, run="p") as buffer:
        assert buffer.store.now() > 0
    with rlbuffer.connect(server.url, run="p", config={"redis_password_file": file}) as buffer:
        assert buffer.store.now() > 0
    monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD_FILE", str(file))
    with rlbuffer.connect(server.url, run="p") as buffer:
        assert buffer.store.now() > 0
    file.write_text("wrong")
    with pytest.raises(ServerUnsuitable) as caught:
        rlbuffer.connect(server.url, run="p")
    assert "RLBUFFER_REDIS_PASSWORD" in str(caught.value)
    monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", SECRET)
    with rlbuffer.connect(server.url.replace("redis://", "redis://default@"), run="p") as buffer:
        assert buffer.store.now() > 0


def test_a_password_file_is_read_again_at_every_new_connection(server: OwnServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    with (
        rlbuffer.connect(server.url, run="p", config={"redis_password_file": file}) as buffer,
        redis.Redis(port=server.port, password=SECRET) as admin,
    ):
        try:
            file.write_text("rotated", encoding="utf-8-sig")
            admin.config_set("requirepass", "rotated")
            admin.client_kill_filter(_type="normal", skipme=True)
            assert buffer.store.now() > 0
            file.unlink()  # the last one counts
            admin.client_kill_filter(_type="normal", skipme=True)
            assert buffer.store.now() > 0
        finally:
            admin.config_set("requirepass", SECRET)


def test_a_password_file_that_holds_none_is_named(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text("\n")
    for file, reason in (
        (missing, f"redis_password_file: cannot read the password file {missing}: No such file or directory"),
        (empty, f"the password file {empty} is empty"),
    ):
        with pytest.raises(ConfigError) as caught:
            rlbuffer.connect("redis://127.0.0.1:1", config=RunSettings(redis_password_file=file))
        assert str(caught.value) == reason


def test_a_password_that_ends_the_address_is_named_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for secret in ("12#secret", "12/secret", "12?secret"):
        with pytest.raises(ConfigError) as caught:
            rlbuffer.connect(f"redis://:{secret}@127.0.0.1:1", run="p", origin="RLBUFFER_REDIS_URL")
        assert "redis://:***@127.0.0.1:1" in str(caught.value)


def test_a_password_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--redis", "redis://u:secret@host"]) == 3
    assert "redis://u:***@host" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"], ["--sources"]])
@pytest.mark.parametrize("url", ["redis://u:se@cr#et@host", "u:se@cr#et@host", "redis://h?password=se@cr#et"])
def test_config_show_hides_passwords(
    url: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLBUFFER_REDIS_URL", url)
    monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", "other-secret")
    assert main(["config", "show", *flags]) == 0
    shown = capsys.readouterr().out
    assert "***" in shown
    assert not [word for word in ("se@", "cr#", "et@", "other-secret") if word in shown]


@pytest.mark.parametrize("variable", ["RLBUFFER_REDIS_PASSWORD", "RLBUFFER_REDIS_PASSWORD_FILE"])
@pytest.mark.parametrize("command", [["inspect"], ["alive", "--run", "p", "batcher"], ["serve"]])
def test_a_password_of_the_environment_does_not_go_where_a_file_of_the_current_folder_points(
    variable: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be somebody else's; whoever names its file, or the address, has seen it."""
    secret = tmp_path / "password"
    secret.write_text("s3cret")
    monkeypatch.setenv(variable, str(secret) if variable.endswith("FILE") else "s3cret")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as strange:
        strange.setblocking(False)
        Path("rlbuffer.toml").write_text(f'redis_url = "redis://127.0.0.1:{strange.getsockname()[1]}"\n')
        assert main(command) == 3
        with pytest.raises(BlockingIOError):
            strange.accept()
    assert load("rlbuffer.toml").settings.redis_url
    assert load(environ=os.environ | {"RLBUFFER_CONFIG": "rlbuffer.toml"}).settings.redis_url
    assert load(flags={"redis_url": ("--redis", "redis://host")}).settings.redis_url == "redis://host"
    monkeypatch.setenv("RLBUFFER_REDIS_URL", "redis://other")
    assert load().settings.redis_url == "redis://other"


def test_settings_do_not_show_the_address_in_a_traceback() -> None:
    assert "secret" not in repr(RunSettings(redis_url="redis://:secret@host"))


def test_a_run_shows_its_password_to_nobody(
    server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`rlbuffer run` and its processes: what they say, what `ps` shows of them, what they leave on the server."""
    config = tmp_path / "rlbuffer.toml"
    config.write_text(CONFIG)
    address = server.url.replace("redis://", f"redis://:{quote(SECRET, safe='')}@")
    monkeypatch.setenv("RLBUFFER_REDIS_URL", address)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path))
    run = subprocess.Popen(
        [*PROGRAM, "run", str(config), "--run", "quiet", "--display", "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        pids = tmp_path / "runs" / "quiet" / "pids.json"
        deadline = time.monotonic() + 180
        while not (pids.exists() and len(json.loads(pids.read_text() or "{}")) >= 3):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lines = command_lines(run.pid)
        assert len(lines) >= 4, lines
        lines += everybodys_command_lines()
        main(["inspect", "--run", "quiet"])
        said = capfd.readouterr()
    finally:
        run.terminate()
        output = run.communicate(timeout=60)[0]
    with rlbuffer.connect(address, run="quiet") as buffer:
        left = str(dict(buffer.store.heartbeats("batcher")))
    everything = [*lines, output, said.out, said.err, left]
    everything += [p.read_text(errors="replace") for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert output
    assert "quiet" in said.out
    assert not [text for text in everything if SECRET in text or quote(SECRET, safe="") in text]


def everybodys_command_lines() -> list[str]:
    """What `ps` shows to everybody: of the server, and of helpers that belong to no process of the run, too."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def command_lines(pid: int) -> list[str]:
    """Command lines in `ps` of a process and all that it has started."""
    found = []
    top = psutil.Process(pid)
    for process in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline()))
    return found
