"""An env that cannot make a group says so: env, kind and last error with file and line, to whoever looks."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import failing_envs
from homes import Home, model_section

from rlbuffer.client.run_state import read_run_state
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
MODEL = model_section(vocab_size=13, eos_token_id=12)


EXPECTED = {
    "raises": ("KeyError", "score"),
    "hangs": ("score() has run for", "score"),
    "sometimesraises": ("IndexError", "score"),
    "callsexit": ("RuntimeError", "score"),
    "notmade": ("its factory raised PermissionError: the judge's key", "__init__"),
    "noprompt": ("FileNotFoundError", "prompt"),
    "prompthangs": ("prompt() has run for", "prompt"),
    "judge": ("ConnectionError", "score"),
    "plays": ("ValueError", "play"),
    "silent": ("GroupFailed", "play"),
}
"""Env -> what is said of it, and the function in which its last place lies."""


SOMETIMES = "sometimesraises"
"""Env of whose groups steps are made; the others make none."""


def write_config(home: Home, *envs: str, at_once: int = 1, more: str = "") -> Path:
    """Returns the config of a run with a worker section for each env."""
    shutil.copy(failing_envs.__file__, home.path)
    sections = [
        f'[worker.{name}]\nenv = "failing_envs:{ENVS[name].__name__}"\ngroup_size = 2\ngroups_in_flight = {at_once}\n'
        for name in envs
    ]
    config = home.path / "failing.toml"
    config.write_text(CONFIG + more + "\n".join(sections))
    return config


def names(text: str, env: str) -> bool:
    """True when `text` says what is wrong with `env`, with file and line."""
    what, function = EXPECTED[env]
    first = inspect.getsourcelines(getattr(ENVS[env], function))[1]
    places = [
        f"failing_envs.py:{line}{behind}" for line in range(first, first + 4) for behind in (f" in {function}", ")")
    ]
    lines = [line for line in text.splitlines() if env in line.lower() and what in line]
    return any(place in line for place in places for line in lines)


def test_every_failing_env_is_named_with_its_kind_and_place(home: Home) -> None:
    assert EXPECTED.keys() == ENVS.keys()
    failing = EXPECTED.keys() - {SOMETIMES}
    config = write_config(home, *sorted(failing))
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    for name in sorted(failing):
        home.start("worker", name, "--config", config, "--display", "plain", log=name)
    with home.connect("failing") as buffer:
        reader = buffer.reader()
        buffer.policy.publish(model_from_config(TINY_QWEN3), reader.step, home.path / "weights")

        def sentences() -> str:
            return "\n".join(map(str, read_run_state(buffer.store).problems))

        missing = set(failing)

        def all_were_named() -> bool:
            said = sentences()
            missing.difference_update([env for env in missing if names(said, env)])
            return not missing

        home.wait_until(all_were_named, seconds=30, why="the workers' problems")
        shown = home.call("top", "--once", "--run", "failing", "--json")
        beats = {p["name"]: p for p in json.loads(shown.stdout)["processes"] if p["kind"] == "worker"}
        assert beats.keys() == failing, shown
        for env, beat in beats.items():
            told = " ".join(problem["detail"] for problem in beat["problems"])
            assert names(f"{env} {told}", env), told
        home.wait_until(
            lambda: all(names((home.path / "serve.log").read_text().replace(". ", ".\n"), env) for env in failing),
            seconds=30,
            why="the output of serve",
        )
    log = (home.path / "raises.log").read_text()
    assert log.count("Traceback") == 1
    assert log.count("abandoned") == 1


def test_an_env_that_fails_sometimes_is_named_though_steps_go_on(home: Home) -> None:
    config = write_config(home, SOMETIMES)
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    home.start("worker", SOMETIMES, "--config", config, "--display", "plain", log=SOMETIMES)
    with home.connect("failing") as buffer:
        reader = buffer.reader()
        buffer.policy.publish(model_from_config(TINY_QWEN3), reader.step, home.path / "weights")

        def was_told() -> bool:
            return names((home.path / "serve.log").read_text(), SOMETIMES)

        home.wait_until(lambda: was_told() and buffer.store.meta().step >= 1, seconds=30, why="step and sentence")
        shown = " ".join(home.call("top", "--once", "--run", "failing").stdout.split())
        assert f"✕ {SOMETIMES} fails: " in shown
        assert f"{SOMETIMES} has abandoned " in shown


def test_a_worker_that_cannot_make_its_env_tells_the_run_why(home: Home) -> None:
    config = write_config(home)
    shutil.copy(Path(failing_envs.__file__).with_name("raising_module.py"), home.path)
    command = ["worker", "--env", "raising_module:make", "--config", config]
    failed = home.call(*command)
    assert failed.returncode == 3
    assert "cannot be imported: KeyError: 'JUDGE_KEY' (" in failed.stderr
    assert failed.stderr.endswith("raising_module.py:3)\n")
    assert not (home.path / "runs").exists()  # what fails leaves none behind
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    said = "KeyError: 'JUDGE_KEY' ("
    home.wait_until(lambda: "ready in" in (home.path / "serve.log").read_text(), seconds=30, why="serve")
    assert home.call(*command).returncode == 3
    assert said in " ".join(home.call("top", "--once", "--run", "failing").stdout.split())
    home.wait_until(
        lambda: f"env raising_module:make: cannot be imported: {said}" in (home.path / "serve.log").read_text(),
        seconds=30,
        why="the sentence of serve",
    )


def test_a_run_says_which_process_an_env_has_ended_and_with_which_exit_code(home: Home) -> None:
    leaver = "[worker.leaver]\nenv = 'leaving_envs:Leaves'\n"
    config = write_config(home, more=f"{MODEL}[trainer]\nworld_size = 1\n{leaver}")
    leaves = "\n\nclass Leaves(Sound):\n    def prompt(self, number):\n        import os\n\n        os._exit(7)\n"
    (home.path / "leaving_envs.py").write_text(Path(failing_envs.__file__).read_text() + leaves)
    home.start("run", config, "--display", "plain", log="run")
    ended = "worker leaver ended with exit code 7"
    home.wait_until(lambda: ended in home.printed(), seconds=30, why="the sentence of the run")
    assert ended in (home.path / "runs" / "failing" / "run.log").read_text()


def test_a_run_whose_env_makes_no_group_ends_and_says_why(home: Home) -> None:
    more = f"{MODEL}[trainer]\nworld_size = 1\n"
    config = write_config(home, "raises", at_once=25, more=more)
    running = home.start("run", config, "--display", "plain", log="run")
    assert home.ended(running, 60) == 3, home.logs()
    said = home.printed()
    (reason,) = (line for line in said.splitlines() if "Error: env raises: none of " in line)
    assert "the last: prompt " in reason
    assert "KeyError: 'verdict' (" in reason
    assert said.count("Traceback") == 1
    assert names(reason, "raises")
    with home.connect("failing") as buffer:
        assert buffer.ledger().total().pushed == (0, 0)
