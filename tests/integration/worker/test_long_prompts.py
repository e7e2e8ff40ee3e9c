"""Prompts that leave no room for a completion: skipped and counted, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worker_stage import Stage, eventually

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.worker.envs import make_env

LIMIT = 6
LENGTHS = [3, 7, 5, 6, 2, 9]
"""Tokens of the prompts in the file: the second, the fourth and the sixth leave no room."""
FITTING = ["env.0", "env.2", "env.4"]


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
    stage.start(groups_in_flight=2)
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
