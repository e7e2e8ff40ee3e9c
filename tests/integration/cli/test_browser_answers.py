"""Questions of somebody whose run goes wrong, answered by the screens of `inspect`, and by their printed twins."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from browsing import Person, browse
from store_runs import Run

import rlbuffer
from rlbuffer.client.texts import Texts
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer_cli.facts import sections
from rlbuffer_cli.main import main


def stale(run: Run) -> None:
    """A worker whose weights are old: two of its prompts went stale, one of them twice."""
    run.lead()
    for i, prompt in enumerate(("3 + 5", "3 + 5", "7 - 2")):
        run.push(f"math.{i}", prompt_id=prompt, worker="inf-3", rewards=[0.25, 0.75])
        run.drop("stale", run.pool())
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=9, location="x", size=1, checksum="c"))
    run.store.heartbeat("worker", "inf-3", {"env": "math", "version": 4, "rollouts_per_second": 2.0})


def test_which_prompts_go_stale_and_from_which_worker(
    run: Run, buffer: rlbuffer.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    stale(run)

    async def tour(person: Person) -> None:
        await person.sees("math.2")
        await person.press("w")
        await person.sees(
            "worker inf-3",
            "v4, 5 behind",
            "6 stale",
            "dropped rollouts in the last 1,000 records: 6 stale",
            "stale prompts: 3 + 5 (4 rollouts), 7 - 2 (2 rollouts)",
        )
        await person.press("escape")
        await person.sees("newest first")
        await person.press("slash", *"state:dropped", "enter")
        await person.sees("where state:dropped", "math.1", "inf-3", "3 + 5")
        await person.press("enter")
        await person.sees("dropped (stale: because)", "from inf-3", "prompt 7 - 2", "waited ", "math.2/0", "math.2/1")
        await person.press("enter")
        await person.sees("rollout math.2/1 (2 of 2 of its group)", "LIFE")

    browse(buffer, tour, size=(140, 30))
    assert main(["inspect", "processes", "--redis", run.url, "--run", run.store.run]) == 0
    assert "stale prompts: 3 + 5 (4 rollouts), 7 - 2 (2 rollouts)" in capsys.readouterr().out


def test_a_writer_without_heartbeats_is_named_by_what_was_dropped_of_it(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.lead()
    run.push("a.0", worker="old-one")
    run.drop("stale", run.pool())

    async def tour(person: Person) -> None:
        await person.sees("a.0")
        await person.press("w")
        await person.sees("worker old-one", "no heartbeat", "2 stale")

    browse(buffer, tour, size=(100, 24))


def test_why_an_env_is_short_when_its_only_worker_is_silent(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("math.0")
    run.store.heartbeat("batcher", "leader", {})
    for name, env in (("inf-1", "math"), ("inf-2", "code")):
        run.store.heartbeat("worker", name, {"env": env, "version": 1})
    run.age("worker", "inf-1", 44.0)

    async def tour(person: Person) -> None:
        shown = await person.sees("✕ No worker of math is at work", "inf-1 was last seen 4")
        assert "No worker of code" not in shown

    browse(buffer, tour)


def test_which_rollout_of_a_step_was_worst_and_what_it_said(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0", rewards=[0.5, 0.125])
    run.push("b.0", rewards=[0.75, 1.0])
    run.lead()
    run.commit()

    async def tour(person: Person) -> None:
        await person.sees("a.0")
        await person.press("t")
        await person.sees("capacity")
        await person.press("enter")
        shown = await person.sees("worst rollout a.0/1 (reward 0.125) · best b.0/1 (reward 1.000)", "a.0/1")
        assert shown.index("a.0/1") < shown.index(" a.0/0") < shown.index(" b.0/0")
        await person.press("enter")
        await person.sees("rollout a.0/1 (2 of 2 of its group)")

    browse(buffer, tour, size=(100, 40))


def test_whether_entropy_fell_before_reward_did(
    run: Run, buffer: rlbuffer.Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    run.step("a.0")
    folder = buffer.settings.output_dir
    folder.mkdir(parents=True)
    rewards, entropies = [0.2, 0.8, 0.9, 0.9, 0.1], [2.0, 2.1, 0.3, 0.2, 0.2]
    lines = [
        json.dumps({"event": "step", "step": i, "reward": rewards[i - 1], "entropy": entropies[i - 1]})
        for i in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"half')

    async def tour(person: Person) -> None:
        await person.sees("a.0")
        await person.press("t")
        shown = await person.sees("reward  0.100 at step 5, 0.100 to 0.900", "entropy  0.200 at step 5, 0.200 to 2.100")
        axes = [
            line.split()
            for line in shown.splitlines()
            if "step 1" in line and "step 5" not in line and "reward" not in line
        ]
        assert axes == [["step", "1", "5"] * 2]  # one axis of steps, and one of values for each

    browse(buffer, tour, size=(140, 30))
    words = ["inspect", "steps", "--redis", run.url, "--run", run.store.run, "--home", str(buffer.settings.home)]
    assert main(words) == 0
    assert "entropy  0.200, 0.200 to 2.100" in capsys.readouterr().out


def test_a_failure_has_its_traceback(run: Run, buffer: rlbuffer.Buffer) -> None:
    trace = 'Traceback (most recent call last):\n  File "envs.py", line 3, in score\nKeyError: \x1b[2J'
    problem = {"kind": "env_fails", "count": 2, "detail": "KeyError: 'x' (envs.py:3)"}
    beat = {"env": "a", "problems": [problem], "traceback": trace}
    run.store.heartbeat("worker", "w-0", beat)

    async def tour(person: Person) -> None:
        await person.sees("no groups yet")
        await person.press("w")
        await person.sees('File "envs.py", line 3, in score', "KeyError: \\x1b[2J")

    browse(buffer, tour, size=(100, 30))


def test_enter_on_a_worker_shows_its_groups_and_esc_goes_back(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0", worker="w-1")
    run.push("a.1", worker="w-2")
    run.store.heartbeat("worker", "w-1", {"version": 0})
    run.store.heartbeat("rank", "0", {"step": 1})

    async def tour(person: Person) -> None:
        await person.sees("a.0", "a.1")
        await person.press("w")
        await person.sees("worker w-1", "rank 0")
        await person.press("G", "enter")
        await person.sees("rank 0 writes no groups")
        await person.press("g", "enter")
        shown = await person.sees('1 group where worker:"w-1"', "esc back")
        assert "a.1" not in shown
        await person.press("escape")
        await person.sees("worker w-1", "rank 0")
        await person.press("escape")
        shown = await person.sees("2 groups", "a.1")
        assert "where" not in shown

    browse(buffer, tour, size=(110, 30))


def test_a_key_without_a_meaning_here_says_so(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0")

    async def tour(person: Person) -> None:
        await person.sees("a.0")
        for key in ("c", "N", "7", "Z"):
            await person.press(key)
            await person.sees(f"{key} does nothing on this screen; ? shows the keys")
        await person.press("r")
        await person.until(lambda shown: "does nothing" not in shown, "no notice")
        for keys in (("s",), ("S",), ("j", "k", "G", "g"), ("question_mark", "escape"), ("slash", *"env:zz", "escape")):
            await person.press(*keys)
            assert "does nothing" not in person.text(), keys
        await person.press("enter")
        await person.sees("group a.0")
        await person.press("slash")
        await person.sees("/ does nothing on this screen; ? shows the keys")

    browse(buffer, tour, size=(100, 30))


def test_a_step_is_opened_by_its_number(run: Run, buffer: rlbuffer.Buffer) -> None:
    for i in range(3):
        run.step(f"a.{i}")

    async def tour(person: Person) -> None:
        await person.sees("a.0")
        await person.press("t")
        await person.sees("3 steps")
        await person.press("slash", *"step:9", "enter")
        await person.sees("no steps match 'step:9'")
        await person.press("escape")
        shown = await person.sees("3 steps")
        assert "match" not in shown
        await person.press("slash", *"step:2", "enter")
        await person.sees("1 step where step:2")
        await person.press("enter")
        await person.sees("step 2 ", "rank 0: ", "a.1/0")
        await person.press("escape")
        await person.sees("1 step where step:2")
        await person.press("escape", "escape")
        await person.sees("newest first")

    browse(buffer, tour, size=(100, 30))


def test_a_rollout_without_turns_shows_where_its_prompt_ends(run: Run, buffer: rlbuffer.Buffer) -> None:
    run.push("a.0", lengths=[20])
    member = buffer.group("a.0").members[0]
    prompt = member.prompt_tokens
    assert sections(member.changed(rollout=replace(member.rollout, turns=())), Texts()) == [
        (0, prompt, f"prompt · {prompt} tokens", ""),
        (prompt, 20, f"sampled · {20 - prompt} tokens", ""),
    ]
    assert sections(member, Texts())[0] == (0, prompt, f"user · {prompt} tokens", "")
