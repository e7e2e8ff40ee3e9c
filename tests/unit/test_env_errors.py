"""Refusals: what is refused of envs and their tokenizers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizer import save_tokenizer

from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs import make_env
from rlbuffer.worker.envs.text import Text
from rlbuffer.worker.envs.verifiers import tasks_of


@pytest.mark.parametrize(
    ("package", "env", "options"),
    [
        ("reasoning_gym", "reasoning_gym", {"dataset": "gcd", "tokenizer": "x"}),
        ("verifiers", "verifiers", {"taskset": "x", "tokenizer": "x"}),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, env: str, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError):
        make_env(env, **options)


def test_a_tokenizer_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError):
        Text(str(tmp_path))


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Text(str(tmp_path))
    assert str(error.value).startswith(f"tokenizer = {str(tmp_path)!r} cannot be loaded: ")


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token"}))
    with pytest.raises(ConfigError):
        Text(str(tmp_path))


class Tasks(list[Any]):
    """A taskset."""

    bounded = True


def test_a_taskset_without_end_or_without_tasks() -> None:
    endless = Tasks([SimpleNamespace(), SimpleNamespace()])
    endless.bounded = False
    assert tasks_of(endless, 1) == endless[:1]
    with pytest.raises(ValueError):
        tasks_of(endless, 0)
    with pytest.raises(ValueError, match=r"^the taskset has no tasks$"):
        tasks_of(Tasks(), 0)
