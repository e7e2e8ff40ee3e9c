"""A loss of one's own in a real `rlbuffer train` sees what was pushed: columns, the age of each token, attachments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from homes import Home, model_section

import rlbuffer

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "teacher.py"

CONFIG = """
run = "taught"

[server]
appendfsync = "no"

[batcher]
row_tokens = 256
step_groups = 2
max_age = 2

[trainer]
steps = 2
timeout_seconds = 120.0

[trainer.loss]
name = "seen:loss"
columns = ["teacher_logprobs"]
options = { clip = 0.4 }
"""

SEEN = """\
import json

from teacher import loss as taught


def loss(tokens, options):
    loss = taught(tokens, options)
    seen = {name: getattr(tokens, name).tolist() for name in ("logprobs", "inference_logprobs", "ages")}
    seen["teacher"], seen["loss"] = tokens.columns["teacher_logprobs"].tolist(), loss.tolist()
    seen["rollouts"] = [tokens.samples[i].rollout_id for i in tokens.rollout.tolist()]
    seen["grid"] = {sample.rollout_id: sample.attachments["grid"].tolist() for sample in tokens.samples}
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\\n")
    return loss
"""
"""The documented loss, and what it was given written down beside it."""

PROMPT, SAMPLED = 2, 6


def group(number: int, newest: int, *, has_teacher: bool = True) -> rlbuffer.Group:
    """Two rollouts, whose first half was sampled by version 0 and whose second by `newest`."""
    rng = np.random.default_rng(number)
    rollouts = []
    for i in range(2):
        tokens = PROMPT + SAMPLED
        teacher = np.zeros(tokens, np.float32)
        teacher[PROMPT:] = -rng.random(SAMPLED)
        half = PROMPT + SAMPLED // 2
        rollouts.append(
            rlbuffer.Rollout(
                tokens=rng.integers(0, 16, tokens),
                loss_mask=np.arange(tokens) >= PROMPT,
                logprobs=np.where(np.arange(tokens) >= PROMPT, -2.8, 0.0),
                reward=float(i),
                version_spans=[(0, PROMPT, half), (newest, half, tokens)],
                columns={"teacher_logprobs": teacher} if has_teacher else {},
                attachments={"grid": np.full((2, 3), number, np.int16)},
            )
        )
    return rlbuffer.Group(
        group_id=f"taught.{number}", env="taught", prompt_id=str(number), rollouts=tuple(rollouts), planned_size=2
    )


def expected(seen: dict[str, Any], clip: float) -> list[float]:
    """The same loss, token by token, from what is known without it."""
    out = []
    names = ("logprobs", "inference_logprobs", "teacher", "ages")
    for at, inference, teacher, age in zip(*(seen[name] for name in names), strict=True):
        ratio, gain, width = np.exp(at - inference), teacher - at, clip / (1 + age)
        out.append(-min(ratio * gain, min(max(ratio, 1 - width), 1 + width) * gain))
    return out


def test_a_loss_over_teacher_logprobs_clips_by_the_age_of_each_token(home: Home) -> None:
    shutil.copy(EXAMPLE, home.path)
    (home.path / "seen.py").write_text(SEEN)
    config = home.path / "taught.toml"
    config.write_text(CONFIG + model_section())
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    trainer = home.start("train", "--config", config, "--display", "plain", log="train")
    groups = {number: group(number, newest) for number, newest in ((0, 0), (1, 0), (3, 1), (4, 1))}
    with home.connect("taught") as buffer:
        writer = buffer.writer("outside")
        for number in (0, 1):
            writer.push(groups[number])
        home.wait_until(lambda: buffer.policy.version >= 1, seconds=60, why="version 1")
        writer.push(group(2, 1, has_teacher=False))
        for number in (3, 4):
            writer.push(groups[number])
        assert home.ended(trainer, 60) == 0, home.logs()
        dropped = buffer.ledger().envs["taught"].dropped
    assert dropped == {"invalid": (2, 2 * (PROMPT + SAMPLED))}, "what has no teacher is left out"

    rollouts = {rollout.rollout_id: rollout for made in groups.values() for rollout in made.rollouts}
    passes = [json.loads(line) for line in (home.path / "seen.jsonl").read_text().splitlines()]
    ages: dict[str, list[int]] = {}
    for seen in passes:
        assert seen["loss"] == pytest.approx(expected(seen, 0.4), abs=1e-6)
        for i, name in enumerate(seen["rollouts"]):
            ages.setdefault(name, []).append(seen["ages"][i])
            of_rollout = rollouts[name].columns["teacher_logprobs"][PROMPT + len(ages[name]) - 1]
            assert seen["teacher"][i] == pytest.approx(float(of_rollout))
        for name, grid in seen["grid"].items():
            assert grid == rollouts[name].attachments["grid"].tolist()
    first, then = [0] * SAMPLED, [1] * (SAMPLED // 2) + [0] * (SAMPLED // 2)
    assert ages == {name: first if name.startswith(("taught.0/", "taught.1/")) else then for name in rollouts}
    mean = [sum(s["loss"]) / len(s["loss"]) for s in passes]
    assert [record["loss"] for record in home.metrics("taught")] == pytest.approx(mean, abs=1e-6)
