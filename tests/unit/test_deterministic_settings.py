"""`deterministic = true`: what it sets, and what it refuses because it would make two runs differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbuffer.config.loading import Loaded
from rlbuffer.errors import ConfigError
from rlbuffer.run.loading import load

ONE = 'deterministic = true\n[worker.a]\nenv = "vcopy"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(text: str, **environ: str) -> Loaded:
    Path("rlbuffer.toml").write_text(text)
    return load(environ=environ)


@pytest.mark.parametrize(
    ("text", "groups"),
    [(ONE, 4), (f"{ONE}groups_per_batch = 8\n", 8), (f"{ONE}[batcher]\nstep_groups = 3\n", 3)],
    ids=["neither", "of the worker", "of the step"],
)
def test_one_setting_sets_what_it_takes(text: str, groups: int) -> None:
    found = loaded(text)
    batcher = found.settings.batcher
    assert (batcher.max_age, batcher.lookahead, batcher.step_groups) == (0, 0, groups)
    assert found.settings.worker["a"].groups_per_batch == groups
    assert found.place("batcher.max_age") == "deterministic, rlbuffer.toml:1"


def test_it_may_come_from_the_environment() -> None:
    found = loaded(ONE.replace("deterministic = true\n", ""), RLBUFFER_DETERMINISTIC="true")
    assert found.settings.batcher.step_groups == 4
    assert found.place("batcher.lookahead") == "deterministic, RLBUFFER_DETERMINISTIC"


def test_what_makes_runs_differ_is_refused() -> None:
    text = """\
deterministic = true
[batcher]
max_age = 1
lookahead = 2
fill_timeout_seconds = 3.0
max_age_seconds = 60.0
step_groups = 4
[batcher.envs.vcopy]
max_age = 2
[worker.a]
env = "vcopy"
groups_per_batch = 5
sampler = "vllm"
[worker.b]
env = "repeat"
replicas = 2
[eval.e]
env = "vcopy"
"""
    with pytest.raises(ConfigError) as refused:
        loaded(text)
    found = [line.strip() for line in str(refused.value).splitlines()[1:]]
    assert found == [
        f"deterministic = true: {mistake}."
        for mistake in (
            "3 workers must be one: of several nobody knows whose group comes first (rlbuffer.toml:11, :1)",
            "batcher.max_age = 1 must be 0 (rlbuffer.toml:3, :1)",
            "batcher.lookahead = 2 must be 0 (rlbuffer.toml:4, :1)",
            "batcher.envs.vcopy.max_age = 2 must be 0 (rlbuffer.toml:9, :1)",
            "batcher.fill_timeout_seconds = 3 must go: it goes by the clock (rlbuffer.toml:5, :1)",
            "batcher.max_age_seconds = 60 must go: it goes by the clock (rlbuffer.toml:6, :1)",
            "worker.a.groups_per_batch = 5 must be batcher.step_groups = 4 (rlbuffer.toml:12, :1)",
            "worker.a.sampler = 'vllm' must be 'transformers': engines batch what comes first (rlbuffer.toml:13, :1)",
            "eval.e must go: it draws from the worker's sampler (rlbuffer.toml:18, :1)",
        )
    ]
