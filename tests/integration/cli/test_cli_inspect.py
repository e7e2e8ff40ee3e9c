"""`inspect` and `verify` on a run that is there: which run is meant, who is alive, how it ended. In memory."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.waiting import Wait
from rlbuffer.store.member import Member
from rlbuffer.testing import make_group
from rlbuffer_cli.session import say_ended

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def call(url: str, typed: Call) -> Call:
    return lambda *arguments: typed(*arguments, "--redis", url)


@pytest.fixture
def buffer(url: str) -> Iterator[Buffer]:
    with rlbuffer.connect(url, run="math") as opened:
        opened.store.role(Member).open_run()
        yield opened


def test_the_run_opened_last_is_shown_unless_one_was_named(
    url: str, buffer: Buffer, call: Call, tmp_path: Path
) -> None:
    with rlbuffer.connect(url, run="default") as older:
        older.store.role(Member).open_run()
    with rlbuffer.connect(url, run="newest") as newest:
        newest.store.role(Member).open_run()
        code, out, err = call("inspect")
        assert (code, out.startswith('run "newest" on ')) == (0, True)
        assert err == 'showing run "newest", the one opened last (--run chooses another)\n'
        (tmp_path / "rlbuffer.toml").write_text('run = "math"\n')
        code, out, err = call("inspect")
        assert out.startswith('run "math" on ')
        assert err == 'showing run "math", of rlbuffer.toml:1; "newest" was opened later (--run chooses another)\n'
        code, out, err = call("inspect", "--run", "default")
        assert (out.startswith('run "default" on '), err) == (True, "")


def test_alive_is_about_the_heartbeat_of_the_one_asked_for(buffer: Buffer, call: Call) -> None:
    buffer.store.role(Member).heartbeat("worker", "vcopy", {"version": 3, "rollouts_per_second": 12.5})
    code, out, _ = call("alive", "worker", "vcopy")
    assert (code, out.startswith("worker vcopy was last seen 0.")) == (0, True)
    code, out, _ = call("alive", "worker", "vcopy", "--within", "0")
    assert (code, out.endswith("ago, more than 0 s\n")) == (1, True)
    code, out, err = call("alive", "worker repeat")
    assert (code, out) == (1, "")
    assert "Error: 'worker repeat' has never been seen in run 'math'. Seen were: worker vcopy.\n" in err
    code, out, _ = call("alive", "worker", "vcopy", "--json")
    record = json.loads(out)
    assert (code, record["schema"], record["process"], record["alive"]) == (0, "rlbuffer.alive/1", "worker vcopy", True)
    code, out, _ = call("alive", "worker", "vcopy", "--within", "0", "--json")
    assert (code, json.loads(out)["alive"]) == (1, False)


@pytest.mark.parametrize(("code", "kind"), [(0, Wait.ENDED), (130, Wait.STOPPED), (1, Wait.FAILED)])
def test_how_a_run_ended_stays_readable(buffer: Buffer, call: Call, code: int, kind: Wait) -> None:
    settings = RunSettings.model_validate({"run": "math", "home": "h", "trainer": {"steps": 7}})
    say_ended(buffer, settings, code)
    state = read_run_state(buffer.store)
    waiting = state.waiting
    assert waiting is not None
    assert waiting.kind is kind
    assert (waiting.is_normal, state.problems) == (kind is not Wait.FAILED, ())
    assert str(waiting) in call("inspect")[1]


def test_the_life_of_a_rollout_is_one_line(buffer: Buffer, call: Call) -> None:
    rollout = rlbuffer.Rollout.from_completion(
        prompt_ids=[1], token_ids=[2] * 250, logprobs=[-1.0] * 250, reward=1.0, policy_version=0
    )
    group = rlbuffer.Group(group_id="g1", env="math", prompt_id="p", rollouts=[rollout], planned_size=1)
    buffer.writer("w").push(group)
    code, out, said = call("inspect", "g1/0")
    assert code == 0
    assert re.search(r"^  sampled by v0 \[1, 251\) -> pushed [-0-9]+ [:0-9]+ UTC -> ready$", out, re.MULTILINE)
    assert len([line for line in out.splitlines() if "trained" in line]) == 199  # the prompt's token is not
    assert "the first 200 of 251 tokens: --json has them all" in said


def test_a_table_is_asked_for_by_its_name(url: str, buffer: Buffer, call: Call) -> None:
    buffer.writer("w").push(make_group(env="a", group_id="a.77"))
    for name, has, lacks in (
        ("envs", "■ a ", "a.77"),
        ("problems", "No problems", "a.77"),
        ("groups", "a.77", "no groups yet"),
    ):
        code, out, _ = call("inspect", name)
        assert (code, has in out, lacks in out) == (0, True, False), out
    assert call("inspect", "envs", "--where", "zz")[1] == "no envs match 'zz'\n"
    assert json.loads(call("inspect", "envs", "--json")[1])["schema"] == "rlbuffer.env/1"
