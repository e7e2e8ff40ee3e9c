"""The user's modules are imported in one child: what is wrong with each is told with its file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from wrong_configs import lay_out, written

from rlbuffer.checks.check import Context
from rlbuffer.checks.host import functions
from rlbuffer.checks.imports import NamedFunction, wrong
from rlbuffer.config import loading

IDS = "vocab_size = 13, eos_token_ids = [12]"
WORKERS = {
    "nowhere:make": ("env", ""),
    "own:mak": ("env", ""),
    "own:value": ("env", ""),
    "own.py:make": ("env", ""),
    "broken:make": ("env", "broken.py:1"),
    "lacking:make": ("env", "lacking.py:1"),
    "raising:make": ("env", "raising.py:2"),
    "misspelt:make": ("env", "misspelt.py:1"),
    "own:one": ("env_options", ""),
    'own:waits"\nenv_options = { first = 1, second = 2 }\n#': ("env", ""),
    'own:make"\nenv_options = { sedd = 1 }\n#': ("env_options", ""),
    "vcoppy": ("env", ""),
    "verifiers": ("env", ".[verifiers]"),
    'vcopy"\nenv_options = { seed = "x" }\n#': ("env_options.seed", ""),
    f'jsonl"\nenv_options = {{ path = "no.jsonl", {IDS} }}\n#': ("env_options.path", ""),
    f'jsonl"\nenv_options = {{ path = "text.jsonl", {IDS} }}\n#': ("env_options.path", "text.jsonl:1"),
    f'jsonl"\nenv_options = {{ path = "ids.jsonl", {IDS} }}\n#': ("env_options.path", "ids.jsonl:2"),
    f'jsonl"\nenv_options = {{ path = "blank", {IDS} }}\n#': ("env_options.path", ""),
    'vcopy"\nsampler_options = { seed = 5 }\n#': ("sampler_options.seed", ""),
    'vcopy"\nsampler = "sglang"\n#': ("sampler", ""),
    'vcopy"\nsampler = "openai"\n#': ("sampler_options.servers", ""),
}
"""The env of a worker, and lines behind it -> (the setting below the worker that is wrong, what the text has)"""
FUNCTIONS = {
    "batcher": ('order = "own:one"\nadvantage = "own:loss"', {"batcher.order", "batcher.advantage"}),
    "trainer.loss": ('name = "own:waits"', {"trainer.loss.name"}),
    "score.s": ('reward = "own:Judge"', {"score.s.reward"}),
    "score.t": ('reward = "own:waits"', set()),
    "eval.e": ('env = "own:mak"', {"eval.e.env"}),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)


def test_twenty_functions_and_envs_are_each_refused_where_they_are_named() -> None:
    workers = [(f"worker.w{n}", f'env = "{env}"') for n, env in enumerate(WORKERS)]
    loaded = loading.load(written(*workers, *((name, lines) for name, (lines, _) in FUNCTIONS.items())), environ={})
    context = Context(loaded=loaded, parts=frozenset({"serve", "train", "worker", "score"}))
    found = {finding.settings[0]: finding for finding in functions(context)}
    expected = {f"worker.w{n}.{below}": text for n, (below, text) in enumerate(WORKERS.values())}
    assert found.keys() == expected.keys() | {name for _, names in FUNCTIONS.values() for name in names}
    for setting, text in expected.items():
        assert text in f"{found[setting].level} {found[setting].text}"
        assert found[setting].text.startswith(setting), "it names the setting"
    assert {"own", "lacking", "raising"} & sys.modules.keys() == set()


def test_a_model_that_is_too_small_for_a_built_in_env() -> None:
    loaded = loading.load(written(("model.config", 'model_type = "qwen3"\nvocab_size = 5')), environ={})
    (found,) = functions(Context(loaded=loaded, parts=frozenset({"worker"})))
    assert found.settings == ("worker.a.env",)


def test_a_sampler_is_asked_for_all_that_its_worker_needs_of_it() -> None:
    asked = 'env = "vcopy"\nsampler = "openai"\nsampler_options = { servers = "http://h:1" }'
    cold = "top_p = 0.9\ntemperature = 0.005"
    loaded = loading.load(written(("", "deterministic = true"), ("worker.a", f"{asked}\n{cold}")), environ={})
    found = functions(Context(loaded=loaded, parts=frozenset({"worker"})))
    assert {name for finding in found for name in finding.settings} == {
        f"worker.a.{name}" for name in ("sampler", "top_p", "temperature")
    }


def test_a_module_that_ends_its_process_or_writes_on_stdout_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    Path("talking.py").write_text("import os\nos.write(1, b'[[1, 2]]\\n')\nprint('[]')\ndef make(): ...\n")
    asked = [
        NamedFunction("a", "talking:make", "group"),
        NamedFunction("b", "leaving:make", ""),
        NamedFunction("c", "own:make", ""),
    ]
    found = wrong(asked[1:], [str(Path.cwd())])
    assert [one.setting for one in found] == ["b"]
    assert all(word in found[0].text for word in ("leaving:make", "exit code 7"))
    found = wrong(asked[:1], [str(Path.cwd())])
    assert [one.setting for one in found] == ["a"]  # it takes nothing, and would be given one argument
    assert capfd.readouterr().out == ""


def test_modules_that_fail_or_hold_the_child_are_named_with_their_lines_and_the_others_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlbuffer.checks.imports.IMPORT_SECONDS", 1.0)
    monkeypatch.setattr("rlbuffer.checks.imports.MORE_SECONDS", 30.0)
    paths = ["endless:make", "broken:make", "own:make"]
    found = wrong([NamedFunction(path, path) for path in paths], [str(Path.cwd())])
    assert [one.setting for one in found] == paths[:-1]
    for one, place in zip(found, ("endless.py:", "broken.py:1)"), strict=True):
        assert place in one.text
