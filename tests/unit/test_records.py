from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import plain
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence, check_logprobs
from rlbuffer.records.spans import MAX_SPANS, Turn, VersionSpan
from rlbuffer.testing import make_group
from rlbuffer.wire.payload import encode_push

BYTES = np.array([0, 1, 2, 1], np.uint8)


def fields(**changes: Any) -> dict[str, Any]:
    """A valid rollout of four tokens, the last two trained."""
    return {
        "tokens": [1, 2, 3, 4],
        "loss_mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "reward": 1.0,
        "version_spans": [(3, 2, 4)],
    } | changes


def made(**changes: Any) -> Rollout:
    return Rollout(**fields(**changes))


def group(**changes: Any) -> Group:
    values: dict[str, Any] = {
        "group_id": "a.1",
        "env": "a",
        "prompt_id": "p",
        "rollouts": (made(), made()),
        "planned_size": 2,
    }
    return Group(**(values | changes))


def test_lists_become_read_only_arrays_of_the_required_dtypes() -> None:
    rollout = made()
    assert (rollout.tokens.dtype, rollout.loss_mask.dtype, rollout.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        rollout.tokens[0] = 9


def test_a_logprob_that_was_rounded_a_little_above_0_is_taken() -> None:
    assert made(logprobs=[0.0, 0.0, 1e-3, -0.25]).logprobs[2] == np.float32(1e-3)
    with pytest.raises(InvalidRollout, match=r"^column logprobs: 0\.002 at position 2 is above 0"):
        made(logprobs=[0.0, 0.0, 2e-3, -0.25])


def test_a_logprob_that_is_no_number_is_refused_by_its_place() -> None:
    for array, place in (([-0.5, math.nan, -0.25], 1), ([[-0.5, -1.0], [-2.0, math.nan]], 1)):
        with pytest.raises(InvalidRollout, match=rf"column logprobs: not finite at position {place}: nan"):
            check_logprobs("logprobs", np.array(array))


@pytest.mark.parametrize("sentinel", [-9999.0, -1e30])
@pytest.mark.parametrize(("column", "least"), [("logprobs", -104), ("ref_logprobs", -1000), ("own_logprobs", -1000)])
def test_a_logprob_that_no_sampler_draws_is_refused_by_column_and_position(
    column: str, least: float, sentinel: float
) -> None:
    values = np.array([0.0, 0.0, sentinel, -0.25])
    changes = {"logprobs": values} if column == "logprobs" else {"columns": {column: values}}
    with pytest.raises(InvalidRollout, match=rf"^column {column}: .*position 2\b"):
        made(**changes)
    values[2] = least - 0.5
    with pytest.raises(InvalidRollout, match=rf"^column {column}: .*position 2\b"):
        made(**changes)
    values[2] = least
    made(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": []}, "column tokens"),
        ({"tokens": np.zeros((4, 0), complex)}, "column tokens"),
        ({"tokens": [1, 2, 3]}, "column loss_mask"),
        ({"logprobs": [0.0] * 5}, "column logprobs"),
        ({"tokens": [[1, 2], [3, 4]]}, "column tokens"),
        ({"tokens": [[1], [2, 3]]}, "column tokens"),
        ({"tokens": [1, 2, -3, 4]}, "column tokens: negative token id -3 at position 2"),
        ({"tokens": [1, 2, 3, 2**31]}, "column tokens"),
        ({"tokens": [1, 2, 3, 1 - 2**32]}, "column tokens"),
        ({"tokens": [1.0, 2.0, 3.0, 4.0]}, "column tokens"),
        ({"tokens": "1234"}, "column tokens"),
        ({"loss_mask": [0, 0, 1, 2]}, "column loss_mask"),
        ({"loss_mask": [0.0, 0.0, 1.0, 1.0]}, "column loss_mask"),
        ({"loss_mask": [True] * 4}, "column loss_mask: the first token"),
        ({"logprobs": [0.0, 0.0, float("nan"), 0.0]}, "column logprobs: not finite at position 2"),
        ({"logprobs": [0.0, 0.0, 0.0, -1e39]}, "column logprobs: not finite at position 3"),
        ({"logprobs": [0.0, 0.0, 0.5, -0.25]}, "column logprobs: 0.5 at position 2"),
        ({"columns": {"ref_logprobs": np.array([0.0, -0.5, 0.002, 0.25])}}, "column ref_logprobs: 0.002 at position 2"),
        (
            {"columns": {"teacher_logprobs": np.array([[0.0, -9.0], [-1.0, 2.5], [0.0, 0.0], [0.0, 0.0]], "f2")}},
            "column teacher_logprobs: 2.5 at position 1",
        ),
        ({"logprobs": [True] * 4}, "column logprobs"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": 1e39}, "reward"),
        ({"reward": -1.001e12}, "reward"),
        ({"reward": 2**64}, "reward"),
        ({"reward": 10**400}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"rewards": {"format": 1.7e308}}, "rewards.format"),
        ({"rewards": {3: 1.0}}, "rewards name"),
        ({"rewards": [1.0]}, "rewards"),
        ({"logprobs": [0.0, 0.0, 0.0, -3e38]}, "column logprobs: the number at position 3"),
        ({"columns": {"ref_logprobs": np.array([0, 0, 1e300, 0])}}, "column ref_logprobs: the number at position 2"),
        ({"columns": {"advantages": np.array([0, 2**62, 0, 0])}}, "column advantages: the number at position 1"),
        ({"successes": {"solved": "false"}}, "successes.solved"),
        ({"is_truncated": 1}, "is_truncated"),
        ({"finish_reason": None}, "finish_reason"),
        ({"text": b"abc"}, "text"),
        ({"text": "ab\ud800"}, "text"),
        ({"rollout_id": "x" * 161}, "rollout_id"),
        ({"columns": {"tokens": [1, 2, 3, 4]}}, "column name 'tokens'"),
        ({"columns": {"a b": [1, 2, 3, 4]}}, "column name 'a b'"),
        ({"columns": {"x" * 65: [1, 2, 3, 4]}}, "column name"),
        ({"columns": {"entropy": [0.5]}}, "column entropy"),
        ({"columns": {"entropy": 0.5}}, "column entropy"),
        ({"columns": {"who": ["a", "b", "c", "d"]}}, "column who: expected numbers, got 'a'"),
        ({"columns": {"z": np.zeros(4, object)}}, "column z: dtype"),
        ({"columns": {"z": np.zeros((4,) + (1,) * 8)}}, "column z: 9 dimensions"),
        ({"columns": {"mask": BYTES.view(np.bool_)}}, "column mask: not a boolean at position 2"),
        ({"columns": {f"c{i}": [0] * 4 for i in range(257)}}, "columns"),
        ({"attachments": {"x": [1.0, float("nan")]}}, "attachment x"),
        ({"attachments": {"x y": [1.0]}}, "attachment name 'x y'"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": "abc"}, "version_spans"),
        ({"version_spans": 3}, "version_spans"),
        ({"version_spans": [(3, 2)]}, "version_spans"),
        ({"version_spans": [(0.5, 2, 4)]}, "version_spans"),
        ({"version_spans": [(True, 2, 4)]}, "version_spans"),
        ({"version_spans": [(-1, 2, 4)]}, "version_spans"),
        ({"version_spans": [(2**53, 2, 4)]}, "version_spans"),
        ({"version_spans": [(2**70, 2, 4)]}, "version_spans"),
        ({"version_spans": [(3, 2, 2**63)]}, "version_spans"),
        ({"version_spans": [(3, 2, 5)]}, "version_spans"),
        ({"version_spans": [(3, -1, 4)]}, "version_spans"),
        ({"version_spans": [(3, 2, 2)]}, "version_spans: [2, 2) is empty"),
        ({"version_spans": [(3, 2, 4), (4, 3, 4)]}, "version_spans"),
        ({"version_spans": [(3, 3, 4)]}, "version_spans: the trained token at position 2"),
        ({"turns": [("user", 0)]}, "turns"),
        ({"turns": [("user", 0, 5)]}, "turns"),
        ({"turns": [("user", 0, 2), ("tool", 1, 4)]}, "turns"),
        ({"turns": [(None, 0, 2)]}, "turns[0].role"),
        ({"turns": [("user", 0, 2, float("nan"))]}, "turns[0].reward"),
        ({"turns": [("user", 0, 2, None, [1])]}, "turns[0].metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": {"when": object}}, "metadata.when"),
        ({"metadata": {"x": [1, {"y": float("nan")}]}}, "metadata.x[1].y"),
        ({"metadata": {"x": {1: 2}}}, "metadata.x"),
        ({"metadata": {"n": 2**64}}, "metadata.n"),
        ({"metadata": {"a": np.zeros(2)}}, "metadata.a: ndarray"),
        ({"metadata": {"a": [0] * 65537}}, "metadata.a"),
    ],
)
def test_a_rollout_that_breaks_a_rule_is_refused_with_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRollout, match=f"^{re.escape(field)}"):
        made(**changes)


def test_values_at_the_limits_are_accepted() -> None:
    rollout = made(
        rollout_id="x" * 160,
        tokens=[0, 1, 2, 2**31 - 1],
        reward=-0.0,
        version_spans=[(0, 0, 1), (2**53 - 1, 2, 4)],
        turns=[("user", 0, 0), ("assistant", 0, 4, 1, {})],
        columns={"x" * 64: np.zeros((4, 0)), "deep": np.zeros((4,) + (1,) * 7)},
        metadata={"n": [2**64 - 1, -(2**63)], "many": [0] * 65536},
    )
    assert rollout.version_spans == (VersionSpan(0, 0, 1), VersionSpan(2**53 - 1, 2, 4))
    assert rollout.turns == (Turn("user", 0, 0), Turn("assistant", 0, 4, 1.0, None))
    assert (rollout.min_policy_version, rollout.max_policy_version) == (0, 2**53 - 1)


@pytest.mark.parametrize(("reason", "truncated"), [("length", True), ("stop", False), ("", False)])
def test_a_rollout_is_truncated_where_its_finish_reason_says_so(reason: str, truncated: bool) -> None:
    completion: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "token_ids": [3],
        "logprobs": [-0.5],
        "reward": 1.0,
        "policy_version": 0,
    }
    for rollout in (made(finish_reason=reason), Rollout.from_completion(**completion, finish_reason=reason)):
        assert rollout.is_truncated is truncated
        assert pickle.loads(pickle.dumps(rollout)) == rollout


def test_a_rollout_that_stopped_by_itself_may_have_been_cut_and_one_at_a_limit_is_no_whole_one() -> None:
    assert made(finish_reason="stop", is_truncated=True).is_truncated
    with pytest.raises(InvalidRollout, match=r"^is_truncated: False.*'length'"):
        made(finish_reason="length", is_truncated=False)


@pytest.mark.parametrize(
    ("mask", "prompt_tokens", "loss_tokens"),
    [
        ([False, False, True, True], 2, 2),
        ([False, True, False, True], 1, 2),
        ([False] * 4, 4, 0),
    ],
)
def test_prompt_and_loss_tokens_follow_from_the_mask(mask: list[bool], prompt_tokens: int, loss_tokens: int) -> None:
    rollout = made(loss_mask=mask, version_spans=[(3, 0, 4)])
    assert (rollout.length, rollout.prompt_tokens, rollout.loss_tokens) == (4, prompt_tokens, loss_tokens)


def test_what_the_caller_changes_afterwards_does_not_change_the_record() -> None:
    tokens, notes = np.array([1, 2, 3, 4], np.int32), {"tags": ["a"]}
    window = tokens[:]
    window.flags.writeable = False  # read-only, but its memory is still the caller's to write
    rollout, other = made(tokens=tokens, metadata=notes), made(tokens=window)
    tokens[0] = -1
    notes["tags"].append("b")
    assert rollout.tokens[0] == other.tokens[0] == 1
    assert rollout.metadata == {"tags": ["a"]}


def test_memory_that_nobody_can_write_to_is_kept_without_a_copy() -> None:
    received = np.array([1, 2, 3, 4], np.int32).tobytes()
    tokens = np.frombuffer(received, np.int32)
    assert np.shares_memory(made(tokens=tokens).tokens, tokens)


def test_a_strided_or_big_endian_array_is_stored_contiguous_and_little_endian() -> None:
    wide = np.arange(16, dtype=">i8").reshape(4, 4)
    column = made(columns={"x": wide[:, ::2]}).columns["x"]
    assert column.dtype == np.dtype("<i8")
    assert column.flags.c_contiguous
    assert column.tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_an_attachment_may_have_no_dimension() -> None:
    assert made(attachments={"x": 2.5}).attachments["x"].shape == ()


def test_metadata_comes_in_the_types_that_it_will_have_after_the_wire() -> None:
    given = {"pair": (1, np.float32(0.5)), "flag": np.bool_(True), "n": np.int64(3), "none": None, "raw": b"\x00"}
    assert made(metadata=given).metadata == {"pair": [1, 0.5], "flag": True, "n": 3, "none": None, "raw": b"\x00"}


def test_a_string_of_a_kind_of_its_own_becomes_a_plain_one() -> None:
    class Word(str, Enum):  # noqa: UP042 - one whose `__str__` is another
        STOP = "stop"

    class Text(str):
        def __str__(self) -> str:
            return "something else"

    failed = made(failure=(Word.STOP, Text("why")), rollout_id=Text("x"), finish_reason=Word.STOP, name=np.str_("n"))
    whole = group(group_id=np.str_("a.1"), env=Word.STOP, worker=Text("w"), rollouts=(failed,), metadata={Word.STOP: 1})
    values = [*failed.failure, failed.rollout_id, failed.finish_reason, failed.name]
    values += [whole.group_id, whole.env, whole.worker, *whole.metadata]
    assert values == ["stop", "why", "x", "stop", "n", "a.1", "stop", "w", "stop"]
    assert {type(value) for value in values} == {str}
    assert encode_push(whole).info.rollouts[0].failure == "stop"


def test_values_nested_as_deep_as_allowed_pass_and_one_level_more_does_not() -> None:
    value: Any = 1
    for _ in range(32):
        value = [value]
    assert plain("x", value) == value
    with pytest.raises(InvalidRollout) as caught:
        plain("x", [value])
    assert str(caught.value) == f"x{'[0]' * 32}: nested too deeply"


def test_metadata_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRollout, match="nested too deeply"):
        made(metadata={"loop": loop})


def test_rollouts_compare_by_value_dtype_and_shape() -> None:
    assert made() == made()
    assert made() != made(reward=0.5)
    assert made(columns={"x": np.zeros(4, np.int32)}) != made(columns={"x": np.zeros(4, np.int64)})
    assert made(columns={"x": np.zeros(4)}) != made(columns={"y": np.zeros(4)})
    assert made() != "rollout"


@pytest.mark.parametrize("name", ["version_spans", "turns"])
def test_a_rollout_has_so_many_spans_and_no_more(name: str) -> None:
    def with_pieces(count: int) -> Rollout:
        mask = np.arange(count) > 0
        pieces = [(7 if name == "version_spans" else "tool", i, i + 1) for i in range(count)]
        whole = {"version_spans": [(7, 0, count)]}
        table = {"tokens": np.ones(count, np.int32), "loss_mask": mask, "logprobs": np.zeros(count, np.float32)}
        return made(**(table | whole | {name: pieces}))

    assert len(getattr(with_pieces(MAX_SPANS), name)) == MAX_SPANS
    with pytest.raises(InvalidRollout, match=f"^{name}: 16385 are more than 16384$"):
        with_pieces(MAX_SPANS + 1)


def test_a_group_survives_pickle_and_deepcopy() -> None:
    original = make_group(
        size=3, metadata={"k": [1]}, columns=[{"x": [0.5] * n} for n in (8, 9, 10)], lengths=[8, 9, 10]
    )
    assert pickle.loads(pickle.dumps(original)) == original
    assert copy.deepcopy(original) == original


def test_a_completion_is_a_prompt_followed_by_trained_tokens() -> None:
    rollout = Rollout.from_completion(
        prompt_ids=[5, 6],
        token_ids=[7, 8, 9],
        logprobs=[-1.0, -2.0, -3.0],
        reward=1,
        policy_version=4,
        finish_reason="stop",
    )
    assert rollout.tokens.tolist() == [5, 6, 7, 8, 9]
    assert rollout.loss_mask.tolist() == [False, False, True, True, True]
    assert rollout.logprobs.tolist() == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert rollout.version_spans == (VersionSpan(4, 2, 5),)
    assert [turn[:3] for turn in rollout.turns] == [("user", 0, 2), ("assistant", 2, 5)]
    assert (rollout.reward, rollout.finish_reason) == (1.0, "stop")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"logprobs": [-1.0]}, "column logprobs"),
        ({"token_ids": [1.7, 2.2]}, "column tokens"),
        ({"token_ids": [1, 2**40]}, "column tokens"),
        ({"token_ids": [[1, 2]]}, "column tokens"),
        ({"logprobs": [-1.0, float("nan")]}, "column logprobs: not finite at position 1"),
    ],
)
def test_a_completion_that_breaks_a_rule_is_refused(changes: dict[str, Any], field: str) -> None:
    values = {"prompt_ids": [5], "token_ids": [7, 8], "logprobs": [-1.0, -2.0], "reward": 1.0, "policy_version": 0}
    with pytest.raises(InvalidRollout, match=f"^{re.escape(field)}"):
        Rollout.from_completion(**(values | changes))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda torch: torch.tensor([-1.0, -2.0], dtype=torch.bfloat16), "BFloat16"),
        (lambda torch: [torch.tensor(-1.0, dtype=torch.bfloat16)] * 2, "BFloat16"),
        (lambda torch: torch.tensor([-1.0, -2.0], requires_grad=True), "requires grad"),
    ],
)
def test_a_tensor_that_numpy_cannot_read_is_refused_with_the_remedy(make: Callable[[Any], Any], why: str) -> None:
    torch = pytest.importorskip("torch")
    logprobs = make(torch)
    values: dict[str, Any] = {"prompt_ids": [5], "token_ids": [7, 8], "reward": 1.0, "policy_version": 0}
    with pytest.raises(InvalidRollout) as caught:
        Rollout.from_completion(logprobs=logprobs, **values)
    assert why in str(caught.value)
    assert "tensor.detach().float().cpu()" in str(caught.value)
    given = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True).detach().float().cpu()
    assert Rollout.from_completion(logprobs=given, **values).logprobs.tolist() == [0.0, -1.0, -2.0]


def test_turns_become_one_table_with_a_span_for_each_sampled_one() -> None:
    rollout = Rollout.from_turns(
        [
            {"role": "user", "tokens": [1, 2]},
            {"role": "assistant", "tokens": [3], "logprobs": [-0.5], "reward": 0.25},
            {"role": "tool", "tokens": [4, 5], "metadata": {"exit": 0}},
            {"role": "assistant", "tokens": [6, 7], "logprobs": [-1, -2], "policy_version": 9},
        ],
        reward=None,
        policy_version=8,
    )
    assert rollout.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert rollout.version_spans == (VersionSpan(8, 2, 3), VersionSpan(9, 5, 7))
    assert rollout.turns[1] == Turn("assistant", 2, 3, 0.25, None)
    assert rollout.turns[2] == Turn("tool", 3, 5, None, {"exit": 0})


def sequence(*sampled: tuple[int, float, int]) -> TokenSequence:
    """A prompt of two tokens, then sampled ones: id, logprob, policy version."""
    turns = [{"role": "user", "tokens": [1, 5]}]
    turns += [
        {"role": "assistant", "tokens": [token], "logprobs": [logprob], "policy_version": version}
        for token, logprob, version in sampled
    ]
    return TokenSequence.from_turns(turns, policy_version=0)


def test_a_beginning_that_an_earlier_sequence_trains_is_masked_and_its_spans_are_gone() -> None:
    """What was sampled once trains once, and ages the rollout where it trains."""
    rollout = Rollout.from_sequences(
        [sequence((7, -0.5, 3), (8, -0.5, 3)), sequence((7, -0.5, 3), (9, -0.5, 8))], reward=1.0
    )
    first, second = rollout.sequences
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.version_spans == (VersionSpan(8, 3, 4),)
    assert first.version_spans == (VersionSpan(3, 2, 3), VersionSpan(3, 3, 4))


def test_a_span_of_which_a_token_is_still_trained_and_one_of_context_stay() -> None:
    long = replace(sequence((7, -0.5, 3), (9, -0.5, 3)), version_spans=(VersionSpan(2, 0, 1), VersionSpan(3, 2, 4)))
    (_, second) = Rollout.from_sequences([sequence((7, -0.5, 3), (8, -0.5, 3)), long], reward=1.0).sequences
    assert second.version_spans == (VersionSpan(2, 0, 1), VersionSpan(3, 2, 4))


def test_a_masked_sequence_ages_the_rollout_no_longer() -> None:
    old, new = (7, -0.5, 1), (9, -0.5, 8)
    rollout = Rollout.from_sequences([sequence(old), sequence(old, new), sequence(old, (4, -0.5, 6))], reward=1.0)
    assert [min(s.version_spans).policy_version for s in rollout.sequences] == [1, 8, 6]


@pytest.mark.parametrize(
    ("logprobs", "trained"),
    [((-0.5, -0.25), [2]), ((-0.5, -0.75), [9, 2]), ((-0.75, -0.25), [7, 9, 2])],
    ids=["sampled once", "parted at the second token", "sampled twice"],
)
def test_tokens_that_are_equal_are_one_act_of_sampling_only_where_their_logprobs_are(
    logprobs: tuple[float, float], trained: list[int]
) -> None:
    first = sequence((7, -0.5, 3), (9, -0.25, 3), (4, -0.5, 3))
    second = sequence((7, logprobs[0], 3), (9, logprobs[1], 3), (2, -0.5, 3))
    rollout = Rollout.from_sequences([first, second], reward=1.0)
    assert [s.tokens[s.loss_mask].tolist() for s in rollout.sequences] == [[7, 9, 4], trained]


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([], "turns"),
        (None, "turns"),
        ([{"role": "user"}], "turns[0].tokens"),
        ([{"tokens": [1]}], "turns[0].role"),
        (["user"], "turns[0]"),
        (
            [{"role": "user", "tokens": [1]}, {"role": "a", "tokens": [2, 3], "logprobs": [-1.0]}],
            "column logprobs",
        ),
    ],
)
def test_turns_that_make_no_rollout_are_refused(turns: Any, field: str) -> None:
    with pytest.raises(InvalidRollout, match=f"^{re.escape(field)}"):
        Rollout.from_turns(turns, reward=1.0, policy_version=0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_id": ""}, "group_id"),
        ({"group_id": "a/1"}, "group_id"),
        ({"group_id": "a\n"}, "group_id"),
        ({"group_id": "x" * 129}, "group_id"),
        ({"env": "a:b"}, "env"),
        ({"prompt_id": 3}, "prompt_id"),
        ({"rollouts": ()}, "rollouts"),
        ({"rollouts": 3}, "rollouts"),
        ({"rollouts": ("x",)}, "rollouts[0]"),
        ({"planned_size": 0}, "planned_size"),
        ({"planned_size": True}, "planned_size"),
        ({"planned_size": 1}, "rollouts: 2 are more than planned_size"),
        ({"adapter": None}, "adapter"),
        ({"worker": 7}, "worker"),
        ({"needs": "ref_logprobs"}, "needs"),
        ({"needs": [1]}, "needs[0]"),
        ({"created": float("nan")}, "created"),
        ({"answer": {1, 2}}, "answer"),
        ({"metadata": {"x": print}}, "metadata.x"),
        ({"rollouts": (made(rollout_id="r"), made(rollout_id="r"))}, "rollouts: id 'r' occurs twice"),
        ({"rollouts": (made(rollout_id="a.1/1"), made())}, "rollouts: id 'a.1/1' occurs twice"),
    ],
)
def test_a_group_that_breaks_a_rule_is_refused_with_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRollout, match=f"^{re.escape(field)}"):
        group(**changes)


def test_rollouts_without_an_id_get_the_group_id_and_their_index() -> None:
    named = group(rollouts=(made(), made(rollout_id="mine"), made()), planned_size=5)
    assert [r.rollout_id for r in named.rollouts] == ["a.1/0", "mine", "a.1/2"]
    assert named.rollouts[0] != made()
    assert np.array_equal(named.rollouts[0].tokens, made().tokens)


def test_the_info_of_a_group_counts_what_the_batcher_needs() -> None:
    rollout = made(
        rewards={"format": 0.5},
        turns=[("user", 0, 2), ("assistant", 2, 4)],
        is_truncated=True,
        version_spans=[(3, 2, 3), (5, 3, 4)],
    )
    info = group(rollouts=(rollout,), needs=["ref_logprobs"], worker="w", created=5, adapter="l").info()
    assert (info.group_id, info.env, info.prompt_id, info.adapter, info.planned_size) == ("a.1", "a", "p", "l", 2)
    assert (info.needs, info.worker, info.created, info.tokens) == (("ref_logprobs",), "w", 5.0, 4)
    (row,) = info.rollouts
    assert (row.rollout_id, row.length, row.prompt_tokens, row.loss_tokens, row.turns) == ("a.1/0", 4, 2, 2, 2)
    assert (row.reward, row.rewards, row.min_version, row.max_version) == (1.0, {"format": 0.5}, 3, 5)
    assert (row.is_truncated, row.size, row.checksum) == (True, 0, 0)
