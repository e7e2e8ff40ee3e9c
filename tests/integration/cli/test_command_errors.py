"""Commands that cannot do what they were asked: nothing on stdout, one message on stderr with what it is about, a code.

{home}, {url} and {run} are filled in.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

from rlbuffer.errors import ConfigError
from rlbuffer.run import members
from rlbuffer.store.server.connection import Connection
from rlbuffer_cli.commands import push as push_command
from rlbuffer_cli.main import main

Call = Callable[..., tuple[int, str]]
FILES = {
    "two.toml": '[worker.a]\nenv = "vcopy"\n[worker.b]\nenv = "repeat"\n[score]\nc.model = "m"\nd.model = "m"\n',
    "strict.toml": "[batcher]\nmin_group_size = 9\n[worker.a]\nenv = 'vcopy'\ngroup_size = 8\n",
    "empty.jsonl": "\n\n",
    "bad.jsonl": '\n{"group_id": "g"}\n',
    "latin.toml": "",
    "open.toml": "[batcher",
}
NO_DATA = "{home} RLBUFFER_HOME --redis --home"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
        monkeypatch.setenv(name, value)  # what `rlbuffer worker` gives its process
    for name in ("RLBUFFER_REDIS_URL", "RLBUFFER_RUN", "RLBUFFER_CONFIG", "RLBUFFER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "home"))
    for name, content in FILES.items():
        Path(name).write_text(content)
    Path("latin.toml").write_bytes(b"run = '\xe9'")

    def run(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return code, err[err.index("Error: ") :].rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("serv", 2, "'serv' serve?"),
        ("xyzzy", 2, "'xyzzy'"),
        ("serve --nope", 2, "--nope"),
        ("serve --display loud", 2, "--display 'loud'"),
        ("alive", 2, "WHO"),
        ("inspect --limit 0", 2, "--limit 0"),
        ("inspect --where evn:math", 2, "'evn' env? rollout.reward"),
        ("inspect --where math", 2, "'math' env:math"),
        ("inspect --where env:", 2, "'env:'"),
        ("inspect --where age>=old", 2, "age 'old'"),
        ("inspect --where env>=a", 2, "env:a 'env>=a'"),
        ("inspect --where state:raedy", 2, "'raedy' ready?"),
        ("inspect", 1, NO_DATA),
        ("verify", 1, NO_DATA),
        ("runs list", 1, NO_DATA),
        ("env pause math", 1, NO_DATA),
        ("env pause a/b", 2, "'a/b'"),
        ("runs rewind -- -1", 2, "N -1"),
        ("runs rewind -1", 2, "-1"),
        ("runs rewind five", 2, "'five'"),
        ("runs reset a --run b", 2, "'a' 'b'"),
        ("push no.jsonl", 2, "'no.jsonl'"),
        ("push empty.jsonl", 1, "empty.jsonl"),
        ("push empty.jsonl --version newest", 2, "newest version"),
        ("push bad.jsonl", 1, "bad.jsonl:2 env"),
        ("worker", 3, "--env [worker.NAME]"),
        ("worker x", 3, "[worker.x] --env `rlbuffer config init"),
        ("worker x --config two.toml", 3, "two.toml [worker.x] --env"),
        ("score x", 3, "[score.x] --model --reward `rlbuffer config init"),
        ("score", 3, "--model --reward [score.NAME]"),
        ("score --config two.toml", 2, "c, d:"),
        ("worker --config two.toml", 2, "a, b:"),
        ("worker --env vcoppy", 3, "--env 'vcoppy' vcopy?"),
        ("run", 3, "[model.config] [worker.NAME] `rlbuffer config init`"),
        ("train", 3, "[model.config] `rlbuffer config init`"),
        ("config check no.toml", 3, "no.toml"),
        ("config check latin.toml", 3, "latin.toml 7)"),
        ("config check open.toml", 3, "open.toml TOML"),
        (
            "config check --for worker strict.toml",
            3,
            "strict.toml:2 :5 batcher.min_group_size worker.a.group_size",
        ),
        ("config show --run BAD", 3, "--run 'BAD'"),
        ("train --world-size 0", 3, "--world-size trainer.world_size"),
        ("inspect --redis http://x", 3, "http://x --redis. redis://HOST:PORT/DB"),
        ("inspect --redis redis://127.0.0.1:1/0?decode_responses=1", 3, "decode_responses. --redis."),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(call: Call, arguments: str, code: int, words: str) -> None:
    actual, said = call(*arguments.split())
    assert actual == code, said
    assert [word for word in words.format(home=Path.cwd() / "home").split() if word not in said] == [], said


def test_a_setting_that_turns_out_wrong_later_is_told_with_its_place(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConfigError("it is in use", setting="metrics.listen")

    monkeypatch.setattr(members, "serve", refuse)
    Path("listen.toml").write_text('[metrics]\nlisten = "127.0.0.1:1"\n')
    assert call("serve", "--config", "listen.toml", "--display", "none") == (3, "Error: listen.toml:2  it is in use")


def test_nobody_there_is_exit_code_4(call: Call) -> None:
    code, said = call("inspect", "--redis", "redis://127.0.0.1:1/0")
    assert code == 4
    assert said.startswith("Error: cannot reach Redis at redis://127.0.0.1:1/0 (connection refused).\n  Tried ")
    assert "The address comes from --redis." in said


# -- of a run that is there --------------------------------------------------------------------------------------------
@pytest.fixture
def made(run: Run) -> Run:
    run.step("a.0")
    run.push("a.1", version=1)
    run.push("a.10", version=1)
    return run


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("inspect --run other", 1, "'other' {url}. {run}."),
        ("inspect --run {run} a.", 1, "'a.': a.0, a.1, a.10. inspect a.0"),
        ("inspect --run {run} b.7", 1, "'b.7'"),
        ("inspect --run {run} a.10/7", 1, "'a.10' '7'. a.10/0, a.10/1."),
        ("inspect --run {run} step:5", 1, "5: 1"),
        ("alive --run {run} batcher", 1, "'batcher' '{run}'."),
        ("runs rewind 4 --keep-pending --run {run}", 1, "5: 1."),
        ("runs rewind 5 --run {run}", 1, "5: 1."),
        ("runs reset {run}", 1, "'{run}' --force"),
    ],
)
def test_a_command_about_what_is_not_there_says_so(
    made: Run, call: Call, arguments: str, code: int, words: str
) -> None:
    values = {"run": made.store.run, "url": made.url}
    actual, said = call(*arguments.format(**values).split(), "--redis", made.url)
    assert actual == code, said
    assert [word for word in words.format(**values).split() if word not in said] == [], said


def test_a_line_that_is_too_long_is_refused_by_its_place(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_command, "MAX_LINE_BYTES", 2**20)
    rollout: dict[str, Any] = {"tokens": [1, 2], "text": "x" * 2**20}
    Path("long.jsonl").write_text(json.dumps({"group_id": "g", "rollouts": [rollout]}) + "\n")
    code, said = call("push", "long.jsonl")
    assert (code, "long.jsonl:1 " in said, "1 MiB" in said) == (1, True, True), said


@pytest.mark.parametrize(
    "arguments", ["serve", "worker vcopy", "worker --env vcopy", "score --model initial", "train", "run", "runs list"]
)
def test_a_server_that_is_not_there_is_said_at_once_with_where_its_address_came_from(
    call: Call, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Connection.__init__.__kwdefaults__, "patience_seconds", 0.0)
    Path("example.toml").write_text((Path(__file__).parents[3] / "rlbuffer.toml").read_text())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    config = ["example.toml"] if arguments == "run" else ["--config", "example.toml"]
    code, text = call(*arguments.split(), *config, "--redis", f"redis://127.0.0.1:{port}")
    assert code == 4
    assert f"redis://127.0.0.1:{port} (connection refused)" in text
    assert "--redis" in text
    assert "Start one there: valkey-server" in text
