"""Differences between two configs, their consequences, and settings that cannot change."""

from __future__ import annotations

import dataclasses

import pytest

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.config_changes import CONSEQUENCES, changes, check_change
from rlbuffer.errors import ConfigError

OLD = BatcherConfig(64, budgets={"a": 0.5, "b": 0.25})


def test_every_setting_was_thought_through() -> None:
    assert set(CONSEQUENCES) == {field.name for field in dataclasses.fields(BatcherConfig)}


def test_differences_are_named_setting_by_setting() -> None:
    new = BatcherConfig(64, max_age=2, budgets={"a": 0.5, "c": 0.1}, envs={"a": {"max_age": 0}})
    assert [str(change) for change in changes(OLD.as_dict(), new.as_dict())] == [
        "batcher.budgets.b: 0.25 -> None",
        "batcher.budgets.c: None -> 0.1",
        ("batcher.envs.a: None -> {'max_age': 0, 'max_age_seconds': None, 'min_group_size': None, 'advantage': None}"),
        "batcher.max_age: 1 -> 2",
    ]
    assert changes(OLD.as_dict(), OLD.as_dict()) == []


@pytest.mark.parametrize(("step", "is_refused"), [(0, False), (1, True)])
def test_the_unit_of_what_is_owed_cannot_change_once_there_are_steps(step: int, is_refused: bool) -> None:
    new = BatcherConfig(64, unit="groups").as_dict()
    if not is_refused:
        check_change(OLD.as_dict(), new, step=step)
        return
    with pytest.raises(ConfigError) as caught:
        check_change(OLD.as_dict(), new, step=step)
    assert caught.value.setting == "batcher.unit"
    check_change({}, new, step=step)
