"""Prompts that leave no room for a completion: skipped and counted, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_tokenizer import save_tokenizer
from worker_stage import Stage, eventually, hurry

from rlbuffer.checks.loading import load
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import ConfigError
from rlbuffer.worker.envs import make_env

LIMIT = 6
LENGTHS = [3, 7, 5, 6, 2, 9]
"""Tokens of the prompts in the file: the second, the fourth and the sixth leave no room."""
FITTING = ["env.0", "env.2", "env.4"]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    hurry(monkeypatch)
    made = Stage()
    yield made
    made.finish()


def written(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": [1] * n, "answer": "3"}) + "\n" for n in LENGTHS))
    return path


@pytest.mark.parametrize("limit", ["context", "row"])
def test_prompts_that_are_too_long_are_skipped_and_counted_and_the_env_ends(
    stage: Stage, tmp_path: Path, limit: str
) -> None:
    stage.env = make_env(  # type: ignore[assignment]
        "jsonl", path=str(written(tmp_path)), name="env", vocab_size=13, eos_token_ids=[12], passes=1, shuffle=False
    )
    if limit == "row":
        stage.buffer.settings = stage.buffer.settings.model_copy(update={"batcher": BatcherConfig(LIMIT)})
    else:
        stage.sampler.context = LIMIT
    stage.announce(0)
    stage.allow(len(LENGTHS), "env")
    stage.start(groups_per_batch=2)
    eventually(lambda: stage.groups() == FITTING and stage.heartbeat()["skipped"] == 3)
    stage.store.close_tickets("env", [0, 2, 4])  # as the leader does that has read them
    stage.thread.join(60)  # type: ignore[union-attr]
    assert stage.raised is None
    beat = stage.heartbeat()
    assert beat["failures"] == {"PromptTooLong": 3}
    assert "line-6" in beat["problems"][0]["detail"]
    (said,) = [line.text for line in stage.told("trouble") if line.level == "WARNING"]
    assert "line-2 (" in said
    assert "data.jsonl:2) of 7 tokens" in said


CONFIG = """
[batcher]
row_tokens = {row_tokens}
[model.config]
model_type = "qwen3"
vocab_size = 128
max_position_embeddings = {context}
[worker.data]
env = "jsonl"
env_options = {{ path = "{path}", {options} }}
"""


@pytest.mark.parametrize(("context", "row_tokens"), [(LIMIT, 64), (64, LIMIT)])
@pytest.mark.parametrize("kind", ["ids", "text"])
def test_the_settings_say_how_many_prompts_of_a_file_are_too_long(
    tmp_path: Path, kind: str, context: int, row_tokens: int
) -> None:
    path, options = written(tmp_path), "vocab_size = 13, eos_token_ids = [12]"
    if kind != "ids":
        options = f'tokenizer = "{save_tokenizer(tmp_path / "kit", template=None)}"'
        path.write_text("".join(json.dumps({"prompt": "x" * n, "answer": "3"}) + "\n" for n in LENGTHS))
    file = tmp_path / "rlbuffer.toml"
    file.write_text(CONFIG.format(path=path, options=options, context=context, row_tokens=row_tokens))
    (said,) = [text for text in load(file, environ={}, parts=("worker",)).warnings if "completion" in text]
    assert all(part in said for part in ("3 of 6 prompts", "data.jsonl:2", f"is {LIMIT} tokens", f"{file}:"))
    assert not [text for text in load(file, environ={}).warnings if "completion" in text]


def test_a_file_of_which_every_prompt_is_too_long_is_refused(tmp_path: Path) -> None:
    file, options = tmp_path / "rlbuffer.toml", "vocab_size = 13, eos_token_ids = [12]"
    file.write_text(CONFIG.format(path=written(tmp_path), options=options, context=2, row_tokens=64))
    with pytest.raises(ConfigError, match="6 of 6 prompts"):
        load(file, environ={}, parts=("worker",))
