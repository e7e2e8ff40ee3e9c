"""Harnesses as people have them, by their base URL alone: what each one heard is what is trained. One that shows its
turns otherwise later on has a sequence for each.

They are in no environment of this project, since they bring much: ``pip install litellm smolagents inspect-ai langgraph
langchain-openai openenv`` beside rlbuffer, and ``npm install @openai/codex @qwen-code/qwen-code`` on the PATH. Each is
skipped where it is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from gateway_stage import Agent, Stage, engine_samples, trained_samples
from own_server import OwnServer

CALL = 'call look_up {"word": "tree"}'
SAID = "say a plant"
pytestmark = pytest.mark.filterwarnings("ignore")
"""Theirs."""


@pytest.fixture(autouse=True)
def leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the check after each test: these packages keep threads and settings of their own."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def stage(server: OwnServer) -> Iterator[Stage]:
    made = Stage(server.url, f"t-{uuid.uuid4().hex[:12]}")
    yield made
    made.close()


def look_up(word: str) -> str:
    """Looks a word up.

    Args:
        word: which one.
    """
    return f"{word} is a plant"


def by_litellm(opened: dict[str, Any], tmp_path: Path) -> str:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": "openai/policy", "api_base": opened["base_url"], "api_key": "none", "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": CALL}]
    message = litellm.completion(messages=messages, **asked).choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        result = look_up(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": SAID})
    chunks = list(litellm.completion(messages=messages, stream=True, **asked))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_smolagents(opened: dict[str, Any], tmp_path: Path) -> str:
    """It forces a call unless it is told otherwise, and shows no calls in later turns."""
    smolagents = pytest.importorskip("smolagents", reason="needs smolagents")
    model = smolagents.OpenAIModel(model_id="policy", api_base=opened["base_url"], api_key="none", tool_choice="auto")
    tool = smolagents.tool(look_up)
    answers: list[Any] = [{"role": "user", "content": [{"type": "text", "text": CALL}]}]
    message = model.generate(answers, tools_to_call_from=[tool])
    (call,) = message.tool_calls
    assert tool(**json.loads(call.function.arguments)) == "tree is a plant"
    answers += [message, {"role": "user", "content": [{"type": "text", "text": SAID}]}]
    return str(model.generate(answers, tools_to_call_from=[tool]).content)


def by_inspect_ai(opened: dict[str, Any], tmp_path: Path) -> str:
    pytest.importorskip("inspect_ai", reason="needs inspect-ai")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser, get_model
    from inspect_ai.solver import Generate, TaskState, solver, use_tools
    from inspect_ai.tool import Tool, tool

    @tool(name="look_up")
    def looks_up() -> Tool:
        async def execute(word: str) -> str:
            """Looks a word up.

            Args:
                word: which one.
            """
            return look_up(word)

        return execute

    @solver
    def asks_once_more() -> Any:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state = await generate(state, tool_calls="single")
            state.messages.append(ChatMessageUser(content=SAID))
            return await generate(state, tool_calls="none")

        return solve

    model = get_model("openai/policy", base_url=opened["base_url"], api_key="none", responses_api=False, memoize=False)
    task = Task(dataset=[Sample(input=CALL)], solver=[use_tools(looks_up()), asks_once_more()])
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    return str(log.samples[0].output.completion)


def by_langgraph(opened: dict[str, Any], tmp_path: Path) -> str:
    pytest.importorskip("langgraph", reason="needs langgraph")
    pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=opened["base_url"], api_key="none")
    graph = create_react_agent(model, [tool(look_up)])
    state = {"messages": [("user", CALL)]}
    for chunk in graph.stream(state, stream_mode="values"):
        state = chunk
    assert any(message.content == "tree is a plant" for message in state["messages"])
    after = graph.invoke({"messages": [*state["messages"], ("user", SAID)]})
    return str(after["messages"][-1].content)


@pytest.mark.parametrize(
    ("play", "sequences"), [(by_litellm, 1), (by_smolagents, 2), (by_inspect_ai, 1), (by_langgraph, 1)]
)
def test_what_a_harness_heard_is_trained_as_the_engine_sampled_it(
    stage: Stage, play: Callable[[dict[str, Any], Path], str], sequences: int, tmp_path: Path
) -> None:
    opened = stage.begin()["open_rollouts"][0]
    assert play(opened, tmp_path) == "a plant"
    assert Agent(stage, opened).end(reward=1.0).status_code == 200
    (rollout,) = stage.rollouts()
    assert len(rollout.sequences) == sequences
    assert trained_samples(rollout) == engine_samples(stage.engine)
    assert len(rollout.metadata["calls"]) >= 2


def codex(opened: dict[str, Any]) -> tuple[str, ...]:
    """It asks for Responses, by a provider of its settings. Its tools for other agents are no plain functions."""
    provider = f'{{name="p",base_url="{opened["base_url"]}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    settings = ["model_provider=p", f"model_providers.p={provider}", "features.multi_agent=false"]
    settings.append('web_search="disabled"')
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "policy")
    given = (part for one in settings for part in ("-c", one))
    return "codex", "exec", *given, *flags, 'call exec_command {"cmd": "%s"}'


def qwen(opened: dict[str, Any]) -> tuple[str, ...]:
    """It asks for chat completions, where its environment says."""
    call = 'call run_shell_command {"command": "%s", "description": "writes", "is_background": false}'
    return "qwen", "--auth-type", "openai", "--yolo", "-p", call


@pytest.mark.parametrize("program", [codex, qwen])
def test_what_a_program_heard_before_and_behind_a_command_is_one_sequence(
    server: OwnServer, program: Callable[[dict[str, Any]], tuple[str, ...]], tmp_path: Path
) -> None:
    if shutil.which(program.__name__) is None:
        pytest.skip(f"needs {program.__name__}")
    stage = Stage(server.url, f"t-{uuid.uuid4().hex[:12]}", engine=FakeEngine(context=200_000))
    try:
        opened = stage.begin()["open_rollouts"][0]
        *words, last = program(opened)
        environment = {"OPENAI_BASE_URL": opened["base_url"], "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy"}
        subprocess.run(
            [*words, last % "echo 7 > made"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", **environment},
            stdin=subprocess.DEVNULL,
            check=True,
        )
        assert (tmp_path / "made").read_text() == "7\n"
        assert Agent(stage, opened).end(reward=1.0).status_code == 200
        (rollout,) = stage.rollouts()
        assert trained_samples(rollout) == engine_samples(stage.engine)
        mask = rollout.sequences[0].loss_mask.astype(int)
        assert int((mask[1:] > mask[:-1]).sum()) == 2
    finally:
        stage.close()


def test_openenvs_validator_finds_nothing_in_what_is_trained(stage: Stage) -> None:
    validate = pytest.importorskip("openenv.core.harness.capture.validate", reason="needs openenv")
    agent = stage.agent()
    agent.post(CALL)
    agent.ask(CALL)
    agent.result("a plant")
    agent.go_on()
    agent.ask(SAID)
    agent.end(reward=1.0)
    (rollout,) = stage.rollouts()
    for sample in stage.engine.samples:
        found = validate.check_turn(sample.prompt, sample.tokens, [float(value) for value in sample.logprobs])
        assert found.ok, found.text()
    for sequence in rollout.sequences:
        shown = SimpleNamespace(
            input_ids=sequence.tokens.tolist(),
            loss_mask=sequence.loss_mask.astype(int).tolist(),
            logprobs=sequence.logprobs.tolist(),
            prompt_len=int(sequence.loss_mask.argmax()),
        )
        found = validate.check_sequence(shown)
        assert found.ok, found.text()
