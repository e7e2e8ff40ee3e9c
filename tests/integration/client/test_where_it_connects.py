"""A program of one's own connects where a command with the same variables does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlbuffer
from rlbuffer.config.loading import load

FILE = """
run = "of-the-file"
redis_url = "memory://of-the-file"

[batcher]
max_age = 7
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"RLBUFFER_CONFIG": "FILE"},
        {"RLBUFFER_CONFIG": "FILE", "RLBUFFER_RUN": "of-a-variable"},
        {"RLBUFFER_CONFIG": "FILE", "RLBUFFER_REDIS_URL": "memory://of-a-variable"},
        {"RLBUFFER_REDIS_URL": "memory://", "RLBUFFER_RUN": "of-a-variable"},
        {"RLBUFFER_REDIS_URL": "memory://"},
    ],
    ids=" ".join,
)
def test_variables_mean_the_same_to_a_program_and_to_a_command(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(file) if value == "FILE" else value)
    monkeypatch.chdir(tmp_path)
    of_command = load().settings
    with rlbuffer.connect() as buffer:
        assert buffer.run == of_command.run
        assert buffer.settings.redis_url == of_command.redis_url
        assert buffer.settings.batcher == of_command.batcher
    with rlbuffer.connect(run="typed") as buffer:
        assert buffer.run == "typed"


@pytest.mark.parametrize(
    ("config", "run"), [({"run": "of-the-mapping"}, "of-the-mapping"), ({}, "of-a-variable"), ("FILE", "of-a-variable")]
)
def test_what_is_handed_over_wins_over_the_file_that_a_variable_names(
    config: Any, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.toml").write_text('run = "other"\n')
    (tmp_path / "run.toml").write_text(FILE)
    monkeypatch.setenv("RLBUFFER_CONFIG", str(tmp_path / "other.toml"))
    monkeypatch.setenv("RLBUFFER_RUN", "of-a-variable")
    with rlbuffer.connect("memory://", config=tmp_path / "run.toml" if config == "FILE" else config) as buffer:
        assert buffer.run == run
        assert buffer.settings.batcher.max_age == (7 if config == "FILE" else 1)
