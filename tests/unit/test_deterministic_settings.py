"""`deterministic = true`: what it sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbuffer.checks.loading import load
from rlbuffer.config.loading import Loaded

ONE = 'deterministic = true\n[worker.a]\nenv = "vcopy"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(text: str, **environ: str) -> Loaded:
    Path("rlbuffer.toml").write_text(text)
    return load(environ=environ)


@pytest.mark.parametrize(
    ("text", "groups"),
    [(ONE, 4), (f"{ONE}groups_in_flight = 8\n", 8), (f"{ONE}[batcher]\nstep_groups = 3\n", 3)],
    ids=["neither", "of the worker", "of the step"],
)
def test_one_setting_sets_what_it_takes(text: str, groups: int) -> None:
    found = loaded(text)
    batcher = found.settings.batcher
    assert (batcher.max_age, batcher.lookahead, batcher.step_groups) == (0, 0, groups)
    assert found.settings.worker["a"].groups_in_flight == groups
    assert found.place("batcher.max_age") == "deterministic, rlbuffer.toml:1"


def test_it_may_come_from_the_environment() -> None:
    found = loaded(ONE.replace("deterministic = true\n", ""), RLBUFFER_DETERMINISTIC="true")
    assert found.settings.batcher.step_groups == 4
    assert found.place("batcher.lookahead") == "deterministic, RLBUFFER_DETERMINISTIC"
