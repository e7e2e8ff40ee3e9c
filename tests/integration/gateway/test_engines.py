"""Engines over HTTP: what is sent to them, what of their answers is believed, and what a call does about the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_templates import decoded
from fake_engine import SGLANG, FakeEngine, logprobs_of

from rlbuffer.errors import ConfigError
from rlbuffer.gateway.engines import fleet as fleets
from rlbuffer.gateway.engines.base import Answer, Engine, shaped, sound
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.request import AgentRequest, Refused
from rlbuffer.gateway.splice import Template
from rlbuffer.worker.samplers.base import Sampling

SAMPLING = Sampling(max_new_tokens=500, temperature=0.7)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


@pytest.fixture(params=["0.33.0", "0.32.0+cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    made = FakeEngine(speaks=request.param).start()
    yield made
    made.stop()


def asking(content: str, **more: Any) -> AgentRequest:
    return AgentRequest(messages=({"role": "user", "content": content},), **more)


def answered(engine: FakeEngine, request: AgentRequest, *, patience: float = 20.0) -> Answer:
    async def work(served: Engine, template: Template) -> Answer:
        assert template.is_append_only
        rendering = await served.render(request, opens=True)
        answer = await served.generate(request, rendering, rendering.tokens, SAMPLING)
        return shaped(sound(answer, served.url), request)

    return in_fleet([engine.url], lambda fleet: fleet.ask("r", work), patience=patience)


def in_fleet(urls: list[str], work: Callable[[Fleet], Awaitable[Any]], *, patience: float = 20.0) -> Any:
    async def run() -> Any:
        fleet = Fleet(urls, timeout_seconds=20.0, patience_seconds=patience)
        try:
            await fleet.start()
            return await work(fleet)
        finally:
            await fleet.close()

    return asyncio.run(run())


def test_an_answer_has_its_tokens_logprobs_versions_and_message(engine: FakeEngine) -> None:
    engine.version = "7"
    answer = answered(engine, asking('call add {"a": 1}', tools=TOOLS))
    (sample,) = engine.samples
    assert answer.completion.tokens.tolist() == sample.tokens
    assert np.array_equal(answer.completion.logprobs, logprobs_of(sample.prompt + sample.tokens, len(sample.prompt)))
    assert answer.completion.version_spans == ((7, 0, len(sample.tokens)),)
    assert [call["function"] for call in answer.message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert answer.message["reasoning_content"]
    assert answer.is_ended


def test_an_engine_that_a_worker_gives_adapters_answers_no_agent(engine: FakeEngine) -> None:
    async def work(served: Engine, template: Template) -> Answer:
        rendering = await served.render(asking("say a"), opens=True)
        return await served.generate(asking("say a"), rendering, rendering.tokens, SAMPLING)

    async def play(fleet: Fleet) -> None:
        await fleet.ask("r", work)
        engine.has_adapter, engine.version = True, "1"
        with pytest.raises(Refused) as refused:
            await fleet.ask("r", work)
        assert (refused.value.status, "LoRA adapter" in refused.value.message) == (503, True)

    in_fleet([engine.url], play, patience=2.0)
    with pytest.raises(ConfigError, match="LoRA adapter"):
        answered(engine, asking("say a"))


@pytest.mark.parametrize(("asked", "text"), [("say hello", "hello"), ("empty", "")])
def test_what_an_answer_says_ends_before_the_token_that_ended_it(engine: FakeEngine, asked: str, text: str) -> None:
    answer = answered(engine, asking(asked))
    assert answer.message["content"] == text
    assert decoded(answer.completion.tokens.tolist()).endswith("<|im_end|>")
    assert answer.is_ended


def test_tokens_are_drawn_as_the_run_says_whatever_the_models_own_settings_are(engine: FakeEngine) -> None:
    answered(engine, asking("say hello"))
    (sample,) = engine.samples
    expected = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 500, "logprobs": 0, "n": 1}
    assert {name: sample.parameters[name] for name in expected} == expected
    assert sample.parameters["skip_special_tokens"] is False  # how tokens become text is the engine's


def test_a_stop_text_ends_an_answer_that_nothing_goes_on_from(engine: FakeEngine) -> None:
    answer = answered(engine, asking("say the answer is a tree", stop=("is a",)))
    assert (answer.message["content"], answer.stopped_by, answer.is_ended) == ("the answer ", "is a", False)


def test_one_call_is_taken_where_the_agent_takes_one(engine: FakeEngine) -> None:
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("a", "b")]
    both = "say " + "\n".join(calls)
    assert len(answered(engine, asking(both)).message["tool_calls"]) == 2
    assert len(answered(engine, asking(both, takes_one_call=True)).message["tool_calls"]) == 1


def spoiled(**changes: Any) -> Callable[[Any], Any]:
    def spoil(answer: Any) -> Any:
        answer["choices"][0].update(changes)
        return answer

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: [],
        lambda answer: {"choices": []},
        lambda answer: {"choices": [answer["choices"][0], answer["choices"][0]]},
        spoiled(token_ids=[]),
        spoiled(token_ids=None),
        spoiled(token_ids=["a"]),
        spoiled(logprobs=None),
        spoiled(logprobs={"content": [{"logprob": -9999.0}]}, token_ids=[1]),
        spoiled(logprobs={"content": [{"logprob": 0.5}]}, token_ids=[1]),
        spoiled(weight_versions=[]),
        spoiled(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        spoiled(weight_versions=[{"version": "default", "start": 0, "end": 1}], token_ids=[1]),
        spoiled(finish_reason="abort"),
    ],
)
def test_an_answer_that_cannot_be_trained_is_asked_for_again_and_then_refused(spoil: Any) -> None:
    engine = FakeEngine().start()
    try:
        left = [1]

        def once(answer: Any) -> Any:
            return spoil(answer) if left and len(engine.samples) and left.pop() else answer

        engine.spoil = once
        assert answered(engine, asking("say hello")).message["content"] == "hello"
        engine.spoil = lambda answer: spoil(answer) if len(engine.samples) > 2 else answer
        with pytest.raises(Refused) as caught:
            answered(engine, asking("say hello"), patience=1.0)
        assert caught.value.status in (400, 503)
    finally:
        engine.stop()


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_call_waits_for_an_engine_that_takes_nothing_now(engine: FakeEngine, status: int) -> None:
    async def work(fleet: Fleet) -> int:
        async def ask(served: Engine, template: Template) -> int:
            request = asking("say hello")
            rendering = await served.render(request, opens=True)
            return len((await served.generate(request, rendering, rendering.tokens, SAMPLING)).completion.tokens)

        engine.status = status
        asyncio.get_running_loop().call_later(0.5, setattr, engine, "status", 200)
        return await fleet.ask("r", ask)

    assert in_fleet([engine.url], work) > 0


def test_a_call_ends_with_a_refusal_that_may_pass_when_its_patience_is_over(engine: FakeEngine) -> None:
    async def work(fleet: Fleet) -> Any:
        async def ask(served: Engine, template: Template) -> Any:
            rendering = await served.render(asking("say hello"), opens=True)
            return await served.generate(asking("say hello"), rendering, rendering.tokens, SAMPLING)

        engine.status = 503
        begun = time.monotonic()
        with pytest.raises(Refused) as caught:
            await fleet.ask("r", ask)
        assert time.monotonic() - begun < 10
        return caught.value

    refused = in_fleet([engine.url], work, patience=1.0)
    assert (refused.status, refused.code, refused.retry_seconds > 0) == (503, "engine_unavailable", True)


def test_an_engine_that_is_away_is_left_to_the_others_and_used_when_it_is_back() -> None:
    first, second = FakeEngine().start(), FakeEngine().start()
    port = int(second.url.rpartition(":")[2])
    second.stop()

    async def work(fleet: Fleet) -> set[str]:
        async def ask(served: Engine, template: Template) -> str:
            await served.render(asking("x"), opens=True)
            return served.url

        assert {await fleet.ask(f"r{i}", ask) for i in range(8)} == {first.url}
        back = FakeEngine().start(port)
        try:
            seen = set[str]()
            while len(seen) < 2:
                seen |= {await fleet.ask(f"r{i}", ask) for i in range(8)}
                await asyncio.sleep(0.2)
            assert await fleet.ask("one", ask) == await fleet.ask("one", ask)
            return seen
        finally:
            await asyncio.to_thread(back.stop)

    try:
        assert in_fleet([first.url, second.url], work) == {first.url, second.url}
    finally:
        first.stop()


def test_a_server_without_the_endpoints_is_refused_with_what_to_start_it_with() -> None:
    engine = FakeEngine(speaks="0.33.0", status=404).start()
    try:
        with pytest.raises(ConfigError, match="--enable-scale-out") as caught:
            in_fleet([engine.url], lambda fleet: fleet.ask("r", None))  # type: ignore[arg-type]
        assert caught.value.setting == "gateway.engines"
    finally:
        engine.stop()


# -- templates that refuse -------------------------------------------------------------------------------------------
def roles(body: Any) -> list[str]:
    return [message["role"] for message in body["messages"]]


def odd_ids(body: Any) -> bool:
    calls = [call["id"] for message in body["messages"] for call in message.get("tool_calls") or ()]
    return any(len(call) != 9 or not call.isalnum() for call in calls)


REFUSALS: dict[str, Callable[[Any], bool]] = {
    "system messages": lambda body: "system" in roles(body),
    "tools": lambda body: bool(body.get("tools")),
    "calls": lambda body: any(message.get("tool_calls") for message in body["messages"]),
    "results of tools": lambda body: "tool" in roles(body),
    "ids that have not nine characters": odd_ids,
    "system messages and tools": lambda body: "system" in roles(body) or bool(body.get("tools")),
}


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("refused", REFUSALS)
def test_a_template_that_refuses_a_kind_of_conversation_takes_the_others(refused: str, status: int) -> None:
    engine = FakeEngine(refuses=lambda body: status if REFUSALS[refused](body) else 0).start()
    plain, with_tools = asking("say hello"), asking("say hello", tools=TOOLS)

    async def work(fleet: Fleet) -> tuple[bool, bool]:
        async def ask(served: Engine, template: Template) -> tuple[bool, bool]:
            await served.render(plain, opens=True)
            return template.goes_on(plain), template.goes_on(with_tools)

        return await fleet.ask("r", ask)

    try:
        takes_tools = refused in ("system messages", "ids that have not nine characters")
        assert in_fleet([engine.url], work) == (True, takes_tools)
    finally:
        engine.stop()


@pytest.mark.parametrize("status", [400, 500])
def test_a_template_that_refuses_what_it_is_tried_with_answers_agents_all_the_same(status: int) -> None:
    engine = FakeEngine(refuses=lambda body: status if "birch" in str(body) else 0).start()

    async def work(fleet: Fleet) -> Any:
        async def ask(served: Engine, template: Template) -> Any:
            await served.render(asking("say hello"), opens=True)
            return template

        return await fleet.ask("r", ask)

    try:
        template = in_fleet([engine.url], work)
        assert not template.is_append_only
        assert "refuses" in template.why
    finally:
        engine.stop()


# -- engines that are started anew -----------------------------------------------------------------------------------
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "other"},
    "context": {"context": 333},
    "template": {"refuses": lambda body: 400 if len(body["messages"]) > 1 else 0},
    "version": {"speaks": "0.32.0"},
}


@pytest.mark.parametrize("is_seen", [True, False], ids=["away-between", "unseen"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_engine_that_was_started_anew_is_asked_as_what_it_is_now(
    change: str, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LOOK_SECONDS", 0.0)
    engine = FakeEngine().start()

    async def work(fleet: Fleet) -> None:
        async def ask(served: Engine, template: Template) -> tuple[str, int, bool]:
            rendering = await served.render(asking("say hello"), opens=True)
            sound(await served.generate(asking("say hello"), rendering, rendering.tokens, SAMPLING), served.url)
            return served.model, served.context, template.is_append_only

        assert await fleet.ask("r", ask) == ("tiny", 8192, True)
        if is_seen:
            engine.is_gone = True
            asyncio.get_running_loop().call_later(0.5, setattr, engine, "is_gone", False)
        for name, value in CHANGES[change].items():
            setattr(engine, name, value)
        expected = {"model": ("other", 8192, True), "context": ("tiny", 333, True), "template": ("tiny", 8192, False)}
        assert await fleet.ask("r", ask) == expected.get(change, ("tiny", 8192, True))
        assert fleet.troubles == []

    try:
        in_fleet([engine.url], work)
    finally:
        engine.stop()


@pytest.mark.parametrize("speaks", ["0.33.0", SGLANG])
@pytest.mark.parametrize("odd", [{"context": "much"}, {"context": 10**400}, {"context": [1]}])
def test_a_server_that_answers_as_no_engine_does_is_in_trouble_and_no_defect(speaks: str, odd: dict[str, Any]) -> None:
    engine = FakeEngine(speaks=speaks).start()
    before = {name: getattr(engine, name) for name in odd}
    for name, value in odd.items():
        setattr(engine, name, value)

    async def work(fleet: Fleet) -> str:
        async def ask(served: Engine, template: Template) -> str:
            await served.render(asking("say hello"), opens=True)
            return served.model

        for name, value in before.items():
            asyncio.get_running_loop().call_later(0.5, setattr, engine, name, value)
        return await fleet.ask("r", ask)

    try:
        assert in_fleet([engine.url], work)
    finally:
        engine.stop()


@pytest.mark.parametrize("speaks", ["0.33.0", SGLANG])
def test_a_proxy_before_an_engine_that_is_not_there_yet_is_no_engine(speaks: str) -> None:
    engine = FakeEngine(speaks=speaks, is_gone=True).start()

    async def work(fleet: Fleet) -> str:
        async def ask(served: Engine, template: Template) -> str:
            await served.render(asking("say hello"), opens=True)
            return served.model

        asyncio.get_running_loop().call_later(0.5, setattr, engine, "is_gone", False)
        return await fleet.ask("r", ask)

    try:
        assert in_fleet([engine.url], work) == "tiny"
    finally:
        engine.stop()


@pytest.mark.parametrize("status", [401, 403, 429, 500, 502, 503])
def test_what_an_engine_quotes_of_one_agent_reaches_no_other(status: int) -> None:
    engine = FakeEngine(complaint="error: words of one agent: and more").start()

    async def work(fleet: Fleet) -> tuple[str, list[str]]:
        async def ask(served: Engine, template: Template) -> Any:
            rendering = await served.render(asking("say hello"), opens=True)
            return await served.generate(asking("say hello"), rendering, rendering.tokens, SAMPLING)

        engine.status = status
        with pytest.raises(Refused) as caught:
            await fleet.ask("r", ask)
        return caught.value.message, fleet.troubles

    try:
        told, troubles = in_fleet([engine.url], work, patience=1.0)
        assert str(status) in told
        assert str(status) in troubles[0]
        assert "words of one agent" not in f"{told} {troubles}"
    finally:
        engine.stop()


# -- logprobs --------------------------------------------------------------------------------------------------------
HEEDING = {"raw": (), "processed": ("temperature", "top_p"), "whole": ("temperature",)}


@pytest.mark.parametrize("speaks", ["0.33.0", "0.32.0", SGLANG])
@pytest.mark.parametrize(
    ("temperature", "top_p", "right"),
    [
        (1.0, 1.0, {"raw", "processed", "whole"}),
        (0.7, 1.0, {"processed", "whole"}),
        (1.3, 1.0, {"processed", "whole"}),
        (1.0, 0.95, {"raw", "whole"}),
        (0.7, 0.95, {"whole"}),
    ],
)
def test_an_engine_whose_logprobs_are_not_the_trainers_is_refused(
    speaks: str, temperature: float, top_p: float, right: set[str]
) -> None:
    async def started(engine: FakeEngine) -> bool:
        fleet = Fleet([engine.url], timeout_seconds=20.0, temperature=temperature, top_p=top_p)
        try:
            await fleet.start()
        except ConfigError:
            return False
        finally:
            await fleet.close()
        return True

    engine = FakeEngine(speaks=speaks).start()
    try:
        for mode, heeds in HEEDING.items():
            engine.heeds = heeds
            assert asyncio.run(started(engine)) == (mode in right), mode
    finally:
        engine.stop()


# -- what was left ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("speaks", ["0.33.0", "0.32.0", SGLANG])
@pytest.mark.parametrize(
    ("tells", "heeds", "right"),
    [(True, ("temperature", "top_k"), True), (False, ("temperature", "top_k"), False), (True, ("temperature",), False)],
)
def test_under_top_k_an_engine_must_tell_what_it_left_and_give_logprobs_of_it(
    speaks: str, tells: bool, heeds: tuple[str, ...], right: bool
) -> None:
    """SGLang's logprobs of its sampling always are."""
    engine = FakeEngine(speaks=speaks, tells=tells, heeds=heeds).start()

    async def answer() -> Answer:
        fleet = Fleet([engine.url], timeout_seconds=20.0, temperature=0.7, top_p=0.9, top_k=3)

        async def work(served: Engine, _: Template) -> Answer:
            asked = asking("say hello")
            rendering = await served.render(asked, opens=True)
            few = replace(SAMPLING, top_k=3, top_p=0.9, min_p=0.05)
            return sound(await served.generate(asked, rendering, rendering.tokens, few), served.url)

        try:
            await fleet.start()
            return await fleet.ask("r", work)
        finally:
            await fleet.close()

    try:
        if not (right or (speaks == SGLANG and tells)):
            with pytest.raises(ConfigError, match=r"which tokens top_k|of the tokens that were left"):
                asyncio.run(answer())
            return
        found = asyncio.run(answer()).completion
        (sample,) = engine.samples
        asked_for = {name: sample.parameters[name] for name in ("top_k", "top_p", "min_p")}
        assert asked_for == {"top_k": 3, "top_p": 0.9, "min_p": 0.05}
        assert np.array_equal(found.logprobs, np.asarray(sample.logprobs, np.float32))
        assert found.support is not None
        rows = FakeEngine.left(sample.tokens, 3)
        assert found.support.tolist() == [row if len(row) == 3 else [-2, -1, -1] for row in rows]
    finally:
        engine.stop()


def test_a_server_that_tells_what_it_left_is_not_asked_for_all() -> None:
    engine = FakeEngine(tells=True).start()
    try:
        with pytest.raises(ConfigError, match="requires top_k > 0"):
            in_fleet([engine.url], lambda fleet: fleet.ask("r", None))  # type: ignore[arg-type]
    finally:
        engine.stop()
