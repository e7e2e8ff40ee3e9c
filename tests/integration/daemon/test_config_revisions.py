"""Settings that change while a run is at work: revisions, standbys, two operators at once, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from daemon_runs import Served, start_trainer
from store_runs import Run

import rlbuffer
from rlbuffer.daemon.config_changes import config_digest
from rlbuffer.errors import ConfigChanged, ConfigError
from rlbuffer.records.policy_version import PolicyVersion

pytest_plugins = ("store_fixtures",)

OLD = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)
NEW = rlbuffer.BatcherConfig(64, step_groups=3, max_age=8)


def ask(run: Run, config: rlbuffer.BatcherConfig) -> str:
    return run.store.ask_config(config.as_dict(), config_digest(config), seen=run.store.meta())


def groups_of(served: Served, step: int) -> tuple[str, ...]:
    header: Any = served.wait_for(lambda: served.run.store.wait_step(step, block_seconds=0), 20)
    return tuple(header.group_ids)


def test_a_leader_takes_new_settings_between_two_steps_and_loses_nothing(served: Served) -> None:
    run = served.run
    start_trainer(run)
    for n in range(3):
        run.push(f"a.{n}")
    served.serve(OLD)
    assert len(groups_of(served, 1)) == 2
    assert ask(run, NEW) == "asked"
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    run.push("a.3")
    run.push("a.4")
    assert len(groups_of(served, 2)) == 3
    assert [header.revision for header in run.store.headers()] == [1, 2]
    assert [header.step for header in run.store.headers()] == [1, 2]
    (event,) = served.said("config", state="taken")
    assert (event["revision"], event["step"], event["changes"]) == (2, 2, ("batcher.step_groups: 2 -> 3",))
    meta = run.store.meta()
    assert (meta.wanted_digest, meta.config["step_groups"]) == ("", 3)
    assert run.store.verify().ok


def test_a_forming_group_stays_whole_over_a_change_of_settings(served: Served) -> None:
    run = served.run
    start_trainer(run)
    run.push("a.0", size=2, planned_size=4, rollout_ids=["a.0/0", "a.0/1"])
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=8))
    served.wait_for(lambda: served.said("ready"))
    ask(run, rlbuffer.BatcherConfig(64, step_groups=1, max_age=7))
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    run.push("a.0", size=2, planned_size=4, rollout_ids=["a.0/2", "a.0/3"])
    assert groups_of(served, 1) == ("a.0",)
    assert next(iter(run.store.headers())).rollouts == 4


def test_without_a_leader_the_settings_wait_for_one_that_starts_with_them(served: Served) -> None:
    run = served.run
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    served.stop()
    assert ask(run, NEW) == "asked"
    served.serve(OLD)
    error = served.wait_for(lambda: served.errors, checks_errors=False)[0]
    assert isinstance(error, ConfigError)
    assert "batcher.step_groups: 3 -> 2" in str(error)
    served.stop()
    served.errors.clear()
    served.serve(NEW)
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    assert run.store.meta().wanted_digest == ""


def test_a_standby_leads_with_the_settings_that_the_run_has_by_then(served: Served) -> None:
    run = served.run
    start_trainer(run)
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    served.serve(OLD)
    served.wait_for(lambda: served.said("leader", state="standby"))
    ask(run, NEW)
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    served.stop(0)
    served.wait_for(lambda: len(served.said("ready")) == 2, 20)
    for n in range(3):
        run.push(f"a.{n}")
    assert len(groups_of(served, 1)) == 3
    assert run.store.meta().revision == 2


def test_a_standby_with_other_settings_is_refused_before_it_stands_by(served: Served) -> None:
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    served.serve(NEW)
    error = served.wait_for(lambda: served.errors, checks_errors=False)[0]
    assert "batcher.step_groups: 2 -> 3" in str(error)
    assert not served.said("leader", state="standby")


def test_a_process_that_follows_goes_on_with_the_settings_of_the_run(served: Served) -> None:
    run = served.run
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    ask(run, NEW)
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    served.stop()
    served.serve(OLD, follows=True)  # as the supervisor starts it again
    served.wait_for(lambda: len(served.said("ready")) == 2, 20)
    meta = run.store.meta()
    assert (meta.revision, meta.config["step_groups"]) == (2, 3)


def test_settings_that_replace_the_run_s_do_so_once_and_undo_nothing_that_came_later(served: Served) -> None:
    run = served.run
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    served.serve(NEW, replace_config=True)
    served.wait_for(lambda: served.said("leader", state="standby"))
    third = rlbuffer.BatcherConfig(64, step_groups=4, max_age=8)
    ask(run, third)
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    served.stop(0)
    served.wait_for(lambda: len(served.said("ready")) == 2, 20)
    assert run.store.meta().config["step_groups"] == 4  # it was started to replace the first ones
    served.stop(0)
    served.serve(NEW, replace_config=True)
    served.wait_for(lambda: run.store.meta().revision == 3, 20)
    assert run.store.meta().config["step_groups"] == 3


def test_the_second_of_two_operators_is_told_and_changes_nothing(run: Run) -> None:
    run.lead()
    run.store.set_config(OLD.as_dict(), config_digest(OLD))
    seen = run.store.meta()
    third = rlbuffer.BatcherConfig(64, step_groups=4, max_age=8)
    assert run.store.ask_config(NEW.as_dict(), config_digest(NEW), seen=seen) == "asked"
    assert run.store.ask_config(NEW.as_dict(), config_digest(NEW), seen=seen) == "asked"  # a lost reply, repeated
    with pytest.raises(ConfigChanged):
        run.store.ask_config(third.as_dict(), config_digest(third), seen=seen)
    assert run.store.meta().wanted["step_groups"] == 3
    assert run.store.ask_config(third.as_dict(), config_digest(third), seen=run.store.meta()) == "asked"
    assert ask(run, OLD) == "asked"  # what is in force takes the wish back
    meta = run.store.meta()
    assert (meta.wanted_digest, meta.revision) == ("", 1)
    assert ask(run, OLD) == "same"


def test_a_selector_that_cannot_be_imported_there_is_refused_and_the_old_settings_go_on(served: Served) -> None:
    run = served.run
    start_trainer(run)
    served.serve(OLD)
    served.wait_for(lambda: served.said("ready"))
    wrong = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, order="no_such_module_here:pick")
    ask(run, wrong)
    (event,) = served.wait_for(lambda: served.said("config", state="refused"), 20)
    assert "no_such_module_here" in event["reason"]
    meta = run.store.meta()
    assert (meta.revision, meta.wanted_digest, meta.config["order"]) == (1, "", "newest_first")
    assert meta.refused == f"{config_digest(wrong)} {event['reason']}"
    run.push("a.0")
    run.push("a.1")
    assert len(groups_of(served, 1)) == 2


def test_what_is_owed_cannot_be_counted_in_another_unit_once_there_are_steps(served: Served) -> None:
    run = served.run
    start_trainer(run)
    run.push("a.0")
    run.push("a.1")
    served.serve(OLD)
    groups_of(served, 1)
    ask(run, rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, unit="groups"))
    (event,) = served.wait_for(lambda: served.said("config", state="refused"), 20)
    assert event["reason"].startswith("batcher.unit")


def test_a_smaller_age_limit_drops_what_is_too_old_by_it_and_each_step_is_judged_by_its_own(served: Served) -> None:
    run = served.run
    attempt = start_trainer(run)
    for n in range(5):
        run.push(f"a.{n}", version=0)
    served.serve(OLD)
    groups_of(served, 1)
    run.store.report(attempt, epoch=run.meta.epoch, trained=1, digest="", oldest_kept=0)
    groups_of(served, 2)
    ask(run, rlbuffer.BatcherConfig(64, step_groups=2, max_age=0))
    served.wait_for(lambda: run.store.meta().revision == 2, 20)
    run.store.report(attempt, epoch=run.meta.epoch, trained=2, digest="", oldest_kept=0)
    run.store.announce(attempt, PolicyVersion(version=2))
    served.wait_for(lambda: served.said("drop", reason="stale"), 20)
    assert [header.revision for header in run.store.headers()] == [1, 1]
    assert run.store.verify().ok  # step 2 trained age 1, which its own rule allowed
