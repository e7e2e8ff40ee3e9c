"""The strangest value of every field: refused at the door, or pushed, committed, pulled and verified; nobody ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np
from daemon_runs import Served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_runs import Run

from rlbuffer.batcher.advantages import ESTIMATORS
from rlbuffer.client.reader import Reader
from rlbuffer.client.searching import list_groups
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig, EnvConfig
from rlbuffer.errors import InvalidRollout
from rlbuffer.packing.further_columns import column_spec
from rlbuffer.records.checks import MAX_NUMBER
from rlbuffer.records.columns import COLUMN_DTYPES
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout

pytest_plugins = ("store_fixtures",)
LENGTH = 4
NAN, INF = math.nan, math.inf

integers = st.sampled_from(
    [0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400]
) | st.sampled_from(
    [-1, -(2**31), -(2**63), -(2**63) - 1, True, 1.5, NAN, "1", None, np.int64(2**62), np.uint64(2**63)]
)
numbers = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-45, MAX_NUMBER, -MAX_NUMBER, math.nextafter(MAX_NUMBER, INF), 3.4e38, 1e39]),
    st.sampled_from([1.7e308, -1.7e308, NAN, INF, -INF, np.float16(6e4), np.float64(1e300), None, "1", b"1", True]),
    integers,
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " ", "\0", "\n", "*", "{rlb:x}", "a/b", "\x1b[31m", "\u202e", "\ud800", "\U0010ffff", b"b", 7]
    ),
    st.sampled_from([64, 65, 128, 129, 160, 161, 256, 257, 2**17]).map(lambda n: "x" * n),
)
plain = st.recursive(
    numbers | texts | st.binary(max_size=4) | st.just({1}) | st.just(np.zeros(2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts.filter(lambda t: t != 7), inner, max_size=2),
    max_leaves=4,
) | st.integers(28, 45).map(lambda depth: _nested(depth))
maps = st.dictionaries(texts, plain, max_size=3) | plain


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Per token, of any dtype, with the ends of what the dtype holds among its values."""
    dtype = draw(st.sampled_from([*sorted(COLUMN_DTYPES, key=str), np.dtype("<c8"), np.dtype("O"), np.dtype(">f8")]))
    if dtype.kind in "iu":
        ends = [np.iinfo(dtype).min, np.iinfo(dtype).max, 0]
    elif dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        ends = [-most, most, 0.0, min(MAX_NUMBER, most), min(2e12, most), NAN, INF]
    else:
        ends = [0, 1]
    shape = draw(st.sampled_from([(LENGTH,), (LENGTH,), (LENGTH, 2), (LENGTH, 0), (LENGTH + 1,), ()]))
    array = np.zeros(shape, dtype)
    if array.size:
        array.reshape(-1)[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from(ends))
    return array


columns = st.dictionaries(
    st.sampled_from(["advantages", "ref_logprobs", "weights", "temperatures", "mine", "tokens", "a b"]),
    arrays(),
    max_size=2,
)
rollout_fields = {
    "rollout_id": texts,
    "tokens": st.lists(integers, min_size=LENGTH, max_size=LENGTH) | arrays(),
    "loss_mask": st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH) | arrays(),
    "logprobs": st.lists(numbers, min_size=LENGTH, max_size=LENGTH) | arrays(),
    "reward": numbers,
    "rewards": st.dictionaries(texts, numbers, max_size=2),
    "successes": st.dictionaries(texts, st.booleans() | numbers, max_size=2),
    "version_spans": st.lists(st.tuples(integers, integers, integers), max_size=2)
    | integers.map(lambda version: [(version, 0, LENGTH)]),
    "turns": st.tuples(texts, st.just(0), integers, numbers, maps).map(lambda turn: [turn])
    | st.tuples(texts, numbers, maps).map(lambda turn: [(turn[0], 0, LENGTH, *turn[1:])]),
    "finish_reason": texts,
    "is_truncated": st.booleans() | numbers,
    "failure": st.tuples(texts, texts) | st.tuples(st.just("tool"), texts) | numbers,
    "columns": columns,
    "attachments": columns,
    "text": texts,
    "metadata": maps,
}
group_fields = {
    "prompt_id": texts,
    "planned_size": integers,
    "answer": plain,
    "metadata": maps,
    "needs": st.lists(texts, max_size=2),
    "worker": texts,
    "created": numbers,
}


def some_of(fields: Mapping[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def rollout_of(reward: float, changes: Mapping[str, Any]) -> Rollout:
    usual = {
        "tokens": [1, 2, 3, 4],
        "loss_mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -1.0],
        "reward": reward,
        "version_spans": [(0, 0, LENGTH)],
    }
    return Rollout(**{**usual, **changes})  # type: ignore[arg-type]


def test_the_strangest_values_are_refused_at_the_door_or_train_and_end_no_process(run: Run, served: Served) -> None:
    served.serve(
        BatcherConfig(
            row_tokens=64,
            step_groups=1,
            max_age=10**9,
            group_timeout_seconds=0.2,
            max_age_seconds=30.0,
            envs={name: EnvConfig(advantage=name) for name in ESTIMATORS},
        )
    )
    reader = run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=60.0))
    reader.start()
    run.store.announce(reader.attempt, PolicyVersion(version=0))
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    names, outcomes = count(), {"refused": 0, "pushed": 0}
    masked: set[str] = set()

    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        env=st.sampled_from(sorted(ESTIMATORS)),
        rollouts=st.lists(some_of(rollout_fields, 2), min_size=1, max_size=3),
        group=some_of(group_fields, 2),
    )
    def push(env: str, rollouts: list[dict[str, Any]], group: dict[str, Any]) -> None:
        usual = {"group_id": f"{env}.{next(names)}", "env": env, "prompt_id": "p", "planned_size": len(rollouts)}
        try:
            made = Group(
                **{**usual, **group},
                rollouts=tuple(rollout_of(float(i), changes) for i, changes in enumerate(rollouts)),
            )
            writer.push(made)
        except InvalidRollout:
            outcomes["refused"] += 1
            return
        outcomes["pushed"] += 1
        # A reader has declared what it makes of these: another shape is masked there, and counted.
        if any(a.ndim > 1 for r in made.rollouts for name, a in r.columns.items() if column_spec(name) is not None):
            masked.add(made.group_id)

    push()
    assert min(outcomes.values()) > 20, outcomes  # both ways are gone
    trained = 0
    while True:
        served.wait_for(lambda known=trained: run.store.meta().step > known or not run.pool(), seconds=60.0)
        if run.store.meta().step == trained:
            break
        trained += 1
        step = reader.pull(trained)
        assert not step.damaged or masked.issuperset(step.header.group_ids)
        for micro_batch in step:
            for array in (micro_batch.advantages, micro_batch.logprobs, *micro_batch.columns.values()):
                assert np.abs(array.astype(np.float64)).max(initial=0.0) <= 2.0**64
        reader.trained(step)
    assert trained > 10
    assert not served.errors
    assert run.store.verify().findings == ()
    assert run.store.history()
    assert list_groups(run.store, limit=1000)
