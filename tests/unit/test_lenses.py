"""Lenses: levels and legends in numbers, and the trainer's own values per token, from its file to the lens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlbuffer.client.trainer_values import NONE, SAMPLES_FILE, KeptValues, TrainerValues
from rlbuffer.packing.pack import pack
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.trainer.reports.debug_samples import keep
from rlbuffer_cli.lenses import lens


def rollout(**columns: Any) -> Rollout:
    return Rollout.from_completion(
        prompt_ids=[1, 2],
        token_ids=[3, 4, 5],
        logprobs=[-0.5, -1.0, -2.0],
        reward=1.0,
        policy_version=3,
        rollout_id="a.0/0",
        columns={name: np.asarray(values, np.float32) for name, values in columns.items()},
    )


def view(made: Rollout, advantage: float | None = None) -> Any:
    return SimpleNamespace(rollout=made, advantage=advantage)


def group(state: State, reason: str = "") -> Any:
    return SimpleNamespace(state=state, reason=reason, step=7 if state in (State.PACKED, State.TRAINED) else None)


GROUP = group(State.TRAINED)


def levels(made: Rollout, name: str, kept: TrainerValues = NONE) -> list[int] | None:
    found_levels = lens(GROUP, view(made, 0.5), name, kept=kept).levels
    return None if found_levels is None else found_levels.tolist()


def test_entropy_is_what_a_worker_pushed_else_what_the_trainer_kept_else_said_to_be_kept_nowhere() -> None:
    kept = TrainerValues(step=7, entropy=np.array([0, 0, 0.05, 0.7, 3.0], np.float32))
    assert levels(rollout(), "entropy", kept) == [0, 0, 5, 3, 1]
    shown = lens(GROUP, view(rollout()), "entropy", kept=kept)
    assert list(shown.labels) == [(1, "≥ 2"), (2, "≥ 1"), (3, "≥ 0.5"), (4, "≥ 0.1"), (5, "< 0.1")]
    assert shown.note.startswith("nats, of the trainer in step 7; mean")
    own = rollout(entropy=[0, 0, 0.2, 0.2, 0.2])
    assert levels(own, "entropy", kept) == [0, 0, 4, 4, 4]
    assert "pushed as column `entropy`; mean 0.2000, most 0.2000" in lens(GROUP, view(own), "entropy", kept=kept).note
    assert lens(GROUP, view(rollout()), "entropy").levels is None
    assert "not kept per token" in lens(GROUP, view(rollout()), "entropy").note


def test_mismatch_is_the_distance_of_the_trainers_logprob_from_the_samplers() -> None:
    kept = TrainerValues(step=7, logprobs=np.array([0, 0, -0.5, -1.1, -0.5], np.float32))
    assert levels(rollout(), "mismatch", kept) == [0, 0, 5, 3, 1]
    note = lens(GROUP, view(rollout()), "mismatch", kept=kept).note
    assert "in nats, of the trainer in step 7; mean 0.5333, most 1.5000 at token 4" in note
    assert levels(rollout(trainer_logprobs=[0, 0, -0.52, -1, -2]), "mismatch") == [0, 0, 4, 5, 5]
    assert "not kept per token" in lens(GROUP, view(rollout()), "mismatch").note


@pytest.mark.parametrize(
    ("state", "reason", "legend"),
    [
        (State.FORMING, "", "advantages are known once the group is packed into a step"),
        (State.READY, "", "advantages are known once the group is packed into a step"),
        (State.TRAINED, "", "no advantages: step 7 trains the group without this rollout"),
        (
            State.DROPPED,
            "stale",
            "no advantages: the group was dropped (stale), and only groups of a step have some",
        ),
    ],
)
def test_a_rollout_without_an_advantage_says_whether_it_gets_one(state: State, reason: str, legend: str) -> None:
    shown = lens(group(state, reason), view(rollout()), "advantage")
    assert (shown.levels, shown.note) == (None, legend)


def test_levels_are_by_probability_and_by_sign_and_size_of_the_advantage() -> None:
    made = rollout(advantages=[0, 0, -2, 0, 0.5])
    assert levels(made, "logprob") == [0, 0, 4, 3, 3]
    assert levels(made, "advantage") == [0, 0, 1, 3, 4]
    assert levels(made, "mask") == [0, 0, 1, 1, 1]
    assert levels(made, "version") == [0, 0, 1, 1, 1]


def test_what_the_trainer_keeps_is_read_back_for_the_rollout_that_it_was(tmp_path: Path) -> None:
    micro_batch = pack([rollout(), rollout()], [0.25, 0.5], row_tokens=16)
    tokens: Any = SimpleNamespace(
        logprobs=torch.tensor([-0.4, -0.9, -2.1, -1.0, -1.0, -1.0]), entropy=torch.arange(6.0)
    )
    keep(tmp_path / SAMPLES_FILE, micro_batch, tokens, 7, 1)
    assert len((tmp_path / SAMPLES_FILE).read_text().splitlines()) == 1, "one was asked for"
    group_id, kept_values = micro_batch.samples[0].group_id, KeptValues(tmp_path)
    values = kept_values.of(group_id, rollout())
    assert values.step == 7
    assert values.logprobs is not None
    assert values.entropy is not None
    assert values.logprobs.tolist() == pytest.approx([0, 0, -0.4, -0.9, -2.1])
    assert values.entropy.tolist() == [0, 0, 0, 1, 2]
    assert kept_values.of("another", rollout()) is NONE
    keep(tmp_path / SAMPLES_FILE, micro_batch, tokens, 8, 1)
    assert kept_values.of(group_id, rollout()).step == 8, "the newest counts"


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"schema": "rlbuffer.debug_sample/1", "step": "x"}', "\x00\xff"])
def test_lines_that_are_none_are_passed_over(tmp_path: Path, line: str) -> None:
    good = {"schema": "rlbuffer.debug_sample/1", "group_id": "a", "rollout_id": "a.0/0", "step": 2}
    (tmp_path / SAMPLES_FILE).write_text(f"{line}\n{json.dumps({**good, 'logprobs': [1], 'entropy': 'x'})}\n{line}")
    values = KeptValues(tmp_path).of("a", rollout())
    assert (values.step, values.logprobs, values.entropy) == (2, None, None), "as many as there are trained tokens"
    assert KeptValues(tmp_path / "nowhere").of("a", rollout()) is NONE
