"""How often a call asks the engine and the server, and what it reads of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from chat_templates import decoded
from gateway_stage import Stage

from rlbuffer.gateway import answering
from rlbuffer.store.gateway import GatewayStore


def test_a_call_asks_as_often_and_reads_its_own_conversation_alone_however_much_was_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stage.first.buffer.store.role(GatewayStore)
    asked, read = Counter[str](), list[int]()

    def counted(name: str) -> Any:
        done = getattr(store, name)

        def count(*args: Any, **more: Any) -> Any:
            found = done(*args, **more)
            if name == "read_calls":
                read.extend(call.number for call in found)
            asked[name] += 1
            return found

        return count

    for name in ("look_up", "read_calls", "record", "heard"):
        monkeypatch.setattr(store, name, counted(name))
    agent = stage.agent()
    helper = type(agent)(stage, agent.opened)
    for turn in range(6):
        helper.ask(f"say {turn} of a helper")
        stage.wait_for(lambda so_many=2 * turn + 1: asked["heard"] == so_many)
        before, samples = asked.copy(), len(stage.engine.samples)
        read.clear()
        stage.engine.asked.clear()
        agent.ask(f"say {turn}")
        stage.wait_for(lambda so_many=2 * turn + 2: asked["heard"] == so_many)
        reads = min(turn, 2)  # the call that it goes on from, and those before that one
        assert asked - before == Counter(look_up=1, read_calls=reads, record=1, heard=1) + Counter()
        assert sorted(read) == [2 * earlier + 2 for earlier in range(turn)]
        assert len(stage.engine.samples) == samples + 1
        messages = sorted(len(body["messages"]) for body in stage.engine.asked)
        assert messages == ([2, 3] if turn else [1]), "what was said before is rendered no second time"
        assert "helper" not in decoded(stage.engine.samples[-1].prompt)


def test_the_digests_of_a_conversation_are_made_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    beginnings = answering.beginnings

    def counted(request: Any) -> list[str]:
        made.append(len(request.messages))
        return beginnings(request)

    monkeypatch.setattr(answering, "beginnings", counted)
    heard = list[str]()
    store = stage.first.buffer.store.role(GatewayStore)
    monkeypatch.setattr(store, "heard", lambda *args, **more: heard.append(args[0]))
    agent = stage.agent()
    agent.ask("say one")
    agent.ask("say two")
    stage.wait_for(lambda: len(heard) == 2)
    assert made == [1, 3]
