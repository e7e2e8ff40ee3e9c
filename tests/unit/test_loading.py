"""Settings and where each came from; every error is one line that begins with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlbuffer.checks.loading import load
from rlbuffer.config.explain import known_settings
from rlbuffer.config.loading import key_lines
from rlbuffer.config.settings import from_json, to_json
from rlbuffer.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = """\
run = "math"

[batcher]
row_tokens = 128
max_age = 2
budgets = { gsm8k = 0.4, code = 0.6 }

[trainer.publish]
every = 2

[worker.gsm8k]
env = "gsm8k"
group_size = 8
[worker.code]
env = "code"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("rlbuffer.toml")
    path.write_text(EXAMPLE)
    return path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def refusal(**arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(**({"environ": {}} | arguments))
    return caught.value


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(file: Path) -> None:
    loaded = load(environ={})
    assert (loaded.settings.run, loaded.place("run")) == ("math", "rlbuffer.toml:1")
    loaded = load(environ={"RLBUFFER_RUN": "from-env"})
    assert (loaded.settings.run, loaded.place("run")) == ("from-env", "RLBUFFER_RUN")
    loaded = load(environ={"RLBUFFER_RUN": "from-env"}, flags={"run": ("--run", "from-flag")})
    assert (loaded.settings.run, loaded.place("run")) == ("from-flag", "--run")
    loaded = load(environ={}, flags={"run": ("--run", None)})
    assert loaded.place("run") == "rlbuffer.toml:1"
    assert loaded.place("batcher.lookahead") == "default"


def test_variables_reach_into_sections_and_know_the_users_own_names(file: Path) -> None:
    variables = {
        "RLBUFFER_BATCHER__MAX_AGE": "3",
        "RLBUFFER_BATCHER__FLAT": "0.5",
        "RLBUFFER_BATCHER__BUDGETS__GSM8K": "0.25",
        "RLBUFFER_BATCHER__BUDGETS__CODE": "[[1, 0.25], [9, 0.5]]",
        "RLBUFFER_WORKER__GSM8K__REPLICAS": "2",
        "RLBUFFER_TRAINER__OPTIMIZER__BETAS": "[0.8, 0.9]",
        "RLBUFFER_TRAINER__REPORTS__CHECK_RANKS": "true",
        "RLBUFFER_MODEL__CONFIG__HIDDEN_SIZE": "64",
        "RLBUFFER_MODEL__PATH": "123",
        "RLBUFFER_SERVER_BIN": "/usr/bin/redis-server",
        "RLBUFFER_TEST_ANYTHING": "1",
        "RLBUFFER_DEBUG": "1",
    }
    loaded = load(environ=variables)
    settings = loaded.settings
    assert settings.batcher.max_age == 3
    assert settings.batcher.flat == 0.5
    assert settings.batcher.budgets == {"gsm8k": 0.25, "code": ((1, 0.25), (9, 0.5))}
    assert settings.worker["gsm8k"].replicas == 2
    assert settings.trainer.optimizer.betas == (0.8, 0.9)
    assert settings.trainer.reports.check_ranks is True
    assert settings.model.config == {"hidden_size": 64}
    assert settings.model.path == "123"
    assert loaded.place("worker.gsm8k.replicas") == "RLBUFFER_WORKER__GSM8K__REPLICAS"


def test_what_is_in_a_table_of_a_variable_comes_from_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[batcher]\nbudgets = { a = 0.5, b = 0.5 }\n")
    loaded = load(file, environ={"RLBUFFER_BATCHER__BUDGETS": "{a = 0.25, c = 0.75}"})
    assert loaded.settings.batcher.budgets.keys() == {"a", "c"}
    assert {name: loaded.place(f"batcher.budgets.{name}") for name in "abc"} == {
        "a": "RLBUFFER_BATCHER__BUDGETS",
        "b": "default",
        "c": "RLBUFFER_BATCHER__BUDGETS",
    }
    assert loaded.place("batcher.budgets") == "RLBUFFER_BATCHER__BUDGETS"


def test_an_empty_variable_counts_as_not_set_and_an_empty_url_as_the_embedded_server(file: Path) -> None:
    assert load(environ={"RLBUFFER_RUN": ""}).settings.run == "math"
    change(file, 'run = "math"', 'redis_url = ""')
    assert load(environ={}).settings.redis_url is None


def test_the_file_is_the_flag_then_the_variable_then_the_current_directory(file: Path) -> None:
    Path("other.toml").write_text('run = "other"')
    assert load(environ={"RLBUFFER_CONFIG": "other.toml"}).place("run") == "other.toml:1"
    assert load("rlbuffer.toml", environ={"RLBUFFER_CONFIG": "other.toml"}).settings.run == "math"
    file.unlink()
    assert load(environ={}).file is None


@pytest.mark.parametrize(
    ("old", "new", "line", "setting", "meant"),
    [
        ("max_age", "max_agee", 5, "batcher.max_agee", "batcher.max_age"),
        ("run =", "rum =", 1, "rum", "run"),
        ("group_size", "grup_size", 13, "worker.gsm8k.grup_size", "worker.gsm8k.group_size"),
        ("[trainer.publish]", "[traner]", 9, "traner", "trainer"),
        ("[trainer.publish]\nevery = 2", "[trainer]\nmax_age = 2", 9, "trainer.max_age", "batcher.max_age"),
        ("group_size", "my_group_size", 13, "worker.gsm8k.my_group_size", "worker.gsm8k.group_size"),
        ("run =", "batcher_lookahead = 2\nrun =", 1, "batcher_lookahead", "batcher.lookahead"),
        ("[batcher]", "batcher = 3\n[model.config]", 3, "batcher", ""),
        ("max_age = 2", "max_age =", 5, "", ""),
    ],
)
def test_a_wrong_file_is_refused_with_its_line_and_what_may_have_been_meant(
    file: Path, old: str, new: str, line: int, setting: str, meant: str
) -> None:
    change(file, old, new)
    error = refusal()
    assert error.setting == setting
    assert f"rlbuffer.toml:{line}" in str(error)
    assert (f"Did you mean {meant}?" in str(error)) == bool(meant)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("worker.NAME.groups_per_batch", "worker.NAME.groups_in_flight"),
        ("trainer.reports.proofs", "trainer.reports.check_ranks"),
        ("trainer.optimizer.stable_updates", "trainer.optimizer.decay_from_update"),
    ],
)
def test_a_setting_by_its_old_name_is_refused_with_the_new_one(file: Path, old: str, new: str) -> None:
    table, _, key = old.replace("NAME", "math").rpartition(".")
    file.write_text(f"[{table}]\n{key} = 1\n")
    assert f"It is called {new.replace('NAME', 'math')} now." in str(refusal())
    assert new in known_settings()


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("RLBUFFER_RUNN", "a", "runn"),
        ("RLBUFFER_BATCHER__MAX_AGEE", "1", "batcher.max_agee"),
        ("RLBUFFER_TRAINER__WORLD_SIZE", "0", "trainer.world_size"),
        ("RLBUFFER_BATCHER__BUDGETS", "0.5", "batcher.budgets"),
        ("RLBUFFER_BATCHER__BUDGETS__MATH", "half", "batcher.budgets.math"),
        ("RLBUFFER_BATCHER__BUDGETS__MATH", "1.5", "batcher.budgets.math"),
        ("RLBUFFER_BATCHER", "1", "batcher"),
        ("RLBUFFER_BATCHER__MIN_GROUP_SIZE", "9", "batcher.min_group_size"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(file: Path, variable: str, value: str, setting: str) -> None:
    error = refusal(environ={variable: value})
    assert error.setting == setting
    assert variable in str(error)


def test_variables_reach_into_a_section_of_a_section(file: Path) -> None:
    assert load(environ={"RLBUFFER_TRAINER__LORA__RANK": "8"}).settings.trainer.lora.rank == 8


def test_a_file_that_is_not_there_is_an_error_when_it_was_asked_for(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert str(missing) in str(refusal(config=missing))


def test_groups_of_an_env_need_what_its_scorers_add(file: Path) -> None:
    file.write_text(file.read_text() + '[score.a]\nmodel = "initial"\n[score.b]\nreward = "m:f"\nenvs = ["code"]\n')
    settings = load(environ={}).settings
    assert settings.needs_of("code") == ("ref_logprobs", "reward")
    assert settings.needs_of("gsm8k") == ("ref_logprobs",)


def test_the_line_of_a_key_is_that_which_begins_with_it_or_with_its_table() -> None:
    lines = key_lines(
        """\
a.b = 1 # x = 3
"q.r" = '[no]'
list = [
  [1, 0.2],
  [2, 0.4]
]
inline = { x = 1 }
[t."u v"] # w = 3
w = 2
[[rows]]
s = 1
"""
    )
    assert lines == {
        ("a", "b"): 1,
        ("q.r",): 2,
        ("list",): 3,
        ("inline",): 7,
        ("t", "u v"): 8,
        ("t", "u v", "w"): 9,
        ("rows",): 10,
        ("rows", "s"): 11,
    }


def test_the_example_file_shows_every_setting() -> None:
    import tomllib

    path = ROOT / "rlbuffer.toml"
    loaded = load(path, environ={})
    assert loaded.warnings == ()
    text = path.read_text()
    # Optional settings without a default stand there as comments.
    full = "\n".join(line.removeprefix("# ") if _is_setting(line) else line for line in text.splitlines())
    data = tomllib.loads(full)
    for name in known_settings():
        assert _has(data, name.split(".")), f"{name} is missing in rlbuffer.toml"


def _is_setting(line: str) -> bool:
    key, equals, _ = line.removeprefix("# ").partition(" = ")
    return line.startswith("# ") and ((bool(equals) and key.isidentifier()) or line.startswith("# [score."))


def _has(data: Any, name: list[str]) -> bool:
    if not name:
        return True
    inner = data.values() if name[0] == "NAME" else [data[name[0]]] if name[0] in data else []
    return any(_has(value, name[1:]) for value in inner)


def test_the_example_file_holds_the_defaults() -> None:
    loaded, default = load(ROOT / "rlbuffer.toml", environ={}), load(environ={}, config=None)
    example, plain = dict(loaded.values()), dict(default.values())
    own = ("batcher.budgets", "batcher.envs", "model.config", "worker")
    assert {k: v for k, v in example.items() if not k.startswith(own)} == {
        k: v for k, v in plain.items() if not k.startswith(own)
    }


def test_settings_survive_the_way_to_another_process(file: Path) -> None:
    settings = load(environ={"RLBUFFER_BATCHER__ENVS": "{gsm8k = {max_age = 3}}"}).settings
    assert from_json(to_json(settings)) == settings


def test_a_file_that_begins_with_a_byte_order_mark_is_read(file: Path) -> None:
    file.write_text("# a comment\n" + EXAMPLE, encoding="utf-8-sig")
    loaded = load(file)
    assert loaded.settings.run == "math"
    assert loaded.place("run") == "rlbuffer.toml:2"
