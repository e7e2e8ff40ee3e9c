"""The batcher against entries that nobody pushed, a server that was away, and another leader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import waits
from daemon_runs import Served, start_trainer
from logged import Logged
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.daemon.reporter import Reporter
from rlbuffer.packing import further_columns
from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.step_plan import Drop
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.store.records import LeaderRead
from rlbuffer.store.viewer import Viewer
from rlbuffer_cli.commands.alive import heard

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)


def test_what_somebody_must_cure_is_told_once_a_minute(run: Run) -> None:
    logged, reporter = Logged("rlbuffer.daemon"), Reporter(run.store)
    for count, env in enumerate(("a", "a", "b", "a"), start=1):
        reporter.report(None, dict, others=[Problem(kind=Trouble.ENV_FAILS, env=env, count=count)])
    logged.close()
    assert [line.env for line in logged.told("trouble")] == ["a", "b"]


GARBAGE: list[Mapping[str, Any]] = [
    {"x": "y"},
    {"env": "a"},
    {"env": "a", "group": "g", "rollouts": "many", "tokens": "-3", "key": "k", "metadata": b"\xff\x00"},
    {"env": "a b\n", "group": "\xff" * 3000, "key": "k", "rollouts": "9" * 6000, "tokens": "9" * 17, "metadata": b""},
    {"env": "", "group": "", "key": "", "rollouts": "", "tokens": "", "metadata": ""},
]


def test_entries_that_nobody_pushed_leave_the_pool_and_stop_nothing(served: Served) -> None:
    run = served.run
    for fields in GARBAGE:
        run.client.xadd(run.store.keys.pool, dict(fields))
    run.push("a.0")
    without_key = {k: v for k, v in run.client.xrange(run.store.keys.pool)[-1][1].items() if k != b"key"}
    run.client.xadd(run.store.keys.pool, without_key | {b"group": b"a.1"})
    served.serve(CONFIG)
    served.wait_for(lambda: len(served.said("drop", reason="invalid")) == len(GARBAGE) + 1)
    assert [entry.group_id for entry in run.pool()] == ["a.0"]
    assert not served.errors
    assert all(len(str(record["group_id"])) <= 128 for record in run.store.history())


def test_a_server_that_was_away_while_an_operator_asked_is_a_loss_all_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading everything again for an operator, a leader goes on with the trainer's word, which may be lost by then."""
    store = served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"))
    look, known, away = store.take_look, store.meta().asked, []

    def away_once(*args: Any, **options: Any) -> LeaderRead:
        found = look(*args, **options)
        if found.meta.asked != known and not away:
            store.connection.losses += 1
            away.append(True)
        return found

    monkeypatch.setattr(store, "take_look", away_once)
    served.run.push("a.0")
    entries = served.run.pool()
    drop = Drop(group_id="a.0", env="a", reason="operator", rollouts=2, tokens=entries[0].tokens, entry_ids=("x",))
    served.run.store.drop_pending([(drop, entries)])
    served.wait_for(lambda: served.said("leader", state="lost"))
    assert "was away: everything is read from it again" in served.said("leader", state="lost")[0]["reason"]


def test_a_standby_that_leaves_does_not_speak_for_the_leader(served: Served) -> None:
    served.serve(CONFIG)
    sentence = served.wait_for(lambda: waits.said(served.run.store))
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("leader", state="standby"))
    served.stop(1)
    assert waits.said(served.run.store) == sentence


def test_a_batcher_that_has_stopped_is_not_alive_until_another_leads(
    served: Served, typed: Callable[..., tuple[int, str, str]]
) -> None:
    def ask() -> tuple[int, str]:
        code, out, _ = typed("alive", "batcher", "--redis", served.run.url, "--run", served.run.store.run)
        return code, out

    def is_heard() -> bool:
        return ask()[0] == 0

    served.serve(CONFIG)
    served.wait_for(lambda: "leader" in served.run.store.heartbeats("batcher"))
    code, out = ask()
    assert (code, "when it stopped" in out) == (0, False)
    if served.run.url.startswith("redis://"):  # else the quick way does not know the server
        assert heard("batcher", run=served.run.store.run, redis=served.run.url, config=None) is not None
    served.stop()
    code, out = ask()
    assert (code, out.endswith(" ago, when it stopped\n")) == (1, True)
    served.serve(CONFIG)
    served.wait_for(is_heard)


def test_a_batcher_that_has_failed_is_not_alive(served: Served) -> None:
    """A function of the user's own that fails ends it: it says so, and does not lead any more."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("broken")

    store = served.serve(CONFIG)
    served.wait_for(lambda: "leader" in served.run.store.heartbeats("batcher"))
    store.take_look = fail
    served.wait_for(lambda: served.errors, checks_errors=False)
    assert served.run.store.heartbeats("batcher")["leader"]["stopped"] is True


def rollouts_of(step: rlbuffer.Step) -> set[str]:
    return {sample.rollout_id for micro_batch in step for sample in micro_batch.samples}


def test_a_push_whose_columns_do_not_go_with_the_others_is_dropped_and_the_step_comes(served: Served) -> None:
    run = served.run
    start_trainer(run)
    run.push("a.0", lengths=[8, 8], columns=[{"x": np.zeros((8, 2), np.float32)}] * 2)
    run.push("a.1", lengths=[8], columns=[{"x": np.zeros((8, 3), np.float32)}])
    run.push("a.2", lengths=[8, 8], columns=[{"x": np.zeros((8, 2), np.float32)}] * 2)
    served.serve(CONFIG)
    (drop,) = served.wait_for(lambda: served.said("drop", reason="invalid"))
    assert drop["detail"] == "column x is float32 [T, 3], but [T, 2] in most rollouts of its step"
    served.wait_for(lambda: run.store.meta().step == 1)
    assert run.store.ledger().envs["a"].dropped["invalid"] == (1, 8)
    assert run.store.verify().ok


def test_all_ranks_have_the_columns_of_the_step_though_only_one_has_rollouts_with_them(served: Served) -> None:
    run = served.run
    start_trainer(run, world_size=2)
    run.push("a.0", lengths=[60], columns=[{"x": np.ones((60, 2), np.int16)}])
    run.push("a.1", lengths=[60])
    served.serve(CONFIG)
    served.wait_for(lambda: run.store.meta().step == 1)
    readers = [Reader(run.again(), rank=rank, world_size=2, timeout_seconds=20) for rank in (0, 1)]
    steps = [reader.pull(1) for reader in readers]
    assert len(set.union(*map(rollouts_of, steps))) == 2
    kinds = [{name: (a.dtype, a.shape[1:]) for name, a in mb.columns.items()} for step in steps for mb in step]
    assert kinds == [{"x": (np.dtype("<i2"), (2,))}] * 2
    assert sorted(int(np.sum(mb.columns["x"])) for step in steps for mb in step) == [0, 120]
    assert [step.damaged for step in steps] == [(), ()]
    for reader in readers:
        reader.close()


def test_a_rollout_that_disagrees_with_the_trainer_s_declaration_is_masked_alike_on_replay_and_said(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = served.run
    start_trainer(run)
    run.push("a.0", lengths=[20], columns=[{"x": np.zeros((20, 3), np.float32)}])
    run.push("a.1", lengths=[20])
    served.serve(CONFIG)
    served.wait_for(lambda: run.store.meta().step == 1)
    monkeypatch.setattr(further_columns, "SPECS", dict(further_columns.SPECS))
    further_columns.register_column("x", fill=0, dtype="f4", shape=(2,))
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    first, again = reader.pull(1), reader.pull(1)
    assert first.damaged == again.damaged == ("a.0/0",)
    told = [record.getMessage() for record in caplog.records if record.name == "rlbuffer.client.reader"]
    said = [message for message in told if "of its rollouts" in message]
    assert said == 2 * said[:1]
    assert "1 of its rollouts of step 1" in said[0]
    assert "a.0/0 of group a.0, env a: column x is float32 [T, 3]" in said[0]
    assert digest_step(first) == digest_step(again)
    assert all(mb.columns["x"].shape[1:] == (2,) for mb in first)
    reader.close()


def test_a_full_server_is_what_the_batcher_says_it_waits_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"used_memory": 3 * 2**20, "maxmemory": 3 * 2**20}
    monkeypatch.setattr(Viewer, "server", lambda store: store.connection.describe() | facts)
    start_trainer(served.run)
    served.serve(CONFIG)
    full = served.wait_for(lambda: waits.problem(served.run.store, Trouble.MEMORY))
    assert "3.0 of 3.0 MiB" in full.detail
