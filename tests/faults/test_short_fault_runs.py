"""The runs of ``make faults`` with few faults, so that the code that makes them is itself under test."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accounts import check_ledger, check_metrics, check_trained, check_uses
from aof import commands, keep_files, read_steps, read_written
from disk_runs import run_full_disks
from failover_runs import FAILOVER, KILL, MOVE, run_failovers
from gateway_runs import LEADER, SERVER, differences, run_gateways, stretches
from gateway_windows import WINDOWS
from homes import Home
from hostile_runs import run_hostile
from kill_runs import run_kills
from network_runs import run_network
from processes_under_test import KINDS
from takeover_runs import run_takeovers
from torn_runs import programs, run_torn
from watched import MISSING
from weight_kills import run_weight_kills
from worker_kills import run_worker_kills

from rlbuffer.records.micro_batch import WholeSample
from rlbuffer.store.keys import Keys

pytestmark = pytest.mark.timeout(900)
"""A machine may be four times as slow as this one."""


def say(line: str) -> None:
    print(line)


def test_a_run_survives_kill_9_of_each_kind_of_process(home: Home) -> None:
    outcome = run_kills(home, seed=5, kills=4, steps=24, say=say)
    assert outcome.findings == []
    assert dict(outcome.faults) == dict.fromkeys(KINDS, 1)
    # The accounts must be able to disagree: a push, a trained step and a trained batch that are not what they were.
    written = read_written(home.path / "server", "tiny")
    metrics = home.metrics()
    with home.connect() as buffer:
        written.pushes.popitem()
        assert check_ledger(buffer, written, 24) != []
        assert check_ledger(buffer, read_written(home.path / "server", "tiny"), 23) != []
    assert check_metrics([*metrics, metrics[0] | {"batch_sha256": ["", ""]}], 24) != []
    written.steps[2] = written.steps[3]
    assert any("never committed" in finding for finding in check_trained(written, metrics, max_uses=1))


def test_a_run_survives_a_network_that_loses_and_breaks_off(home: Home) -> None:
    outcome = run_network(home, seed=4, faults=12, pauses=2, steps=24, say=say)
    assert outcome.findings == []


def test_sampling_goes_on_after_a_worker_is_killed_in_a_load(home: Home) -> None:
    outcome = run_worker_kills(home, seed=3, kills=3, say=say)
    assert outcome.findings == []
    assert outcome.facts["rollouts compared"] > 0


def test_no_version_of_weights_is_ever_wrong_where_publisher_relay_and_worker_are_killed(tmp_path: Path) -> None:
    outcome = run_weight_kills(tmp_path, seed=3, kills=2, say=say)
    assert outcome.findings == []
    assert dict(outcome.faults) == {"publisher": 2, "relay": 2, "worker": 2}


def test_the_other_batcher_goes_on_while_the_leader_is_halted_and_refuses_it_afterwards(home: Home) -> None:
    outcome = run_takeovers(home, rounds=1, steps_between=3, say=say)
    assert outcome.findings == []
    assert len(outcome.facts["takeover seconds"]) == 1


@pytest.mark.parametrize("program", programs(), ids=lambda path: Path(path).name)
def test_half_a_transaction_in_the_file_does_not_come_to_life_at_the_second_start(tmp_path: Path, program: str) -> None:
    outcome = run_torn(tmp_path, program=program, cuts=6, seed=2, say=say)
    assert outcome.findings == []
    assert outcome.facts["refused, with what to do"] == 0


def test_a_run_survives_failovers_of_shards_and_slots_that_move(home: Home) -> None:
    outcome = run_failovers(home, seed=3, failovers=1, kills=1, steps=45, say=say, place="cluster", slot_moves=1)
    assert outcome.findings == []
    assert dict(outcome.faults) == {FAILOVER: 1, KILL: 1, MOVE: 1}


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)} on PATH")
def test_what_a_run_survives_on_one_server_it_survives_on_several(home: Home) -> None:
    outcome = run_network(home, seed=6, faults=8, pauses=1, steps=20, say=say, place="sentinels")
    assert outcome.findings == []


def test_no_process_of_a_run_ends_while_the_disk_is_full(home: Home) -> None:
    outcome = run_full_disks(home, rounds=1, full_seconds=0, say=say)
    assert outcome.findings == []
    assert dict(outcome.faults) == {"full disk": 1}


def test_no_process_of_another_role_ends_of_what_a_hostile_worker_sends(home: Home) -> None:
    outcome = run_hostile(home, moves=3, pushes=150, seed=3, world_size=1, say=say)
    assert outcome.findings == []
    assert dict(outcome.faults) == {"move": 3, "push": 150}


def test_agents_lose_nothing_that_they_heard_when_a_gateway_is_killed_in_each_window(home: Home) -> None:
    if os.environ.get("RLBUFFER_ADAPTERS") != "1":
        pytest.importorskip("openai", reason="needs the clients of OpenAI and Anthropic: make adapters-test")
        pytest.importorskip("anthropic", reason="needs the clients of OpenAI and Anthropic: make adapters-test")
    outcome = run_gateways(home, seed=7, rollouts=12, agents=6, per_window=1, leader_kills=1, server_kills=1, say=say)
    assert outcome.findings == []
    assert dict(outcome.faults) == dict.fromkeys((*WINDOWS, LEADER, SERVER), 1)


def test_the_account_of_agents_finds_what_is_lost_doubled_or_changed() -> None:
    sample = WholeSample(
        *("tasks.0/0", "tasks.0", "tasks", 1.0, {}, 0.5, (0, 1), None, 2, 5),
        metadata={"calls": ["a", "b"]},
        tokens=np.array([1, 2, 3, 4, 5], np.int32),
        loss_mask=np.array([False, False, True, False, True]),
        logprobs=np.array([0, 0, -1, 0, -2], np.float32),
        advantages=np.zeros(5, np.float32),
        token_versions=np.array([-1, -1, 0, -1, 1]),
        columns={},
        age=1,
    )
    answered = stretches([sample])
    heard = {"tasks.0/0": ["a", "b"]}
    assert len(answered) == 2
    assert differences(heard, answered, [sample]) == []
    assert differences({"tasks.0/0": ["a", "b", "c"]}, answered, [sample]) != []
    assert differences({"tasks.0/0": ["a"]}, answered, [sample]) != []
    assert differences(heard, answered, [sample, sample]) != []
    assert differences(heard, answered, []) != []
    assert differences(heard, Counter(), [sample]) != []
    for name, other in (("logprobs", -1.0000001), ("token_versions", 1), ("tokens", 9)):
        values = getattr(sample, name).copy()
        values[2] = other
        assert differences(heard, answered, [replace(sample, **{name: values})]) != [], name


def test_a_rollout_in_two_trained_steps_is_found() -> None:
    metrics = [{"step": 1, "digest": "d1"}, {"step": 2, "digest": "d2"}, {"step": 1, "digest": "d1"}]
    assert check_uses({(1, "d1"): ["a.0/0"], (2, "d2"): ["a.1/0"]}, metrics) == []
    assert check_uses({(1, "d1"): ["a.0/0"], (2, "d2"): ["a.0/0"]}, metrics) == ["rollout a.0/0 was trained 2 times"]
    assert check_uses({(1, "d1"): ["a.0/0"], (2, "x"): []}, metrics) == [
        "step 2 was trained with digest d2, which was never committed"
    ]


def test_a_step_stays_known_when_its_server_begins_its_file_anew(tmp_path: Path) -> None:
    folder = tmp_path / "appendonlydir"
    folder.mkdir()
    for sequence, step in ((2, 45), (10, 46)):
        fields = [b"XADD", Keys("tiny").steps.encode(), f"{step}-0".encode(), b"digest", f"d{step}".encode()]
        with (folder / f"appendonly.aof.{sequence}.incr.aof").open("wb") as file:
            keep_files(tmp_path)
            file.write(b"*%d\r\n" % len(fields) + b"".join(b"$%d\r\n%s\r\n" % (len(f), f) for f in fields))
        (folder / file.name).unlink()
    assert read_steps(tmp_path, "tiny") == {(45, "d45"): [], (46, "d46"): []}


def test_a_command_that_a_kill_cut_short_is_left_out() -> None:
    whole = b"*2\r\n$3\r\nSET\r\n$1\r\nk\r\n"
    for cut in range(len(whole)):
        assert list(commands(whole + whole[:cut])) == [[b"SET", b"k"]]
