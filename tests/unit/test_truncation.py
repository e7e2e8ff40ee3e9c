"""Cutting rollouts that are longer than a row."""

from __future__ import annotations

import numpy as np
import pytest

from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.truncation import truncated, truncated_group
from rlbuffer.testing import make_group


def two_turns() -> Rollout:
    turns = [
        {"role": "user", "tokens": [1, 2, 3]},
        {"role": "assistant", "tokens": [4, 5], "logprobs": [-0.1, -0.2], "policy_version": 3},
        {"role": "tool", "tokens": [6, 7]},
        {"role": "assistant", "tokens": [8, 9], "logprobs": [-0.3, -0.4], "policy_version": 5, "reward": 0.5},
    ]
    return Rollout.from_turns(
        turns,
        reward=1.0,
        policy_version=3,
        columns={"entropy": np.arange(9, dtype=np.float32), "experts": np.zeros((9, 2), np.int16)},
        text="whole",
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("length", "spans", "turns", "trained"),
    [
        (8, [(3, 3, 5), (5, 7, 8)], [("user", 0, 3), ("assistant", 3, 5), ("tool", 5, 7), ("assistant", 7, 8)], 3),
        (5, [(3, 3, 5)], [("user", 0, 3), ("assistant", 3, 5)], 2),
        (4, [(3, 3, 4)], [("user", 0, 3), ("assistant", 3, 4)], 1),
    ],
)
def test_spans_turns_and_every_column_end_where_the_rollout_is_cut(length, spans, turns, trained):
    cut = truncated(two_turns(), length)
    assert [tuple(s) for s in cut.version_spans] == spans
    assert [(t.role, t.start, t.end) for t in cut.turns] == turns
    assert (cut.length, cut.loss_tokens, cut.is_truncated) == (length, trained, True)
    assert cut.columns["entropy"].tolist() == list(range(length))
    assert cut.columns["experts"].shape == (length, 2)
    assert (cut.reward, cut.text, cut.finish_reason) == (1.0, "whole", "stop")


IMAGE = 99
"""Token that stands for a piece of an image."""


def with_images(attachments: bool) -> Rollout:
    """Image, answer of 3, image, answer of 3; six tokens an image, as columns and, or not, as attachments."""
    turns = [
        {"role": "user", "tokens": [1] + [IMAGE] * 6},
        {"role": "assistant", "tokens": [2, 3, 4], "logprobs": [-0.1] * 3},
        {"role": "tool", "tokens": [IMAGE] * 6},
        {"role": "assistant", "tokens": [5, 6, 7], "logprobs": [-0.1] * 3},
    ]
    return Rollout.from_turns(
        turns,
        reward=1.0,
        policy_version=0,
        columns={"patches": np.ones((19, 4), np.float32)},
        attachments={"pixels": np.zeros((2, 4, 4), np.uint8)} if attachments else {},
    )


@pytest.mark.parametrize("attachments", [False, True])
@pytest.mark.parametrize("length", range(1, 20))
def test_a_cut_goes_through_no_image_and_leaves_something_to_train(length: int, attachments: bool) -> None:
    whole = with_images(attachments)
    cut = truncated(whole, length)
    if cut is whole:  # the batcher drops it as oversized, unless it fits
        assert length >= 19 or length <= 7 or attachments
        return
    assert (cut.is_truncated, cut.loss_tokens > 0, cut.length <= length) == (True, True, True)
    images = int((cut.tokens == IMAGE).sum())
    assert images in (6, 12)
    assert images == 12 or not attachments, "an attachment without its tokens"
    assert len(cut.columns["patches"]) == cut.length


@pytest.mark.parametrize("length", [9, 10])
def test_what_fits_is_left_as_it_is(length):
    rollout = two_turns()
    assert truncated(rollout, length) is rollout


def test_only_the_long_rollouts_of_a_group_are_cut():
    group = make_group(size=3, lengths=[8, 20, 10])
    cut = truncated_group(group, 10)
    assert [(r.length, r.is_truncated) for r in cut.rollouts] == [(8, False), (10, True), (10, False)]
    assert [r.rollout_id for r in cut.rollouts] == [r.rollout_id for r in group.rollouts]
    assert truncated_group(cut, 10) is cut


def test_each_sequence_of_a_rollout_is_cut_by_itself() -> None:
    def sequence(length: int) -> TokenSequence:
        turns = [
            {"role": "user", "tokens": [1, length]},
            {"role": "assistant", "tokens": [3] * length, "logprobs": [-0.5] * length},
        ]
        return TokenSequence.from_turns(turns, policy_version=2)

    whole = Rollout.from_sequences([sequence(3), sequence(9), sequence(6)], reward=1.0)
    cut = truncated(whole, 8)
    assert [len(s.tokens) for s in cut.sequences] == [5, 8, 8]
    assert (cut.loss_tokens, cut.is_truncated) == (3 + 6 + 6, True)
    assert cut.further[1] is whole.further[1]
    assert truncated(cut, 8) is cut
