"""NeMo Gym's model server beside a gateway: what it samples is recorded by its sink, and pushed as any open rollout.

Its package is not here: entries are records of its fields. tests/adapters has its own capture tests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from gateway_stage import Stage, engine_samples, trained_samples

from rlbuffer.errors import ConfigError, InvalidRollout, SamplerUnavailable
from rlbuffer.gateway import nemo_gym
from rlbuffer.gateway.nemo_gym import TokenSink
from rlbuffer.gateway.request import Refused
from rlbuffer.worker.samplers import endpoint


@dataclass
class Entry:
    """Gym's ``TokenEntry``."""

    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    model: str = "tiny"
    output_items: list[dict[str, Any]] = field(default_factory=list)
    created_at: float = 1.5

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return asdict(self)


class Server:
    """A model server of Gym's: it asks the engine behind token ids, and hands what it samples to its sink."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.file = stage, folder / "rlbuffer.toml"
        self.file.write_text(
            f'run = "{stage.run}"\nredis_url = "{stage.server}"\n[gateway]\nengines = ["{stage.engine_url}"]\n'
        )
        self.runner = asyncio.Runner()
        self.sink = self.another()

    def another(self) -> TokenSink:
        """The sink of one process more."""
        return TokenSink(config=str(self.file))

    def wait(self, work: Any) -> Any:
        return self.runner.run(work)

    def begin(self, rollout: str, call: str = "", *, sink: TokenSink | None = None) -> str:
        call = call or uuid.uuid4().hex
        self.wait((sink or self.sink).begin_call(rollout, call))
        return call

    def sampled(self, rollout: str, prompt: list[int], call: str) -> Entry:
        """What the engine says behind a prompt."""
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 6}}
        answer = httpx.post(f"{self.stage.engine_url}/inference/v1/generate", json=body, timeout=60).json()
        (choice,) = answer["choices"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        content = [{"type": "output_text", "text": "a tree"}]
        item = {"type": "message", "role": "assistant", "content": content}
        return Entry(rollout, call, prompt, choice["token_ids"], logprobs, output_items=[item])

    def call(self, rollout: str, prompt: list[int], *, sink: TokenSink | None = None) -> list[int]:
        """One call of an agent. -> all tokens that a next prompt may go on from."""
        entry = self.sampled(rollout, prompt, self.begin(rollout, sink=sink))
        self.wait((sink or self.sink).put(entry))
        return [*prompt, *entry.generation_token_ids]

    def close(self) -> None:
        self.wait(self.sink.close())
        self.runner.close()


@pytest.fixture
def stage(redis_url: str, run_name: str) -> Iterator[Stage]:
    made = Stage(redis_url, run_name, engine=FakeEngine())
    yield made
    made.close()


@pytest.fixture
def server(stage: Stage, tmp_path: Path) -> Iterator[Server]:
    made = Server(stage, tmp_path)
    yield made
    made.close()


def test_calls_of_a_model_server_are_one_rollout_with_exactly_what_was_seen_and_sampled(
    stage: Stage, server: Server
) -> None:
    opened = stage.begin()["open_rollouts"][0]
    rollout, other = opened["api_key"], server.another()
    first = server.call(rollout, [5, 6, 7])
    stage.engine.version = "3"
    second = server.call(rollout, [*first, 8, 9], sink=other)  # a second process of the model server
    server.call(rollout, [*second, 10])
    server.call(rollout, [*first, 11])  # a branch
    server.call(rollout, [1, 2])  # a helper
    server.wait(other.close())
    ended = httpx.post(opened["end_url"], json={"reward": 0.5}, timeout=60)
    assert ended.status_code == 200, ended.text
    (found,) = stage.rollouts()
    assert Counter(trained_samples(found)) == Counter(engine_samples(stage.engine))
    assert (found.reward, found.failure, len(found.sequences)) == (0.5, None, 3)
    spans = [span for sequence in found.sequences for span in sequence.version_spans]
    trained = sum(int(sequence.loss_mask.sum()) for sequence in found.sequences)
    assert sum(span.end - span.start for span in spans) == trained
    assert Counter(span.policy_version for span in spans) == {0: 1, 3: 4}
    assert stage.buffer.verify().ok


def test_an_agent_goes_on_at_the_gateway_in_the_rollout_that_a_model_server_records(
    stage: Stage, server: Server
) -> None:
    agent = stage.agent()
    agent.ask("say a tree")
    (sample,) = stage.engine.samples
    server.call(agent.opened["api_key"], [*sample.prompt, *sample.tokens, 4])
    agent.ask("say the answer")
    agent.end()
    (found,) = stage.rollouts()
    assert Counter(trained_samples(found)) == Counter(engine_samples(stage.engine))
    assert len(found.sequences) == 2


def test_a_call_counts_once_however_often_it_is_put_and_not_with_other_tokens(stage: Stage, server: Server) -> None:
    opened = stage.begin()["open_rollouts"][0]
    rollout = opened["api_key"]
    entry = server.sampled(rollout, [5, 6], server.begin(rollout, "c1"))
    for _ in range(2):
        server.wait(server.sink.put(entry))
    again = server.another()
    server.wait(again.put(entry))  # it has not begun there
    for name, value in (("generation_token_ids", entry.generation_token_ids[::-1]), ("output_items", [])):
        if getattr(entry, name) != value:
            odd = Entry(**{**asdict(entry), name: value})
            with pytest.raises(InvalidRollout, match="is another one"):
                server.wait(again.put(odd))
    server.wait(again.close())
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert trained_samples(found) == engine_samples(stage.engine)


def test_weights_that_change_while_a_call_is_sampled_count_as_the_older_ones(stage: Stage, server: Server) -> None:
    opened = stage.begin()["open_rollouts"][0]
    stage.engine.version = "4"
    entry = server.sampled(opened["api_key"], [5, 6], server.begin(opened["api_key"], "c1"))
    stage.engine.version = "5"
    server.wait(server.sink.put(entry))
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert [span.policy_version for span in found.version_spans] == [4]


def test_a_call_waits_for_a_load_and_begins_with_no_weights_of_another_name(
    stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = stage.begin()["open_rollouts"][0]["api_key"]
    stage.engine.version = "default"
    with pytest.raises(SamplerUnavailable, match="no policy version of this run"):
        server.begin(rollout)
    named = [[None], [None], [7]]

    async def answers() -> list[int | None]:
        return named.pop(0)

    monkeypatch.setattr(server.sink, "_named", answers)
    server.begin(rollout, "c1")
    assert (named, server.sink._begun[rollout, "c1"].version) == ([], 7)


def test_an_engine_that_is_too_busy_to_name_its_version_may_be_the_one_that_samples(
    stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = FakeEngine(version="5").start()
    try:
        server.file.write_text(server.file.read_text().replace(stage.engine_url, f'{stage.engine_url}", "{busy.url}'))
        stage.engine.version, busy.unanswered_looks = "9", 2
        monkeypatch.setattr(endpoint, "ENDPOINT_PROBE_SECONDS", 0.5)
        sink, rollout = server.another(), stage.begin()["open_rollouts"][0]["api_key"]
        server.begin(rollout, "c1", sink=sink)
        assert (busy.unanswered_looks, sink._begun[rollout, "c1"].version) == (0, 5)
        monkeypatch.setattr(nemo_gym, "PATIENCE_SECONDS", 0.0)
        busy.unanswered_looks = 9
        with pytest.raises(SamplerUnavailable, match="names no version for 0 s"):
            server.begin(rollout, "c2", sink=sink)
    finally:
        busy.stop()
    server.begin(rollout, "c3", sink=sink)  # what is gone samples nothing
    assert sink._begun[rollout, "c3"].version == 9
    server.wait(sink.close())


def test_a_call_that_another_process_recorded_meanwhile_is_read_by_the_next_look(
    stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = stage.begin()["open_rollouts"][0]
    rollout, other, theirs = opened["api_key"], server.another(), list[int]()
    entry = server.sampled(rollout, [5, 6, 7], server.begin(rollout))
    version_of = server.sink._version_of

    async def meanwhile(*given: Any) -> int:  # after this process has looked up the rollout, before it records its call
        if not theirs:
            call = uuid.uuid4().hex
            await other.begin_call(rollout, call)
            one = await asyncio.to_thread(server.sampled, rollout, [1, 2], call)
            await other.put(one)
            theirs.extend([1, 2, *one.generation_token_ids])
        return await version_of(*given)

    monkeypatch.setattr(server.sink, "_version_of", meanwhile)
    server.wait(server.sink.put(entry))
    server.call(rollout, [*theirs, 9])
    server.wait(other.close())
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert Counter(trained_samples(found)) == Counter(engine_samples(stage.engine))
    assert len(found.sequences) == 2  # the last call goes on from the other process's


def test_an_entry_that_nobody_began_needs_its_version(stage: Stage, server: Server) -> None:
    opened = stage.begin()["open_rollouts"][0]
    entry: Any = server.sampled(opened["api_key"], [5, 6], "c1")
    with pytest.raises(InvalidRollout, match="which policy version"):
        server.wait(server.sink.put(entry))
    entry.policy_version = 2  # a field more, as Gym's record may have
    server.wait(server.sink.put(entry))
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert [span.policy_version for span in found.version_spans] == [2]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids holds what is no token id"),
        ({"generation_token_ids": [2**31]}, "generation_token_ids holds what is no token id"),
        ({"generation_token_ids": [1.5]}, "generation_token_ids holds what is no token id"),
        ({"generation_log_probs": [0.5]}, "column logprobs"),
        ({"generation_log_probs": [float("nan")]}, "column logprobs"),
        ({"generation_log_probs": ["a"]}, "generation_log_probs holds what is no number"),
        ({"generation_log_probs": []}, "0 logprobs for 1 sampled tokens"),
    ],
)
def test_an_entry_that_cannot_be_trained_is_refused_and_its_rollout_fails(
    stage: Stage, server: Server, odd: dict[str, Any], words: str
) -> None:
    opened = stage.begin()["open_rollouts"][0]
    rollout = opened["api_key"]
    call = server.begin(rollout)
    whole = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5], **odd}
    with pytest.raises(InvalidRollout, match=words):
        server.wait(server.sink.put(Entry(rollout, call, **whole)))
    server.wait(server.sink.mark_incomplete(rollout, call))  # what Gym does then
    server.wait(server.sink.mark_incomplete(rollout, call))
    with pytest.raises(Refused, match="has ended"):
        server.begin(rollout)
    assert httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60).status_code == 409
    (found,) = stage.rollouts()
    assert found.failure is not None
    assert (found.failure.kind, found.reward) == (nemo_gym.INCOMPLETE, None)
    assert call in found.failure.message


def test_a_call_that_sampled_nothing_is_none(stage: Stage, server: Server) -> None:
    opened = stage.begin()["open_rollouts"][0]
    server.wait(server.sink.put(Entry(opened["api_key"], server.begin(opened["api_key"]), [1], [], [])))
    server.call(opened["api_key"], [5, 6])
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert trained_samples(found) == engine_samples(stage.engine)


def test_an_id_of_no_open_rollout_and_one_that_is_frozen_are_refused_before_they_are_sampled(
    stage: Stage, server: Server
) -> None:
    rollout = stage.begin()["open_rollouts"][0]["api_key"]
    other = f"{rollout[:-1]}{'B' if rollout[-1] == 'A' else 'A'}"
    for unknown in ("0-0", f"{rollout}-a1", other):
        with pytest.raises(Refused, match="no open rollout"):
            server.begin(unknown)
        with pytest.raises(Refused, match="no open rollout"):
            server.wait(server.sink.mark_incomplete(unknown, "c1"))
    entry = server.sampled(rollout, [5, 6], server.begin(rollout))
    server.sink._store.freeze(rollout)
    with pytest.raises(Refused, match="takes no calls any more"):
        server.begin(rollout)
    with pytest.raises(Refused, match="takes no calls any more"):
        server.wait(server.sink.put(entry))


def test_a_server_that_has_lost_a_call_takes_the_next_one(stage: Stage, server: Server) -> None:
    opened = stage.begin()["open_rollouts"][0]
    rollout, key = opened["api_key"], stage.buffer.store.keys.open_rollout(opened["name"])
    client = stage.buffer.store.connection.client
    before = client.hgetall(key)
    first = server.call(rollout, [5, 6, 7])
    client.delete(key)  # as a crash with the newest writes does
    client.hset(key, mapping=before)
    server.call(rollout, [*first, 8])
    httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
    (found,) = stage.rollouts()
    assert trained_samples(found) == engine_samples(stage.engine)[1:]


def test_a_sink_needs_the_engines_that_its_model_server_asks(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "rlbuffer.toml"
    file.write_text(f'run = "{stage.run}"\nredis_url = "{stage.server}"\n')
    with pytest.raises(ConfigError, match=r"gateway\.engines names no engine"):
        TokenSink(config=str(file))


def test_the_longest_beginning_is_gone_on_from_and_of_equal_ones_the_newest() -> None:
    def call(number: int, prompt: list[int], tokens: list[int], after: int = 0) -> nemo_gym.OpenCall:
        ids = (np.array(part, np.int32) for part in (prompt, tokens))
        return nemo_gym.OpenCall(
            **dict(zip(("prompt", "tokens"), ids, strict=True)),
            logprobs=np.zeros(len(tokens), np.float32),
            after=after,
            number=number,
        )

    known = nemo_gym._Known()
    for one in (call(1, [1], [2]), call(2, [3], [4], after=1), call(3, [1], [2]), call(4, [], [3], after=3)):
        known.add(one)

    def goes_on_from(*prompt: int) -> int:
        end = known.longest(np.array(prompt, np.int32))
        return 0 if end is None else end.number

    assert [goes_on_from(*p) for p in [(1, 2, 3, 4, 5), (1, 2, 9), (1, 2, 3, 9), (1, 2), (2, 1, 2), (1,)]] == [
        2,
        3,
        4,
        0,
        0,
        0,
    ]
