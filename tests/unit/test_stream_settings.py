"""Settings of a stream: what they fill in, what they refuse, and what its trainer's pace makes of tickets."""

from __future__ import annotations

from typing import Any

import pytest

from rlbuffer.batcher.pace import Pace, load
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.loading import validated
from rlbuffer.daemon.config_changes import check_change
from rlbuffer.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "newest_first"),
        ("step_groups", 4),
        ("step_rollouts", 8),
        ("rows_per_micro_batch", 2),
        ("max_uses", 2),
        ("fill_timeout_seconds", 3.0),
        ("advantage_scale", "batch"),
        ("truncated", "mask"),
    ],
)
def test_settings_of_rows_are_refused_beside_a_stream(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"batcher\.feeds = 'stream': .*batcher\.{name}"):
        validated({"batcher": {"feeds": "stream", name: value}})
    assert getattr(validated({"batcher": {name: value}}).batcher, name) == value


def test_a_stream_is_one_group_a_step_and_comes_back_from_its_settings() -> None:
    config = validated({"batcher": {"feeds": "stream"}}).batcher
    assert (config.step_groups, config.order, config.is_stream) == (1, "oldest_first", True)
    assert BatcherConfig(**config.as_dict()) == config


def test_a_run_with_steps_stays_what_it_is() -> None:
    ranks, stream = BatcherConfig(64).as_dict(), BatcherConfig(64, feeds="stream").as_dict()
    check_change(ranks, stream, step=0)
    with pytest.raises(ConfigError, match=r"batcher\.feeds"):
        check_change(ranks, stream, step=1)


def test_the_pace_is_that_of_the_last_whole_version_or_of_this_one() -> None:
    pace = Pace()
    for version in (0, 0, 0, 1, 1, 1, 1, 2):
        pace = pace.after(version, 1)
    assert (pace.groups, pace.groups_per_version) == (1, 4.0)
    assert load(pace.dump()) == pace
    assert pace.after(4, 1).groups_per_version == 1.0
