"""`config apply`, `drop`, `env pause --all`, `serve --resume | --fresh`: what they say, and exit codes.

In memory, with a daemon in a thread where one is needed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import waits
from daemon_runs import Served
from looks import allowances
from store_runs import Run

import rlbuffer
from rlbuffer.daemon.config_changes import config_digest
from rlbuffer.errors import SchemaMismatch
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait
from rlbuffer.testing import make_group
from rlbuffer.wire.jsonl import line_of

Call = Callable[..., tuple[int, str, str]]

OLD = "[batcher]\nrow_tokens = 64\nstep_groups = 2\n"
NEW = "[batcher]\nrow_tokens = 64\nstep_groups = 2\nmax_age = 3\n"


@pytest.fixture
def served(run: Run) -> Iterator[Served]:
    daemons = Served(run)
    yield daemons
    daemons.close()


@pytest.fixture
def call(run: Run, typed: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
        monkeypatch.setenv(name, value)  # what `rlbuffer worker` gives its process
    (tmp_path / "old.toml").write_text(OLD)
    (tmp_path / "new.toml").write_text(NEW)

    return lambda *words, on="": typed(*words, "--redis", run.url, "--run", on or run.store.run)


def config() -> rlbuffer.BatcherConfig:
    return rlbuffer.BatcherConfig(64, step_groups=2)


def set_config(run: Run) -> None:
    run.lead()
    run.store.set_config(config().as_dict(), config_digest(config()))
    run.store.release_lease()


# -- config apply ------------------------------------------------------------------------------------------------------
def test_apply_shows_what_differs_and_stores_it_where_nobody_leads(run: Run, call: Call) -> None:
    set_config(run)
    name = run.store.run
    code, out, err = call("config", "apply", "old.toml")
    assert (code, f'"{name}"' in out, "revision 1" in out, err) == (0, True, True, "")
    code, out, err = call("config", "apply", "new.toml")
    assert (code, out.startswith("batcher.max_age: 1 -> 3   new.toml:4 "), err) == (0, True, "")
    assert "no batcher is at work" in out
    assert run.store.meta().wanted["max_age"] == 3
    assert "settings revision 1; others are asked for and not taken yet\n" in call("inspect")[1]


def test_apply_waits_until_the_leader_has_taken_it(served: Served, call: Call) -> None:
    served.serve(config())
    served.wait_for(lambda: served.said("ready"), 20)
    code, out, err = call("config", "apply", "new.toml", "--json")
    assert (code, err) == (0, "")
    change, outcome = map(json.loads, out.splitlines())
    assert (change["setting"], change["old"], change["new"], change["source"]) == (
        "batcher.max_age",
        1,
        3,
        "new.toml:4",
    )
    assert (outcome["run"], outcome["state"], outcome["revision"]) == (served.run.store.run, "taken", 2)
    code, out, _ = call("config", "apply", "new.toml")
    assert (code, "revision 2" in out) == (0, True)


def test_apply_refuses_a_bad_file_and_what_the_batcher_refuses(served: Served, call: Call, tmp_path: Path) -> None:
    served.serve(config())
    served.wait_for(lambda: served.said("ready"), 20)
    (tmp_path / "bad.toml").write_text("[batcher]\nrow_tokens = 64\nmax_agee = 3\n")
    code, _, err = call("config", "apply", "bad.toml")
    assert (code, err.startswith("Error: bad.toml:3  batcher.max_agee ")) == (3, True)
    (tmp_path / "own.toml").write_text(OLD + 'order = "nowhere_at_all:pick"\n')
    code, _, err = call("config", "apply", "own.toml")
    assert code == 3
    assert (f'"{served.run.store.run}" refused' in err, "batcher.order = " in err) == (True, True)
    assert served.run.store.meta().revision == 1


def test_apply_gives_up_on_a_leader_that_does_not_act(run: Run, call: Call) -> None:
    set_config(run)
    run.lead()
    code, _, err = call("config", "apply", "new.toml", "--timeout", "0.3")
    assert (code, "within 0.3 s" in err) == (5, True)


def test_apply_says_when_somebody_else_changes_the_settings_again_before_they_are_taken(run: Run, call: Call) -> None:
    set_config(run)
    run.lead()  # it leads, and takes nothing
    theirs = rlbuffer.BatcherConfig(64, step_groups=2, max_age=5)

    def come_second() -> None:
        for _ in range(1200):
            seen = run.store.meta()
            if seen.wanted_digest:
                run.store.ask_config(theirs.as_dict(), config_digest(theirs), seen=seen)
                return
            time.sleep(0.05)

    other = threading.Thread(target=come_second)
    other.start()
    code, out, err = call("config", "apply", "new.toml", "--timeout", "60")
    other.join(timeout=60)
    assert (code, "(revision 1) were changed again meanwhile" in err) == (1, True)
    assert out.startswith("batcher.max_age: 1 -> 3 ")
    assert run.store.meta().wanted["max_age"] == 5


@pytest.mark.parametrize("asks", [(), ("--yes",), ("--json",), ("--json", "--yes")], ids=" ".join)
def test_apply_takes_nothing_back_to_its_default_unasked(
    run: Run, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: tuple[str, ...]
) -> None:
    """In force: max_age 4, an env's own, two budgets. The file names none of them, or a part; a variable names one."""
    theirs = '[batcher]\nrow_tokens = 64\nstep_groups = 2\nmax_age = 4\norder = "oldest_first"\n'
    envs = "[batcher.envs.a]\nmax_age = 6\nmin_group_size = 2\n[batcher.budgets]\na = 0.25\nb = 0.75\n"
    (tmp_path / "all.toml").write_text(theirs + envs)
    assert call("config", "apply", "all.toml", "--yes")[0] == 0
    run.lead()
    wanted = run.store.meta().wanted
    assert wanted["max_age"] == 4
    run.store.set_config(wanted, run.store.meta().wanted_digest, settles=run.store.meta().wanted_digest)
    run.store.release_lease()
    few = "[batcher]\nrow_tokens = 64\nstep_groups = 3\n[batcher.envs.a]\nmin_group_size = 2\n"
    (tmp_path / "few.toml").write_text(few + "[batcher.budgets]\na = 1.0\n")
    monkeypatch.setenv("RLBUFFER_BATCHER__ORDER", "newest_first")
    code, out, err = call("config", "apply", "few.toml", *asks)
    if "--yes" in asks:
        assert (code, err) == (0, "")
        assert run.store.meta().wanted["max_age"] == 1
        return
    assert (code, run.store.meta().wanted) == (2, {})
    named = "batcher.budgets.b (0.75 -> None), batcher.envs.a.max_age (6 -> None), batcher.max_age (4 -> 1)"
    assert f"takes 3 settings of run {json.dumps(run.store.run)} back to the default: {named} (not named in " in err
    assert "batcher.step_groups" in out


@pytest.mark.parametrize("asks", [(), ("--yes",)])
def test_apply_without_a_file_is_refused(run: Run, call: Call, tmp_path: Path, asks: tuple[str, ...]) -> None:
    set_config(run)
    before = run.store.meta()
    code, _, err = call("config", "apply", *asks)
    assert (code, "`rlbuffer config apply FILE`" in err) == (2, True)
    assert run.store.meta() == before
    (tmp_path / "rlbuffer.toml").write_text(OLD)  # found in the folder, as every command finds it
    assert call("config", "apply", *asks)[0] == 0


# -- drop --------------------------------------------------------------------------------------------------------------
def test_drop_says_what_would_go_and_does_it_only_when_told(run: Run, call: Call) -> None:
    name = run.store.run
    run.push("a.0", lengths=[500, 500])
    run.push("b.0", lengths=[500, 700])
    code, out, err = call("drop", "--where", "env:a,b")
    assert (code, out) == (2, "")
    assert f'2 groups (4 rollouts, 2.2k tokens) of run "{name}" for good (a 1, b 1)' in err
    assert call("drop", "--where", "env:a", "--json")[:2] == (2, "")
    assert len(run.pool()) == 2
    code, out, _ = call("drop", "--where", "env:a", "--yes")
    assert (code, "1 group (2 rollouts, 1k tokens)" in out) == (0, True)
    code, out, _ = call("drop", "--where", "env:a", "--yes")
    assert (code, "no pending group" in out) == (0, True)
    record = json.loads(call("drop", "--where", "env:b", "--yes", "--json")[1])
    assert (record["schema"], record["envs"]) == (
        "rlbuffer.drop/1",
        {"b": {"groups": 1, "rollouts": 2, "tokens": 1200}},
    )
    assert (record["groups"], record["rollouts"], record["tokens"], record["dropped_pushes"]) == (1, 2, 1200, 1)
    assert run.store.ledger().total().dropped == {"operator": (4, 2200)}
    listed = call("inspect", "--where", "state:dropped reason:operator", "--json")[1]
    assert [json.loads(line)["group_id"] for line in listed.splitlines()] == ["b.0", "a.0"]
    assert call("verify")[0] == 0


@pytest.mark.parametrize("where", ["", "evn:a", "state:gone"])
def test_drop_refuses_filters_that_say_nothing(call: Call, where: str) -> None:
    code, out, _ = call("drop", "--where", where, "--yes")
    assert (code, out) == (2, "")


# -- env pause --all ---------------------------------------------------------------------------------------------------
def test_a_run_whose_envs_are_all_paused_gives_no_tickets_until_they_are_resumed(served: Served, call: Call) -> None:
    run = served.run
    number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    served.serve(config())
    served.wait_for(lambda: served.said("ready"), 20)
    run.store.report(number, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)
    served.wait_for(lambda: allowances(run.store), 20)
    code, out, err = call("env", "pause", "--all")
    assert (code, out, err) == (
        0,
        f'run "{run.store.run}" gives no more tickets, and comes to rest. Back: rlbuffer env resume --all\n',
        "",
    )
    assert run.store.take_tickets("a", 1, ttl_seconds=60) == []
    served.wait_for(lambda: waits.kind(run.store) is Wait.DRAINING, 20)
    assert "draining since " in call("inspect")[1]
    assert json.loads(call("top", "--once", "--json")[1])["draining_since"] > 1e9
    assert [call("env", "resume", "--all")[1].split('" ')[1] for _ in range(2)] == [
        "gives tickets again\n",
        "gave tickets already\n",
    ]
    served.wait_for(lambda: run.store.take_tickets("a", 1, ttl_seconds=60), 20)


# -- serve -------------------------------------------------------------------------------------------------------------
def test_serve_resumes_only_what_is_there_and_begins_only_what_is_not(run: Run, call: Call) -> None:
    name = run.store.run
    code, _, err = call("serve", "--resume", on="other")
    assert (code, "'other'" in err, f"Runs there: {name}." in err) == (1, True, True)
    run.step("a.0")
    run.push("a.1")
    code, _, err = call("serve", "--fresh")
    assert (code, "1 step and 2 pending rollouts" in err, f"runs reset {name} --yes" in err) == (1, True, True)
    assert call("serve", "--fresh", "--resume")[0] == 2


# -- every command, a run of another schema ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "--resume"],
        ["inspect"],
        ["verify"],
        ["drop", "--where", "env:a", "--yes"],
        ["env", "pause", "--all"],
        ["env", "resume", "--all"],
        ["env", "pause", "a"],
        ["env", "resume", "a"],
        ["runs", "rewind", "0", "--keep-pending"],
        ["runs", "rewind", "0"],
        ["config", "apply", "old.toml"],
        ["push", "g.jsonl"],
        ["worker", "--env", "vcopy"],
    ],
)
def test_every_command_refuses_a_run_of_another_schema(run: Run, call: Call, arguments: list[str]) -> None:
    Path("g.jsonl").write_text(line_of(make_group(env="a", group_id="g")) + "\n")
    run.client.hset(run.store.keys.meta, "schema", 99)
    before = run.control_keys()
    code, out, err = call(*arguments)
    assert (code, out) == (1, "")
    assert f"{run.store.run!r} was written with schema 99, " in err
    assert run.control_keys() == before


def test_a_trainer_refuses_it_when_its_reader_is_made(run: Run) -> None:
    run.client.hset(run.store.keys.meta, "schema", 99)
    with rlbuffer.connect(run.url, run=run.store.run) as buffer, pytest.raises(SchemaMismatch) as caught:
        buffer.reader(0, 1)
    assert (caught.value.exit_code, caught.value.schema) == (1, 99)


def test_reset_refuses_it_too_and_the_list_of_runs_goes_on(run: Run, call: Call) -> None:
    run.client.hset(run.store.keys.meta, "schema", 99)
    code, _, err = call("runs", "reset", run.store.run, "--yes")
    assert code == 1
    assert "was written with schema 99" in err
    code, out, err = call("runs", "list")
    assert (code, err) == (0, "")
    assert out.startswith(f"{run.store.run} ! ")
    assert "was written with schema 99" in out
    assert json.loads(call("runs", "list", "--json")[1])["schema_of_run"] == 99


def test_the_list_of_runs_goes_on_after_one_with_a_damaged_trainer(run: Run, call: Call) -> None:
    run.client.hset(run.store.keys.trainer, mapping={"number": 1, "world_size": "2.0"})
    code, out, err = call("runs", "list")
    assert (code, err) == (0, "")
    why = f"{run.store.keys.trainer} of run {run.store.run!r} holds '2.0' as world_size, which is no whole number"
    cure = "start the trainer again, which writes a new one"
    assert " ".join(out.split()).startswith(f"{run.store.run} ! {why}: {cure}")
    assert why in json.loads(call("runs", "list", "--json")[1])["damaged"]
