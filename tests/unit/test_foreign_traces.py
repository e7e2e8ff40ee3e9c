"""Traces of other frameworks as groups. Recorded ones are compared with what their own training adapters made of them
(commit 79cc558d has the tests/support/record_traces that did it: verifiers 0.4.0, openenv 0.10.0, agentlightning 0.3.0,
NeMo Gym); of other formats a small file of the documented shape is read."""

from __future__ import annotations

import json
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
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.traces import read
from rlbuffer.traces.attempt import Attempt, Stretch, rollout_of
from rlbuffer.traces.formats import recognised
from rlbuffer.traces.reading import rollouts_in
from rlbuffer.traces.values import Value

FIXTURES = Path(__file__).parent / "fixtures" / "traces"


def recorded(name: str) -> tuple[list[Value], Any]:
    lines = (FIXTURES / f"{name}.jsonl").read_text().splitlines()
    records = [Value(json.loads(line), f"{name}:{number}") for number, line in enumerate(lines, 1)]
    return records, json.loads((FIXTURES / f"{name}.expected.json").read_text())


def attempts(records: list[Value], name: str = "") -> list[Attempt]:
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
    assert groups.said.count("1 AgentTimeoutError: 900 s") == 2
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
def test_a_file_of_text_is_named_for_what_it_is(record: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidRollout, match=r"^\S+x\.jsonl:1  this is .*no token ids"):
        read(file_of(tmp_path / "x.jsonl", record))


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
    assert sentence in found.said
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

    attempt = Attempt(
        at=Value({}),
        group="g",
        prompt="p",
        reward=1.0,
        sequences=(stretch(False, True), stretch(False, False, False), stretch(False, False, True)),
    )
    assert [len(one.tokens) for one in rollout_of(attempt, policy_version=1).sequences] == [2, 3]
    assert [one.loss_mask.tolist() for one in rollout_of(attempt, policy_version=1).further] == [[False, False, True]]
