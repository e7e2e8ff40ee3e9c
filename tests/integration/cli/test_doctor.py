"""`rlbuffer doctor` finds each of the planted troubles, and says what to do about it. Every one of them is real."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import own_server
import pytest
import redis
import waits
from every_role import EveryRole
from own_server import OwnServer
from store_runs import Run

import rlbuffer
from rlbuffer.checks import host
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.store.keys import SCHEMA, Keys
from rlbuffer.store.member import Member
from rlbuffer.store.server import embedded
from rlbuffer_cli.main import main

Call = Callable[..., tuple[int, str, str]]
LIMITS = {"maxmemory": "64mb"}
GOOD = '[model.config]\nmodel_type = "qwen3"\nvocab_size = 13\n[worker.a]\nenv = "vcopy"\n'


@dataclass
class Place:
    """Where a trouble is planted: an empty folder, and a server that is started with the options of the trouble."""

    folder: Path
    open: ExitStack
    arguments: list[str] = field(default_factory=list)
    monkeypatch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch)

    def server(self, environment: dict[str, str] | None = None, **options: str) -> OwnServer:
        named = {name.replace("_", "-"): value for name, value in (LIMITS | options).items()}
        server = OwnServer(self.folder / "server", options=named, environment=environment)
        self.open.enter_context(server)
        self.arguments += ["--redis", server.url]
        return server

    def config(self, text: str) -> None:
        (self.folder / "rlbuffer.toml").write_text(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    for name in ("REDIS_URL", "RUN", "CONFIG", "HOME", "REDIS_PASSWORD", "SERVER_BIN"):
        monkeypatch.delenv(f"RLBUFFER_{name}", raising=False)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:
        yield Place(tmp_path, stack, monkeypatch=monkeypatch)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["doctor", *arguments])
        return code, *capsys.readouterr()

    return run


# -- troubles ----------------------------------------------------------------------------------------------------------
def evicts(place: Place) -> None:
    place.server(maxmemory_policy="allkeys-lru")


def writes_nothing_down(place: Place) -> None:
    place.server(appendonly="no")


def is_full(place: Place) -> None:
    server = place.server(maxmemory="4mb")
    with redis.Redis(port=server.port) as client, suppress(redis.exceptions.OutOfMemoryError):
        for number in range(10_000):
            client.set(f"other:{number}", bytes(20_000))


def has_no_limit(place: Place) -> None:
    place.server(maxmemory="0")


def takes_another_password(place: Place) -> None:
    place.server(requirepass="right")
    place.monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", "wrong")


def is_not_there(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place.arguments += ["--redis", f"redis://127.0.0.1:{port}/0"]


def follows_another(place: Place) -> None:
    place.server(replicaof="127.0.0.1 1")


def holds_a_run_of_another_schema(place: Place) -> None:
    server = place.server()
    with rlbuffer.connect(server.url, run="old") as buffer:
        buffer.store.role(Member).open_run()
    with redis.Redis(port=server.port) as client:
        client.hset(Keys("old").meta, "schema", SCHEMA - 1)
    place.arguments += ["--run", "old"]


def has_another_clock(place: Place) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("shifting a server's clock needs a C compiler and Linux")
    library, shift = place.folder / "clock_shift.so", place.folder / "shift"
    source = Path(own_server.__file__).with_name("clock_shift.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("q", 120_000_000))
    place.server(environment={"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)})


def has_a_misspelt_setting(place: Place) -> None:
    place.config(f"[batcher]\nmax_agee = 1\n{GOOD}")


def has_a_file_that_is_no_toml(place: Place) -> None:
    place.config("[batcher\n")


def has_a_port_that_is_taken(place: Place) -> None:
    listener = place.open.enter_context(socket.create_server(("127.0.0.1", 0)))
    listen = f'listen = "127.0.0.1:{listener.getsockname()[1]}"'
    place.config(f'{GOOD}[weights]\n{listen}\nurl = "http://trainer:9465"\n')


def has_an_old_server_program(place: Place) -> None:
    program = place.folder / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0:0'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    place.monkeypatch.setenv("RLBUFFER_SERVER_BIN", str(program))


def needs_more_memory_than_there_is(place: Place) -> None:
    place.server(maxmemory="8mb")
    place.config(f"[batcher]\nrow_tokens = 200000\nstep_groups = 0\n{GOOD}")


TROUBLES = [
    (evicts, "server", "failure"),
    (writes_nothing_down, "persistence", "warning"),
    (is_full, "server-memory", "failure"),
    (has_no_limit, "server-memory", "warning"),
    (takes_another_password, "server", "failure"),
    (is_not_there, "server", "failure"),
    (follows_another, "server", "failure"),
    (holds_a_run_of_another_schema, "run", "failure"),
    (has_another_clock, "clock", "warning"),
    (has_a_misspelt_setting, "settings", "failure"),
    (has_a_file_that_is_no_toml, "settings", "failure"),
    (has_a_port_that_is_taken, "ports", "warning"),
    (has_an_old_server_program, "server", "failure"),
    (needs_more_memory_than_there_is, "server-memory", "failure"),
]


@pytest.mark.server
@pytest.mark.parametrize(("plant", "check", "level"), TROUBLES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_planted_trouble_is_found(
    place: Place, call: Call, plant: Callable[[Place], None], check: str, level: str
) -> None:
    plant(place)
    code, out, err = call(*place.arguments, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert {record["schema"] for record in records} == {"rlbuffer.check/1"}
    troubles = [record for record in records if record["level"] != "ok"]
    assert (check, level) in [(record["check"], record["level"]) for record in troubles], troubles
    assert (code, err) == (int(any(record["level"] == "failure" for record in troubles)), "")


@pytest.mark.server
@pytest.mark.parametrize("user", ["viewer", "worker", "scorer", "trainer", "operator"])
def test_a_sound_run_has_no_failure_under_the_user_of_any_role(place: Place, call: Call, user: str) -> None:
    users = place.folder / "users.acl"
    users.write_text((Path(__file__).parents[3] / "deploy" / "users.acl").read_text())
    server = place.server(aclfile=str(users))
    host = server.url.removeprefix("redis://")
    with rlbuffer.connect(f"redis://operator:CHANGE-operator@{host}", run="math") as buffer:
        buffer.store.role(Member).open_run()
    place.monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", f"CHANGE-{user}")
    code, out, err = call("--redis", f"redis://{user}@{host}", "--run", "math", "--json")
    runs = [record for record in map(json.loads, out.splitlines()) if record["check"] == "run"]
    assert (code, err, [record["level"] for record in runs]) == (0, "", ["ok"])


@pytest.mark.server
def test_a_sound_host_and_server_have_no_trouble(place: Place, call: Call) -> None:
    server = place.server()
    place.config(GOOD)
    with rlbuffer.connect(server.url, run="math") as buffer:
        buffer.store.role(Member).open_run()
    code, out, err = call(*place.arguments, "--run", "math")
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert (code, err, out.splitlines()[-1]) == (0, "", "0 failures, 0 warnings")
    assert {check for level, check, _ in lines[:-1] if level == "ok"} >= {
        *("settings", "home", "packages", "server", "server-memory", "persistence", "clock", "run"),
    }


def test_a_run_that_is_not_there_is_a_warning_with_those_that_are(place: Place, call: Call) -> None:
    server = place.server()
    missing = ("--redis", server.url, "--run", "nosuch")
    assert 'ok       run             no run "nosuch" is there yet' in call(*missing)[1]  # the first one is to begin
    for name in ("math", "code"):
        with rlbuffer.connect(server.url, run=name) as buffer:
            buffer.store.role(Member).open_run()
    records = map(json.loads, call(*missing, "--json")[1].splitlines())
    (found,) = (record for record in records if record["check"] == "run")
    assert found["level"] == "warning"
    assert "code, math" in found["fix"] or "math, code" in found["fix"]


def test_looking_starts_no_server_and_makes_no_folder(place: Place, call: Call) -> None:
    code, out, _ = call()
    assert (code, list(place.folder.iterdir())) == (0, [])
    assert " embedded, " in out


def test_a_disk_that_is_full_is_a_failure(place: Place, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    place.config(GOOD)
    monkeypatch.setattr(host, "FULL_DISK_BYTES", 2**62)
    code, out, _ = call()
    assert (code, "failure  home " in out) == (1, True)


@pytest.mark.server
@pytest.mark.parametrize("has_server", [False, True], ids=["a new home", "a home that has had a server"])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_filesystem_without_locks_is_a_failure(
    place: Place, call: Call, monkeypatch: pytest.MonkeyPatch, number: int, has_server: bool
) -> None:
    if has_server:
        (place.folder / "home" / "server").mkdir(parents=True)
        (place.folder / "home" / "server" / "server.json").write_text('{"pid": 1, "socket": "/nowhere"}')
        (place.folder / "home" / "server" / "alive.lock").touch()
    else:
        place.config(GOOD)

    def refused(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    code, out, err = call(*([] if has_server else ["--for", "serve"]))
    (failure,) = [line for line in out.splitlines() if line.startswith("failure")]
    assert (code, err, "has no flock" in failure, str(place.folder) in failure) == (1, "", True, True)


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "Function not implemented"), ImportError("no sem_open.")])
def test_a_host_whose_ranks_cannot_share_locks_is_a_failure(
    place: Place, call: Call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*args: object) -> None:
        raise error

    place.config(GOOD)
    monkeypatch.setattr("multiprocessing.context.BaseContext.Lock", refused)
    code, out, err = call("--for", "train")
    (failure,) = [line for line in out.splitlines() if line.startswith("failure")]
    assert (code, err, "shared-locks" in failure, "ranks cannot share locks" in failure) == (1, "", True, True)


def test_what_a_user_may_not_ask_is_said_to_be_unknown(place: Place, call: Call) -> None:
    acl = place.folder / "users.acl"
    acl.write_text("user default off\nuser w on >pw ~* &* +@all -info -config -time\n")
    server = place.server(aclfile=f'"{acl}"')
    place.monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", "pw")
    code, out, _ = call("--redis", server.url.replace("//", "//w@"), "--json")
    found = {(record["check"], record["level"]) for record in map(json.loads, out.splitlines())}
    assert (code, found >= {("server", "warning"), ("clock", "warning")}) == (0, True)


@pytest.mark.parametrize("width", [40, 80])
def test_lines_fit_a_narrow_terminal(place: Place, call: Call, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("rlbuffer_cli.text.terminal_width", lambda stream=None: width)
    monkeypatch.setenv("NO_COLOR", "1")
    has_a_port_that_is_taken(place)
    out = call(*place.arguments)[1]
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.server
def test_a_run_that_does_not_go_on_is_a_warning_with_the_sentence_of_inspect(place: Place, call: Call) -> None:
    place.monkeypatch.setattr("rlbuffer.checks.server.FIRST_STEP_SECONDS", 0.0)
    server = place.server()
    with rlbuffer.connect(server.url, run="math") as buffer:
        store = buffer.store.role(EveryRole)
        store.open_run()
        named = (*place.arguments, "--run", "math")
        assert "warning  run" not in call(*named)[1]  # nobody works: nothing is to go on
        fails = Problem(kind=Trouble.ENV_FAILS, env="math", worker="w", count=1, detail="KeyError: 'x'")
        store.heartbeat("worker", "w", {"env": "math", "problems": [fails.record()]})
        assert "no batcher was seen" in call(*named)[1]
        short = Waiting(kind=Wait.ENV_SHORT, step=1, env="math", groups=7)
        waits.says(store, short)
        code, out, _ = call(*named, "--json")
        troubles = [r for r in map(json.loads, out.splitlines()) if (r["check"], r["level"]) == ("run", "warning")]
        assert code == 0
        assert troubles[0]["text"] == str(fails)
        assert troubles[1]["text"].endswith(str(short))
        key = store.keys.heartbeats("worker")
        store.heartbeat("worker", "w", {"env": "math"})
        raw = store.connection.client.hget(key, "w")
        store.connection.client.hset(key, "w", raw.replace(raw.split()[0], str(int(raw.split()[0]) - 60_000).encode()))
        assert "No worker of math is at work (w was last seen 60 s ago)" in call(*named)[1]


@pytest.mark.server
def test_settings_that_the_embedded_server_at_work_does_not_have_are_told(home: Path, typed: Call) -> None:
    at_work = embedded.ensure(home, ServerSettings(maxmemory="64mb", appendfsync="no"))
    try:
        for limit, sync in (("128mb", "always"), ("65536kb", "no")):
            Path("rlbuffer.toml").write_text(f'[server]\nmaxmemory = "{limit}"\nappendfsync = "{sync}"\n')
            differs = limit == "128mb"
            out = typed("doctor", "--for", "serve", "--home", str(home))[1]
            err = typed("serve", "--resume", "--run", "none", "--home", str(home))[2]
            for text in (out, err):
                said = " ".join(text.split())
                assert (f"server.maxmemory = '{limit}' (rlbuffer.toml:2), but the embedded" in said) == differs
                assert ("64.0 MiB" in said and "'always' (rlbuffer.toml:3)" in said) == differs or text is out
                assert ("by ending all processes" in said) == differs
    finally:
        at_work.release()


@pytest.mark.server
def test_a_file_that_lies_beside_another_run_is_not_compared_with_that_runs_server(home: Path, typed: Call) -> None:
    at_work = embedded.ensure(home, ServerSettings(maxmemory="64mb", appendfsync="no"))
    try:
        limit = '[server]\nmaxmemory = "128mb"\n'
        Path("rlbuffer.toml").write_text(limit)
        begun, other = (Run(at_work.address, home, name) for name in ("begun", "other"))
        for run, config in ((begun, RunSettings().batcher.as_dict()), (other, {"max_age": 7})):
            run.lead()
            run.store.set_config(config, "digest")
            run.close()
        for named, flags, is_compared in (
            ("", (), False),
            ("", ("--run", "other"), False),
            ("", ("--run", "begun"), True),
            ('run = "other"\n', (), True),
            ('run = "new"\n', (), False),
        ):
            Path("rlbuffer.toml").write_text(named + limit)
            out = typed("doctor", "--for", "serve", "--home", str(home), *flags)[1]
            assert ("server-settings" in out) == is_compared, (named, flags, out)
    finally:
        at_work.release()


@pytest.mark.server
def test_a_server_that_ends_with_its_last_user_keeps_no_run_from_starting(
    home: Path, typed: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, find = embedded.ensure(home, ServerSettings()), embedded.find

    def leaving(*arguments: Path) -> str | None:
        address = find(*arguments)
        at_work.release()
        for _ in range(6000):
            if find(*arguments) is None:
                break
            time.sleep(0.01)
        return address

    monkeypatch.setattr(embedded, "find", leaving)
    err = typed("serve", "--resume", "--run", "none", "--home", str(home))[2]
    assert "cannot reach" not in err
    assert "none" in err
