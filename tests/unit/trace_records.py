"""A record of each format of which no recording is kept: small, and of the documented shape."""

from __future__ import annotations

from typing import Any

P, A, B = [1, 15, 27, 4], [8, 9, 2], [8, 10, 11, 2]
LA, LB = [-0.5, -0.25, -0.125], [-0.5, -1.5, -0.75, -0.0625]


def slime(i: int, **changes: Any) -> dict[str, Any]:
    answer, logprobs = ((A, LA), (B, LB))[i]
    base = {"group_index": 7, "index": i, "tokens": P + answer, "response_length": len(answer), "reward": 1.0 - i}
    base |= {"loss_mask": [0] + [1] * (len(answer) - 1), "weight_versions": ["5", "6"], "rollout_log_probs": logprobs}
    return base | {"remove_sample": False, "status": ("completed", "truncated")[i]} | changes


def harbor(i: int, **changes: Any) -> dict[str, Any]:
    """A trial with two turns of the main agent, a rewritten history and a summary by a sub-agent."""
    turns = [P, [*P, *A, 30], [1, 40]]
    main = {"prompt_token_ids": turns, "completion_token_ids": [A, B, A], "logprobs": [LA, LB, LA]}
    sub = {"prompt_token_ids": [[1, 50]], "completion_token_ids": [B], "logprobs": [LB]}
    result = {"rollout_details": [main, sub]}
    base = {"task_name": "hello", "trial_name": f"t{i}", "agent_result": result, "exception_info": None}
    return base | {"verifier_result": {"rewards": {"reward": 1.0 - i, "style": 0.5}}} | changes


def atif() -> dict[str, Any]:
    def step(number: int, prompt: list[int], answer: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": answer, "logprobs": logprobs}
        return {"step_id": number, "source": "agent", "message": "", "metrics": metrics, **more}

    agent = {"name": "terminus-2", "version": "2"}
    observed = {"observation": {"results": [{"content": "ok"}]}, "llm_call_count": 1}
    child = {"schema_version": "ATIF-v1.8", "trajectory_id": "sub", "agent": agent}
    child["steps"] = [step(1, [1, 50], B, LB)]
    steps = [{"step_id": 1, "source": "user", "message": "hi"}, step(2, P, A, LA, **observed)]
    steps += [step(3, [*P, *A, 30], B, LB), step(4, P, A, LA, is_copied_context=True)]
    root = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": agent, "steps": steps}
    return root | {"subagent_trajectories": [child]}


def lightning_event(kind: str, attempt: str = "0", **data: Any) -> dict[str, Any]:
    return {"event_type": kind, "rollout_id": "r", "attempt_id": attempt, "timestamp": 1.0, "data": data}


def answered(prompt: list[int], answer: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
    content = {"content": [{"logprob": p} for p in logprobs]}
    response = {"prompt_token_ids": prompt, "choices": [{"token_ids": answer, "logprobs": content}]}
    return lightning_event("model_request", response=response, server={"version": 4}, **more)


def row(i: int, **changes: Any) -> dict[str, Any]:
    answer, logprobs = ((A, LA), (B, LB))[i]
    base = {"input_tokens": P, "output_tokens": answer, "output_logprobs": logprobs, "rewards": 1.0 - i, "step": 2}
    return base | {"problem_id": "p7", "task_type": "math", "task_rewards": 1.0 - i} | changes


def instruct(i: int, **changes: Any) -> dict[str, Any]:
    answer, logprobs = ((A, LA), (B, LB))[i]
    base = {"step": 3, "prompt_idx": 0, "sample_idx": i, "prompt_tokens": P, "response_tokens": answer}
    return base | {"logprobs": logprobs, "reward": 10.0 * i, "finish_reason": "stop", "dataset": "gsm8k"} | changes


def completed(rollout: str = "r") -> dict[str, Any]:
    triplet = {"prompt": {"token_ids": P}, "response": {"token_ids": A, "log_probs": LA}}
    return {"rollout_id": rollout, "data_id": "d", "triplets": [triplet], "final_reward": 1.0}


def trace() -> dict[str, Any]:
    mask = [0] * len(P) + [1] * len(A)
    turn = {"prompt_token_ids": P, "completion_token_ids": A, "per_token_logps": LA, "loss_mask": mask}
    return {"schema_version": 1, "turns": [turn]}


def gym(i: int) -> dict[str, Any]:
    """A finished rollout of NeMo Gym."""

    def item(prompt: list[int], answer: list[int], logprobs: list[float]) -> dict[str, Any]:
        ids = {"prompt_token_ids": prompt, "generation_token_ids": answer, "generation_log_probs": logprobs}
        return {"type": "message", **ids}

    output = [item(P, A, LA), {"type": "function_call_output"}, item([*P, *A, 30], B, LB)]
    return {"response": {"output": output}, "reward": 0.5, "_ng_task_index": 3, "_ng_rollout_index": i}
