"""More than a hundred wrong configurations: `rlbuffer config check` finds every mistake of each, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_configs import GOOD, MODULES, TABLE

from rlbuffer.errors import ConfigError
from rlbuffer.run.host_checks import EVERYTHING
from rlbuffer.run.loading import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in MODULES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="latin-1")
    return tmp_path


def written(*changes: tuple[str, str]) -> Path:
    """The good config with sections changed; ``-NAME`` leaves one out. A setting that is given again is replaced."""
    sections = dict(GOOD)
    head, tail = "", ""
    for section, lines in changes:
        if section.startswith("-"):
            del sections[section[1:]]
            tail += f"{lines}\n"
        elif section:
            new = [line.partition(" = ")[0] for line in lines.split("\n")]
            kept = [x for x in sections.get(section, "").split("\n") if x.partition(" = ")[0] not in new]
            sections[section] = "\n".join([*kept, lines])
        else:
            head += f"{lines}\n"
            sections = {k: v for k, v in sections.items() if not (lines == "worker = 3" and k == "worker.a")}
    path = Path("rlbuffer.toml")
    path.write_text(head + "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items()) + tail)
    return path


def found(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, environ={}, parts=EVERYTHING)
    return str(refused.value)


def test_the_config_that_the_mistakes_are_put_into_has_none(folder: Path) -> None:
    extra = ("worker.b", 'env = "own:make"\nenv_options = { size = 4 }'), ("trainer.loss", 'name = "own:loss"')
    assert load(written(*extra), environ={}, parts=EVERYTHING).settings.trainer.loss.name == "own:loss"
    load(written(("worker.b", 'env = "kit.envs:make"')), environ={}, parts=EVERYTHING)
    assert not Path("imported").exists()  # a check runs nobody's code


@pytest.mark.parametrize(("section", "lines", "said"), TABLE, ids=lambda value: str(value)[:40])
def test_a_wrong_config_is_found_with_its_mistakes_and_no_other(
    folder: Path, section: str, lines: str, said: list[str]
) -> None:
    text = found(written((section, lines)))
    assert text.startswith(f"{len(said)} mistakes in the settings:\n") == (len(said) > 1), text
    for mistake in said:
        for part in mistake.split(" ... "):
            assert part in text


def test_all_mistakes_of_one_file_are_told_at_once(folder: Path) -> None:
    """One of each kind, in one file: names, values, addresses, combinations, losses, modules, the model."""
    path = written(
        ("batcher", "max_agee = 1\nclose_fill = 2.0\nmax_uses = 0"),
        ("", 'redis_url = "localhost:6379"'),
        ("server", 'maxmemory = "lots"'),
        ("trainer", "steps = 0"),
        ("trainer.loss", 'name = "gspo"\ndual_clip = 3.0'),
        ("worker.a", "gpus = [0]\nreplicas = 2"),
        ("worker.b", 'env = "nowhere:make"'),
        ("worker.c", 'env = "vcoppy"'),
        ("-model.config", '[model]\npath = "nowhere"'),
    )
    text = found(path)
    assert text.startswith("11 mistakes in the settings:\n  rlbuffer.toml:4  batcher.max_agee is not a setting.")
    for part in (
        "batcher.close_fill = 2.0 must lie",
        "batcher.max_uses = 0 must be",
        "localhost:6379 is not the address",
        "maxmemory = 'lots'",
        "dual_clip = 3.0 does nothing",
        "trainer.steps = 0: input",
        "cannot be dealt equally",
        "there is no module nowhere",
        "env 'vcoppy' is not one of",
        "model.path: nowhere is not a directory",
    ):
        assert part in text


def test_a_package_that_is_not_installed_is_named_with_what_brings_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.run.host_checks.is_installed", lambda module: module in ("torch", "transformers"))
    text = found(
        written(
            ("trainer", "reports = { tensorboard = true }\nlora = { rank = 4 }"),
            ("worker.b", 'env = "reasoning_gym"'),
            ("worker.a", 'sampler = "vllm"'),
        )
    )
    assert [line.partition("  ")[2] for line in text.split("\n")[1:]] == [
        "rlbuffer.toml:9  trainer.lora.rank needs the module peft: pip install 'rlbuffer[lora]'",
        (
            "rlbuffer.toml:8  trainer.reports.tensorboard needs the module tensorboard: "
            "pip install 'rlbuffer[tensorboard]'"
        ),
        "rlbuffer.toml:12  worker.a.sampler = 'vllm' needs the module vllm: pip install 'rlbuffer[vllm]'",
        "rlbuffer.toml:15  worker.b.env = 'reasoning_gym' needs the module reasoning_gym: pip install 'rlbuffer[envs]'",
        "rlbuffer.toml:15  worker.b.env_options.dataset is required: env reasoning_gym has no default for it",
        "rlbuffer.toml:15  worker.b.env_options.tokenizer is required: env reasoning_gym has no default for it",
    ]


def test_what_may_only_follow_from_another_mistake_is_not_told(folder: Path) -> None:
    text = found(written(("batcher", "max_age = -3"), ("trainer.publish", "every = 3")))
    assert text == "rlbuffer.toml:3  batcher.max_age = -3 must not be negative"
    text = found(written(("-worker.a", "[worker.b]\ngroup_size = 4")))
    assert text == "rlbuffer.toml:9  worker.b.env is required"


def test_a_command_needs_on_its_host_only_what_it_uses(folder: Path) -> None:
    path = written(("-model.config", ""), ("worker.b", 'env = "nowhere:make"'), ("batcher", 'order = "own:order"'))
    load(path, environ={})
    load(path, environ={}, parts=("worker.a",))
    for part, text in (("worker.b", "worker.b.env ="), ("train", "model: "), ("serve", "batcher.order =")):
        with pytest.raises(ConfigError, match=f"^(rlbuffer.toml:[0-9]+  )?{text}"):
            load(path, environ={}, parts=(part,))


def test_a_server_program_that_is_not_there_is_a_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBUFFER_SERVER_BIN", "no-such-server")
    assert "RLBUFFER_SERVER_BIN names no-such-server, which is not a file" in found(written(("", 'run = "a"')))
    load(written(("", 'redis_url = "redis://h"')), environ={}, parts=EVERYTHING)


DOUBTS = [
    ("worker.b", 'env = "own:make"\nenv_options = { name = "math" }', ("batcher", "budgets = { math = 0.5 }"), ""),
    ("worker.b", 'env = "own:make"', ("batcher", "budgets = { math = 0.5 }"), ""),
    (
        "worker.b",
        'env = "vcopy"\nenv_options = { seed = 5 }',
        None,
        "worker.a and worker.b both sample vcopy, with other options: a ticket's number is another prompt in each.",
    ),
    ("worker.a", "group_size = 1", None, "worker.a.group_size = 1: advantages compare the rollouts of a group"),
    ("worker.a", "max_new_tokens = 2000", None, "what is longer than batcher.row_tokens = 1024 is dropped"),
    ("worker.a", "gpus = [0]", None, "worker.a.gpus = [0] does nothing with device = cpu"),
    (
        "trainer.optimizer",
        "min_learning_rate = 0.0001",
        None,
        "trainer.optimizer.min_learning_rate does nothing without another schedule",
    ),
    ("trainer.optimizer", "stable = 1", None, "trainer.optimizer.stable does nothing without schedule = wsd_sqrt"),
    ("trainer.loss", 'kl_estimator = "k1"', None, "trainer.loss.kl_estimator does nothing without kl_beta above 0"),
    ("batcher", 'remainder = "repeat"', None, "batcher.remainder: no worker here samples repeat"),
    ("batcher", "envs = { vcopyy = { max_age = 2 } }", None, "batcher.envs.vcopyy: no worker here samples vcopyy"),
    ("weights", 'url = "http://h:1"', None, "weights.url is set and weights.listen is not"),
    ("weights", 'relays = ["http://h:1"]', None, "weights.relays are asked only for versions with a weights.url"),
]


@pytest.mark.parametrize(("section", "lines", "more", "said"), DOUBTS, ids=lambda value: str(value)[:40])
def test_what_works_and_is_hardly_meant_is_warned_of(
    folder: Path, section: str, lines: str, more: tuple[str, str] | None, said: str
) -> None:
    warnings = load(written((section, lines), *([more] if more else [])), environ={}).warnings
    assert len(warnings) == bool(said), warnings
    assert said in "".join(warnings)


CALL = """\
import json, sys
from rlbuffer_cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted({"torch", "transformers", "vllm"} & set(sys.modules))]))
"""


@pytest.mark.parametrize(
    ("command", "head"),
    [
        (["config", "check"], "Error: 5 mistakes in the settings:"),
        (["run"], "Error: 5 mistakes in the settings:"),
        (["train"], "Error: 2 mistakes in the settings:"),
        (["worker", "b"], "Error: 2 mistakes in the settings:"),
        (["serve"], "Error: 2 mistakes in the settings:"),
    ],
)
def test_a_command_says_what_is_wrong_before_it_loads_torch_or_starts_anything(
    folder: Path, command: list[str], head: str
) -> None:
    written(
        ("", f'home = "{folder}/home"'),
        ("server", 'maxmemory = "lots"'),
        ("batcher", 'order = "own:order"'),
        ("worker.b", 'env = "own:mak"'),
        ("trainer.reports", "tensorboard = false"),
        ("-model.config", ""),
        ("score.s", 'reward = "nowhere:judge"'),
    )
    done = subprocess.run([sys.executable, "-c", CALL, *command], capture_output=True, text=True, check=True)
    assert done.stderr.startswith(head), done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [3, []]
    assert not (folder / "home").exists()
