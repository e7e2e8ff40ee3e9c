"""More than a hundred wrong configurations: `rlbuffer config check` finds every mistake of each, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_configs import GOOD, MODULES, TABLE

from rlbuffer.config import loading
from rlbuffer.errors import ConfigError
from rlbuffer.run.host_checks import EVERYTHING, Parts
from rlbuffer.run.loading import load, mistakes_in


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


def refused(path: Path, parts: Parts = EVERYTHING) -> tuple[str, str, str]:
    """(kind, settings, text) of what is refused."""
    try:
        loaded = loading.load(path, environ={})
    except ConfigError as error:
        return "value", error.setting, str(error)
    for kind, looked_at in (("together", ()), ("host", parts)):
        if found := [mistake for mistake in mistakes_in(loaded, looked_at) if not mistake.works]:
            return kind, " ".join(m.settings[0] for m in found), "\n".join(m.text for m in found)
    return "", "", ""


def test_the_config_that_the_mistakes_are_put_into_has_none(folder: Path) -> None:
    extra = ("worker.b", 'env = "own:make"\nenv_options = { size = 4 }'), ("trainer.loss", 'name = "own:loss"')
    assert load(written(*extra), environ={}, parts=EVERYTHING).settings.trainer.loss.name == "own:loss"
    load(written(("worker.b", 'env = "kit.envs:make"')), environ={}, parts=EVERYTHING)
    assert not Path("imported").exists()  # a check runs nobody's code


@pytest.mark.parametrize(("section", "lines", "kind", "settings", "line"), TABLE, ids=lambda value: str(value)[:40])
def test_a_wrong_config_is_refused_where_it_stands_and_nothing_else_is(
    folder: Path, section: str, lines: str, kind: str, settings: str, line: int
) -> None:
    found = refused(written((section, lines)))
    assert found[:2] == (kind, settings), found
    assert f"rlbuffer.toml:{line}" in found[2] or not line


def test_all_wrong_values_are_told_at_once_and_then_all_that_cannot_work_together(folder: Path) -> None:
    values = [("batcher", "max_agee = 1\nclose_fill = 2.0\nmax_uses = 0"), ("trainer", "steps = 0")]
    pairs = [
        ("", 'redis_url = "localhost:6379"'),
        ("server", 'maxmemory = "lots"'),
        ("worker.a", "gpus = [0]\nreplicas = 2"),
        ("worker.b", 'env = "nowhere:make"'),
        ("-model.config", '[model]\npath = "nowhere"'),
    ]
    for changes, count in ((values + pairs, 4), (pairs, 5)):
        with pytest.raises(ConfigError) as caught:
            load(written(*changes), environ={}, parts=EVERYTHING)
        assert (
            sum(line.startswith("  ") and not line.startswith("    ") for line in str(caught.value).split("\n"))
            == count
        )


def test_a_package_that_is_not_installed_is_named_with_what_brings_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.run.host_checks.is_installed", lambda module: module in ("torch", "transformers"))
    kind, settings, _ = refused(
        written(
            ("trainer", "reports = { tensorboard = true }\nlora = { rank = 4 }"),
            ("worker.b", 'env = "reasoning_gym"'),
            ("worker.a", 'sampler = "vllm"'),
        )
    )
    assert kind == "host"
    assert settings.split() == [
        *("trainer.lora.rank", "trainer.reports.tensorboard", "worker.a.sampler", "worker.b.env"),
        *("worker.b.env_options.dataset", "worker.b.env_options.tokenizer"),
    ]


def test_a_command_needs_on_its_host_only_what_it_uses(folder: Path) -> None:
    path = written(("-model.config", ""), ("worker.b", 'env = "nowhere:make"'), ("batcher", 'order = "own:order"'))
    load(path, environ={})
    load(path, environ={}, parts=("worker.a",))
    for part, setting in (("worker.b", "worker.b.env"), ("train", "model"), ("serve", "batcher.order")):
        assert refused(path, (part,))[:2] == ("host", setting)


def test_a_server_program_that_is_not_there_is_a_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBUFFER_SERVER_BIN", "no-such-server")
    assert refused(written(("", 'run = "a"')))[1] == "RLBUFFER_SERVER_BIN"
    load(written(("", 'redis_url = "redis://h"')), environ={}, parts=EVERYTHING)


DOUBTS = [
    ("worker.b", 'env = "own:make"\nenv_options = { name = "math" }', ("batcher", "budgets = { math = 0.5 }"), ""),
    ("worker.b", 'env = "own:make"', ("batcher", "budgets = { math = 0.5 }"), ""),
    ("worker.b", 'env = "vcopy"\nenv_options = { seed = 5 }', None, "worker.b"),
    ("worker.a", "group_size = 1", None, "worker.a.group_size"),
    ("worker.a", "max_new_tokens = 2000", None, "worker.a.max_new_tokens"),
    ("worker.a", "gpus = [0]", None, "worker.a.gpus"),
    ("trainer.optimizer", "min_learning_rate = 0.0001", None, "trainer.optimizer.min_learning_rate"),
    ("trainer.optimizer", "stable_updates = 1", None, "trainer.optimizer.stable_updates"),
    ("trainer.loss", 'kl_estimator = "k1"', None, "trainer.loss.kl_estimator"),
    ("batcher", 'remainder = "repeat"', None, "batcher.remainder"),
    ("batcher", "envs = { vcopyy = { max_age = 2 } }", None, "batcher.envs.vcopyy"),
    ("batcher", "budgets = { code = 0.5 }", None, "batcher.budgets.code"),
    ("batcher", "max_uses = 3", None, "batcher.max_uses"),
    ("worker.a", "temperature = 0.5", None, "worker.a.temperature"),
    ("trainer.optimizer", "updates_per_pass = 3", None, "trainer.optimizer.updates_per_pass"),
    ("trainer.optimizer", "updates_per_pass = 3", ("batcher", "step_groups = 8"), ""),
    ("weights", 'url = "http://h:1"', None, "weights.url"),
    ("weights", 'listen = "0.0.0.0:9465"', None, "weights.listen"),
]


@pytest.mark.parametrize(("section", "lines", "more", "setting"), DOUBTS, ids=lambda value: str(value)[:40])
def test_what_works_and_is_hardly_meant_is_warned_of(
    folder: Path, section: str, lines: str, more: tuple[str, str] | None, setting: str
) -> None:
    warnings = load(written((section, lines), *([more] if more else [])), environ={}).warnings
    assert len(warnings) == bool(setting), warnings
    assert not setting or (setting in warnings[0] and "rlbuffer.toml:" in warnings[0])


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
