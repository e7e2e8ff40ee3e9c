"""Commands as a newcomer meets them: help, exit codes, error texts. Nothing here needs a server."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import rlbuffer
from rlbuffer.client.filters import FIELDS
from rlbuffer.process.inputs import Input
from rlbuffer_cli.commands.push import read_groups
from rlbuffer_cli.main import COMMANDS

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(typed: Run) -> Run:
    return typed


EXAMPLE_FILE = Path(__file__).parents[2] / "rlbuffer.toml"


def command(name: str) -> click.Command:
    found = importlib.import_module(f"rlbuffer_cli.commands.{name.replace('-', '_')}").command
    assert isinstance(found, click.Command)
    return found


def test_help_and_version(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert run("--version") == (0, f"rlbuffer {rlbuffer.__version__}\n", "")
    code, out, _ = run("inspect", "--help")
    assert code == 0
    assert "Changes nothing." in out
    assert [field for field in FIELDS if not re.search(rf"(?<![\w.]){re.escape(field)}\b", out)] == []


def leaves(found: click.Command) -> Iterator[click.Command]:
    for inner in found.commands.values() if isinstance(found, click.Group) else ():
        yield from leaves(inner)
    if not isinstance(found, click.Group):
        yield found


@pytest.mark.parametrize("leaf", [leaf for name in COMMANDS for leaf in leaves(command(name))], ids=lambda c: c.name)
def test_the_options_of_a_command_stand_before_those_of_all(leaf: click.Command) -> None:
    own, _, common = leaf.get_help(click.Context(leaf)).partition("\nCommon:\n")
    flags = {p.opts[-1] for p in leaf.params if isinstance(p, click.Option) and not p.hidden}
    of_all = flags & {"--config", "--redis", "--run", "--home"} | {"--help"}
    listed = [set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)) for text in (own, common)]
    assert listed == [flags - of_all, of_all]


def test_what_an_error_tells_to_type_is_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that an error names must be one, also for who has installed the wheel and has no file of ours."""
    told = [run("run")[2], run("worker", "x")[2], run("train")[2]]
    for number, text in enumerate(told):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        (command,) = re.findall(r"`rlbuffer ([^`>]*)", text)[:1]
        assert run(*command.split())[0] == 0


def test_looking_starts_nothing(run: Run, tmp_path: Path) -> None:
    assert run("inspect")[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where_an_error_came_from(run: Run) -> None:
    from rlbuffer.errors import ConfigError

    with pytest.raises(ConfigError, match=r"no\.toml"):
        run("config", "check", "--debug", "no.toml")


def test_config_show_hides_what_may_be_a_secret(run: Run) -> None:
    Path("rlbuffer.toml").write_text(
        '[worker.math]\nenv = "vcopy"\nsampler_options = { api_key = "sk-3", max_model_len = 77 }\n'
    )
    for options in ((), ("--json",), ("--sources",)):
        code, out, _ = run("config", "show", *options)
        assert (code, "sk-" in out) == (0, False)
        joined = "." if options == ("--json",) else "]\n"
        assert f"worker.math.sampler_options{joined}api_key" in out
        assert "77" in out
        assert "8192" in out, "tokens of a row are no secret"


def test_config_show_tells_value_and_source(run: Run) -> None:
    Path("rlbuffer.toml").write_text("[batcher]\nmax_age = 3\n")
    code, out, _ = run("config", "show", "--sources", "--run", "x")
    assert code == 0
    top, batcher, trainer = (
        dict(line.split(" = ") for line in table.splitlines()[bool(i) :])
        for i, table in enumerate(out.split("\n\n"))
        if i == 0 or table.startswith(("[batcher]", "[trainer]"))
    )
    assert batcher["max_age"].split() == ["3", "#", "rlbuffer.toml:2"]
    assert top["run"].split() == ['"x"', "#", "--run"]
    assert top["# redis_url"].split() == ["(not", "set)", "#", "default"]
    assert batcher["row_tokens"].split() == ["8192", "#", "default"]
    assert list(trainer)[:3] == ["world_size", "steps", "# output"]
    code, out, _ = run("config", "show", "--json")
    record = next(r for r in map(json.loads, out.splitlines()) if r["name"] == "batcher.max_age")
    assert record == {
        "schema": "rlbuffer.setting/1",
        "name": "batcher.max_age",
        "value": 3,
        "source": "rlbuffer.toml:2",
    }


def test_what_config_show_prints_is_a_file_with_the_same_settings(run: Run) -> None:
    Path("rlbuffer.toml").write_text(EXAMPLE_FILE.read_text())
    first = run("config", "show")
    Path("rlbuffer.toml").write_text(first[1])
    assert run("config", "show") == first
    assert (first[0], first[1].count("\n[trainer.")) == (0, 7)


def line(**changes: Any) -> str:
    rollout = {
        "tokens": [1, 2, 3],
        "loss_mask": [False, True, True],
        "logprobs": [0.0, -0.5, -0.25],
        "reward": 0.5,
        "version_spans": [[0, 1, 3]],
    }
    group = {"group_id": "g1", "env": "math", "prompt_id": "p", "planned_size": 1, "rollouts": [rollout | changes]}
    return json.dumps(group)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"group_id": ', ["g.jsonl:3  not JSON: Expecting value: line 1 column 13 (char 12)"]),
        ('{"env": "a", "env": "b"}', ["g.jsonl:3  ", "'env' occurs twice"]),
        ("[1]", ["g.jsonl[0]  "]),
        ("1", ["g.jsonl:3  "]),
        (line(reward=float("nan")), ["g.jsonl:3  ", "reward"]),
        (line(logprobs=[0.0]), ["g.jsonl:3  ", "logprobs"]),
        (line(version_spans=[[-1, 1, 3]]), ["g.jsonl:3  ", "version"]),
        (line(rewrad=1), ["g.jsonl:3  ", "rewrad", "reward"]),
    ],
)
def test_a_file_of_bad_lines_is_refused_with_the_place_of_the_first(
    run: Run, tmp_path: Path, bad: str, words: list[str]
) -> None:
    Path("g.jsonl").write_text(f"\n\n{bad}\n")
    code, out, err = run("push", "g.jsonl")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert all(word in err for word in words), err
    assert not (tmp_path / "home").exists()


def test_the_deterministic_demo_takes_no_config_of_ones_own(run: Run) -> None:
    assert run("demo", "--deterministic", "--config", "mine.toml")[0] == 2


def test_a_file_of_groups_that_begins_with_a_byte_order_mark_is_read() -> None:
    file = Input("groups.jsonl", io.BytesIO(line().encode("utf-8-sig")))
    assert [group.group_id for group in read_groups(file, wrong=pytest.fail)] == ["g1"]
