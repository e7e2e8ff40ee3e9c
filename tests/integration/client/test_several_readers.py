"""Several readers of one buffer, as a notebook makes them: what is announced or published fences none at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rlbuffer
from rlbuffer.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RUNS = count(1)


@pytest.fixture
def buffer() -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect("memory://", run=f"several-{next(RUNS)}") as made:
        yield made


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    made: PreTrainedModel = transformers.LlamaForCausalLM(config)
    return made


Say = Callable[[rlbuffer.Buffer, int], object]


@pytest.fixture(params=["announce", "publish"])
def say(request: pytest.FixtureRequest, tmp_path: Path) -> Say:
    if request.param == "announce":
        return lambda buffer, version: buffer.policy.announce(version, location="", size=0, checksum="")
    model = request.getfixturevalue("model")
    return lambda buffer, version: buffer.policy.publish(model, version, tmp_path)


def refused(buffer: rlbuffer.Buffer) -> None:
    with pytest.raises(CheckpointError):
        buffer.reader().load_state_dict({})


def closed(buffer: rlbuffer.Buffer) -> None:
    with buffer.reader(1, 2) as reader:
        reader.start()


def closed_before_it_began(buffer: rlbuffer.Buffer) -> None:
    buffer.reader().close()


def never_used(buffer: rlbuffer.Buffer) -> None:
    buffer.reader()


def begun(buffer: rlbuffer.Buffer) -> None:
    buffer.reader().start()


@pytest.mark.parametrize("before", [refused, closed, closed_before_it_began, never_used, begun])
def test_a_reader_of_before_fences_nobody(
    buffer: rlbuffer.Buffer, say: Say, before: Callable[[rlbuffer.Buffer], None]
) -> None:
    before(buffer)
    reader = buffer.reader()
    reader.start()
    assert say(buffer, 0)
    assert buffer.store.trainer().number == reader.attempt
    reader.checkpointed(0)  # AttemptFenced where another one has begun
    assert say(buffer, 1)
    assert buffer.policy.version == 1


@pytest.mark.parametrize("after", [refused, never_used, closed_before_it_began])
def test_a_reader_that_is_made_later_and_not_begun_fences_nobody(
    buffer: rlbuffer.Buffer, say: Say, after: Callable[[rlbuffer.Buffer], None]
) -> None:
    reader = buffer.reader()
    reader.start()
    after(buffer)
    assert say(buffer, 0)
    reader.checkpointed(0)
    assert buffer.store.trainer().number == reader.attempt


def test_the_last_of_readers_that_have_not_begun_begins(buffer: rlbuffer.Buffer, say: Say) -> None:
    _, last = buffer.reader(), buffer.reader()
    assert say(buffer, 0)
    assert buffer.store.trainer().number == last.attempt > 0
