"""The flags that every command has."""

from __future__ import annotations

import shlex

import pytest

from rlbuffer_cli.options import RunFlags


@pytest.mark.parametrize(
    "typed",
    [
        {},
        {"home": "a folder/home"},
        {"config": "other.toml", "home": "h"},
        {"redis": "redis://host:6379/0"},
    ],
)
def test_the_next_command_is_led_to_the_same_run(typed: dict[str, str]) -> None:
    given = RunFlags(config=typed.get("config"), redis=typed.get("redis"), run=None, home=typed.get("home"))
    words = shlex.split(given.again("math"))
    assert dict(zip(words[::2], words[1::2], strict=True)) == {f"--{k}": v for k, v in typed.items()} | {
        "--run": "math"
    }
