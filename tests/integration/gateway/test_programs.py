"""Programs as an env: what they get, what their end is, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gateway_stage import Stage, engine_samples, trained_samples

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.records.rollout import Rollout
from rlbuffer.store.open_rollouts import checked_end, open_rollouts
from rlbuffer.worker.envs.command import Command, read_end
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
    with connect(stage.server, run=stage.run, config=stage.first.settings) as buffer:
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


LEAVERS = {
    "child": "subprocess.Popen(['sleep', '1000'])",
    "session": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "daemon": "subprocess.Popen(['sh', '-c', 'setsid sleep 1000 & setsid sh -c \"sleep 1000 & sleep 1000\" &'])",
    "stubborn": "subprocess.Popen(['setsid', 'sh', '-c', 'trap : TERM HUP; sleep 1000; sleep 1000'])",
}
"""How a program leaves others behind."""


def marked(mark: str) -> list[int]:
    """Processes that have a variable of this text."""
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if place.name.isdigit() and mark.encode() in (place / "environ").read_bytes():
                found += [int(place.name)] * is_running(int(place.name))
    return found


@pytest.mark.parametrize("how", LEAVERS)
@pytest.mark.parametrize("end", ["exit", "timeout", "stop", "kill"])
def test_nothing_that_a_program_has_started_outlives_it_or_its_worker(tmp_path: Path, how: str, end: str) -> None:
    ready, mark = tmp_path / "ready", f"mark-{uuid.uuid4().hex}"
    stays = "" if end == "exit" else "time.sleep(1000)"
    program = f"import subprocess, sys, time\n{LEAVERS[how]}\ntime.sleep(0.3)\nopen({str(ready)!r}, 'w')\n{stays}"
    seconds = 3.0 if end == "timeout" else 999.0
    worker = (
        "import asyncio, os\nfrom rlbuffer.worker.envs.command import Command\n"
        f"made = Command(command=[{sys.executable!r}, '-c', {program!r}])\n"
        "async def work():\n"
        f"    task = asyncio.create_task(made.end_of(dict(os.environ, MARK={mark!r}), {seconds}))\n"
        f"    while not os.path.exists({str(ready)!r}): await asyncio.sleep(0.01)\n"
        f"    if {end == 'stop'}: task.cancel()\n"
        "    await asyncio.gather(task, return_exceptions=True)\n"
        "asyncio.run(work())\n"
        f"open({str(tmp_path / 'done')!r}, 'w')\nimport time\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", worker])
    try:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.01)
        if end == "kill":
            process.kill()
        else:
            while not (tmp_path / "done").exists():
                assert process.poll() is None
                time.sleep(0.01)
            assert marked(mark) == []
        while marked(mark):
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def test_a_program_is_killed_with_its_keeper(tmp_path: Path) -> None:
    mark, seen = f"mark-{uuid.uuid4().hex}", list[int]()

    async def work() -> Any:
        made = Command(command=["sleep", "1000"])
        task = asyncio.create_task(made.end_of(dict(os.environ, MARK=mark), 999.0))
        while len(seen) < 2:
            seen[:] = marked(mark)
            await asyncio.sleep(0.01)
        (keeper,) = (pid for pid in seen if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(keeper, signal.SIGKILL)
        return await task

    end = asyncio.run(work())
    assert end.failure.kind == "killed"
    while marked(mark):
        time.sleep(0.01)


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


@pytest.mark.parametrize("idle", [1.0, 3.0])
def test_a_program_that_asks_nothing_for_long_is_not_abandoned(redis_url: str, run_name: str, idle: float) -> None:
    stage = Stage(redis_url, run_name, idle_seconds=idle)
    try:
        program = f"{ASKING}\nimport time\ntime.sleep({idle + 3})\nprint(0.25)"
        rollouts = played(stage, program, rollouts=2)
        assert [(r.reward, r.failure) for r in rollouts] == [(0.25, None)] * 2
    finally:
        stage.close()


def test_a_worker_that_is_gone_leaves_its_rollouts_to_the_idle_limit_of_the_settings(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(redis_url, run_name, idle_seconds=1.0)
    try:
        from rlbuffer.worker import programs

        monkeypatch.setattr(programs._Programs, "_touched", lambda *_: asyncio.sleep(1000))
        (rollout,) = played(stage, "import time; time.sleep(8)", rollouts=1)
        assert rollout.failure is not None
        assert rollout.failure.kind == "abandoned"
    finally:
        stage.close()


@pytest.mark.parametrize("spared", [{}, {"NO_PROXY": "example.com"}, {"no_proxy": "example.com,.local"}])
def test_a_proxy_gets_no_capability(stage: Stage, monkeypatch: pytest.MonkeyPatch, spared: dict[str, str]) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, text in spared.items():
        monkeypatch.setenv(name, text)
    (rollout,) = played(stage, ASKING, rollouts=1)
    assert rollout.reward == 1.0
    made = Command(command=["true"]).environment_of("http://gateway.example:8400", "key", 1, 0)
    for name in ("NO_PROXY", "no_proxy"):
        given = [host for hosts in spared.values() for host in hosts.split(",")]
        assert {*made[name].split(",")} >= {"gateway.example", *given}


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
