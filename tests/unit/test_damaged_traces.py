"""Every field of every format taken away and replaced: a result or one sentence, and never half of anything.

`RLBUFFER_TEST_MUTATIONS` is how many random mutations each reader gets beside that. From 2000 on, which takes minutes,
each field is replaced by each value, else by two that are drawn.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trace_records import LA, A, P, answered, atif, completed, gym, harbor, instruct, lightning_event, row, slime, trace

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.testing import make_group
from rlbuffer.traces import Traces, read
from rlbuffer.wire.jsonl import group_from_dict, line_of
from rlbuffer.wire.payload import encode_push

FIXTURES = Path(__file__).parent / "fixtures" / "traces"
MUTATIONS = int(os.environ.get("RLBUFFER_TEST_MUTATIONS", "30"))
IS_WHOLE = MUTATIONS >= 2000
GONE = object()
DEEPEST = 12
"""Steps to the deepest field that any format has."""
Way = tuple[str | int, ...]


def recorded(name: str, count: int) -> list[Any]:
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()[:count]]


def nested(make: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(1000):
        value = make(value)
    return value


VALUES: dict[str, Any] = {
    "gone": GONE,
    "null": None,
    "text": "x",
    "empty text": "",
    "half a surrogate": "\ud800",
    "zero": 0,
    "negative": -1,
    "fraction": 1.5,
    "huge": 10**30,
    "beyond float": 10**400,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "false": False,
    "empty list": [],
    "list": [0, "x"],
    "lists": [[1], [1, 2]],
    "empty object": {},
    "object": {"\ud800": 1, "a": None},
    "deep list": nested(lambda inner: [inner]),
    "deep object": nested(lambda inner: {"a": inner}),
}

# Each with two rollouts at least, so that what one mutation must not touch is there.
RECORDS: dict[str, list[Any]] = {
    "verifiers": recorded("verifiers", 3)[1:],
    "verifiers-traces": [one["traces"][0] | {"group_id": "g"} for one in recorded("verifiers", 2)],
    "openenv": [*recorded("openenv", 1), trace()],
    "harbor": [
        harbor(0, verifier_result={"rewards": {"tests": 1.0}}),
        harbor(1, exception_info={"exception_type": "E", "exception_message": "m"}),
    ],
    "atif": [atif(), atif() | {"session_id": "other"}],
    "nemo-gym-entries": recorded("nemo_gym", 5),
    "nemo-gym": [gym(0), gym(1) | {"mask_sample": True}],
    "agent-lightning-spans": [recorded("agent_lightning", 13)[i] for i in (1, 4, 5, 9, 12)],
    "agent-lightning-events": [
        answered(P, A, LA),
        lightning_event("reward", value=0.5),
        answered(P, A, LA) | {"rollout_id": "other"},
    ],
    "agent-lightning": [completed(), completed("other")],
    "slime": [
        slime(0, index=21),
        slime(0, index=22, reward={"exact": 1.0}),
        slime(0, index=23, rollout_id=3),
        slime(1, index=24, rollout_id=3, reward=1.0),
    ],
    "slime documents": [{"rollout_id": 1, "samples": [slime(0, index=21), slime(1, index=22)]}, slime(0, index=23)],
    "open-instruct": [instruct(0), instruct(1, request_info={"tool_calleds": True, "tool_outputs": "4"})],
    "prime-rl": [row(0, output_mask=[1, 0, 1], temperature=0.5), row(1)],
}
GROUPS = [json.loads(line_of(make_group(lengths=[8, 9])))]
GROUPS[0]["rollouts"][0] |= {
    "rewards": {"exact": 1.0},
    "successes": {"solved": True},
    "turns": [["user", 0, 1, 0.5, {"k": [1]}], {"role": "assistant", "start": 1, "end": 3}],
    "columns": {"entropy": [0.5] * 8, "experts": {"dtype": "<i4", "shape": [8, 1], "values": [1] * 8}},
    "attachments": {"image": [[[0, 255]]]},
    "metadata": {"difficulty": 3, "raw": {"base64": "AP8="}},
    "further": [{"tokens": [1, 7], "loss_mask": [False, True], "logprobs": [0, -1], "version_spans": [[0, 1, 2]]}],
}


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """To every value of a record; of the items of a list to the first and the last."""
    if way:
        yield way
    if len(way) == DEEPEST:
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from ways(item, (*way, name))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from ways(value[index], (*way, index))


def changed(record: Any, way: Way, value: Any) -> Any:
    """A copy of the record in which one value is another one, or gone."""
    if not way:
        return value
    copy = record.copy()
    inner = changed(copy[way[0]], way[1:], value)
    if inner is GONE:
        del copy[way[0]]
    else:
        copy[way[0]] = inner
    return copy


def reading(source: list[Any] | Path) -> Traces | str:
    """The result, or the one sentence."""
    try:
        found = read(source, policy_version=1, reward=0.5)
    except InvalidRollout as error:
        return str(error)
    for sentence in (found.summary, *found.damaged):
        checked(sentence)
    return found


def checked(sentence: str) -> None:
    assert sentence
    assert "\n" not in sentence
    assert len(sentence) < 700
    sentence.encode()


def made(traces: Traces | str) -> Counter[Any]:
    """Rollouts, however they are grouped."""
    if isinstance(traces, str):
        return Counter()
    rollouts = [rollout for group in traces for rollout in group.rollouts]
    return Counter(
        (one.reward, one.failure, *((s.tokens.tobytes(), s.loss_mask.tobytes()) for s in one.sequences))
        for one in rollouts
    )


def attempts(traces: Traces | str) -> int:
    return 0 if isinstance(traces, str) else made(traces).total() + len(traces.left_out)


def of_one_rollout(name: str, records: list[Any], index: int) -> set[int]:
    """The records that are of the same rollout as this one."""
    if name in ("nemo-gym-entries", "agent-lightning-spans", "agent-lightning-events"):
        return {i for i, one in enumerate(records) if one["rollout_id"] == records[index]["rollout_id"]}
    if name in ("slime", "slime documents"):
        keys = [_slime_keys(one) for one in records]
        return {i for i, one in enumerate(keys) if one & keys[index]}
    return {index}


def _slime_keys(record: Any) -> set[Any]:
    return {one.get("rollout_id", one["index"]) for one in record.get("samples", [record])}


def untouched(name: str, records: list[Any]) -> list[Traces | str]:
    """For each record what is read without it and without what is of its rollout."""
    out = list[Traces | str]()
    for index in range(len(records)):
        gone = of_one_rollout(name, records, index)
        rest = [one for i, one in enumerate(records) if i not in gone]
        out.append(reading(rest) if rest else "nothing is there")
    return out


def holds(records: list[Any], rest: Traces | str, *, may_vanish: bool) -> None:
    """What other records say is there as it was, and what became of this one's is said."""
    found = reading(records)
    if isinstance(found, str):
        checked(found)
        assert attempts(rest) == 0 or made(rest).total() == 0, found
        return
    assert made(rest) <= made(found)
    assert attempts(found) >= attempts(rest) + (not may_vanish)


@pytest.mark.parametrize("name", RECORDS)
def test_each_field_gone_or_of_another_kind_is_a_result_or_one_sentence(name: str) -> None:
    records = RECORDS[name]
    rests, rng = untouched(name, records), random.Random(44)
    assert attempts(reading(records)) > 1
    for index, record in enumerate(records):
        for way in ways(record):
            for kind, value in values(rng):
                may_vanish = way[-1] == "trainable" or "traces" in way[-2:] or "samples" in way[-2:]
                with told(f"record {index}, {'.'.join(map(str, way))}, {kind}"):
                    damaged = [*records[:index], changed(record, way, value), *records[index + 1 :]]
                    holds(damaged, rests[index], may_vanish=may_vanish)


def values(rng: random.Random) -> list[tuple[str, Any]]:
    """What takes the place of a field: nothing, and others of :data:`VALUES`."""
    others = list(VALUES.items())[1:]
    return [("gone", GONE), *(others if IS_WHOLE else rng.sample(others, 2))]


@contextmanager
def told(where: str) -> Iterator[None]:
    """Says what was changed where that makes an error."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from None


def mutated(record: Any, rng: random.Random) -> Any:
    """The record with up to four things wrong with it at once."""
    for _ in range(rng.randint(1, 4)):
        places = list(ways(record)) if isinstance(record, dict | list) else []
        if not places:
            return record
        way = rng.choice(places)
        value = at(record, way)
        kind = rng.random()
        if kind < 0.5:
            value = rng.choice(list(VALUES.values()))
        elif kind < 0.7:
            value = at(record, rng.choice(places))
        elif isinstance(value, list) and value:
            cut = rng.randint(0, len(value))
            value = rng.choice([value[:cut], value + value, value[::-1], [*value[:cut], None, *value[cut:]]])
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value = rng.choice([-value, value + 1, value * 1000, str(value)])
        else:
            value = GONE
        record = changed(record, way, value)
    return record


def at(record: Any, way: Way) -> Any:
    """The value there."""
    for step in way:
        record = record[step]
    return record


@pytest.mark.parametrize("name", RECORDS)
def test_random_mutations_are_results_or_sentences(name: str, tmp_path: Path) -> None:
    rng = random.Random(45)
    for number in range(MUTATIONS):
        records = list(RECORDS[name])
        for _ in range(rng.randint(1, 2)):
            index = rng.randrange(len(records))
            records[index] = mutated(records[index], rng)
        with told(f"mutation {number}"):
            found = reading(records)
            if isinstance(found, str):
                checked(found)
            if number % 10 == 0:
                of_file = reading_file(tmp_path / "x.jsonl", records)
                assert isinstance(of_file, Traces) == isinstance(found, Traces)
                assert made(of_file) == made(found)


def reading_file(path: Path, records: list[Any]) -> Traces | str:
    """The same by way of a file; what JSON cannot hold is a line that is no JSON."""
    lines = list[str]()
    for record in records:
        try:
            lines.append(json.dumps(record))
        except (ValueError, RecursionError):
            return reading(records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return reading(path)


@pytest.mark.parametrize("way", list(ways(GROUPS[0])), ids=lambda way: ".".join(map(str, way)))
def test_each_field_of_a_group_gone_or_of_another_kind_is_a_group_or_one_sentence(way: Way) -> None:
    for kind, value in VALUES.items():
        with told(kind):
            whole(changed(GROUPS[0], way, value))


def test_random_mutations_of_a_group_are_groups_or_sentences() -> None:
    rng = random.Random(45)
    for number in range(MUTATIONS):
        with told(f"mutation {number}"):
            whole(mutated(GROUPS[0], rng))


def whole(record: Any) -> None:
    """Is a group of all of its rollouts, which can be sent, or one sentence."""
    try:
        group = group_from_dict(record)
        encode_push(group)
    except (InvalidRollout, PayloadError) as error:
        checked(str(error))
    else:
        assert len(group.rollouts) == len(record["rollouts"])
