"""Wrong values: each is refused where it stands, and all of them at once; then what cannot work together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_configs import VALUES, lay_out, written

from rlbuffer.checks.check import EVERYTHING
from rlbuffer.checks.loading import load
from rlbuffer.config.explain import known_settings
from rlbuffer.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("section", "lines", "setting", "line"), VALUES, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_where_it_stands(
    folder: Path, section: str, lines: str, setting: str, line: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written((section, lines)), environ={})
    assert (caught.value.setting, f"rlbuffer.toml:{line}" in str(caught.value)) == (setting, True)


def test_all_that_is_wrong_is_told_at_once(folder: Path) -> None:
    values = [("batcher", "max_agee = 1\nclose_fill = 2.0\nmax_uses = 0"), ("trainer", "steps = 0")]
    pairs = [
        ("", 'redis_url = "localhost:6379"'),
        ("worker.a", "gpus = [0]\nreplicas = 2"),
        ("-model.config", ""),
    ]
    for changes, count in ((values, 4), (values + pairs, 7), (pairs, 3)):
        with pytest.raises(ConfigError) as caught:
            load(written(*changes), environ={}, parts=EVERYTHING)
        assert (
            sum(line.startswith("  ") and not line.startswith("    ") for line in str(caught.value).split("\n"))
            == count
        )


CONSEQUENCES = [
    ("worker.a", "env = 3"),  # else: there is no worker
    ("model.config", "model_type = 3\n[model]\npath = 3"),  # else: one of path and config is needed
    ("trainer.optimizer", 'schedule = "linear"\nwarmup_updates = -1'),
    ("batcher", "budgets = { vcopy = 2.0 }\nmin_group_size = 99"),
]


@pytest.mark.parametrize("change", CONSEQUENCES, ids=str)
def test_nothing_is_told_that_follows_from_another_mistake_alone(folder: Path, change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(change), environ={}, parts=EVERYTHING)
    mistakes = [text for text in str(caught.value).split("\n") if "rlbuffer.toml" in text]
    assert len(mistakes) == change[1].count("= 3") + change[1].count("-1") + change[1].count("2.0") + change[1].count(
        "99"
    )


WRONG = (3.5, "x y", [1.5], {"k": {"l": 1}}, True, -1, float("nan"), "")
LIBRARY = ("input should", "string should", "unable to parse", "valid ", "validation error", "pydantic")


@pytest.mark.parametrize("name", known_settings())
def test_a_wrong_value_of_any_setting_is_refused_in_our_words(name: str) -> None:
    dotted = name.replace("NAME", "a")
    base = {"worker.a.env": ("", "vcopy"), "eval.a.env": ("", "vcopy"), "score.a.model": ("", "initial")}
    for value in WRONG:
        try:
            load(environ={}, flags={**base, dotted: ("--flag", value)})
        except ConfigError as error:
            text = str(error)
            assert all(word in text for word in ("--flag", *dotted.split("."))), text
            assert not any(word in text.lower() for word in LIBRARY), text


CALL = """\
import json, sys
from rlbuffer_cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({"torch", "transformers", "vllm", "own"} & set(sys.modules))]))
"""


def test_a_command_says_what_is_wrong_before_it_loads_torch_or_starts_anything(folder: Path) -> None:
    written(("", f'home = "{folder}/home"'), ("batcher", 'order = "own:order"'), ("-model.config", ""))
    for command in (["run"], ["train"]):
        done = subprocess.run([sys.executable, "-c", CALL, *command], capture_output=True, text=True, check=True)
        assert done.stderr.startswith("Error: "), done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [3, []]
        assert not (folder / "home").exists()
