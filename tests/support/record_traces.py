"""Records small traces with the producers' own code, and what their own training adapters make of them.

Each producer wants an environment of its own, so this is run once a producer and release, never by a test:

    python tests/support/record_traces.py verifiers PRIME_RL     # verifiers 0.4.0, msgspec; a checkout of prime-rl
    python tests/support/record_traces.py openenv                # openenv 0.10.0
    python tests/support/record_traces.py agent_lightning        # agentlightning 0.3.0
    python tests/support/record_traces.py nemo_gym GYM           # pydantic; a checkout of NVIDIA-NeMo/Gym

A file ``<name>.jsonl`` is what the producer writes, ``<name>.expected.json`` what is trained of it: per rollout a list
of ``[token ids, mask, logprobs]``.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "unit" / "fixtures" / "traces"


def encoded(text: str) -> list[int]:
    """Token ids of a text: as good as any here, and the same each time."""
    return [100 + ord(letter) for letter in text]


class Sampler:
    """Answers with ids of their own and logprobs of many digits."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next = 1000

    def answer(self, length: int) -> tuple[list[int], list[float]]:
        ids = list(range(self._next, self._next + length))
        self._next += length
        return ids, [-self._random.random() * 3 for _ in ids]


def written(name: str, records: list[Any], expected: Any) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (OUT / f"{name}.jsonl").write_text(lines)
    (OUT / f"{name}.expected.json").write_text(json.dumps(expected) + "\n")


def loaded(name: str, path: Path) -> types.ModuleType:
    """A module of a checkout by its path, without the package around it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def verifiers(checkout: str) -> None:
    """A conversation with a tool, a retry, a fork, a sub-agent, a compaction that resumed and one that did not."""
    import verifiers.v1 as vf
    from verifiers.v1 import graph
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.semantic import ACPInfo, SemanticEdge, SemanticEdgeSet
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Branch, ModelCall, Trace, TraceTask, WireTrace
    from verifiers.v1.types import (
        AssistantMessage,
        Response,
        SystemMessage,
        ToolCall,
        ToolMessage,
        TurnTokens,
        UserMessage,
    )

    source = Path(checkout) / "src" / "prime_rl"
    loaded("prime_rl.transports.rollouts.types", source / "transports/rollouts/types.py")
    sys.modules["prime_rl.transports.rollouts"] = sys.modules["prime_rl.transports.rollouts.types"]
    loaded("prime_rl.utils.logger", source / "utils/logger.py")
    adapter = loaded("prime_rl.orchestrator.trajectories", source / "orchestrator/trajectories.py")
    # The adapter is older than 0.4.0: a branch has no images of its own any more, and says whether it is trainable.
    Branch.multi_modal_data = None
    branches = Trace.branches.fget
    Trace.branches = property(lambda self: [branch for branch in branches(self) if branch.trainable])

    sampler = Sampler(1)

    def said(trace: Any, messages: list[Any], length: int, name: str, **reply: Any) -> Any:
        ids, spans = list[int](), list[tuple[int, int]]()
        for message in messages:
            start = len(ids)
            ids += [3, *rendered[id(message)]] if id(message) in rendered else [1, *encoded(str(message.content)), 2]
            spans.append((start, len(ids)))
        answer, logprobs = sampler.answer(length)
        message = AssistantMessage(**reply)
        rendered[id(message)] = answer
        tokens = TurnTokens(
            prompt_ids=[*ids, 3], completion_ids=answer, completion_logprobs=logprobs, message_spans=spans
        )
        response = Response(id=name, created=0, model="m", message=message, finish_reason="stop", tokens=tokens)
        node = graph.prepare_turn(trace, messages).commit(response)
        finish = "tool_calls" if reply.get("tool_calls") else "stop"
        trace.calls.append(ModelCall(node=node, finish_reason=finish, acp=ACPInfo(request_id=name)))
        return message

    rendered: dict[int, list[int]] = {}

    def trace_of(number: int) -> Any:
        trace = Trace[WireTaskData, vf.State, WireAgentConfig](
            id=f"trace{number}",
            task=TraceTask(type="Sum", data=WireTaskData(prompt="2+2?", idx=0), key="sum-0"),
            agent=AgentInfo(config=WireAgentConfig(), name="solver"),
        )
        system, user = SystemMessage(content="add"), UserMessage(content="2+2?")
        call = ToolCall(id="c1", name="calc", arguments='{"a": 2}')
        first = said(trace, [system, user], 3, "first", content="", tool_calls=[call])
        tool = ToolMessage(tool_call_id="c1", content="4")
        said(trace, [system, user, first, tool], 4, "answer", content="four")
        if number == 1:
            trace.record_reward("exact", 0.0)
            trace.record_reward("form", 0.5, weight=0.2)
            return trace
        said(trace, [system, user, first, tool], 2, "retry", content="4!")
        other = UserMessage(content="sure?")
        said(trace, [system, user, first, other], 2, "fork", content="yes")
        summary = UserMessage(content="sum up")
        said(trace, [system, user, first, tool, summary], 3, "summary", content="so far")
        said(trace, [system, user, first, tool, UserMessage(content="again")], 2, "lost", content="lost")
        said(trace, [system, UserMessage(content="so far")], 3, "resumed", content="done")
        said(trace, [SystemMessage(content="sub"), UserMessage(content="part")], 2, "sub", content="sub answer")
        edges = [
            ("answer", "summary", "compaction_attempt"),
            ("answer", "lost", "compaction_attempt"),
            ("summary", "resumed", "compaction"),
            ("first", "sub", "subagent_call"),
        ]
        trace.add_semantic_edges(
            SemanticEdgeSet(
                edges=[SemanticEdge(source_request_id=a, target_request_id=b, type=kind) for a, b, kind in edges]
            )
        )
        trace.record_reward("exact", 1.0)
        return trace

    def episode(traces: list[Any], *, ok: bool, number: int) -> Any:
        policy = vf.TrainRunInfo(id="run", work=vf.TrainWorkInfo(step=5, policy={"start": 3, "end": 4}))
        return vf.Episode[WireTaskData, vf.State, WireAgentConfig](
            id=f"episode{number}",
            env={"id": "sum", "name": "sums"},
            task=traces[0].task,
            group={"id": "g1"},
            run=policy,
            ok=ok,
            traces=traces,
        )

    episodes = list[Any]()
    for number in (0, 1, 2):
        trace = trace_of(number)
        trace.stop("agent_completed")
        trace.ok = True
        traces = [trace]
        if number == 1:
            judge = trace_of(9)
            judge.agent = AgentInfo(config=WireAgentConfig(), name="judge", trainable=False)
            judge.ok = True
            traces.append(judge)
        if number == 2:
            trace.record_error(TimeoutError("the sandbox is gone"))
        episodes.append(episode(traces, ok=number != 2, number=number))
    exact = [json.loads(json.dumps(one.to_record(float_decimals=None))) for one in episodes]
    rounded = [json.loads(json.dumps(one.to_record())) for one in episodes]

    def trained(records: list[Any]) -> list[Any]:
        out = []
        for record in records[:2]:
            samples = adapter.trace_to_samples(WireTrace.model_validate(record["traces"][0]))
            out.append([[sample.token_ids, sample.mask, sample.logprobs] for sample in samples])
        return out

    written("verifiers", exact, trained(exact))
    written("verifiers_rounded", rounded, trained(rounded))


def openenv() -> None:
    """A coding agent with tools, a retry, a fork and a new root; title generation, which is not the agent's."""
    from openenv.core.harness.capture.contract import to_training_trace
    from openenv.core.harness.capture.export import export_session
    from openenv.core.harness.capture.graph import TurnNode
    from openenv.core.harness.capture.sessions import Session

    sampler = Sampler(2)
    session = Session(session_id="s1")

    def turn(name: str, prompt: list[int], length: int, role: str, tools: int = 1) -> list[int]:
        answer, logprobs = sampler.answer(length)
        session.graph.add_turn(
            TurnNode(
                node_id=name,
                prompt_ids=prompt,
                sampled_ids=answer,
                sampled_logprobs=logprobs,
                n_tools=tools,
                finish_reason="length" if name == "last" else "tool_calls",
                request_messages=[{"role": "user", "content": "go"}, {"role": role, "content": "x"}],
                response_message={"role": "assistant", "content": name},
            )
        )
        return prompt + answer

    one = turn("one", encoded("fix it"), 3, "user")
    turn("title", encoded("title?"), 2, "user", tools=0)
    turn("retried", [*one, *encoded("ls")], 2, "tool")
    two = turn("two", [*one, *encoded("ls")], 4, "tool")
    turn("fork", [*one, *encoded("cat")], 2, "tool")
    turn("three", [*two, *encoded("ok")], 2, "tool")
    turn("last", encoded("another system prompt"), 3, "user")
    document = export_session(session)
    trace = to_training_trace(session.graph, document)
    expected = [
        [row["input_ids"], row["loss_mask"], row["logprobs"]] for row in document["sequences"] if row["trainable"]
    ]
    record = trace.model_dump(mode="json")
    written("openenv", [record | {"task_id": "fix-1", "reward": 0.5, "rewards": {"tests": 0.5}}], [expected])


def agent_lightning() -> None:
    """Two rollouts of spans: one with a tool and a context that starts anew, one that was made again."""
    from agentlightning.adapter import TracerTraceToTriplet
    from agentlightning.emitter import emit_reward
    from agentlightning.types import Span

    sampler = Sampler(3)
    records, expected = list[Any](), list[Any]()

    def span(rollout: str, attempt: str, number: int, name: str, attributes: dict[str, Any], parent: str | None) -> Any:
        return Span.from_attributes(
            attributes=attributes,
            rollout_id=rollout,
            attempt_id=attempt,
            sequence_id=number,
            name=name,
            trace_id="0" * 32,
            span_id=f"{rollout}{attempt}{number:04d}",
            parent_id=parent,
            start_time=float(number),
            end_time=number + 0.5,
        )

    def call(
        rollout: str, attempt: str, number: int, prompt: list[int], length: int, parent: str
    ) -> tuple[Any, list[int]]:
        answer, logprobs = sampler.answer(length)
        content = [
            {"token": str(i), "logprob": p, "bytes": None, "top_logprobs": []}
            for i, p in zip(answer, logprobs, strict=True)
        ]
        attributes = {
            "prompt_token_ids": prompt,
            "response_token_ids": answer,
            "gen_ai.response.id": f"{rollout}{number}",
            "logprobs.content": json.dumps(content),
        }
        return span(rollout, attempt, number, "openai.chat.completion", attributes, parent), [*prompt, *answer]

    for rollout, attempt in (("r1", "a1"), ("r2", "a1"), ("r2", "a2")):
        root = span(rollout, attempt, 0, "agent", {"agent.name": "solver"}, None)
        root.end_time = 100.0
        spans = [root]
        one, context = call(rollout, attempt, 1, encoded("2+2?"), 3, root.span_id)
        spans.append(one)
        if attempt == "a1" and rollout == "r1":
            two, _ = call(rollout, attempt, 2, [*context, *encoded("4")], 2, root.span_id)
            three, _ = call(rollout, attempt, 3, encoded("anew"), 2, root.span_id)
            repeated = three.model_copy(
                update={"span_id": "again", "sequence_id": 4, "start_time": 4.0, "end_time": 4.5}
            )
            spans += [two, three, repeated]
        if (rollout, attempt) != ("r2", "a1"):
            core = emit_reward({"exact": 1.0, "form": 0.25}, primary_key="exact", propagate=False)
            reward = span(rollout, attempt, 8, core.name, dict(core.attributes), root.span_id)
            judge, _ = call(rollout, attempt, 9, encoded("good?"), 2, reward.span_id)
            spans += [reward, judge]
            triplets = TracerTraceToTriplet().adapt(spans)
            expected.append(
                [
                    [
                        t.prompt["token_ids"],
                        t.response["token_ids"],
                        [p["logprob"] for p in t.response["logprobs"]],
                        t.reward,
                    ]
                    for t in triplets
                ]
            )
        records += [json.loads(one.model_dump_json()) for one in spans]
    written("agent_lightning", records, expected)


def nemo_gym(checkout: str) -> None:
    """Rollouts of entries with tools, retries, sub-agents, a compaction and calls without an answer, at random."""
    root = Path(checkout) / "nemo_gym" / "token_id_capture"
    records_module = loaded("nemo_gym.token_id_capture.records", root / "records.py")
    builder = loaded("nemo_gym.token_id_capture.builder", root / "builder.py")
    sampler, draw = Sampler(4), random.Random(4)
    records, expected = list[Any](), list[Any]()
    for number in range(24):
        ends: list[list[int]] = [encoded(letter) for letter in "ab"]
        entries = []
        for call in range(draw.randint(1, 7)):
            prompt = [*draw.choice(ends), *(encoded("t") if draw.random() < 0.4 else [])]
            if entries and draw.random() < 0.3:
                prompt = draw.choice(entries).prompt_token_ids
            answer, logprobs = sampler.answer(0 if draw.random() < 0.1 else draw.randint(1, 3))
            if entries and draw.random() < 0.15:  # the same answer once more
                answer, logprobs = entries[-1].generation_token_ids, entries[-1].generation_log_probs
            entries.append(
                records_module.TokenEntry(
                    rollout_id=f"{number // 4}-{number % 4}",
                    model_call_id=f"call{draw.randrange(1000):03d}-{call}",
                    prompt_token_ids=prompt,
                    generation_token_ids=answer,
                    generation_log_probs=logprobs,
                    created_at=float(call),
                )
            )
            ends.append([*prompt, *answer])
        draw.shuffle(entries)
        built = builder.prefix_merging(entries)
        unresolved = bool(built.notes.unresolved_retries)
        chains = [
            [
                [link.interstitial, link.entry.generation_token_ids, link.entry.generation_log_probs]
                for link in chain.links
            ]
            for chain in sorted(
                built.chains, key=lambda chain: (chain.links[0].entry.created_at, chain.links[0].entry.model_call_id)
            )
        ]
        roots = [
            chain.root_prompt
            for chain in sorted(
                built.chains, key=lambda chain: (chain.links[0].entry.created_at, chain.links[0].entry.model_call_id)
            )
        ]
        expected.append({"unresolved": unresolved, "roots": roots, "chains": chains})
        records += [entry.model_dump(mode="json") for entry in entries]
    written("nemo_gym", records, expected)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    {"verifiers": verifiers, "openenv": openenv, "agent_lightning": agent_lightning, "nemo_gym": nemo_gym}[sys.argv[1]](
        *sys.argv[2:]
    )
