"""From a trace of verifiers to a rollout; the shapes are those that verifiers 0.4.0 gives."""

from __future__ import annotations

import binascii
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlbuffer.errors import InvalidRollout, TraceUnusable
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.support import WIDEST
from rlbuffer.traces.values import Value
from rlbuffer.traces.verifiers import attempt
from rlbuffer.worker.envs.traces import rollout_of
from rlbuffer.worker.samplers import Completion

Message = dict[str, Any]


def node(role: str, ids: list[int], sampled: int = 0, *, mask: list[bool] | None = None) -> Message:
    """A message of `ids`, of which the last `sampled` were sampled."""
    mask = mask or [False] * (len(ids) - sampled) + [True] * sampled
    logprobs = np.linspace(-0.5, -0.25, sum(mask)).astype(np.float32).tolist()
    return {"message": {"role": role}, "token_ids": ids, "mask": mask, "logprobs": logprobs, "semantic_parents": []}


def branch(*nodes: Message, attempt: bool = False) -> list[Message]:
    """Messages that follow each other; an `attempt` at a compaction that nothing resumed."""
    links = [{"node": 0, "type": "compaction_attempt"}] if attempt else []
    return [*nodes[:-1], nodes[-1] | {"semantic_parents": links}]


CONVERSATION = branch(
    node("system", [1, 2]),
    node("user", [3]),
    node("assistant", [4, 5, 6], sampled=2),
    node("tool", [7, 8]),
    node("assistant", [4, 9], sampled=1),
)


def trace(*branches: list[Message], **changes: Any) -> Any:
    nodes = list[Message]()
    for one in branches or (CONVERSATION,):
        first = len(nodes)
        nodes += [message | {"parent": first + i - 1 if i else None} for i, message in enumerate(one)]
    base: dict[str, Any] = {
        "id": "t1",
        "ok": True,
        "errors": [],
        "stop_condition": "agent_completed",
        "rewards": {"exact": {"score": 1.0, "weight": 1.0}, "format": {"score": 0.5, "weight": 0.2}},
        "metrics": {"turns": 2.0, "unknown": None},
        "nodes": nodes,
    }
    return SimpleNamespace(model_dump=lambda mode: base | changes)


def completion(tokens: list[int], *spans: tuple[int, int, int], reason: str = "stop") -> Completion:
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.linspace(-0.5, -0.25, len(tokens)).astype(np.float32),
        finish_reason=reason,
        version_spans=tuple(VersionSpan(*span) for span in spans) or (VersionSpan(7, 0, len(tokens)),),
    )


SAID = [completion([5, 6], (7, 0, 1), (8, 1, 2)), completion([9], (8, 0, 1))]


def made(a_trace: Any, said: list[Completion]) -> Any:
    return rollout_of(a_trace, said, text="told")


def test_a_conversation_is_one_rollout_with_only_what_was_sampled_trained() -> None:
    rollout = made(trace(), SAID)
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 4, 9]
    assert rollout.tokens[rollout.loss_mask].tolist() == [5, 6, 9]
    assert rollout.logprobs.tolist() == pytest.approx([0, 0, 0, 0, -0.5, -0.25, 0, 0, 0, -0.5])
    assert rollout.version_spans == (VersionSpan(7, 4, 5), VersionSpan(8, 5, 6), VersionSpan(8, 9, 10))
    assert rollout.turns == (
        Turn("system", 0, 2),
        Turn("user", 2, 3),
        Turn("assistant", 3, 6),
        Turn("tool", 6, 8),
        Turn("assistant", 8, 10),
    )
    assert (rollout.reward, rollout.rewards) == (1.1, {"exact": 1.0, "format": 0.5})
    assert rollout.metadata == {"trace": "t1", "stop": "agent_completed", "metrics": {"turns": 2.0}}
    assert (rollout.text, rollout.finish_reason, rollout.is_truncated) == ("told", "stop", False)


def test_paths_that_part_are_sequences_of_one_rollout_and_what_they_share_trains_once() -> None:
    whole = trace()
    record = whole.model_dump("python")
    fork = [node("user", [11]) | {"parent": 2}, node("assistant", [4, 12], sampled=1) | {"parent": 5}]
    record["nodes"] += fork
    rollout = made(SimpleNamespace(model_dump=lambda mode: record), [*SAID, completion([12])])
    assert [s.tokens.tolist() for s in rollout.sequences] == [
        [1, 2, 3, 4, 5, 6, 7, 8, 4, 9],
        [1, 2, 3, 4, 5, 6, 11, 4, 12],
    ]
    assert [s.tokens[s.loss_mask].tolist() for s in rollout.sequences] == [[5, 6, 9], [12]]
    assert [[t.role for t in s.turns][-2:] for s in rollout.sequences] == [["tool", "assistant"], ["user", "assistant"]]
    assert (rollout.reward, rollout.max_policy_version) == (1.1, 8)


def left(counts: list[int], ids: list[int]) -> dict[str, Any]:
    """`sampling_mask` as verifiers puts it on its wire: all ids, and the number of each token's."""
    arrays = {"ids": np.array(ids, np.int32), "counts": np.array(counts, np.int32)}
    return {
        "sampling_mask": {
            name: {"data": binascii.b2a_base64(a.tobytes()).decode(), "dtype": "int32", "shape": list(a.shape)}
            for name, a in arrays.items()
        }
    }


def test_the_tokens_that_sampling_left_come_with_a_trace_and_a_message_without_them_keeps_the_rest() -> None:
    nodes = branch(
        node("user", [3]), node("assistant", [4, 5, 6], 2) | left([2, 1], [5, 8, 6]), node("assistant", [9], 1)
    )
    record = trace(nodes).model_dump("python")
    (sequence,) = attempt(Value(record), version=1).sequences
    assert sequence.columns["support"].tolist() == [[-1, -1], [-1, -1], [5, 8], [6, -1], [-1, -1]]
    assert sequence.loss_mask.tolist() == [False, False, True, True, True]
    in_process = record["nodes"][1] | {"sampling_mask": {"ids": np.array([5, 8, 6]), "counts": np.array([2, 1])}}
    in_a_file = record["nodes"][1] | {"sampling_mask": {"ids": [5, 8, 6], "counts": [2, 1]}}
    for other in (in_process, in_a_file):
        (same,) = attempt(Value({**record, "nodes": [record["nodes"][0], other, record["nodes"][2]]})).sequences
        assert same.columns["support"].tolist() == sequence.columns["support"].tolist()


def test_a_token_of_which_too_many_others_were_left_is_not_trained() -> None:
    wide = node("assistant", [4, 5], 2) | left([WIDEST + 1, 1], [*range(WIDEST + 1), 5])
    (sequence,) = attempt(Value(trace(branch(node("user", [3]), wide)).model_dump("python")), version=1).sequences
    assert sequence.columns["support"].tolist() == [[-1], [-2], [5]]
    assert sequence.loss_mask.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("counts", "ids"), [([2], [5, 8]), ([2, 2], [5, 8, 6]), ([2, 1], [5, 8, 6, 7]), ([-1, 4], [5, 8, 6]), ([], [])]
)
def test_a_record_of_other_tokens_than_were_sampled_is_damaged(counts: list[int], ids: list[int]) -> None:
    broken = node("assistant", [4, 5, 6], 2) | left(counts, ids)
    with pytest.raises(InvalidRollout, match="sampling_mask"):
        attempt(Value(trace(branch(node("user", [3]), broken)).model_dump("python")), version=1)


def test_the_sampler_s_own_record_is_that_of_the_rollout() -> None:
    first = replace(SAID[0], support=np.array([[5, 8], [6, -1]], np.int32))
    second = replace(SAID[1], support=np.array([[-2]], np.int32))
    rollout = made(trace(), [first, second])
    none = [-1, -1]
    assert rollout.columns["support"].tolist() == [*[none] * 4, [5, 8], [6, -1], *[none] * 3, [-2, -1]]
    assert rollout.tokens[rollout.loss_mask].tolist() == [5, 6]


def test_requests_that_the_trace_does_not_hold_are_left_out() -> None:
    rollout = made(trace(), [completion([5, 5]), SAID[0], completion([1]), SAID[1]])
    assert rollout.tokens[rollout.loss_mask].tolist() == [5, 6, 9]


@pytest.mark.parametrize(
    ("last", "trace_says", "truncated"),
    [("stop", "agent_completed", False), ("length", "agent_completed", True), ("stop", "max_turns", True)],
)
def test_a_rollout_is_truncated_when_its_trace_or_its_last_turn_is(last: str, trace_says: str, truncated: bool) -> None:
    said = [SAID[0], completion([9], reason=last)]
    assert made(trace(stop_condition=trace_says), said).is_truncated is truncated


@pytest.mark.parametrize(
    ("changes", "branches", "message"),
    [
        (
            {"ok": False, "errors": [{"type": "ToolsetError", "message": "no server"}]},
            [],
            "the trace failed (agent_completed): ToolsetError: no server",
        ),
        (
            {"ok": False, "errors": [{"type": "ToolError", "message": "sandbox died"}]},
            [branch(node("user", [1]), node("assistant", [5, 7], 2))],
            "the trace failed (agent_completed): ToolError: sandbox died",
        ),
        ({"ok": False, "stop_condition": None}, [], "the trace failed (no stop condition): failed: no reason given"),
        ({"rewards": {"exact": None}}, [], "the trace failed (agent_completed): unscored: exact"),
        ({}, [branch(node("user", [1, 2]))], "the trace failed (agent_completed): empty"),
        (
            {},
            [branch(node("user", [1]), node("assistant", [5, 6], 2), attempt=True)],
            "the trace failed (agent_completed): empty",
        ),
        (
            {},
            [branch(node("user", [1]), node("assistant", [5, 7], 2))],
            "message 1 of the trace holds other tokens than were sampled",
        ),
        (
            {},
            [branch(node("user", [1]), node("assistant", [5, 2, 6], mask=[True, False, True]))],
            "message 1 of the trace has sampled tokens in several places",
        ),
    ],
)
def test_a_trace_that_cannot_be_trained_is_refused(changes: dict[str, Any], branches: list[Any], message: str) -> None:
    with pytest.raises(TraceUnusable) as error:
        made(trace(*branches, **changes), [*SAID, *SAID])
    assert str(error.value).startswith(message)


def test_requests_that_were_answered_at_once_are_told_apart_by_their_logprobs() -> None:
    twice = branch(node("user", [3]), node("assistant", [4, 9], 1), node("tool", [7]), node("assistant", [4, 9], 1))
    other = replace(SAID[1], logprobs=np.array([-0.75], np.float32), version_spans=(VersionSpan(6, 0, 1),))
    twice[1] = twice[1] | {"logprobs": [-0.75]}
    rollout = made(trace(twice), [SAID[1], other])
    assert rollout.version_spans == (VersionSpan(6, 2, 3), VersionSpan(8, 5, 6))


def test_a_branch_that_is_not_trained_does_not_count() -> None:
    assert made(trace(CONVERSATION, branch(node("user", [1]), node("assistant", [5], 1), attempt=True)), SAID)


def test_a_rollout_has_the_experts_of_the_calls_that_sampled_its_messages() -> None:
    def routed(length: int, first: int) -> np.ndarray:
        """Of all tokens but the last; one layer."""
        rows = np.zeros((length, 1, 2), np.uint8)
        rows[:-1, 0] = [[first + i, first + i + 1] for i in range(length - 1)]
        return rows

    first = replace(completion([5, 6]), routed_experts=routed(6, 0))
    other_context = replace(completion([9]), routed_experts=routed(4, 100))
    for second, expected in (
        (replace(completion([9]), routed_experts=routed(10, 100)), [[100 + i, 101 + i] for i in range(9)]),
        (completion([9]), [[i, i + 1] for i in range(5)]),
        (other_context, [[i, i + 1] for i in range(5)]),
    ):
        rollout = made(trace(), [first, second])
        rows = rollout.columns["routed_experts"][:, 0].tolist()
        assert rows == [*expected, *[[0, 0]] * (10 - len(expected))]
    assert "routed_experts" not in made(trace(), SAID).columns
