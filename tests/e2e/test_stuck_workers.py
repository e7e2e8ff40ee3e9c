"""A worker that cannot end itself is ended and named, and its run goes on; a second `rlbuffer run` does not begin."""

from __future__ import annotations

import inspect
import os
import shutil
import signal

import failing_envs
import stuck_envs
from homes import Home, model_section

STUCK = {"holds": stuck_envs.Holds, "blocks": stuck_envs.Blocks, "never": stuck_envs.Never}
CONFIG = """
run = "stuck"

[server]
appendfsync = "no"

[batcher]
row_tokens = 64
step_groups = 4

[trainer]
world_size = 1
steps = 100000

[worker.sound]
env = "failing_envs:Sound"
env_options = { seconds = 0.2 }
group_size = 2
"""


def line(name: str) -> int:
    """The line of the env at which its worker is stuck."""
    lines, first = inspect.getsourcelines(STUCK[name].score)
    return first + next(number for number, text in enumerate(lines) if "re.fullmatch" in text or "3600" in text)


def test_workers_that_cannot_end_themselves_are_ended_and_named_and_the_run_goes_on(home: Home) -> None:
    for module in (failing_envs, stuck_envs):
        shutil.copy(module.__file__, home.path)
    sections = "".join(
        f'[worker.{name}]\nenv = "stuck_envs:{env.__name__}"\nenv_options = {{ seconds = 0.2 }}\n'
        "group_size = 2\ngroups_in_flight = 1\n"
        for name, env in STUCK.items()
    )
    config = home.path / "stuck.toml"
    config.write_text(CONFIG + sections + model_section(vocab_size=13, eos_token_id=12))
    running = home.start("run", config, "--display", "plain", log="run")
    with home.connect("stuck") as buffer:

        def said() -> str:
            return (home.path / "run.log").read_text()

        def hangs(name: str) -> bool:
            return "score() has run" in str(buffer.store.heartbeats("worker").get(name, {}).get("problems"))

        home.wait_until((home.path / stuck_envs.HELD).exists, seconds=60, why="the worker that holds its interpreter")
        begun = {"holds": home.pids("stuck")["worker holds"]}
        home.wait_until(lambda: hangs("blocks") and hangs("never"), seconds=60, why="two workers that hang")
        begun |= {name: home.pids("stuck")[f"worker {name}"] for name in ("blocks", "never")}

        second = home.call("run", config, "--display", "plain", timeout=60)
        assert second.returncode == 3, second
        assert f"pid {home.pids('stuck')['run']} on {os.uname().nodename}" in " ".join(second.stderr.split())

        for name in ("blocks", "never"):
            os.kill(begun[name], signal.SIGTERM)

        def ended(name: str) -> bool:
            own = [text for text in said().splitlines() if f" worker {name} " in text]
            return any(f'stuck_envs.py", line {line(name)} in score' in text for text in own)

        home.wait_until(
            lambda: ended("holds") and ended("blocks"), seconds=30, why="the places of those that were ended"
        )
        home.wait_until(
            lambda: (
                f"stuck_envs.py:{line('never')} in score"
                in str(buffer.store.heartbeats("worker")["never"].get("problems"))
            ),
            seconds=30,
            why="the place of the one that does not return",
        )
        home.wait_until(
            lambda: all(home.pids("stuck").get(f"worker {name}", pid) != pid for name, pid in begun.items()),
            seconds=30,
            why="the workers after them",
        )
        step = buffer.store.meta().step
        home.wait_until(lambda: buffer.store.meta().step > step, seconds=30, why="the next step")
    running.send_signal(signal.SIGTERM)
    assert home.ended(running, 60) == 130
