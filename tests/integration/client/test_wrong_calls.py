"""Calls of the public API that cannot be meant: each is refused in one sentence of ours, with the value, by an error
that ``except RlbufferError`` catches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_families import LLAMA, made

import rlbuffer
from rlbuffer import Failure, Group, PolicyVersion, RlbufferError, Rollout, Ticket, TokenSequence, Turn, VersionSpan
from rlbuffer.client import Stream
from rlbuffer.packing import pack
from rlbuffer.testing import make_group

TICKET = Ticket(env="math", number=0, group_id="math.0")
ROLLOUTS = make_group(rollout_ids=["", ""]).rollouts
GROUP = make_group(env="math")
COMPLETION: dict[str, Any] = {
    "prompt_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.1], "reward": 1.0, "policy_version": 0
}  # fmt: skip
SEQUENCE: dict[str, Any] = {
    "tokens": [1, 2], "loss_mask": [False, True], "logprobs": [0.0, -0.5], "version_spans": [(0, 1, 2)]
}  # fmt: skip
FIELDS: dict[str, Any] = {"env": "math", "prompt_id": "p", "rollouts": ROLLOUTS, "planned_size": 2}


def completed(**changes: Any) -> Rollout:
    return Rollout.from_completion(**COMPLETION | changes)


def sequence(**changes: Any) -> TokenSequence:
    return TokenSequence(**SEQUENCE | changes)


def grouped(group_id: Any = "math.0", **changes: Any) -> Group:
    return Group(group_id, **FIELDS | changes)


def packed() -> rlbuffer.MicroBatch:
    return pack(GROUP.rollouts, [0.5, -0.5, 0.5, -0.5], row_tokens=256)


def of_another_run(c: Any) -> None:
    """A state of another run under the same server: the run does not have its step."""
    c.buffer.reader().load_state_dict({"step": 4, "epoch": 3, "digest": "abc", "steps": []})
    reader = c.buffer.reader()
    reader.load_state_dict({"step": 4, "epoch": 3, "digest": "abc", "steps": []})
    reader.start()


Call = Callable[[Any], object]
CALLS: dict[str, tuple[Call, str]] = {
    # -- connect
    "connect: a number": (lambda c: rlbuffer.connect(6379), "6379"),  # type: ignore[arg-type]
    "connect: another scheme": (lambda c: rlbuffer.connect("http://host:6379"), "http://host:6379"),
    "connect: no port": (lambda c: rlbuffer.connect("redis://host:port"), "redis://host:"),
    "connect: a run of blanks": (lambda c: rlbuffer.connect("memory://", run="my run"), "my run"),
    "connect: run is a number": (lambda c: rlbuffer.connect("memory://", run=7), "7"),  # type: ignore[arg-type]
    "connect: run is None": (lambda c: rlbuffer.connect("memory://", run=None), "None"),  # type: ignore[arg-type]
    "connect: config is a list": (lambda c: rlbuffer.connect("memory://", config=[1, 2]), "[1, 2]"),  # type: ignore[arg-type]
    "connect: config is no file": (lambda c: rlbuffer.connect("memory://", config="nowhere.toml"), "nowhere.toml"),
    "connect: unknown setting": (lambda c: rlbuffer.connect("memory://", config={"batcher": {"ages": 1}}), "ages"),
    "connect: name is a number": (lambda c: rlbuffer.connect("memory://", name=3), "3"),  # type: ignore[arg-type]
    # -- Buffer
    "writer: no name": (lambda c: c.buffer.writer(""), "''"),
    "writer: None": (lambda c: c.buffer.writer(None), "None"),
    "writer: a blank": (lambda c: c.buffer.writer("worker 0"), "worker 0"),
    "writer: an incarnation": (lambda c: c.buffer.writer("w", incarnation="a b"), "a b"),
    "writer: patience is text": (lambda c: c.buffer.writer("w", patience_seconds="5"), "'5'"),
    "writer: patience is NaN": (lambda c: c.buffer.writer("w", patience_seconds=math.nan), "nan"),
    "writer: on_retry": (lambda c: c.buffer.writer("w", on_retry=3), "3"),
    "writer: ticket_seconds is 0": (lambda c: c.buffer.writer("w", ticket_seconds=0), "0"),
    "writer: ticket_seconds is text": (lambda c: c.buffer.writer("w", ticket_seconds="60"), "'60'"),
    "writer: section": (lambda c: c.buffer.writer("w", section=4), "4"),
    "reader: rank beyond": (lambda c: c.buffer.reader(2, 2), "2"),
    "reader: rank is text": (lambda c: c.buffer.reader("0", 2), "'0'"),
    "reader: world size 0": (lambda c: c.buffer.reader(0, 0), "0"),
    "reader: NaN seconds": (lambda c: c.buffer.reader(timeout_seconds=math.nan), "nan"),
    "reader: columns": (lambda c: c.buffer.reader(columns="ref_logprobs"), "ref_logprobs"),
    "reader: vocabulary": (lambda c: c.buffer.reader(vocabulary="large"), "large"),
    "groups: where is a number": (lambda c: c.buffer.groups(3), "3"),
    "groups: where is no filter": (lambda c: c.buffer.groups("colour:red"), "colour"),
    "groups: limit is text": (lambda c: c.buffer.groups("", "ten"), "ten"),
    "groups: limit is negative": (lambda c: c.buffer.groups("", -1), "-1"),
    "group: None": (lambda c: c.buffer.group(None), "None"),
    "group: unknown": (lambda c: c.buffer.group("math.99"), "math.99"),
    "step: unknown": (lambda c: c.buffer.step(99), "99"),
    "step: text": (lambda c: c.buffer.step("one"), "one"),
    "step: 0": (lambda c: c.buffer.step(0), "0"),
    # -- Policy
    "announce: negative": (lambda c: c.announce(-1), "-1"),
    "announce: text": (lambda c: c.announce("one"), "one"),
    "announce: location": (lambda c: c.announce(1, location=7), "7"),
    "announce: size": (lambda c: c.announce(1, size=-1), "-1"),
    "announce: adapter": (lambda c: c.announce(1, adapter=3), "3"),
    "current: adapter": (lambda c: c.buffer.policy.current(3), "3"),
    "wait: text": (lambda c: c.buffer.policy.wait("one", timeout_seconds=0), "one"),
    "wait: seconds": (lambda c: c.buffer.policy.wait(1, timeout_seconds="1"), "'1'"),
    "wait: too long": (lambda c: c.buffer.policy.wait(1, timeout_seconds=0), "1"),
    "publish: no model": (lambda c: c.publish(None, 1), "NoneType"),
    "publish: version": (lambda c: c.publish(SimpleNamespace(), "one"), "one"),
    "publish: folder": (lambda c: c.publish(SimpleNamespace(), 1, 3), "3"),
    "publish: keep": (lambda c: c.publish(SimpleNamespace(), 1, keep=-1), "-1"),
    "publish: no reader": (lambda c: rlbuffer.connect("memory://").policy.publish(made(LLAMA), 1), "buffer.reader("),
    # -- Writer
    "take: env": (lambda c: c.writer.take(None), "None"),
    "take: env of blanks": (lambda c: c.writer.take("a b"), "a b"),
    "take: n is text": (lambda c: c.writer.take("a", "two"), "two"),
    "take: n is 0": (lambda c: c.writer.take("a", 0), "0"),
    "take: n is a float": (lambda c: c.writer.take("a", 1.5), "1.5"),
    "take: seconds": (lambda c: c.writer.take("a", timeout_seconds="1"), "'1'"),
    "take: NaN seconds": (lambda c: c.writer.take("a", timeout_seconds=math.nan), "nan"),
    "take: size is text": (lambda c: c.writer.take("a", size="all"), "all"),
    "take: size is negative": (lambda c: c.writer.take("a", size=-1), "-1"),
    "tickets: env": (lambda c: next(c.writer.tickets("a b")), "a b"),
    "renew: None": (lambda c: c.writer.renew(None), "None"),
    "renew: one ticket": (lambda c: c.writer.renew(TICKET), "Ticket"),
    "release: text": (lambda c: c.writer.release(["math.0"]), "math.0"),
    "skip: a number": (lambda c: c.writer.skip([3]), "3"),
    "push: None": (lambda c: c.writer.push(None), "None"),
    "push: text": (lambda c: c.writer.push("math.0", ROLLOUTS), "math.0"),
    "push: a rollout": (lambda c: c.writer.push(ROLLOUTS[0]), "Rollout"),
    "push: no rollouts": (lambda c: c.writer.push(TICKET), "math.0"),
    "push: an empty list": (lambda c: c.writer.push(TICKET, []), "rollouts"),
    "push: one rollout": (lambda c: c.writer.push(TICKET, ROLLOUTS[0]), "Rollout"),
    "push: texts": (lambda c: c.writer.push(TICKET, ["an answer"]), "an answer"),
    "push: unknown field": (lambda c: c.writer.push(TICKET, ROLLOUTS, answers=4), "answers"),
    "push: too many": (lambda c: c.writer.push(TICKET, ROLLOUTS, planned_size=1), "1"),
    "push: a group and rollouts": (lambda c: c.writer.push(GROUP, ROLLOUTS), "Group"),
    "push: sequence": (lambda c: c.writer.push(GROUP, sequence=0), "0"),
    "push: sequence is text": (lambda c: c.writer.push(GROUP, sequence="first"), "first"),
    "push_many: None": (lambda c: c.writer.push_many(None), "None"),
    "push_many: a group": (lambda c: c.writer.push_many(GROUP), "Group"),
    "push_many: a ticket": (lambda c: c.writer.push_many([TICKET]), "Ticket"),
    "done: env": (lambda c: c.writer.done(3), "3"),
    # -- Reader
    "steps: text": (lambda c: next(c.reader.steps("one")), "one"),
    "steps: 0": (lambda c: next(c.reader.steps(0)), "0"),
    "steps: last": (lambda c: next(c.reader.steps(last="ten")), "ten"),
    "steps: until": (lambda c: next(c.reader.steps(until=3)), "3"),
    "pull: text": (lambda c: c.reader.pull("one"), "one"),
    "pull: None": (lambda c: c.reader.pull(None), "None"),
    "start: text": (lambda c: c.buffer.reader().start("one"), "one"),
    "start: ahead": (lambda c: c.buffer.reader().start(9), "9"),
    "trained: None": (lambda c: c.reader.trained(None), "None"),
    "trained: text": (lambda c: c.reader.trained("one"), "one"),
    "trained: unknown": (lambda c: c.reader.trained(99), "99"),
    "checkpointed: None": (lambda c: c.reader.checkpointed(None), "None"),
    "checkpointed: negative": (lambda c: c.reader.checkpointed(-1), "-1"),
    "checkpointed: oldest": (lambda c: c.reader.checkpointed(0, oldest_kept="one"), "one"),
    "announce: no version": (lambda c: c.reader.announce(3), "3"),
    "postpones: a number": (lambda c: c.reader.postpones(3), "3"),
    "still_there: a number": (lambda c: c.reader.still_there(3), "3"),
    "add_record: text": (lambda c: c.reader.add_record("loss"), "loss"),
    "add_record: a value": (lambda c: c.reader.add_record({"step": 1, "model": object()}), "object"),
    "load_state_dict: empty": (lambda c: c.buffer.reader().load_state_dict({}), "'step'"),
    "load_state_dict: None": (lambda c: c.buffer.reader().load_state_dict(None), "None"),
    "load_state_dict: a step": (lambda c: c.load(step="x"), "'x'"),
    "load_state_dict: steps": (lambda c: c.load(steps=[3]), "3"),
    "load_state_dict: begun": (lambda c: c.reader.load_state_dict(c.reader.state_dict()), "load_state_dict"),
    "load_state_dict: another run's": (of_another_run, "4"),
    # -- Stream
    "stream: vocabulary": (lambda c: c.streamed.stream(vocabulary="large"), "large"),
    "stream: columns": (lambda c: c.streamed.stream(columns="ref_logprobs"), "ref_logprobs"),
    "stream: seconds": (lambda c: c.streamed.stream(timeout_seconds="1"), "'1'"),
    "stream trained: None": (lambda c: c.stream.trained(None), "None"),
    "stream trained: text": (lambda c: c.stream.trained("one"), "one"),
    "stream trained: not taken": (lambda c: c.stream.trained(99), "99"),
    "stream trained: part": (lambda c: c.stream.trained(0, part="half"), "half"),
    "stream trained: unused is None": (lambda c: c.stream.trained(0, unused=None), "None"),
    "stream trained: unused is one id": (lambda c: c.stream.trained(0, unused="math.0/1"), "math.0/1"),
    "stream trained: unused are numbers": (lambda c: c.stream.trained(0, unused=[3]), "3"),
    "stream trained: unused is unknown": (lambda c: c.stream.trained(0, unused=["math.0/1"]), "math.0/1"),
    "stream version: None": (lambda c: c.stream.version(None), "None"),
    "stream version: long": (lambda c: c.stream.version("v" * 65), "v" * 20),
    "stream checkpointed: text": (lambda c: c.stream.checkpointed("one"), "one"),
    "stream checkpointed: oldest": (lambda c: c.stream.checkpointed(0, oldest_kept="one"), "one"),
    "stream resume: text": (lambda c: c.streamed.stream().resume("state"), "state"),
    "stream resume: empty": (lambda c: c.streamed.stream().resume({}), "'part'"),
    "stream resume: part": (lambda c: c.resume(part="half"), "half"),
    "stream resume: unused is None": (lambda c: c.resume(unused=None), "None"),
    "stream resume: unused is one id": (lambda c: c.resume(unused="math.0/1"), "math.0/1"),
    "stream resume: version": (lambda c: c.resume(version="one"), "one"),
    "stream resume: reader": (lambda c: c.resume(reader=None), "None"),
    "stream resume: again": (lambda c: c.stream.resume(), "resumed already"),
    # -- closed
    "closed buffer: ledger": (lambda c: c.closed.ledger(), "closed"),
    "closed buffer: writer": (lambda c: c.closed.writer("w"), "closed"),
    "closed buffer: policy": (lambda c: c.closed.policy.version, "closed"),
    "closed reader: steps": (lambda c: next(c.ended.steps()), "closed"),
    "closed reader: pull": (lambda c: c.ended.pull(1), "closed"),
    # -- records
    "from_completion: text": (lambda c: completed(prompt_ids="What is 3 + 4?"), "tokenize"),
    "from_completion: texts": (lambda c: completed(token_ids=["the", "end"]), "tokenize"),
    "from_completion: None": (lambda c: completed(prompt_ids=None), "None"),
    "from_completion: floats": (lambda c: completed(token_ids=[0.5, 1.5]), "0.5"),
    "from_completion: logprobs None": (lambda c: completed(logprobs=None), "None"),
    "from_completion: one is None": (lambda c: completed(logprobs=[-0.5, None]), "None"),
    "from_completion: too few": (lambda c: completed(logprobs=[-0.5]), "[1]"),
    "from_completion: NaN": (lambda c: completed(logprobs=[-0.5, math.nan]), "position"),
    "from_completion: above 0": (lambda c: completed(logprobs=[-0.5, 2.0]), "2"),
    "from_completion: negative id": (lambda c: completed(token_ids=[3, -4]), "-4"),
    "from_completion: reward is text": (lambda c: completed(reward="good"), "good"),
    "from_completion: reward is NaN": (lambda c: completed(reward=math.nan), "nan"),
    "from_completion: version": (lambda c: completed(policy_version=-1), "-1"),
    "from_completion: version None": (lambda c: completed(policy_version=None), "None"),
    "from_completion: unknown": (lambda c: completed(rewards_by_name={}), "rewards_by_name"),
    "from_completion: columns": (lambda c: completed(columns={"x": [1.0]}), "[1]"),
    "from_turns: None": (lambda c: Rollout.from_turns(None, reward=1.0, policy_version=0), "None"),
    "from_turns: texts": (lambda c: Rollout.from_turns(["hi"], reward=1.0, policy_version=0), "hi"),
    "from_turns: no tokens": (lambda c: Rollout.from_turns([{"role": "user"}], reward=1.0, policy_version=0), "tokens"),
    "from_sequences: None": (lambda c: Rollout.from_sequences(None, reward=1.0), "None"),
    "from_sequences: unknown": (lambda c: Rollout.from_sequences([sequence()], reward=1.0, rewrd=2), "rewrd"),
    "from_sequences: numbers": (lambda c: Rollout.from_sequences([3], reward=1.0), "3"),
    "rollout: failure": (lambda c: completed(failure="it broke"), "it broke"),
    "rollout: kind of a failure": (lambda c: completed(failure=Failure("a b")), "a b"),
    "rollout: metadata": (lambda c: completed(metadata=[1]), "[1]"),
    "sequence: mask": (lambda c: sequence(loss_mask=[0, 7]), "7"),
    "sequence: shape": (lambda c: sequence(tokens=np.ones((2, 2), int)), "[2, 2]"),
    "sequence: spans": (lambda c: sequence(version_spans=[VersionSpan(0, 0, 9)]), "9"),
    "sequence: turns": (lambda c: sequence(turns=[Turn("user", 1, 0)]), "[1, 0)"),
    "group: id": (lambda c: grouped("a b"), "a b"),
    "group: env": (lambda c: grouped(env=None), "None"),
    "group: rollouts": (lambda c: grouped(rollouts="abc"), "abc"),
    "group: size": (lambda c: grouped(planned_size=0), "0"),
    "group: answer": (lambda c: grouped(answer=object()), "object"),
    "ticket: env": (lambda c: replace(TICKET, env="a b"), "a b"),
    "ticket: number": (lambda c: replace(TICKET, number=-1), "-1"),
    "ticket: group": (lambda c: replace(TICKET, group_id=None), "None"),
    "policy version": (lambda c: PolicyVersion(version=1.5), "1.5"),  # type: ignore[arg-type]
    "unpack: None": (lambda c: packed().unpack(None), "None"),
    "unpack: too few": (lambda c: packed().unpack([1, 2]), "2"),
    "padded: rows": (lambda c: packed().padded(rows="two"), "two"),
    "padded: multiple": (lambda c: packed().padded(pad_to_multiple_of=0), "0"),
    "to: a device": (lambda c: packed().to("gpu"), "gpu"),
    "backward: a float": (lambda c: packed().backward(0.5), "0.5"),  # type: ignore[arg-type]
    "batcher config: text": (lambda c: rlbuffer.BatcherConfig("many"), "many"),  # type: ignore[arg-type]
    "batcher config: NaN": (lambda c: rlbuffer.BatcherConfig(64, max_age_seconds=math.nan), "nan"),
    "batcher config: budgets": (lambda c: rlbuffer.BatcherConfig(64, budgets={"a": -1.0}), "-1"),
    "batcher config: order": (lambda c: rlbuffer.BatcherConfig(64, order="shuffled"), "shuffled"),
}


class Opened:
    """What the calls are made on."""

    def __init__(self) -> None:
        self.buffer = rlbuffer.connect("memory://", run="wrong")
        self.writer = self.buffer.writer("w")
        self.reader = self.buffer.reader(timeout_seconds=5.0)
        self.reader.start()
        self.streamed = rlbuffer.connect("memory://", run="streamed")
        self.stream = self.streamed.stream(timeout_seconds=5.0)
        self.stream.resume()
        self.ended = self.buffer.reader(1, 2, timeout_seconds=5.0)
        self.ended.start()
        self.ended.close()
        self.closed = rlbuffer.connect("memory://", run="closed")
        self.closed.close()

    def announce(self, version: Any, **changes: Any) -> None:
        self.buffer.policy.announce(version, **{"location": "", "size": 0, "checksum": ""} | changes)

    def publish(self, *arguments: Any, **options: Any) -> None:
        self.buffer.policy.publish(*arguments, **options)

    def resume(self, **changes: Any) -> None:
        self.streamed.stream().resume({**Stream.BEGINNING, **changes})

    def load(self, **changes: Any) -> None:
        self.buffer.reader().load_state_dict({"step": 1, "epoch": 1, "digest": "abc", "steps": []} | changes)


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    made.buffer.close()
    made.streamed.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_one_sentence_with_the_value(name: str, opened: Opened) -> None:
    call, value = CALLS[name]
    with pytest.raises(RlbufferError) as caught:
        call(opened)
    message = str(caught.value)
    assert value in message
    assert "\n" not in message or message.splitlines()[1].startswith("  Write ")  # the forms of an address
    assert not any(word in message for word in ("has no attribute", "object is not", "must be str", "NoneType object"))
