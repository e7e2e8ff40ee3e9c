"""Every command that README and docs show runs in an empty folder, beside a real run, or says why it cannot here."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import shell_snippets
from homes import Home
from own_server import OwnServer

from rlbuffer.errors import ConfigError
from rlbuffer.run.loading import load
from rlbuffer.store.member import Member
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

RUN_HERE = (
    shell_snippets.SHIPPED_ENDS | shell_snippets.SHIPPED_LASTS | shell_snippets.DOCS_ENDS | shell_snippets.DOCS_LASTS
)
EXAMPLES = shell_snippets.ROOT / "docs" / "examples"
JUDGE = "def reward(rollout, group):\n    return 1.0\n"
SMALL = """
[model.config]
model_type = "qwen3"
vocab_size = 13
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16

[worker.vcopy]
env = "vcopy"
"""


def test_every_command_on_a_page_is_run_here_or_has_a_reason_why_not() -> None:
    unknown = [
        f"{place}  {command}"
        for place, command in shell_snippets.commands()
        if command not in RUN_HERE and not shell_snippets.why_not_here(command)
    ]
    assert unknown == [], "enter them in tests/support/shell_snippets.py; a block that is no command is one of `text`"


def test_no_table_names_a_command_that_is_on_no_page() -> None:
    shown = {command for _, command in shell_snippets.commands()}
    assert sorted({*RUN_HERE, *shell_snippets.NOT_HERE} - shown) == []
    for beginning in shell_snippets.NOT_HERE_BEGINNINGS:
        assert any(command.startswith(beginning) for command in shown), beginning


def test_variables_that_a_page_sets_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [command for _, command in shell_snippets.commands()]
    names = set(re.findall(r"\b(RLBUFFER_[A-Z_]+)=", "\n".join(lines)))
    assert len(names) >= 4
    for name in names:
        said = ""
        try:
            load(environ={name: "x"})
        except ConfigError as error:
            said = str(error)  # `x` is no address and no file
        assert "is not a variable" not in said


@pytest.fixture
def folder(home: Home) -> Home:
    """An empty folder of somebody who has installed rlbuffer and has two models."""
    home.environment["HOME"] = str(home.path)
    for name in ("base", "qwen3-0.6b"):
        model_from_config(TINY_QWEN3).save_pretrained(home.path / "models" / name)
    return home


def starts(home: Home, lasting: Mapping[str, str], command: str, words: Mapping[str, str]) -> None:
    """Starts a command that goes on, and waits until it is at work."""
    log = re.sub(r"[^a-z0-9]+", "-", command)
    process = home.start(*typed(home, command, words)[1:], log=log)

    def is_at_work() -> bool:
        assert process.poll() is None, home.logs()
        return lasting[command] in (home.path / f"{log}.log").read_text()

    home.wait_until(is_at_work, seconds=60, why=f"`{command}` at work")


def ends(home: Home, expected: Mapping[str, tuple[int | tuple[int, ...], str]], words: Mapping[str, str]) -> None:
    """Runs the commands in their order."""
    for command, (code, text) in expected.items():
        done = home.call(*typed(home, command, words)[1:])
        codes = (code,) if isinstance(code, int) else code
        told = f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}\n{home.logs()}"
        assert done.returncode in codes, told
        assert text in done.stdout + done.stderr, told


def typed(home: Home, command: str, words: Mapping[str, str]) -> list[str]:
    """The words that a shell makes of it, with values in place of the reader's own."""
    return [words.get(word, word).replace("~", str(home.path)) for word in shlex.split(command)]


def test_the_pages_commands_for_the_run_that_comes_along(folder: Home) -> None:
    example = folder.call("config", "example").stdout
    (folder.path / "rlbuffer.toml").write_text(example)
    (folder.path / "new.toml").write_text(example.replace("\nmax_age = 1 ", "\nmax_age = 2 ", 1))
    folder.environment["RLBUFFER_BATCHER__ROW_TOKENS"] = "4096"  # half the tokens of a step: half the time
    lasting = shell_snippets.SHIPPED_LASTS
    serve, *others, score = lasting
    starts(folder, lasting, serve, {})
    *workers, trainer = others
    folder.start(*typed(folder, trainer, {})[1:], log="train")  # it and the workers wait for each other
    for command in workers:
        starts(folder, lasting, command, {})
    folder.wait_until(lambda: folder.metrics("default"), seconds=60, why="the first step")
    log = folder.path / "train.log"
    folder.wait_until(lambda: lasting[trainer] in log.read_text(), seconds=60, why="its line")
    with folder.connect("old-run") as buffer:
        buffer.role(Member).open_run()
    folder.environment["RLBUFFER_RUN"] = "default"  # old-run was opened later
    ends(folder, shell_snippets.SHIPPED_ENDS, {})
    starts(folder, lasting, score, {})


def test_the_pages_commands_for_a_run_called_math(folder: Home) -> None:
    shutil.copy(EXAMPLES / "parity.py", folder.path)
    (folder.path / "my_judge").mkdir()
    (folder.path / "my_judge" / "api.py").write_text(JUDGE)
    (folder.path / "rlbuffer.toml").write_text(SMALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = {"RUN": "math", "0.0.0.0:9466": f"127.0.0.1:{port}"}
    lasting = shell_snippets.DOCS_LASTS
    for command in lasting:
        starts(folder, lasting, command, words)
    with OwnServer(folder.path / "new") as server:
        ends(folder, shell_snippets.DOCS_ENDS, words | {"redis://new-host:6379": server.url})
