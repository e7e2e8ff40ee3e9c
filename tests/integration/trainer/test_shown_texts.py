"""The texts of shown rollouts: decoded where there is a tokenizer; nothing that is wrong with it ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import CHARACTERS, SPECIAL, save_tokenizer

from rlbuffer.config.settings import RunSettings
from rlbuffer.trainer.reports.examples import text_decoder


def shown(path: str) -> str:
    tokens = [len(SPECIAL) + CHARACTERS.index(character) for character in "hi"]
    return text_decoder(RunSettings(model={"path": path}))(tokens)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return save_tokenizer(tmp_path / "model")


def test_a_model_under_the_home_of_its_user_decodes(model: Path) -> None:
    assert shown(str(model)) == shown("~/model") == "hi"


@pytest.mark.parametrize("text", ['{"version": "1.0", "model": {"type": "Newer"}}', "[]", "{"])
def test_a_tokenizer_that_cannot_be_loaded_shows_no_text(model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert shown(str(model)) == ""


def test_a_tokenizer_whose_package_is_missing_shows_no_text(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (model / "tokenizer.model").write_bytes(b"no such model")
    assert shown(str(model)) == ""


@pytest.mark.parametrize(
    ("envs", "text"), [(["vcopy", "repeat"], "12=$"), (["vcopy"], "12=$"), (["vcopy", "own:Env"], ""), ([], "")]
)
def test_tokens_of_the_built_in_envs_are_their_symbols(envs: list[str], text: str) -> None:
    settings = RunSettings(worker={env.replace(":", "-"): {"env": env} for env in envs})
    assert text_decoder(settings)([1, 2, 11, 12]) == text
