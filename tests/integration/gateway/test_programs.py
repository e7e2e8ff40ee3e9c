"""Programs as an env: what they get, what their end is, and that nothing of them is left."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_stage import Stage, engine_samples, trained_samples

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.records.rollout import Rollout
from rlbuffer.store.open_rollouts import checked_end, open_rollouts
from rlbuffer.worker.envs.command import read_end
from rlbuffer.worker.loop import run_worker

ASKING = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "say task " + os.environ["TASK_NUMBER"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("it said", said)
print(json.dumps({"reward": float(said == "task " + os.environ["TASK_NUMBER"]), "rewards": {"index": 0.5}}))
"""


@pytest.fixture
def stage(redis_url: str, run_name: str) -> Iterator[Stage]:
    made = Stage(redis_url, run_name)
    yield made
    made.close()


def played(stage: Stage, program: str, *, rollouts: int = 2, **more: Any) -> list[Rollout]:
    """The rollouts of one ticket of a program."""
    options = {"name": "agents", "command": [sys.executable, "-c", program], "gateway": stage.first.url, "tickets": 1}
    settings = WorkerSettings(
        env="command",
        env_options={**options, **more.pop("options", {})},
        group_size=rollouts,
        **{"rollout_timeout_seconds": 60.0, **more},
    )
    stop = threading.Event()
    with connect(stage.server, run=stage.run) as buffer:
        assert run_worker(buffer, "programs", settings, stop=stop)
    return stage.rollouts(rollouts)


def test_a_program_is_given_its_task_and_earns_what_its_last_line_says(stage: Stage) -> None:
    rollouts = played(stage, ASKING)
    assert [(r.reward, dict(r.rewards), r.failure) for r in rollouts] == [(1.0, {"index": 0.5}, None)] * 2
    assert sorted(s for r in rollouts for s in trained_samples(r)) == sorted(engine_samples(stage.engine))


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("import sys; print(1.0); sys.exit('no way')", "exit_1"),
        ("print('no number')", "no_reward"),
        ('print(\'{"reward": "much"}\')', "no_reward"),
        ('print(\'{"failure": "lost"}\')', "failed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal_9"),
    ],
)
def test_a_program_that_fails_is_a_failed_attempt(stage: Stage, program: str, kind: str) -> None:
    (rollout,) = played(stage, program, rollouts=1)
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.kind == kind
    assert "no way" in rollout.failure.message or kind != "exit_1"


def test_a_program_that_is_not_there_is_a_failed_attempt(stage: Stage) -> None:
    (rollout,) = played(stage, "", rollouts=1, options={"command": ["no-such-program-anywhere"]})
    assert rollout.failure is not None
    assert rollout.failure.kind == "not_started"


def test_a_program_has_its_time_and_what_it_has_started_goes_with_it(stage: Stage, tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '1000'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)"
    )
    begun = time.monotonic()
    (rollout,) = played(stage, program, rollouts=1, rollout_timeout_seconds=5.0)
    assert time.monotonic() - begun < 60
    assert rollout.failure is not None
    assert rollout.failure.kind == "timeout"
    pid = int((tmp_path / "pid").read_text())
    stage.wait_for(lambda: not is_running(pid))


def test_what_a_program_has_left_behind_is_killed_at_its_end(stage: Stage, tmp_path: Path) -> None:
    program = (
        "import subprocess\n"
        f"child = subprocess.Popen(['sleep', '1000'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "print(1.0)"
    )
    (rollout,) = played(stage, program, rollouts=1)
    assert rollout.failure is not None  # it asked nothing
    assert rollout.failure.kind == "empty"
    stage.wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_variable_of_rlbuffer_reaches_a_program(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBUFFER_GATEWAY_TOKEN", "secret")
    monkeypatch.setenv("RLBUFFER_REDIS_PASSWORD", "secret")
    program = f"import os, json; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w')); print(0)"
    played(stage, program, rollouts=1, options={"environment": {"OWN": "1"}, "directory": str(tmp_path)})
    seen = (tmp_path / "seen").read_text()
    assert "RLBUFFER" not in seen
    assert "secret" not in seen
    assert '"OWN": "1"' in seen
    assert f'"PATH": "{os.environ["PATH"]}"' in seen


def test_a_worker_that_is_stopped_ends_its_programs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlbuffer.worker import programs

    monkeypatch.setattr(programs, "DRAIN_SECONDS", 0.5)
    options = {
        "name": "agents",
        "command": [sys.executable, "-c", "import time; time.sleep(1000)"],
        "gateway": stage.first.url,
    }
    settings = WorkerSettings(env="command", env_options=options, group_size=1, groups_in_flight=2)
    stop = threading.Event()
    with connect(stage.server, run=stage.run) as buffer:
        thread = threading.Thread(target=run_worker, args=(buffer, "w", settings), kwargs={"stop": stop})
        thread.start()
        stage.wait_for(lambda: len(open_rollouts(stage.buffer.store)) == 2)
        stop.set()
        thread.join()
    assert [r.failure and r.failure.kind for r in stage.rollouts(2)] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("output", "reward", "kind"),
    [
        ("1", 1.0, None),
        ("0.5\n\n  \n", 0.5, None),
        ('{"reward": 1, "rewards": {"a": 0}}\nbye', 1.0, None),
        ('{"rewards": {"a": 0.25}}', 0.25, None),
        ("true", None, "no_reward"),
        ("NaN", None, "no_reward"),
        ("1e400", None, "no_reward"),
        ('{"rewards": {"a": 1, "b": 2}}', None, "no_reward"),
        ("[1]", None, "no_reward"),
        ("[" * 100_000, None, "no_reward"),
        ("", None, "no_reward"),
        ('{"failure": {"a": 1}}', None, "failed"),
        ("9" * 310, None, "no_reward"),
        ("9" * 4000, None, "no_reward"),
        ("-" + "9" * 310, None, "no_reward"),
        ('{"rewards": {"a": %s}}' % ("9" * 310), None, "no_reward"),
        ('{"reward": 1, "rewards": {"a": %s}}' % ("9" * 310), None, "no_reward"),
        ("9" * 5000, None, "no_reward"),
        ('{"failure": "\\ud83d"}', None, "failed"),
        ('{"failure": "%s\\ud83d"}' % ("a" * 499), None, "failed"),
        ('{"reward": 1, "rewards": {"\\ud83d": 1}}', 1.0, None),
        ('{"failure": ' + "[" * 900 + "1" + "]" * 900 + "}", None, "failed"),
        ('{"reward": 0.5, "note": "a\u2028b\x85c"}', 0.5, None),
        ('1%\r50%\r{"reward": 0.5}\r\n', 0.5, None),
    ],
)
def test_the_last_line_of_json_is_the_end(output: str, reward: float | None, kind: str | None) -> None:
    end = read_end(output)
    assert (end.reward, end.failure and end.failure.kind) == (reward, kind)
    assert checked_end(end) == end
    if end.failure is not None:
        assert end.failure.message == end.failure.message.encode().decode()


@pytest.mark.parametrize("line", ["9" * 310, '{"failure": "\\ud83d"}', '{"reward": 1, "rewards": {"\\ud83d": 1}}'])
def test_an_odd_last_line_of_one_program_leaves_the_others_their_reward(stage: Stage, line: str) -> None:
    program = f"import os\nodd = {line!r}\n{ASKING}\nprint(odd if os.environ['TASK_INDEX'] == '0' else 0.5)"
    rollouts = played(stage, program, rollouts=3)
    assert [r.reward for r in rollouts if r.rollout_id[-1] != "0"] == [0.5, 0.5]
    (odd,) = (r for r in rollouts if r.rollout_id[-1] == "0")
    assert odd.reward == 1.0 or (odd.failure is not None and odd.failure.kind in ("failed", "no_reward"))


def test_what_goes_wrong_on_the_host_is_a_failed_attempt_of_its_kind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", no_room)
    (rollout,) = played(stage, ASKING, rollouts=1)
    assert rollout.failure is not None
    assert rollout.failure.kind == "not_started"
    assert "Too many open files" in rollout.failure.message
