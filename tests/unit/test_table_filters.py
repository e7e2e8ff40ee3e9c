"""Tables of other things than groups have the language of filters, with the fields that they have."""

from __future__ import annotations

import re

import pytest

from rlbuffer.errors import FilterError
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.step_record import StepRecord
from rlbuffer_cli.drift import DRIFT, DriftRow
from rlbuffer_cli.run_tables import PROCESSES, ProcessRow
from rlbuffer_cli.tables import VIEWS

PROCESSES_SEEN = [
    ("gateway", "gateway-1", ""),
    ("worker", "w-0", "math"),
    ("worker", "w-1", "math"),
    ("rank", "0", ""),
    ("engine", "vllm:8000", ""),
]


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ("", [(40, "0"), (40, "1"), (40, "rest"), (41, "0")]),
        ("step:40", [(40, "0"), (40, "1"), (40, "rest")]),
        ("step>40", [(41, "0")]),
        ("step:40 age>=1", [(40, "1"), (40, "rest")]),
        ("age>4", [(40, "rest")]),
        ("tokens>=8k", [(41, "0")]),
    ],
)
def test_ages_of_steps_are_filtered_by_the_fields_that_they_have(where: str, taken: list[tuple[int, str]]) -> None:
    tokens = {40: {"0": 10, "1": 20, "rest": 30}, 41: {"0": 9000}}
    rows = [
        DriftRow(StepRecord(step=step, drift={age: {"tokens": count} for age, count in ages.items()}), age, False)
        for step, ages in tokens.items()
        for age in ages
    ]
    assert [(row.record.step, row.age) for row in filter(DRIFT.takes(where), rows)] == taken


def test_a_word_is_a_part_of_the_name_where_things_have_names() -> None:
    rows = [ProcessRow(Process(kind=kind, name=name, seconds_ago=1.0, env=env)) for kind, name, env in PROCESSES_SEEN]
    for where, names in (
        ("gate", ["gateway-1"]),
        ("math", ["w-0", "w-1"]),
        ("rank 0", ["0"]),
        ("env:math worker:w-1", ["w-1"]),
        ("env:math 1", ["w-1"]),
        ("env:ma", []),
        ("vllm:80", ["vllm:8000"]),
    ):
        assert [row.process.name for row in filter(PROCESSES.takes(where), rows)] == names, where


@pytest.mark.parametrize(
    ("table", "where", "message"),
    [
        ("drift", "reward<0.1", "ages of steps are not filtered by reward, but by step, age or tokens"),
        ("processes", "step:4", "processes are not filtered by step, but by env, worker or a part of the name"),
        ("drift", "40", "cannot read '40' in the filter: expected FIELD:VALUE or FIELD>=NUMBER, e.g. step:40"),
        ("steps", "sttep:4", "Did you mean step?"),
    ],
)
def test_a_field_that_a_table_does_not_have_is_named_with_those_that_it_has(
    table: str, where: str, message: str
) -> None:
    with pytest.raises(FilterError, match=re.escape(message)):
        VIEWS[table].takes(where)
