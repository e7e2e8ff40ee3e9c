"""Traces of other frameworks as groups. Recorded ones are compared with what their own training adapters made of them
(commit 79cc558d has the tests/support/record_traces that did it: verifiers 0.4.0, openenv 0.10.0, agentlightning 0.3.0,
NeMo Gym); of other formats a small file of the documented shape is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_records import (
    LA,
    LB,
    A,
    B,
    P,
    answered,
    atif,
    completed,
    gym,
    harbor,
    instruct,
    lightning_event,
    row,
    slime,
    trace,
)

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.traces import is_trace, read
from rlbuffer.traces.attempt import Stretch, TraceAttempt, rollout_of
from rlbuffer.traces.formats import recognised
from rlbuffer.traces.reading import rollouts_in
from rlbuffer.traces.values import Value

FIXTURES = Path(__file__).parent / "fixtures" / "traces"


def recorded(name: str) -> tuple[list[Value], Any]:
    lines = (FIXTURES / f"{name}.jsonl").read_text().splitlines()
    records = [Value(json.loads(line), f"{name}:{number}") for number, line in enumerate(lines, 1)]
    return records, json.loads((FIXTURES / f"{name}.expected.json").read_text())


def attempts(records: list[Value], name: str = "") -> list[TraceAttempt]:
    found = recognised(records[0], name or None)
    return [one for unit in rollouts_in(found, records, []) for one in found.attempts(unit)]


def trained(sequences: Iterable[Stretch]) -> list[list[Any]]:
    return [[s.tokens.tolist(), s.loss_mask.astype(int).tolist(), s.logprobs.tolist()] for s in sequences]


def exact(sequences: list[Any]) -> list[list[Any]]:
    """What an adapter made, its logprobs as float32."""
    return [[ids, [int(m) for m in mask], np.float32(logprobs).tolist()] for ids, mask, logprobs in sequences]


@pytest.mark.parametrize("name", ["verifiers", "verifiers_rounded"])
def test_traces_of_verifiers_train_what_prime_rl_trains_of_them(name: str) -> None:
    records, expected = recorded(name)
    first, second, failed = attempts(records)
    assert [trained(first.sequences), trained(second.sequences)] == [exact(one) for one in expected]
    assert len(first.sequences) == 6, "retry, fork, compaction that resumed, what follows it, and the sub-agent"
    assert (first.reward, second.reward, second.rewards) == (1.0, pytest.approx(0.1), {"exact": 0.0, "form": 0.5})
    assert {(one.group, one.prompt, one.env) for one in (first, second, failed)} == {("g1", "sum-0", "sums")}
    assert {span.policy_version for one in first.sequences for span in one.version_spans} == {3}
    assert second.sequences[0].turns[2:4] == (
        Turn("assistant", second.sequences[0].turns[2].start, second.sequences[0].turns[2].end),
        Turn("tool", second.sequences[0].turns[3].start, second.sequences[0].turns[3].end),
    )
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.message) == ("TimeoutError", "the sandbox is gone")
    assert failed.sequences, "for people to look at"


def test_calls_of_openenv_become_the_sequences_of_its_own_graph() -> None:
    records, (expected,) = recorded("openenv")
    (attempt,) = attempts(records)
    ours, shared = trained(attempt.sequences), [0] * 10
    assert [one[0] for one in ours] == [one[0] for one in expected]
    assert [one[2] for one in ours] == [np.float32(one[2]).tolist() for one in expected]
    seen: set[tuple[int, ...]] = set()
    for (ids, mask, _), (_, own, _) in zip(ours, expected, strict=True):
        shared = [int(bool(m) and tuple(ids[: i + 1]) not in seen) for i, m in enumerate(own)]
        seen |= {tuple(ids[: i + 1]) for i in range(len(ids))}
        assert mask == shared, "a call that two paths share trains in the first"
    assert (attempt.reward, attempt.rewards, attempt.prompt) == (0.5, {"tests": 0.5}, "fix-1")
    assert attempt.finish_reason == "length"


def test_spans_of_agent_lightning_are_the_calls_of_its_own_adapter() -> None:
    records, expected = recorded("agent_lightning")
    first, retried, second = attempts(records)
    for attempt, triplets in ((first, expected[0]), (second, expected[1])):
        calls = [(prompt + answer, logprobs) for prompt, answer, logprobs, _ in triplets]
        sampled = [(ids, mask, logprobs) for ids, mask, logprobs in trained(attempt.sequences)]
        own = [token for ids, mask, _ in sampled for token, m in zip(ids, mask, strict=True) if m]
        assert own == [token for _, answer, _, _ in triplets for token in answer]
        said = [p for _, mask, logprobs in sampled for p, m in zip(logprobs, mask, strict=True) if m]
        assert said == np.float32([p for _, logprobs in calls for p in logprobs]).tolist()
        assert attempt.reward == triplets[-1][3] == 1.0
        assert attempt.rewards == {"exact": 1.0, "form": 0.25}
    assert [len(one.sequences) for one in (first, second)] == [2, 1], "a context that starts anew is another sequence"
    assert retried.failure is not None
    assert retried.failure.kind == "retried"


def test_entries_of_nemo_gym_are_chained_as_its_own_builder_chains_them() -> None:
    records, expected = recorded("nemo_gym")
    found = attempts(records)
    assert len(found) == len(expected) == 24
    kinds = {None: 0, "empty": 0, "unresolved_retry": 0}
    for attempt, own in zip(found, expected, strict=True):
        kind = attempt.failure.kind if attempt.failure else None
        kinds[kind] += 1
        assert (kind == "unresolved_retry") == own["unresolved"]
        if kind:
            continue
        seen: set[tuple[int, ...]] = set()
        for sequence, root, chain in zip(attempt.sequences, own["roots"], own["chains"], strict=True):
            ids, mask, logprobs = list(root), [0] * len(root), [0.0] * len(root)
            for between, answer, values in chain:
                ids += between + answer
                mask += [0] * len(between) + [int(tuple(ids) not in seen)] * len(answer)
                logprobs += [0.0] * len(between) + values
                seen.add(tuple(ids))
            assert trained([sequence]) == exact([[ids, mask, logprobs]])
    assert all(kinds.values()), "the fixture has each kind"


def file_of(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mask(before: int, *after: int) -> list[int]:
    return [0] * before + list(after)


def test_samples_of_slime_keep_their_mask_their_versions_and_their_rollout(tmp_path: Path) -> None:
    one = slime(0, remove_sample=True)
    groups = read(
        file_of(tmp_path / "a.jsonl", slime(1), one, slime(0, status="aborted", index=9), slime(0, group_index=8))
    )
    assert groups.format == "slime"
    (first, second, stopped), (other,) = (group.rollouts for group in groups)
    assert first.loss_mask.astype(int).tolist() == mask(5, 1, 1, 1)
    assert first.logprobs.tolist() == [0, 0, 0, 0, *LB]
    assert (first.is_truncated, first.finish_reason, first.version_spans) == (True, "length", (VersionSpan(5, 5, 8),))
    assert not second.loss_mask.any(), "taken out of the loss, and its reward counts"
    assert (second.reward, other.is_truncated) == (1.0, False)
    assert (stopped.failure, stopped.reward, stopped.tokens.tolist()) == (
        ("aborted", "the sample is not finished"),
        None,
        second.tokens.tolist(),
    )
    assert groups.left_out == ()
    (split,) = attempts([Value(slime(0, rollout_id=3)), Value(slime(1, rollout_id=3, reward=1.0))])
    assert len(split.sequences) == 2
    assert read({"rollout_id": 1, "samples": [slime(0), slime(1)]}).groups[0].planned_size == 2


def test_a_trial_of_harbor_is_a_rollout_of_its_segments() -> None:
    lost = {"exception_type": "AgentTimeoutError", "exception_message": "900 s"}
    first, failed = attempts([Value(harbor(0)), Value(harbor(1, exception_info=lost))])
    assert trained(first.sequences) == exact(
        [
            [[*P, *A, 30, *B], mask(4, 1, 1, 1, 0, 1, 1, 1, 1), [0, 0, 0, 0, *LA, 0, *LB]],
            [[1, 40, *A], mask(2, 1, 1, 1), [0, 0, *LA]],
            [[1, 50, *B], mask(2, 1, 1, 1, 1), [0, 0, *LB]],
        ]
    )
    assert (first.prompt, first.rewards) == ("hello", {"reward": 1.0, "style": 0.5})
    assert failed.failure == ("AgentTimeoutError", "900 s")
    assert len(failed.sequences) == 3
    groups = read(
        [harbor(0), harbor(1, exception_info=lost), harbor(0, exception_info=lost, agent_result={})],
        policy_version=1,
        reward="style",
    )
    assert [rollout.failure for group in groups for rollout in group.rollouts] == [None, failed.failure]
    assert [one.failure for one in groups.left_out] == [failed.failure], "no token of it is there"
    assert groups.summary.count("1 AgentTimeoutError: 900 s") == 2
    detail = {"prompt_token_ids": [P], "completion_token_ids": [A], "logprobs": [LA]}
    single = harbor(0, agent_result={"rollout_details": [detail]})
    with pytest.raises(InvalidRollout, match="reward, style"):
        read(single, policy_version=1)
    assert read(single, policy_version=1, reward="style").groups[0].rollouts[0].reward == 0.5


def test_a_trajectory_in_atif_trains_each_call_once_and_its_sub_agents(tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(atif(), indent=2))
    assert read(path, policy_version=1).format == "atif"
    (attempt,) = attempts([Value(atif())])
    main, child = attempt.sequences
    assert trained([main]) == exact([[[*P, *A, 30, *B], mask(4, 1, 1, 1, 0, 1, 1, 1, 1), [0, 0, 0, 0, *LA, 0, *LB]]])
    assert [turn.role for turn in main.turns] == ["user", "assistant", "tool", "assistant"]
    assert (child.name, child.tokens.tolist()) == ("sub", [1, 50, *B])
    several = atif()
    several["steps"][1]["llm_call_count"] = 3
    with pytest.raises(InvalidRollout, match=r"steps\[1\]\.llm_call_count"):
        attempts([Value(several)])


def test_events_of_agent_lightning_keep_the_last_answer_to_a_prompt() -> None:
    events = [
        answered(P, B, LB),
        answered(P, A, LA),
        answered([*P, *A, 30], B, LB),
        answered([9], A, LA, http_status=500),
    ]
    groups = read([*events, lightning_event("reward", value=0.25)])
    (rollout,) = groups.groups[0].rollouts
    assert rollout.tokens.tolist() == [*P, *A, 30, *B]
    assert (rollout.reward, {span.policy_version for span in rollout.version_spans}) == (0.25, {4})
    assert read(completed(), policy_version=0).groups[0].prompt_id == "d"


def test_a_finished_rollout_of_nemo_gym_is_what_its_output_holds() -> None:
    record = gym(0)
    groups = read([record, record | {"mask_sample": True}, record | {"_ng_rollout_index": 1}], policy_version=2)
    (group,) = groups
    assert (group.prompt_id, len(group.rollouts)) == ("3", 3)
    assert group.rollouts[0].loss_mask.astype(int).tolist() == mask(4, 1, 1, 1, 0, 1, 1, 1, 1)
    assert [rollout.failure and rollout.failure.kind for rollout in group.rollouts] == [None, "masked", None]


def test_parquet_of_prime_rl_is_grouped_by_problem_or_by_prompt(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [row(0, output_mask=None), row(1, output_mask=[0, 1, 1, 1]), row(0, problem_id="p8")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    groups = read(tmp_path / "a.parquet", policy_version=1)
    assert [(group.group_id, group.env, len(group.rollouts)) for group in groups] == [
        ("math.2.p7", "math", 2),
        ("math.2.p8", "math", 1),
    ]
    assert groups.groups[0].rollouts[1].loss_mask.astype(int).tolist() == mask(5, 1, 1, 1)
    heated = read(row(0, temperature=0.5), policy_version=1).groups[0].rollouts[0]
    assert heated.columns["temperatures"].tolist() == [1, 1, 1, 1, 0.5, 0.5, 0.5]
    alone = [{name: value for name, value in one.items() if name not in ("step", "problem_id")} for one in rows[:2]]
    assert len(read(alone, policy_version=1).groups) == 1


def test_rollouts_of_open_instruct_leave_out_what_a_tool_may_have_written() -> None:
    nan = instruct(0, logprobs=[-0.5, -0.25, float("nan")])
    tool = instruct(1, request_info={"tool_calleds": True, "tool_outputs": "4"})
    groups = read([instruct(1), nan, tool], policy_version=1)
    (group,) = groups
    assert (group.env, len(group.rollouts)) == ("gsm8k", 2)
    assert group.rollouts[1].loss_mask.astype(int).tolist() == mask(4, 1, 1, 0), "an end token that nobody sampled"
    assert [one.failure.kind for one in groups.left_out] == ["tools"]


@pytest.mark.parametrize(
    "record",
    [
        {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 12},
        {"content": ["2+2? 4"], "rewards": [1.0], "generation_logprobs": [[0.0]], "input_lengths": [7], "idx": 0},
        {"step": 12, "prompt": "2+2?", "completion": "4", "accuracy_reward": 1.0, "advantage": 0.7},
        {"episode_id": "e", "messages": [], "tool_trace": [], "reward": 1.0},
        {"sample_id": 1, "trajectory": "[]", "completion": "[]", "reward": 1.0},
    ],
)
def test_a_log_of_texts_without_token_ids_is_no_trace(record: dict[str, Any], tmp_path: Path) -> None:
    file = file_of(tmp_path / "x.jsonl", record)
    assert not is_trace(file)
    with pytest.raises(InvalidRollout, match=r"^\S+x\.jsonl:1  no format that is known has the fields .*; known are "):
        read(file)


DAMAGED = {
    "slime": (slime(0), ["tokens", "response_length", "rollout_log_probs", "loss_mask"]),
    "openenv": (
        trace(),
        ["turns.0.prompt_token_ids", "turns.0.completion_token_ids", "turns.0.per_token_logps", "turns.0.loss_mask"],
    ),
    "harbor": (harbor(0), ["agent_result.rollout_details.0.logprobs.1", "verifier_result.rewards.reward"]),
    "prime-rl": (row(0), ["input_tokens", "output_tokens", "output_logprobs", "rewards"]),
    "open-instruct": (instruct(0), ["prompt_tokens", "response_tokens", "logprobs", "reward"]),
    "agent-lightning-events": (answered(P, A, LA), ["data.response.prompt_token_ids", "data.server.version"]),
}


TOGETHER: dict[str, dict[str, Any]] = {"slime": {"index": 5}, "agent-lightning-events": {"rollout_id": "other"}}
"""Formats in which the good and the damaged record are of one rollout -> what makes another one."""


@pytest.mark.parametrize(
    ("name", "path", "wrong"),
    [
        (name, path, wrong)
        for name, (_, paths) in DAMAGED.items()
        for path in paths
        for wrong in ("oops", [1, "x"], {"a": 1})
    ],
)
def test_a_damaged_line_is_left_out_with_its_rollout_and_names_the_field(
    name: str, path: str, wrong: Any, tmp_path: Path
) -> None:
    good = DAMAGED[name][0]
    others = [good | TOGETHER[name]] if name in TOGETHER else []
    bad = json.loads(json.dumps(good))
    at: Any = bad
    *way, last = path.split(".")
    for step in way:
        at = at[int(step)] if step.isdecimal() else at[step]
    at[int(last) if last.isdecimal() else last] = wrong
    reward = "reward" if name == "harbor" else 0.5
    found = read(file_of(tmp_path / "x.jsonl", good, bad, *others), name, policy_version=1, reward=reward)
    (sentence,) = found.damaged
    assert sentence.startswith(f"{tmp_path}/x.jsonl:2  ")
    assert next(part for part in reversed(path.split(".")) if not part.isdecimal()) in sentence
    assert "\n" not in sentence
    assert sentence in found.summary
    assert sum(len(group.rollouts) for group in found) == len(others) + (name not in TOGETHER)


@pytest.mark.parametrize("line", ['{"tokens": [1, ', "nonsense", "[]", '{"unheard": 1}', '{"a": 1, "a": 2}', ""])
def test_what_is_no_record_is_one_error_with_its_place(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidRollout, match=r"x\.jsonl") as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_without_a_version_from_the_producer_the_caller_gives_it() -> None:
    with pytest.raises(InvalidRollout, match="policy_version"):
        read(row(0))
    assert read(row(0), policy_version=9, env="mine").groups[0].env == "mine"


def test_a_format_may_be_asked_for_and_an_unknown_one_names_those_that_are() -> None:
    assert read(row(0), "prime-rl", policy_version=1).format == "prime-rl"
    with pytest.raises(InvalidRollout, match="known are verifiers"):
        read(row(0), "primerl")


def test_more_sequences_than_a_rollout_may_have_leave_one_attempt_out() -> None:
    def turn(i: int) -> dict[str, Any]:
        return {
            "node_id": str(i),
            "prompt_token_ids": [1, 2 + i],
            "completion_token_ids": [3],
            "per_token_logps": [-0.5],
            "loss_mask": [0, 0, 1],
        }

    def record(turns: int) -> dict[str, Any]:
        return {"schema_version": 1, "turns": [turn(i) for i in range(turns)], "reward": 1.0}

    found = read([record(257), record(256)], policy_version=0)
    assert [len(r.sequences) for group in found.groups for r in group.rollouts] == [256]
    assert [one.failure.kind for one in found.left_out] == ["sequences"]


def test_a_path_that_trains_nothing_is_no_sequence_of_the_rollout() -> None:
    def stretch(*trains: bool) -> Stretch:
        tokens = np.arange(len(trains), dtype=np.int32)
        return Stretch(
            tokens=tokens, loss_mask=np.array(trains), logprobs=np.where(trains, np.float32(-0.5), np.float32(0))
        )

    attempt = TraceAttempt(
        at=Value({}),
        group="g",
        prompt="p",
        reward=1.0,
        sequences=(stretch(False, True), stretch(False, False, False), stretch(False, False, True)),
    )
    assert [len(one.tokens) for one in rollout_of(attempt, policy_version=1).sequences] == [2, 3]
    assert [one.loss_mask.tolist() for one in rollout_of(attempt, policy_version=1).further] == [[False, False, True]]


def node(role: str, ids: list[int], logprobs: list[float] | None = None, *, parent: int | None, link: str = "") -> Any:
    """A message of verifiers; one with logprobs was sampled."""
    mask = [False] * len(ids) if logprobs is None else [True] * len(ids)
    links = [{"node": 0, "type": link}] if link else []
    base = {"message": {"role": role}, "token_ids": ids, "mask": mask, "logprobs": logprobs or []}
    return base | {"parent": parent, "semantic_parents": links}


def compacted(*nodes: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "rewards": {"exact": 1.0}, "group_id": "g", "policy_version": 3, "ok": True}


TURNS = [
    node("user", P, parent=None),
    node("assistant", A, LA, parent=0),
    node("tool", [30], parent=1),
    node("assistant", B, LB, parent=2),
]
SUMMARY = [node("user", [31], parent=3), node("assistant", [40, 2], [-0.5, -0.5], parent=4, link="compaction_attempt")]


def test_turns_before_a_compaction_that_nothing_resumed_are_trained() -> None:
    """Of a branch that ends in an attempt at a compaction that attempt alone does not train."""
    (rollout,) = read(compacted(*TURNS, *SUMMARY)).groups[0].rollouts
    assert rollout.tokens.tolist() == [*P, *A, 30, *B, 31]
    assert rollout.tokens[rollout.loss_mask].tolist() == [*A, *B]
    assert (rollout.reward, rollout.failure) == (1.0, None)


def test_two_attempts_at_a_compaction_leave_the_turns_before_them_trained_once() -> None:
    again = node("assistant", [41, 2], [-1.5, -0.5], parent=4, link="compaction_attempt")
    (rollout,) = read(compacted(*TURNS, *SUMMARY, again)).groups[0].rollouts
    assert [s.tokens[s.loss_mask].tolist() for s in rollout.sequences] == [[*A, *B]]


def test_a_branch_that_goes_on_beside_an_unused_compaction_is_the_main_one_as_before() -> None:
    on = [node("tool", [32], parent=3), node("assistant", A, LA, parent=6)]
    (rollout,) = read(compacted(*TURNS, *SUMMARY, *on)).groups[0].rollouts
    assert [s.tokens.tolist() for s in rollout.sequences] == [[*P, *A, 30, *B, 32, *A]]


def test_a_message_without_a_record_of_experts_costs_itself_alone() -> None:
    def routed(count: int, first: int, dtype: str = "uint8") -> dict[str, Any]:
        rows = np.array([[[first + i, first + i + 1]] for i in range(count)], dtype)
        return {"routed_experts": {"data": rows.tobytes(), "dtype": dtype, "shape": list(rows.shape)}}

    turns = [
        {**TURNS[0], **routed(len(P), 0)},
        {**TURNS[1], **routed(len(A) - 1, 20)},  # without its last token
        TURNS[2],
        {**TURNS[3], **routed(len(B), 40, "int16")},
    ]
    (rollout,) = read(compacted(*turns)).groups[0].rollouts
    rows = rollout.columns["routed_experts"]
    assert rows.dtype == np.int16
    expected = [[i, i + 1] for i in range(len(P))] + [[20 + i, 21 + i] for i in range(len(A) - 1)]
    expected += [[0, 0], [0, 0]] + [[40 + i, 41 + i] for i in range(len(B))]
    assert rows[:, 0].tolist() == expected
    other = {**TURNS[3], **routed(len(B), 40)}
    other["routed_experts"]["shape"] = [len(B), 2, 1]
    (rollout,) = read(compacted(*turns[:3], other)).groups[0].rollouts
    assert "routed_experts" not in rollout.columns  # of two models


def test_a_trace_of_nothing_but_a_compaction_says_so() -> None:
    attempt = node("assistant", [40, 2], [-0.5, -0.5], parent=0, link="compaction_attempt")
    (one,) = read([compacted(TURNS[0], attempt)]).left_out
    assert one.failure == ("empty", "only a compaction was sampled, which nothing goes on from")
    (one,) = read([compacted(TURNS[0])]).left_out
    assert one.failure == ("empty", "nothing was sampled, or without token ids")


def test_a_verdict_of_slime_is_a_reward_of_1_or_0() -> None:
    group = read([slime(0, reward=True), slime(1, reward=False), slime(1, index=2, reward=0.5)]).groups[0]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.5]


def test_samples_of_slime_without_a_rollout_id_are_segments_by_their_index() -> None:
    other = slime(1, index=4, reward=0.0)
    lines = [slime(0), slime(0, tokens=[*P, 5], response_length=1, loss_mask=[1], rollout_log_probs=[-1.0]), other]
    (group,) = read(lines)
    assert [(rollout.reward, len(rollout.sequences)) for rollout in group.rollouts] == [(1.0, 2), (0.0, 1)]
    nameless = [{name: value for name, value in slime(i).items() if name != "index"} for i in (0, 1)]
    assert [len(rollout.sequences) for rollout in read(nameless).groups[0].rollouts] == [1, 1]


@pytest.mark.parametrize("name", ["index", "rollout_id"])
@pytest.mark.parametrize("rewards", [(1.0, 0.5), (1.0, None), ({"a": 1.0}, {"a": 0.0})])
def test_segments_of_slime_whose_rewards_differ_are_left_out_with_both(
    tmp_path: Path, name: str, rewards: tuple[Any, Any]
) -> None:
    lines = [slime(0, **{"index": i, name: 5, "reward": reward}) for i, reward in enumerate(rewards)]
    found = read(file_of(tmp_path / "x.jsonl", *lines, slime(1)), reward=0.5)
    (sentence,) = found.damaged
    assert sentence.startswith(f"{tmp_path}/x.jsonl:2  {name}: rollout 5 has the rewards {rewards[0]} ")
    assert str(rewards[1]) in sentence
    assert [rollout.reward for rollout in found.groups[0].rollouts] == [0.0]
    with pytest.raises(InvalidRollout, match="has the rewards"):
        read(lines, reward=0.5)


LIMITS = ["AgentTimeoutError", "ContextLengthExceededError", "OutputLengthExceededError", "MaxTurnsExceededError"]
FAILURES = ["VerifierTimeoutError", "EnvironmentStartTimeoutError", "AgentSetupTimeoutError", "RateLimitError"]


@pytest.mark.parametrize("kind", LIMITS + FAILURES)
@pytest.mark.parametrize("scored", [True, False])
def test_an_attempt_of_harbor_at_a_limit_keeps_its_score_where_that_is_asked_for(kind: str, scored: bool) -> None:
    error = {"exception_type": kind, "exception_message": "900 s"}
    changes = {} if scored else {"verifier_result": None}
    trial = harbor(0, exception_info=error, **changes)
    (as_ever,) = read([trial], policy_version=1, reward="reward").groups[0].rollouts
    assert (as_ever.failure, as_ever.reward) == ((kind, "900 s"), None)
    (rollout,) = read([trial], policy_version=1, reward="reward", limits="score").groups[0].rollouts
    if scored and kind in LIMITS:
        assert (rollout.failure, rollout.reward, rollout.is_truncated) == (None, 1.0, True)
    else:
        assert (rollout.failure, rollout.reward) == (as_ever.failure, None)


def test_a_limit_beside_another_error_of_a_step_is_no_score() -> None:
    errors = [{"exception_type": kind} for kind in ("AgentTimeoutError", "DockerError")]
    steps = [{"exception_info": errors[1]}]
    trial = harbor(0, exception_info=errors[0], step_results=steps)
    (rollout,) = read([trial], policy_version=1, reward="reward", limits="score").groups[0].rollouts
    assert rollout.failure is not None


def spans(**attributes: Any) -> list[dict[str, Any]]:
    """A call and its reward, as Agent Lightning 0.3 records them."""
    call = {"prompt_token_ids": P, "response_token_ids": A, "logprobs.content": [{"logprob": p} for p in LA]}
    told = [("openai.chat.completion", call), ("agentlightning.annotation", attributes)]
    base = {"rollout_id": "r", "attempt_id": "a"}
    return [base | {"span_id": str(i), "name": name, "attributes": its} for i, (name, its) in enumerate(told)]


def test_a_reward_of_agent_lightning_without_a_name_is_the_primary_one() -> None:
    name = "agentlightning.reward"
    records = spans(**{f"{name}.0.value": 0.5, f"{name}.1.name": "form", f"{name}.1.value": 0.25, f"{name}.2.value": 2})
    (rollout,) = read(records, policy_version=1).groups[0].rollouts
    assert (rollout.reward, rollout.rewards) == (0.5, {"primary": 0.5, "form": 0.25, "reward_2": 2.0})
    with pytest.raises(InvalidRollout, match=r"attributes\.agentlightning\.reward\.0\.value: missing"):
        read(spans(**{f"{name}.0.name": "primary"}), policy_version=1)


@pytest.mark.parametrize("empty", [None, [], "", "[]", [[]]])
def test_an_empty_last_answer_of_agent_lightning_keeps_the_turns_before_it(empty: Any) -> None:
    records = spans(reward=1.0)
    last = {"prompt_token_ids": [*P, *A, 30], "response_token_ids": empty}
    records.insert(1, records[0] | {"span_id": "9", "attributes": last})
    (rollout,) = read(records, policy_version=1).groups[0].rollouts
    assert rollout.tokens.tolist() == [*P, *A]
    assert rollout.reward == 1.0


def test_an_empty_answer_is_the_last_one_to_its_prompt() -> None:
    """As Agent Lightning 1.0 has it: of requests with one prompt the last counts, and then empty ones are left out."""
    events = [answered(P, A, LA), answered([*P, *A, 30], B, LB), answered([*P, *A, 30], [], [])]
    (rollout,) = read([*events, lightning_event("reward", value=1.0)]).groups[0].rollouts
    assert rollout.tokens.tolist() == [*P, *A]
    failed = answered([*P, *A, 30], [], [], status="error")
    (rollout,) = read([*events[:2], failed, lightning_event("reward", value=1.0)]).groups[0].rollouts
    assert rollout.tokens.tolist() == [*P, *A, 30, *B], "a request that failed answers nothing"


def test_retries_weigh_the_same_by_way_of_a_reader_and_of_from_sequences() -> None:
    """A and B are two answers to one prompt, whose first token has the same logprob: one act of sampling, as it is told
    by ids and logprobs, which trains once. LC differs in it, and trains by itself."""
    lc = [-0.75, *LB[1:]]
    for logprobs, trained_of_second in ((LB, B[1:]), (lc, B)):
        sequences = [
            TokenSequence.from_turns(
                [{"role": "user", "tokens": P}, {"role": "assistant", "tokens": answer, "logprobs": its}],
                policy_version=1,
            )
            for answer, its in ((A, LA), (B, logprobs))
        ]
        by_hand = Rollout.from_sequences(sequences, reward=1.0)
        assert [s.tokens[s.loss_mask].tolist() for s in by_hand.sequences] == [A, trained_of_second]
        mask = [0] * len(P)
        turns = [
            {"prompt_token_ids": P, "completion_token_ids": t, "per_token_logps": p, "loss_mask": mask + [1] * len(t)}
            for t, p in ((A, LA), (B, logprobs))
        ]
        detail = {"prompt_token_ids": [P, P], "completion_token_ids": [A, B], "logprobs": [LA, logprobs]}
        second = slime(1, reward=1.0, index=0, rollout_log_probs=logprobs, loss_mask=None)
        read_ones = [
            read(trace() | {"turns": turns, "reward": 1.0}, policy_version=1),
            read(harbor(0, agent_result={"rollout_details": [detail]}), policy_version=1, reward="reward"),
            read([slime(0, loss_mask=None), second]),
            read(compacted(TURNS[0], TURNS[1], node("assistant", B, logprobs, parent=0))),
        ]
        for found in read_ones:
            (rollout,) = found.groups[0].rollouts
            assert [s.tokens.tolist() for s in rollout.sequences] == [[*P, *A], [*P, *B]], found.format
            assert [s.loss_mask.tolist() for s in rollout.sequences] == [
                s.loss_mask.tolist() for s in by_hand.sequences
            ], found.format


def test_a_call_that_was_recorded_twice_trains_once() -> None:
    turn = trace()["turns"][0]
    (rollout,) = read(trace() | {"turns": [turn, turn], "reward": 1.0}, policy_version=1).groups[0].rollouts
    assert rollout.loss_tokens == len(A)


def test_lines_that_are_torn_or_no_record_are_left_out_and_the_first_of_them_decides_no_format(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.jsonl", {"torn": 1}, row(0), row(1))
    path.write_text(path.read_text() + json.dumps(row(0))[:60] + "\n[]\n" + json.dumps(row(0, problem_id="p8")))
    found = read(path, policy_version=1)
    assert [(group.prompt_id, len(group.rollouts)) for group in found] == [("p7", 2), ("p8", 1)]
    assert [one.place for one in found.left_out] == [f"{path}:4", f"{path}:1", f"{path}:5"]
    assert all(one.is_damaged and one.failure.kind == "damaged" for one in found.left_out)
    assert "3 damaged records left out" in found.summary


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_traces_may_be_compressed(tmp_path: Path, pack: Any) -> None:
    path = file_of(tmp_path / "x.jsonl", row(0), row(1))
    path.write_bytes(pack(path.read_bytes()))
    assert len(read(path, policy_version=1).groups[0].rollouts) == 2


def test_what_cannot_be_opened_is_one_sentence_of_rlbuffers_own(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "no.jsonl", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        ("a\0b", "cannot be read"),
        ("/dev/null", "nothing is there"),
    ):
        with pytest.raises(InvalidRollout, match=words):
            read(path)


@pytest.mark.parametrize("nested", ["[" * 1000 + "]" * 1000, '{"a":' * 1000 + "1" + "}" * 1000])
def test_a_line_nested_a_thousand_deep_is_left_out(tmp_path: Path, nested: str) -> None:
    path = file_of(tmp_path / "x.jsonl", row(0), row(1))
    deep = json.dumps(row(0, seed="DEEP")).replace('"DEEP"', nested)
    path.write_text(f"{path.read_text()}{nested}\n{deep}\n")
    found = read(path, policy_version=1)
    assert len(found.groups[0].rollouts) == 2
    assert [one.place for one in found.left_out] == [f"{path}:3", f"{path}:4"]
