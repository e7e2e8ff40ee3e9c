"""`config init`, `config explain` and `completion`: a file to begin with, a setting in words, what shells type."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbuffer.config.explain import known_settings
from rlbuffer.config.loading import key_lines, load
from rlbuffer.config.settings import RunSettings
from rlbuffer_cli.main import COMMANDS

Run = Callable[..., tuple[int, str, str]]
WORKER = '[worker.a]\nenv = "vcopy"\n'


@pytest.fixture
def run(typed: Run) -> Run:
    return typed


# -- init --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def env_of_ones_own(tmp_path: Path) -> str:
    """Beside the file, as a person has it."""
    shutil.copy(Path(__file__).parents[2] / "docs" / "examples" / "parity.py", tmp_path)
    return "parity:Parity"


def test_init_writes_a_file_that_works_and_replaces_none(run: Run, env_of_ones_own: str) -> None:
    for number, given in enumerate(([], ["--env", env_of_ones_own], ["--env", "vcopy", "--env", "repeat"])):
        file = f"{number}.toml"
        code, out, err = run("config", "init", file, *given)
        assert (code, out, f"rlbuffer config check {file}" in err) == (0, "", True)
        assert run("config", "check", file)[:2] == (
            0,
            f"ok: {file}, {len(load(file).sources)} settings given, 0 warnings\n",
        )
        assert run("config", "init", "-", *given)[1] == Path(file).read_text()
        assert [worker.env for worker in load(file).settings.worker.values()] == given[1::2] or ["vcopy"]
    Path("0.toml").write_text("mine")
    code, out, err = run("config", "init", "0.toml")
    assert (code, out, "0.toml is there already" in err) == (3, "", True)
    assert Path("0.toml").read_text() == "mine"
    assert "cannot write no/folder.toml: No such file or directory" in run("config", "init", "no/folder.toml")[2]


def test_the_file_for_an_env_and_a_model_is_twelve_lines(run: Run) -> None:
    text = run("config", "init", "-", "--env", "my_envs:Larger", "--model", "models/a b")[1]
    assert len([line for line in text.splitlines() if line]) == 12
    Path("rlbuffer.toml").write_text(text)
    settings = load().settings
    assert (settings.model.path, settings.worker["larger"].env) == ("models/a b", "my_envs:Larger")


def test_the_reference_has_every_setting_and_only_defaults(run: Run) -> None:
    text = run("config", "init", "--all", "-")[1]
    Path("all.toml").write_text(text)
    assert load("all.toml").settings == RunSettings(home=load("all.toml").settings.home)
    names = {".".join(path) for path in key_lines(re.sub(r"^# (?=\[|[a-z_]+ = )", "", text, flags=re.MULTILINE))}
    assert set(known_settings()) <= names


# -- explain -----------------------------------------------------------------------------------------------------------
def test_a_setting_is_explained_with_its_value_and_where_that_comes_from(run: Run) -> None:
    Path("rlbuffer.toml").write_text(f"[batcher]\nmin_group_size = 4\n{WORKER}group_size = 8\n")
    code, out, err = run("config", "explain", "batcher.min_group_size")
    assert (code, err) == (0, "")
    name, *said = out.splitlines()
    assert (name, [line.split()[0] for line in said[1:]]) == (
        "batcher.min_group_size",
        ["values", "default", "value", "variable", "checked"],
    )
    assert all(word in out for word in ("from 1", "4   (rlbuffer.toml:2)", "RLBUFFER_BATCHER__MIN_GROUP_SIZE"))
    for key in ("worker.a.group_size", "worker.NAME.group_size"):
        assert "  value     worker.a.group_size = 8   (rlbuffer.toml:5)" in run("config", "explain", key)[1]
    assert "value" not in run("config", "explain", "worker.b.group_size")[1].replace("  values ", "")


def test_the_last_part_of_a_name_is_enough_where_it_is_unique(run: Run) -> None:
    assert run("config", "explain", "lookahead")[1].startswith("batcher.lookahead\n")
    code, out, err = run("config", "explain", "gpus")
    assert (code, out, "trainer.gpus, worker.NAME.gpus, score.NAME.gpus" in err) == (3, "", True)
    meant = {"batcher.max_agee": "batcher.max_age?", "trainer.max_agee": "", "batch": "batcher?"}
    for written, name in (meant | {"lookahed": "batcher.lookahead?"}).items():
        code, _, err = run("config", "explain", written)
        assert (code, f"Did you mean {name}" in err) == (3, True)
    assert "`rlbuffer config show` lists all settings." in run("config", "explain", "qqqqqq")[2]


def test_a_table_is_explained_as_what_is_in_it(run: Run) -> None:
    records = [json.loads(line) for line in run("config", "explain", "server", "--json")[1].splitlines()]
    assert [record["name"] for record in records] == ["server.maxmemory", "server.appendfsync"]
    assert records[1]["values"] == "everysec, always, no"
    assert (records[1]["default"], records[1]["given"]) == ('"everysec"', [])
    assert {record["schema"] for record in records} == {"rlbuffer.explanation/1"}


def test_what_may_be_a_secret_is_not_explained(run: Run) -> None:
    Path("rlbuffer.toml").write_text('redis_url = "redis://u:sk-1@h:1/0"\n')
    for flag in ((), ("--json",)):
        assert "sk-1" not in run("config", "explain", "redis_url", *flag)[1]


# -- completion --------------------------------------------------------------------------------------------------------
def completed(words: str, current: str) -> set[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLBUFFER_")}
    asked = {"_RLBUFFER_COMPLETE": "bash_complete", "COMP_WORDS": f"{words} {current}".strip()}
    count = len(words.split())
    result = subprocess.run(
        [sys.executable, "-m", "rlbuffer_cli"],
        env=environment | asked | {"COMP_CWORD": str(count)},
        capture_output=True,
        text=True,
    )
    assert result.stderr == ""
    return {line.partition(",")[2] for line in result.stdout.splitlines()}


def test_a_shell_completes_commands_options_and_settings() -> None:
    assert completed("rlbuffer", "ru") == {name for name in COMMANDS if name.startswith("ru")}
    assert "--once" in completed("rlbuffer top", "--o")
    assert completed("rlbuffer config explain", "batcher.max_a") == {"batcher.max_age", "batcher.max_age_seconds"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_completion_prints_is_a_script_of_that_shell(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert (code, "_RLBUFFER_COMPLETE" in out, "rlbuffer" in out) == (0, True, True)
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=out, text=True, check=True)
