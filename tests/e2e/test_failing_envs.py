"""An env that cannot make a group says so: env, kind and last error with file and line, to whoever looks."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import failing_envs
from homes import Home

from rlbuffer.weights.model import TINY_QWEN3, model_from_config

ENVS = {
    name.lower(): env
    for name, env in vars(failing_envs).items()
    if inspect.isclass(env) and issubclass(env, failing_envs.Sound) and env is not failing_envs.Sound
}
CONFIG = """
run = "failing"

[server]
appendfsync = "no"

[batcher]
row_tokens = 64
step_groups = 4
"""


EXPECTED = {
    "notanumber": ("InvalidRollout", "score"),
    "raises": ("KeyError", "score"),
    "hangs": ("score() has run for", "score"),
    "givesafloat": ("TypeError", "score"),
    "textreward": ("InvalidRollout", "score"),
    "noprompt": ("FileNotFoundError", "prompt"),
    "prompthangs": ("prompt() has run for", "prompt"),
    "givesadict": ("TypeError", "prompt"),
    "vocabulary": ("InvalidRollout", "prompt"),
    "plainlist": ("InvalidRollout", "prompt"),
    "judge": ("ConnectionError", "score"),
    "judgeblocks": ("score() has run for", "score"),
    "plays": ("ValueError", "play"),
    "playhangs": ("play() has run for", "play"),
    "silent": ("GroupFailed", "play"),
}
"""Env -> what is said of it, and the function in which its last place lies."""


def write_config(home: Home, *envs: str, tries: int, more: str = "") -> Path:
    """-> the config of a run with a worker section for each env."""
    shutil.copy(failing_envs.__file__, home.path)
    sections = [
        f'[worker.{name}]\nenv = "failing_envs:{ENVS[name].__name__}"\ngroup_size = 2\ngroups_per_batch = 1\n'
        f"max_failures = {tries}\n"
        for name in envs
    ]
    config = home.path / "failing.toml"
    config.write_text(CONFIG + more + "\n".join(sections))
    return config


def names(text: str, env: str) -> bool:
    """Whether `text` says what is wrong with `env`, with file and line."""
    what, function = EXPECTED[env]
    first = inspect.getsourcelines(getattr(ENVS[env], function))[1]
    places = [f"failing_envs.py:{line} in {function}" for line in range(first, first + 4)]
    return any(env in line and what in line and any(place in line for place in places) for line in text.splitlines())


def test_every_failing_env_is_named_with_its_kind_and_place(home: Home) -> None:
    assert EXPECTED.keys() == ENVS.keys()
    config = write_config(home, *ENVS, tries=0)
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    for name in ENVS:
        home.start("worker", name, "--config", config, "--display", "plain", log=name)
    with home.connect("failing") as buffer:
        reader = buffer.reader()
        buffer.policy().publish(model_from_config(TINY_QWEN3), reader.step, home.path / "weights")

        def sentences() -> str:
            return buffer.store.waiting().get("batcher", "").replace(". ", ".\n")

        home.wait_until(lambda: all(names(sentences(), env) for env in ENVS), seconds=30, why="the batcher's sentence")
        shown = home.call("inspect", "--run", "failing", "--json", "--totals")
        records = [json.loads(line) for line in shown.stdout.splitlines()]
        beats = {r["env"]: r for r in records if r["schema"] == "rlbuffer.worker/1"}
        assert beats.keys() == ENVS.keys(), shown
        for env, (what, _) in EXPECTED.items():
            beat = beats[env]
            told = f"{env} {beat['busy']}" if "has run" in what else f"{env} {beat['failures']} {beat['failure']}"
            assert names(told, env), told
        home.wait_until(
            lambda: all(names((home.path / "serve.log").read_text().replace(". ", ".\n"), env) for env in ENVS),
            seconds=30,
            why="the output of serve",
        )
    log = (home.path / "raises.log").read_text()
    assert log.count("Traceback") == 1
    assert log.count("given up") == 1


def test_a_run_whose_env_makes_no_group_ends_and_says_why(home: Home) -> None:
    model = "".join(f"{key} = {json.dumps(value)}\n" for key, value in TINY_QWEN3.items() if value is not None)
    more = f"[model.config]\n{model}[trainer]\nworld_size = 1\n"
    config = write_config(home, "raises", tries=3, more=more)
    running = home.start("run", config, "--display", "plain", log="run")
    assert home.ended(running, 60) == 3, home.logs()
    said = home.printed()
    reason = "Error: env raises: none of 3 groups could be made (KeyError 3), the last: KeyError: 'verdict' ("
    assert reason in said
    assert said.count("Traceback") == 1
    assert names(next(line for line in said.splitlines() if reason in line), "raises")
    with home.connect("failing") as buffer:
        assert buffer.ledger().total().pushed == (0, 0)
