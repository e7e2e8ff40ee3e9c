"""Settings and where each came from; every error is one line that begins with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlbuffer.config.setting_tree import run_schema
from rlbuffer.config.settings import from_json, to_json
from rlbuffer.config.toml_lines import key_lines
from rlbuffer.errors import ConfigError
from rlbuffer.run.loading import load

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


def refusal(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**({"environ": {}} | arguments))
    return str(caught.value)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(file: Path) -> None:
    loaded = load(environ={})
    assert (loaded.settings.run, loaded.source("run")) == ("math", "rlbuffer.toml:1")
    loaded = load(environ={"RLBUFFER_RUN": "from-env"})
    assert (loaded.settings.run, loaded.source("run")) == ("from-env", "RLBUFFER_RUN")
    loaded = load(environ={"RLBUFFER_RUN": "from-env"}, flags={"run": ("--run", "from-flag")})
    assert (loaded.settings.run, loaded.source("run")) == ("from-flag", "--run")
    loaded = load(environ={}, flags={"run": ("--run", None)})
    assert loaded.source("run") == "rlbuffer.toml:1"
    assert loaded.source("batcher.lookahead") == "default"


def test_variables_reach_into_sections_and_know_the_users_own_names(file: Path) -> None:
    variables = {
        "RLBUFFER_BATCHER__MAX_AGE": "3",
        "RLBUFFER_BATCHER__FLAT": "0.5",
        "RLBUFFER_BATCHER__BUDGETS__GSM8K": "0.25",
        "RLBUFFER_BATCHER__BUDGETS__CODE": "[[1, 0.25], [9, 0.5]]",
        "RLBUFFER_WORKER__GSM8K__REPLICAS": "2",
        "RLBUFFER_TRAINER__OPTIMIZER__BETAS": "[0.8, 0.9]",
        "RLBUFFER_TRAINER__REPORTS__PROOFS": "true",
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
    assert settings.trainer.reports.proofs is True
    assert settings.model.config == {"hidden_size": 64}
    assert settings.model.path == "123"
    assert loaded.source("worker.gsm8k.replicas") == "RLBUFFER_WORKER__GSM8K__REPLICAS"


def test_what_is_in_a_table_of_a_variable_comes_from_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[batcher]\nbudgets = { a = 0.5, b = 0.5 }\n")
    loaded = load(file, environ={"RLBUFFER_BATCHER__BUDGETS": "{a = 0.25, c = 0.75}"})
    assert loaded.settings.batcher.budgets.keys() == {"a", "c"}
    assert {name: loaded.source(f"batcher.budgets.{name}") for name in "abc"} == {
        "a": "RLBUFFER_BATCHER__BUDGETS",
        "b": "default",
        "c": "RLBUFFER_BATCHER__BUDGETS",
    }
    assert loaded.source("batcher.budgets") == "RLBUFFER_BATCHER__BUDGETS"


def test_an_empty_variable_counts_as_not_set_and_an_empty_url_as_the_embedded_server(file: Path) -> None:
    assert load(environ={"RLBUFFER_RUN": ""}).settings.run == "math"
    change(file, 'run = "math"', 'redis_url = ""')
    assert load(environ={}).settings.redis_url is None


def test_the_file_is_the_flag_then_the_variable_then_the_current_directory(file: Path) -> None:
    Path("other.toml").write_text('run = "other"')
    assert load(environ={"RLBUFFER_CONFIG": "other.toml"}).source("run") == "other.toml:1"
    assert load("rlbuffer.toml", environ={"RLBUFFER_CONFIG": "other.toml"}).settings.run == "math"
    file.unlink()
    assert load(environ={}).file is None


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("max_age", "max_agee", "rlbuffer.toml:5  batcher.max_agee is not a setting. Did you mean batcher.max_age?"),
        ("run =", "rum =", "rlbuffer.toml:1  rum is not a setting. Did you mean run?"),
        (
            "group_size",
            "grup_size",
            "rlbuffer.toml:13  worker.gsm8k.grup_size is not a setting. Did you mean worker.gsm8k.group_size?",
        ),
        (
            "[trainer.publish]",
            "[traner]",
            "rlbuffer.toml:8  traner is not a setting. Did you mean trainer?",
        ),
        (
            "[trainer.publish]\nevery = 2",
            "[trainer]\nmax_age = 2",
            "rlbuffer.toml:9  trainer.max_age is not a setting. Did you mean batcher.max_age?",
        ),
        (
            "max_age = 2",
            'max_age = "two"',
            (
                "rlbuffer.toml:5  batcher.max_age = 'two': input should be a valid integer, unable to parse "
                "string as an integer"
            ),
        ),
        ("max_age = 2", "max_age = -1", "rlbuffer.toml:5  batcher.max_age = -1 must not be negative"),
        ("0.4,", "0.5,", "rlbuffer.toml:6  batcher.budgets sum to 1.1: fractions above 1 can never be met"),
        ('env = "code"', "replicas = 2", "rlbuffer.toml:15  worker.code.env is required"),
        ("[batcher]", "batcher = 3\n[model.config]", "rlbuffer.toml:3  batcher is a section ([batcher]), got 3"),
        ("max_age = 2", "max_age =", "rlbuffer.toml:5  not valid TOML: Invalid value (column 10)"),
        (
            "every = 2",
            "every = 4",
            (
                "these settings can never make a batch: trainer.publish.every = 4 leaves the newest weights up to 3 "
                "versions behind, but max_age = 2 (rlbuffer.toml:9, :5)."
            ),
        ),
        (
            'env = "code"',
            'env = "code"\nsampler = "vllm"\ntop_p = 0.8\ntemperature = 0.7',
            (
                "worker.code.top_p = 0.8 needs temperature = 1 with sampler vllm, not 0.7: vLLM would give logprobs of "
                "what the nucleus leaves, and every ratio would be wrong by its mass (rlbuffer.toml:17, :18)."
            ),
        ),
        (
            "max_age = 2",
            "min_group_size = 16",
            (
                "these settings can never make a batch: min_group_size = 16, but the workers' group_size = 8 "
                "(rlbuffer.toml:5, :13)."
            ),
        ),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_reason(file: Path, old: str, new: str, text: str) -> None:
    change(file, old, new)
    assert refusal() == text


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("RLBUFFER_RUNN", "a", "RLBUFFER_RUNN is not a variable that rlbuffer knows. Did you mean RLBUFFER_RUN?"),
        (
            "RLBUFFER_BATCHER__MAX_AGEE",
            "1",
            "RLBUFFER_BATCHER__MAX_AGEE is not a variable that rlbuffer knows. Did you mean RLBUFFER_BATCHER__MAX_AGE?",
        ),
        (
            "RLBUFFER_TRAINER__WORLD_SIZE",
            "0",
            "RLBUFFER_TRAINER__WORLD_SIZE  trainer.world_size = '0': input should be greater than or equal to 1",
        ),
        (
            "RLBUFFER_BATCHER__BUDGETS",
            "0.5",
            "RLBUFFER_BATCHER__BUDGETS  batcher.budgets is a table ([batcher.budgets]), got 0.5",
        ),
        (
            "RLBUFFER_BATCHER__BUDGETS__MATH",
            "half",
            (
                "RLBUFFER_BATCHER__BUDGETS__MATH  batcher.budgets.math = 'half': must be a fraction, or a list of "
                "[step, fraction]"
            ),
        ),
        (
            "RLBUFFER_BATCHER__BUDGETS__MATH",
            "1.5",
            "RLBUFFER_BATCHER__BUDGETS__MATH  batcher.budgets.math = 1.5 must be above 0 and at most 1",
        ),
        (
            "RLBUFFER_BATCHER__MIN_GROUP_SIZE",
            "9",
            (
                "these settings can never make a batch: min_group_size = 9, but the workers' group_size = 8 "
                "(RLBUFFER_BATCHER__MIN_GROUP_SIZE, rlbuffer.toml:13)."
            ),
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(file: Path, variable: str, value: str, text: str) -> None:
    assert refusal(environ={variable: value}) == text


def test_variables_reach_into_a_section_of_a_section(file: Path) -> None:
    assert load(environ={"RLBUFFER_TRAINER__LORA__RANK": "8"}).settings.trainer.lora.rank == 8


@pytest.mark.parametrize(("env", "shortest"), [("vcopy", 6), ("repeat", 4)])
def test_a_row_shorter_than_the_shortest_rollout_is_refused(file: Path, env: str, shortest: int) -> None:
    rows = "[batcher]\nrow_tokens = {}\n[worker.w]\nenv = '{}'\n"
    file.write_text(rows.format(shortest, env))
    assert load(environ={}).settings.batcher.row_tokens == shortest
    file.write_text(rows.format(shortest - 1, env))
    assert refusal() == (
        f"these settings can never make a batch: row_tokens = {shortest - 1}, but the shortest rollout of {env} has "
        f"{shortest} tokens (rlbuffer.toml:2, :4)."
    )


def test_a_file_that_is_not_there_is_an_error_when_it_was_asked_for(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert refusal(config=missing) == f"cannot read the config file {missing}: No such file or directory"


def test_what_groups_need_and_no_scorer_of_the_file_gives_is_doubtful(file: Path) -> None:
    change(file, 'env = "code"', 'env = "code"\nneeds = ["ref_logprobs", "reward"]')
    assert load(environ={}).warnings == (
        (
            "worker.code.needs: no [score.NAME] section gives ref_logprobs, reward; its groups wait until a scorer "
            "elsewhere does (rlbuffer.toml:16)."
        ),
    )
    file.write_text(file.read_text() + '[score.a]\nmodel = "initial"\n[score.b]\nreward = "m:f"\nenvs = ["code"]\n')
    assert load(environ={}).warnings == ()


def test_doubtful_settings_only_warn(file: Path) -> None:
    change(file, 'env = "code"', 'env = "prose"\ntemperature = 0.5')
    assert load(environ={}).warnings == (
        "batcher.budgets.code: no worker here samples code; steps wait until one elsewhere does (rlbuffer.toml:6).",
        (
            "worker.code samples prose, which has no budget while the others take all of it: its groups will never "
            "train (rlbuffer.toml:15, :6)."
        ),
        (
            "worker.code.temperature = 0.5, but trainer.temperature = 1: the trainer would compare logprobs of two "
            "distributions (rlbuffer.toml:16, default)."
        ),
    )


@pytest.mark.parametrize(("uses", "age", "steps"), [(2, 0, "1 step"), (2, 1, None), (4, 2, "3 steps")])
def test_more_uses_than_the_age_allows_are_doubtful(file: Path, uses: int, age: int, steps: str | None) -> None:
    file.write_text(f"[batcher]\nmax_uses = {uses}\nmax_age = {age}\n")
    sentence = (
        f"batcher.max_uses = {uses} is never reached: with max_age = {age} a group is young enough for {steps} "
        "(rlbuffer.toml:2, :3)."
    )
    assert load(environ={}).warnings == ((sentence,) if steps else ())


@pytest.mark.parametrize("closing", ["", "step_groups = 8"])
def test_more_updates_than_micro_batches_are_doubtful(file: Path, closing: str) -> None:
    file.write_text(f"[batcher]\nmicro_batches_per_rank = 2\n{closing}\n[trainer.optimizer]\nupdates_per_pass = 3\n")
    sentence = (
        "trainer.optimizer.updates_per_pass = 3, but a step has 2 micro-batches on a rank, and an update has at least "
        "one (rlbuffer.toml:5, :2)."
    )
    assert load(environ={}).warnings == (() if closing else (sentence,))


def test_a_schedule_that_cannot_be_meant_is_refused_with_the_file(file: Path) -> None:
    file.write_text('[trainer]\nsteps = 10\n[trainer.optimizer]\nschedule = "wsd_sqrt"\nstable = 10\n')
    assert refusal() == (
        "rlbuffer.toml:5  trainer.optimizer.stable = 10: with schedule = wsd_sqrt the rate falls from that update on, "
        "so it must be at least warmup_updates = 0 and less than the 10 planned updates"
    )


def test_lines_are_found_through_every_form_of_toml() -> None:
    text = """\
a.b = 1 # x = 3
"q.r" = '[no]'
text = \"\"\"
[not.a.table]
k = \\\"\"\" 1
\"\"\"
list = [
  1, # ]
  "]", { z = 1 },
]
inline = { x = 1, "y y" = [2,
  3], n = { m = 2 } }
[t."u v"]
w = 2
[[rows]]
s = ''' ' [x] '''
[[rows]]
s = 1979-05-27T07:32:00Z
"""
    found = key_lines(text)
    assert found[("a", "b")] == 1
    assert found[("q.r",)] == 2
    assert found[("text",)] == 3
    assert found[("list",)] == 7
    assert found[("inline",)] == found[("inline", "x")] == found[("inline", "y y")] == 11
    assert found[("inline", "n", "m")] == 12
    assert found[("t", "u v")] == 13
    assert found[("t", "u v", "w")] == 14
    assert found[("rows", "s")] == 16
    assert ("k",) not in found
    assert ("not", "a", "table") not in found


def test_the_example_file_shows_every_setting() -> None:
    import tomllib

    path = ROOT / "rlbuffer.toml"
    loaded = load(path, environ={})
    assert loaded.warnings == ()
    text = path.read_text()
    # Optional settings without a default stand there as comments.
    full = "\n".join(line.removeprefix("# ") if _is_setting(line) else line for line in text.splitlines())
    data = tomllib.loads(full)
    for name in run_schema().names():
        assert _has(data, name), f"{'.'.join(name)} is missing in rlbuffer.toml"


def _is_setting(line: str) -> bool:
    key, equals, _ = line.removeprefix("# ").partition(" = ")
    return line.startswith("# ") and ((bool(equals) and key.isidentifier()) or line.startswith("# [score."))


def _has(data: Any, name: tuple[str, ...]) -> bool:
    if not name:
        return True
    inner = data.values() if name[0] == "*" else [data[name[0]]] if name[0] in data else []
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
    assert loaded.source("run") == "rlbuffer.toml:2"
