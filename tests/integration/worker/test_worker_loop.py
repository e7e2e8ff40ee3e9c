"""The worker against the real scripts (memory://): tickets, versions, groups, troubles, stopping."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_role import stands_in
from holding_engine import HoldingEngine
from worker_stage import PATIENCE_SECONDS, Stage, eventually

from rlbuffer.errors import (
    ConfigError,
    InvalidRollout,
    SamplerBusy,
    SamplerUnavailable,
    ServerFull,
    WeightsError,
    WrongLogprobs,
)
from rlbuffer.process import heartbeat
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.testing import make_group
from rlbuffer.weights.files import publish
from rlbuffer.worker import faults, groups_in_flight, loop
from rlbuffer.worker.envs import Score
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.faults import error_of_status
from rlbuffer.worker.groups_in_flight import LAST_FAILURE, GroupsInFlight
from rlbuffer.worker.samplers import SamplerTraits
from rlbuffer.worker.samplers.transformers import Batched


class Full:
    """A store that takes no pushes while it is full."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_full = True

    def __getattr__(self, name: str) -> Any:
        if self.is_full and name.startswith("push"):
            return self._refuse
        return getattr(self._store, name)

    def _refuse(self, *args: Any, **values: Any) -> Any:
        raise ServerFull("the server is at its memory limit")


def test_a_worker_leaves_when_the_trainer_has_made_its_last_step_and_one_that_comes_later_waits(stage: Stage) -> None:
    stage.announce(0)
    stage.allow(2)
    stage.start()
    eventually(lambda: len(stage.groups()) == 2)
    stage.store.set_finished(f"{stage.attempt} 3")
    assert stage.thread is not None
    stage.thread.join(30)
    assert (stage.thread.is_alive(), stage.raised) == (False, None)
    assert [line.text for line in stage.told("done")] == [
        f"run {stage.buffer.run!r} has ended: its trainer has made its last step, 3"
    ]
    stage.start()
    ended = Waiting(kind=Wait.ENDED, step=3)
    eventually(lambda: replace(Waiting.of(stage.heartbeat().get("waiting")) or ended, seconds=0.0) == ended)
    stage.store.set_finished("")
    stage.allow(4)
    eventually(lambda: len(stage.groups()) == 4)


def test_a_worker_waits_for_a_full_server_and_says_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.client.producer.LAST_DELAY_SECONDS", 0.1)
    full = stands_in(Full(stage.store), stage.buffer)
    stage.allow(1)
    stage.announce(0)
    stage.start()
    eventually(lambda: stage.heartbeat().get("waiting", {}).get("kind") == "server")
    eventually(lambda: any("the server is at its memory limit" in e.text for e in stage.told("waiting")))
    assert stage.heartbeat()["problems"] == []
    full.is_full = False
    eventually(lambda: stage.groups() == ["counting.0"])
    stage.finish()
    assert stage.raised is None
    assert stage.heartbeat().get("waiting", {}).get("kind") != "server"


def test_a_score_that_hangs_does_not_keep_a_worker_from_ending(stage: Stage) -> None:
    hanging, over = threading.Event(), threading.Event()

    def score(*args: Any, **values: Any) -> Score:
        hanging.set()
        over.wait()
        raise AssertionError

    stage.env.score = score  # type: ignore[method-assign]
    stage.allow(1)
    stage.announce(0)
    stage.start()
    assert hanging.wait(PATIENCE_SECONDS)
    stage.finish()
    over.set()
    assert stage.raised is None
    assert stage.groups() == []


def test_a_worker_that_waits_for_a_full_server_can_be_stopped(stage: Stage) -> None:
    stands_in(Full(stage.store), stage.buffer)
    stage.allow(1)
    stage.announce(0)
    stage.start()
    eventually(lambda: stage.heartbeat().get("waiting", {}).get("kind") == "server")
    stage.finish()
    assert stage.raised is None
    assert stage.told("stopped")[0].groups == 0


def test_tickets_become_groups_of_their_number_in_one_batch(stage: Stage) -> None:
    stage.allow(3)
    stage.announce(0)
    stage.start()
    eventually(lambda: len(stage.groups()) == 3)
    stage.finish()
    assert stage.raised is None
    assert stage.sampler.batches == [["0", "1", "2"]]
    assert stage.groups() == ["counting.0", "counting.1", "counting.2"]
    entries = sorted(stage.store.read_pool(), key=lambda entry: entry.group_id)
    info = entries[1].info
    assert (info.env, info.prompt_id, info.planned_size, info.worker) == ("counting", "1", 2, "w-0")
    assert [(r.rollout_id, r.length, r.prompt_tokens, r.loss_tokens, r.reward) for r in info.rollouts] == [
        ("counting.1/0", 3, 1, 2, 1.0),
        ("counting.1/1", 3, 1, 2, 1.0),
    ]
    assert {(r.min_version, r.max_version) for r in info.rollouts} == {(0, 0)}
    pushed = stage.told("group")
    assert sorted(event.group_id for event in pushed) == ["counting.0", "counting.1", "counting.2"]
    assert (pushed[0].version, pushed[0].rollouts, pushed[0].tokens, pushed[0].reward) == (0, 2, 6, 1.0)
    (ended,) = stage.told("stopped")
    assert (ended.groups, ended.rollouts, ended.failed_groups) == (3, 6, 0)


def test_a_worker_whose_env_has_no_share_of_a_step_says_who_has_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits() -> Waiting | None:
        return Waiting.of(stage.heartbeat().get("waiting"))

    monkeypatch.setattr("rlbuffer.worker.loop.DRAIN_LOOK_SECONDS", 0.1)
    stage.start()
    stage.announce(0)
    eventually(lambda: (its := waits()) is not None and its.kind is Wait.TICKET)
    stage.store.set_config({"budgets": {"math": 0.75, "code": [[1, 0.25], [9, 0.2]]}}, "digest")
    eventually(lambda: (its := waits()) is not None and its.kind is Wait.NO_SHARE and its.detail == "math, code")


def test_a_worker_waits_for_the_first_version_and_for_tickets_and_says_so(stage: Stage) -> None:
    stage.start()
    eventually(lambda: stage.told("waiting"))
    assert stage.told("waiting")[0].kind == Wait.WEIGHTS
    assert stage.sampler.loads == []
    stage.announce(0)
    eventually(lambda: stage.told("waiting")[-1].kind == Wait.TICKET)
    eventually(lambda: stage.heartbeat().get("waiting", {}).get("kind") == "ticket")
    stage.allow(1)
    eventually(lambda: stage.groups() == ["counting.0"])
    assert stage.sampler.loads == [0]


class Counted:
    """A store that counts how often it is asked for what an idle worker waits for, and told that it lives."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name in ("take_tickets", "ask", "policy", "meta", "heartbeat"):
            self.calls[name] += 1
        return getattr(self._store, name)


def test_a_worker_without_tickets_asks_ever_less_often_and_still_ends_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "pauses_between_asks", lambda: iter((0.1, 0.2, 3600.0)))
    store = stands_in(Counted(stage.store), stage.buffer)
    stage.announce(0)
    stage.start()
    eventually(lambda: store.calls["ask"] == 1)
    eventually(lambda: (stage.heartbeat().get("waiting") or {}).get("kind") == Wait.TICKET)
    stage.finish()  # it does not sleep an hour
    assert stage.raised is None
    assert (store.calls["take_tickets"], store.calls["ask"]) == (2, 1)
    assert store.calls["policy"] <= 4


@pytest.fixture
def idle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The store of a worker that has waited for long as soon as it begins; its thread waits for late asks for ever."""
    monkeypatch.setattr(loop, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "LATE_SECONDS", 3600.0)
    monkeypatch.setattr(loop, "pauses_between_asks", lambda: repeat(loop.SOON_SECONDS))
    store = stands_in(Counted(stage.store), stage.buffer)
    monkeypatch.setattr(loop, "together", lambda pause, now: store.calls.update(["together"]) or 2 * pause)
    stage.announce(0)
    return store


def asks_on(store: Counted) -> None:
    """Waits until a worker that asks now has asked twice more: what it was told by then it has told."""
    asked = store.calls["ask"]
    eventually(lambda: store.calls["ask"] > asked + 2)


def test_one_request_of_an_idle_worker_tells_of_it_and_sees_versions_and_a_drain(stage: Stage, idle: Counted) -> None:
    stage.start()
    asks_on(idle)
    before = idle.calls.copy()
    asks_on(idle)
    stage.store.ask_drain()
    eventually(lambda: stage.heartbeat().get("waiting", {}).get("kind") == "draining")
    assert set(idle.calls - before) == {"ask", "together"}
    stage.announce(1)
    eventually(lambda: stage.heartbeat()["version"] == 1)
    stage.finish()
    assert stage.sampler.loads == [0, 1]
    assert stage.raised is None


def test_a_worker_with_groups_in_flight_beats_for_itself_however_long_it_waits_for_more(
    stage: Stage, idle: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batched, "traits", SamplerTraits(is_exact=True))
    stage.sampler.gate.clear()
    stage.allow(1)
    stage.start()
    eventually(stage.sampler.sampling.is_set)
    before = idle.calls.copy()
    eventually(lambda: idle.calls["take_tickets"] > before["take_tickets"] + 2)
    eventually(lambda: idle.calls["heartbeat"] > before["heartbeat"] + 2)
    assert idle.calls["ask"] == before["ask"]
    stage.announce(1)
    stage.sampler.gate.set()
    eventually(lambda: stage.sampler.version == 1)


def test_an_idle_worker_whose_heartbeat_is_not_taken_sends_it_by_itself(
    stage: Stage, idle: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = stage.store.ask
    monkeypatch.setattr(stage.store, "ask", lambda *args, **values: replace(ask(*args, **values), is_heard=False))
    stage.start()
    asks_on(idle)
    beats = idle.calls["heartbeat"]
    eventually(lambda: idle.calls["heartbeat"] > beats + 2)


def test_a_worker_of_a_run_that_drains_says_so_while_it_waits(stage: Stage) -> None:
    stage.announce(0)
    stage.allow(2)
    stage.store.ask_drain()
    stage.allow(2)  # whatever the leader says
    stage.start()
    eventually(lambda: stage.heartbeat().get("waiting", {}).get("kind") == "draining")
    assert stage.groups() == []
    stage.store.ask_undrain()
    stage.allow(2)
    eventually(stage.groups)


def test_what_is_sampled_is_sampled_by_the_version_that_is_current_then(stage: Stage) -> None:
    stage.announce(0)
    stage.start()
    eventually(lambda: stage.sampler.loads == [0])
    for version in (1, 2):
        stage.announce(version)
        stage.allow(version)
        eventually(lambda expected=version: len(stage.groups()) == expected)
    stage.finish()
    assert [entry.info.rollouts[0].max_version for entry in stage.store.read_pool()] == [1, 2]
    assert stage.sampler.loads == [0, 1, 2]


def test_weights_that_cannot_be_loaded_leave_the_old_version_sampling(stage: Stage) -> None:
    stage.sampler.bad_versions = {1}
    stage.announce(0)
    stage.start()
    eventually(lambda: stage.sampler.loads == [0])
    stage.announce(1)
    eventually(lambda: stage.told("trouble"))
    assert stage.told("trouble")[0].text == "version 1: bad; version 0 goes on sampling"
    stage.allow(1)
    eventually(lambda: len(stage.groups()) == 1)
    assert stage.store.read_pool()[0].info.rollouts[0].max_version == 0
    eventually(lambda: "version 1: bad" in str(stage.heartbeat().get("problems")))
    stage.sampler.bad_versions = set()
    eventually(lambda: stage.told("version")[-1].version == 1)  # tried again after a while


def test_a_scoring_failure_costs_its_group_only_and_gives_its_ticket_back(stage: Stage) -> None:
    stage.env.scores = {"1": [ValueError("no verdict")]}
    stage.allow(3)
    stage.announce(0)
    stage.start()
    eventually(lambda: len(stage.groups()) == 3)
    stage.finish()
    assert stage.groups() == ["counting.0", "counting.1", "counting.2"]
    assert stage.told("group")[-1].group_id == "counting.1"
    assert stage.troubles()[0] == "group counting.1 abandoned: prompt 1: ValueError: no verdict"
    (ended,) = stage.told("stopped")
    assert (ended.groups, ended.rollouts, ended.failed_groups) == (3, 6, 1)
    beat = stage.heartbeat()
    assert beat["failed_groups"] == 1
    assert [(problem["kind"], problem["count"]) for problem in beat["problems"]] == [("env_fails", 1)]


@pytest.mark.parametrize(
    ("error", "said"), [(SamplerUnavailable("it has died"), 2), (SamplerBusy("429", seconds=0.2), 1)]
)
def test_each_death_of_a_sampler_that_has_worked_is_said_and_that_it_is_busy_once(
    stage: Stage, error: Exception, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "FIRST_PAUSE_SECONDS", 0.2)
    failing, sample = [1, 1, 0, 1, 0, 0], stage.sampler.sample

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if failing and failing.pop(0):
            raise error
        return sample(*args, **kwargs)

    monkeypatch.setattr(stage.sampler, "sample", sometimes)
    stage.allow(3)
    stage.announce(0)
    stage.start(groups_in_flight=1)
    eventually(lambda: len(stage.groups()) == 3)
    stage.finish()
    assert [line.level for line in stage.told("trouble")].count("WARNING") == said


def test_stopping_while_sampling_gives_all_tickets_back_at_once(stage: Stage) -> None:
    stage.sampler.gate.clear()
    stage.allow(3)
    stage.announce(0)
    stage.start()
    assert stage.sampler.sampling.wait(PATIENCE_SECONDS)
    other = stage.buffer.writer("w-1")
    assert other.take("counting", 3, timeout_seconds=0.0) == []
    stage.finish()
    assert stage.groups() == []
    assert [ticket.number for ticket in other.take("counting", 3, timeout_seconds=0.0)] == [0, 1, 2]


def test_tickets_stay_out_however_long_sampling_takes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WORKER_TICKET_SECONDS", 0.3)
    stage.sampler.gate.clear()
    stage.allow(2)
    stage.announce(0)
    stage.start()
    assert stage.sampler.sampling.wait(PATIENCE_SECONDS)
    other = stage.buffer.writer("w-1")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert other.take("counting", 1, timeout_seconds=0.0) == []
        time.sleep(0.02)
    stage.sampler.gate.set()
    eventually(lambda: stage.groups() == ["counting.0", "counting.1"])


def test_a_run_in_another_epoch_makes_the_worker_start_afresh(stage: Stage) -> None:
    stage.announce(5)
    stage.start()
    eventually(lambda: stage.sampler.loads == [5])
    stage.store.client.hset(stage.store.keys.meta, "epoch", 77)  # what a rewind does: new epoch, older version
    stage.store.client.delete(stage.store.keys.policy)
    stage.store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0)
    stage.attempt = stage.store.trainer().number
    stage.announce(2)
    stage.allow(1)
    eventually(lambda: stage.told("restart"))
    stage.allow(2)
    eventually(lambda: len(stage.groups()) >= 1)
    assert stage.raised is None
    assert stage.sampler.loads[-1] == 2
    assert {entry.info.rollouts[0].max_version for entry in stage.store.read_pool()} == {2}


def test_an_env_that_the_model_cannot_answer_ends_the_worker(stage: Stage) -> None:
    stage.sampler.vocab_size = 10
    stage.announce(0)
    stage.start()
    stage.thread.join(PATIENCE_SECONDS)  # type: ignore[union-attr]
    assert isinstance(stage.raised, ConfigError)
    assert str(stage.raised) == "env counting uses 13 token ids, the model of version 0 knows 10"


def test_groups_that_are_ready_together_go_in_one_call_and_a_bad_one_costs_itself_alone(stage: Stage) -> None:
    in_flight = GroupsInFlight.__new__(GroupsInFlight)
    noted: list[str] = []
    in_flight.refusal = ""
    in_flight._writer = stage.buffer.writer("w-0")
    in_flight._difficulty = SimpleNamespace(note=lambda group: noted.append(group.group_id))  # type: ignore[assignment]
    large = {"large": b"x" * (5 << 20)}
    groups = [make_group(seed=n, env="counting", metadata=large if n == 2 else {}) for n in range(1, 5)]
    in_flight._ready = deque((group, Future()) for group in groups)
    waited = [stored for _, stored in in_flight._ready]
    assert waited[3].cancel()
    in_flight._store_ready()
    in_flight._store_ready()  # the others' turn: nothing is left
    assert [type(stored.exception()) for stored in waited[:3]] == [type(None), InvalidRollout, type(None)]
    assert noted == stage.groups() == ["counting.1", "counting.3"]


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_prompt_that_is_turned_away_while_others_are_served_fails_as_its_own_group(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    sample = Batched.sample

    async def refusing(self: Batched, prompt: Any, **rest: Any) -> Any:
        if prompt[0] == 0:
            raise error_of_status(status, f"it answers {status}")
        return await sample(self, prompt, **rest)

    stage.sampler.vocab_size = 1000  # as many prompts
    monkeypatch.setattr(Batched, "sample", refusing)
    monkeypatch.setattr(groups_in_flight, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(faults, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(faults, "LONGEST_PAUSE_SECONDS", 0.02)
    stage.allow(200)
    stage.announce(0)
    stage.start()
    eventually(lambda: any("counting.0 " in t and "is left out" in t for t in stage.troubles()))
    stage.finish()
    assert stage.raised is None
    assert "counting.0" not in stage.groups()
    assert sum("group counting.0 " in trouble for trouble in stage.troubles()) == LAST_FAILURE
    assert stage.heartbeat()["failures"][type(error_of_status(status, "")).__name__] >= LAST_FAILURE
    left = stage.buffer.writer("w-1").take("counting", 200, timeout_seconds=0.0)
    assert 0 not in [ticket.number for ticket in left], "its ticket is closed"


@pytest.mark.parametrize("reason", ["abort", "short"])
def test_a_prompt_that_a_server_aborts_for_ever_is_left_out_while_others_are_served(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """ "short": it says null, and the completion is not whole."""
    for module in (groups_in_flight, faults):
        monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(faults, "LONGEST_PAUSE_SECONDS", 0.02)
    state = {"number": torch.zeros(2)}
    with HoldingEngine() as engine:
        engine.finish_reasons[tuple(VCopy().prompt(0).tokens.tolist())] = reason
        stage.allow(400, env="vcopy")
        stage.announce(publish(tmp_path, 0, state=state, config={"vocab_size": 13}, keep=1))
        stage.start(env="vcopy", sampler="openai", sampler_options={"servers": [engine.url]}, self_check="never")
        eventually(lambda: any("vcopy.0 " in t and "is left out" in t for t in stage.troubles()))
        stage.finish()
    assert stage.raised is None
    assert "vcopy.0" not in stage.groups()
    assert "vcopy.1" in stage.groups()
    assert sum("group vcopy.0 " in trouble for trouble in stage.troubles()) == LAST_FAILURE


def test_a_sampler_that_serves_nobody_fails_no_group_however_often_it_is_asked(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refusing(prompts: Any, **rest: Any) -> Any:
        asked.append(len(prompts))
        raise error_of_status(503, "it answers 503")

    monkeypatch.setattr(stage.sampler, "sample", refusing)
    monkeypatch.setattr(faults, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(faults, "LONGEST_PAUSE_SECONDS", 0.02)
    stage.allow(1)
    stage.announce(0)
    stage.start()
    eventually(lambda: len(asked) > 3 * LAST_FAILURE**2)
    stage.finish()
    assert stage.heartbeat()["failed_groups"] == 0


def test_a_worker_compares_what_it_starts_with_and_what_is_the_first_to_take_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads rightly at its start may not in place."""
    compared: list[int] = []

    async def check(sampler: Any, policy: PolicyVersion, *_: Any) -> float:
        compared.append(policy.version)
        if policy.version == 1 and compared.count(1) == 1:
            raise SamplerUnavailable("the engine is away")
        if policy.version == 1:
            raise WrongLogprobs("not those of the published weights")
        return 0.0

    monkeypatch.setattr("rlbuffer.worker.samplers.selfcheck.check_sampler", check)
    monkeypatch.setattr("rlbuffer.worker.versions.RELOAD_SECONDS", 0.1)
    stage.allow(1)
    stage.announce(0)
    stage.start(self_check="always")
    eventually(lambda: stage.groups() == ["counting.0"])
    stage.announce(1)
    eventually(lambda: stage.raised is not None)
    assert isinstance(stage.raised, WrongLogprobs)
    assert compared == [0, 1, 1]


@pytest.mark.parametrize("error", [AttributeError("'int' object has no attribute 'tokens'"), WrongLogprobs("a nan")])
def test_a_sampler_of_the_users_own_that_fails_its_check_is_named_with_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def check(*_: Any) -> float:
        raise error

    monkeypatch.setattr("rlbuffer.worker.samplers.selfcheck.check_sampler", check)
    stage.allow(0)
    stage.announce(0)
    stage.start(self_check="always", sampler="own_samplers:Own")
    eventually(lambda: stage.raised is not None)
    assert isinstance(stage.raised, WrongLogprobs)
    for part in ("own_samplers:Own", str(error), f"({__file__}:"):
        assert part in str(stage.raised)


@pytest.mark.parametrize("error", [WeightsError("the version's files are gone"), SamplerUnavailable("it is away")])
def test_a_check_that_finds_no_weights_or_no_engine_is_made_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checks = iter([error])

    async def check(*_: Any) -> float:
        for first in checks:
            raise first
        return 0.0

    monkeypatch.setattr("rlbuffer.worker.samplers.selfcheck.check_sampler", check)
    monkeypatch.setattr("rlbuffer.worker.versions.RELOAD_SECONDS", 0.1)
    stage.allow(1)
    stage.announce(0)
    stage.start(self_check="always", sampler="own_samplers:Own")
    eventually(lambda: stage.groups() == ["counting.0"] or stage.raised)
    assert stage.raised is None


def test_a_worker_compares_no_version_after_the_second(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    async def check(sampler: Any, policy: PolicyVersion, *_: Any) -> float:
        compared.append(policy.version)
        return 0.0

    monkeypatch.setattr("rlbuffer.worker.samplers.selfcheck.check_sampler", check)
    stage.allow(0)
    stage.start(self_check="always")
    for version in range(4):
        stage.announce(version)
        eventually(lambda: stage.heartbeat().get("version") == version)  # noqa: B023 - called at once
    assert compared == [0, 1]
