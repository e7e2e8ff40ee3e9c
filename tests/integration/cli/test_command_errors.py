"""Exact texts and exit codes of commands that cannot do what they were asked: nothing on stdout, one message on stderr.

{home}, {url} and {run} are filled in; a usage error is preceded by the usage, which is left out here.
"""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_runs import Run

from rlbuffer.store.server.connection import Connection
from rlbuffer_cli.commands import push as push_command
from rlbuffer_cli.main import main

Call = Callable[..., tuple[int, str]]
FILES = {
    "two.toml": '[worker.a]\nenv = "vcopy"\n[worker.b]\nenv = "repeat"\n[score]\nc.model = "m"\nd.model = "m"\n',
    "short.toml": '[batcher]\nrow_tokens = 3\n[worker.a]\nenv = "vcopy"\n',
    "strict.toml": "[batcher]\nmin_group_size = 9\n[worker.a]\nenv = 'vcopy'\ngroup_size = 8\n",
    "empty.jsonl": "\n\n",
    "bad.jsonl": '\n{"group_id": "g"}\n',
    "latin.toml": "",
    "open.toml": "[batcher",
}
NO_DATA = (
    "Error: nothing was ever stored under {home} (RLBUFFER_HOME): no embedded server has run there. Start one with "
    "`rlbuffer demo`, or say where the run is: --redis URL or --home DIR."
)
NO_MODEL = (
    "model: exactly one of path and config is needed; neither is set. Give [model] path = a Hugging Face model's "
    "directory, or [model.config] for a fresh model (the file that `rlbuffer config example` prints has one)"
)
BEGIN = "or a file to begin with: `rlbuffer config example > rlbuffer.toml`"


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
    ("arguments", "code", "text"),
    [
        ("serv", 2, "Error: there is no command 'serv'. Did you mean serve?"),
        ("xyzzy", 2, "Error: there is no command 'xyzzy'."),
        ("serve --nope", 2, "Error: No such option '--nope'. "),
        ("serve --display loud", 2, "Error: Invalid value for '--display': 'loud' is not one of "),
        ("inspect --limit 0", 2, "Error: Invalid value for '--limit': 0 is not in the range x>=1."),
        (
            "inspect --where evn:math",
            2,
            (
                "Error: 'evn' is not a field to filter by. Did you mean env? Fields: env, state, reason, worker, "
                "adapter, id, prompt, age, reward, tokens, step, waited, stop, text, truncated, rollout.reward, "
                "rollout.tokens, rollout.trained, rollout.version, rollout.advantage, rollout.logprob."
            ),
        ),
        (
            "inspect --where math",
            2,
            "Error: cannot read 'math' in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. env:math age>=2",
        ),
        ("inspect --where env:", 2, "Error: 'env:' in the filter has no value"),
        ("inspect --where age>=old", 2, "Error: age is compared with a number (8, 0.5, 8k, 2M), got 'old'"),
        ("inspect --where env>=a", 2, "Error: env is text: write env:a (or env!=a), not 'env>=a'"),
        (
            "inspect --where state:raedy",
            2,
            "Error: 'raedy' is not a state. Did you mean ready? One of: forming, ready, packed, trained, dropped.",
        ),
        ("inspect", 1, NO_DATA),
        ("verify", 1, NO_DATA),
        ("runs list", 1, NO_DATA),
        ("env pause math", 1, NO_DATA),
        ("env pause a/b", 2, "Error: 'a/b' is not an env name: [A-Za-z0-9_.-]{{1,64}}"),
        ("runs void 0", 2, "Error: Invalid value for 'N': 0 is not in the range x>=1."),
        ("runs rewind -1", 2, "Error: No such option '-1'."),
        ("runs rewind five", 2, "Error: Invalid value for 'N': 'five' is not a valid integer range."),
        ("runs reset a --run b", 2, "Error: the run is named twice: 'a' and --run 'b'"),
        ("push no.jsonl", 2, "Error: Invalid value for 'FILE': File 'no.jsonl' does not exist."),
        ("push empty.jsonl", 1, "Error: empty.jsonl holds no group"),
        ("push bad.jsonl", 1, "Error: bad.jsonl:2  env: missing"),
        (
            "worker",
            3,
            (
                "Error: which env? Give --env (vcopy, repeat, arithmetic, package.module:factory), or a [worker.NAME] "
                "section."
            ),
        ),
        ("worker x", 3, f"Error: no rlbuffer.toml is here, and so no [worker.x] section. Give --env, {BEGIN}"),
        (
            "worker x --config two.toml",
            3,
            "Error: two.toml has no [worker.x] section. Give --env, or add the section.",
        ),
        (
            "score x",
            3,
            f"Error: no rlbuffer.toml is here, and so no [score.x] section. Give --model or --reward, {BEGIN}",
        ),
        (
            "score",
            3,
            (
                "Error: what shall be added? Give --model PATH, --reward package.module:function, or a [score.NAME] "
                "section."
            ),
        ),
        ("score --config two.toml", 2, "Error: which scorer? The config has c, d: rlbuffer score c"),
        ("worker --config two.toml", 2, "Error: which worker? The config has a, b: rlbuffer worker a"),
        (
            "worker --env vcoppy",
            3,
            (
                "Error: --env  env 'vcoppy' is not one of vcopy, repeat, arithmetic, jsonl, reasoning_gym, verifiers. "
                "Did you mean vcopy?"
            ),
        ),
        (
            "run",
            3,
            (
                "Error: 2 mistakes in the settings:\n"
                f"  {NO_MODEL}\n"
                "  there is no [worker.NAME] section: nothing would be sampled. Add one "
                "(the file that `rlbuffer config example` prints has two)"
            ),
        ),
        (
            "train",
            3,
            f"Error: {NO_MODEL}",
        ),
        (
            "config check --config no.toml",
            3,
            "Error: cannot read the config file no.toml: No such file or directory",
        ),
        ("config check --config latin.toml", 3, "Error: latin.toml is not UTF-8 text (byte 7)"),
        (
            "config check --config open.toml",
            3,
            "Error: open.toml  not valid TOML: Expected ']' at the end of a table declaration (at end of document)",
        ),
        (
            "config check --for worker --config short.toml",
            3,
            "Error: short.toml:4  env vcopy: ",
        ),
        (
            "config check --for worker --config strict.toml",
            3,
            (
                "Error: strict.toml:2, :5  batcher.min_group_size = 9, but worker.a.group_size = 8: no group would "
                "ever be trained"
            ),
        ),
        (
            "config show --run BAD",
            3,
            "Error: --run  run = 'BAD': string should match pattern '^[a-z0-9_-][a-z0-9_.-]{{0,63}}$'",
        ),
        (
            "train --world-size 0",
            3,
            "Error: --world-size  trainer.world_size = 0: input should be greater than or equal to 1",
        ),
        (
            "inspect --redis http://x",
            3,
            (
                "Error: http://x is not the address of a server.\n  The address comes from --redis.\n"
                "  Write redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH?db=DB or memory://.\n"
                "  Where sentinels name the primary: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB.\n"
                "  A cluster of several shards, by some of its nodes: redis+cluster://HOST:PORT,HOST:PORT."
            ),
        ),
        (
            "inspect --redis redis://127.0.0.1:1/0?decode_responses=1",
            3,
            (
                "Error: the address redis://127.0.0.1:1/0?decode_responses=1 has an option that cannot be set there: "
                "decode_responses.\n  The address comes from --redis."
            ),
        ),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(call: Call, arguments: str, code: int, text: str) -> None:
    actual, said = call(*arguments.split())
    text = text.format(home=Path.cwd() / "home")
    assert actual == code
    # Sentences that click words itself may end differently from version to version.
    assert said.startswith(text) if text.endswith(" ") else said == text


def test_nobody_there_is_exit_code_4(call: Call) -> None:
    code, said = call("inspect", "--redis", "redis://127.0.0.1:1/0")
    assert code == 4
    assert said.startswith("Error: cannot reach Redis at redis://127.0.0.1:1/0 (connection refused).\n  Tried ")
    assert "The address comes from --redis." in said


# -- of a run that is there --------------------------------------------------------------------------------------------
@pytest.fixture
def made(tmp_path: Path) -> Run:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    run.step("a.0")
    run.push("a.1", version=1)
    run.push("a.10", version=1)
    return run


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            "inspect --run other",
            1,
            "Error: there is no run 'other' on {url}. Runs there: {run}.",
        ),
        (
            "inspect --run {run} a.",
            1,
            (
                "Error: 3 groups of run {run!r} begin with 'a.': a.0, a.1, a.10. Type one of them whole: "
                "rlbuffer inspect a.0"
            ),
        ),
        (
            "inspect --run {run} b.7",
            1,
            "Error: run {run!r} has no group 'b.7': it was retired with its step, or never pushed.",
        ),
        (
            "inspect --run {run} a.10/7",
            1,
            "Error: group 'a.10' has no rollout '7'. Its rollouts: a.10/0, a.10/1.",
        ),
        (
            "alive --run {run} batcher",
            1,
            "Error: 'batcher' has never been heard in run {run!r}. Heard were: nobody.",
        ),
        ("runs void 5 --run {run}", 1, "Error: run {run!r} has no step 5: the last committed one is 1."),
        ("runs rewind 5 --run {run}", 1, "Error: run {run!r} has no step 5: the last committed one is 1."),
        (
            "runs reset {run}",
            2,
            'Error: this removes run "{run}" (1 step, 4 pending rollouts) for good: say so with --yes',
        ),
    ],
)
def test_a_command_about_what_is_not_there_says_so(made: Run, call: Call, arguments: str, code: int, text: str) -> None:
    values = {"run": made.store.run, "url": made.url}
    actual, said = call(*arguments.format(**values).split(), "--redis", made.url)
    assert (actual, said) == (code, text.format(**values))


def test_a_line_that_is_too_long_is_refused_by_its_place(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_command, "MAX_LINE_BYTES", 2**20)
    rollout: dict[str, Any] = {"tokens": [1, 2], "text": "x" * 2**20}
    Path("long.jsonl").write_text(json.dumps({"group_id": "g", "rollouts": [rollout]}) + "\n")
    assert call("push", "long.jsonl") == (
        1,
        (
            "Error: long.jsonl:1  the line is longer than 1 MiB, the most that one rollout may take; "
            "push large rollouts from Python"
        ),
    )


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
    code, text = call(*arguments.split(), "--config", "example.toml", "--redis", f"redis://127.0.0.1:{port}")
    assert code == 4
    assert text.startswith(f"Error: cannot reach Redis at redis://127.0.0.1:{port} (connection refused).\n")
    assert text.endswith(
        f"The address comes from --redis.\n  Start one there:   valkey-server --port {port}   (or redis-server)\n"
        "  Or use the embedded one: leave --redis out."
    )
