"""`runs list`, `rewind` and `reset` on runs that are there. In memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from every_role import EveryRole
from store_runs import Run

from rlbuffer.client.buffer import Buffer
from rlbuffer.errors import RunGone, ServerFull
from rlbuffer.store.producer import PushOrigin
from rlbuffer.store.worker import WorkerStore

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(run: Run) -> Run:
    for i in range(3):
        run.step(f"a.{i}")
    run.push("a.3", version=3)
    return run


@pytest.fixture
def call(made: Run, typed: Call) -> Call:
    return lambda *arguments: typed(*arguments, "--redis", made.url)


def test_runs_lists_what_the_server_holds(made: Run, call: Call) -> None:
    code, out, err = call("runs", "list")
    assert (code, err) == (0, "")
    head, row = out.splitlines()
    assert head.split() == ["run", "step", "trained", "pending", "rollouts", "opened"]
    assert row.split()[:4] == [made.store.run, "3", "0", "2"]
    record = json.loads(call("runs", "list", "--json")[1])
    assert (record["run"], record["step"], record["pending_rollouts"]) == (made.store.run, 3, 2)
    made.store.delete_run()
    assert call("runs", "list")[1].startswith("no runs on memory://")


def test_void_and_rewind_say_from_where_the_run_goes_on(made: Run, call: Call) -> None:
    name, epoch = made.store.run, made.meta.epoch
    code, out, _ = call("runs", "rewind", "2", "--keep-pending", "--run", name, "--yes")
    assert code == 0
    assert f"from step 2 in epoch {epoch + 1}; void: 1 step, 0 pending pushes." in out
    with pytest.raises(RunGone):
        made.store.attempt(uuid="t", world_size=1, resume_step=3)
    made.store.attempt(uuid="t", world_size=1, resume_step=2)
    assert made.store.trainer().checkpoint == 2
    made.client.hset(made.store.keys.trainer, "seen", 1)
    newer = made.home / "home" / "runs" / name / "checkpoints" / "step-00000002"
    newer.mkdir(parents=True)
    (newer.parent / "step-00000001").mkdir()
    for gone, names_newer in (("1 step, 1 pending push", True), ("0 steps, 0 pending pushes", False)):
        epoch += 1
        code, out, err = call("runs", "rewind", "1", "--run", name, "--yes")
        assert (code, f"from step 1 in epoch {epoch + 1}; void: {gone}." in out, err) == (0, True, "")
        assert (str(newer) in out) == names_newer
        if names_newer:
            newer.rmdir()
    code, _, err = call("runs", "rewind", "9", "--run", name)
    assert (code, "has no step 9: the last committed one is 1" in err) == (1, True)
    assert call("verify", "--run", name)[0] == 0


def test_a_trainer_at_work_is_ended_only_by_force(made: Run, call: Call) -> None:
    made.train(1)
    code, _, err = call("runs", "rewind", "1", "--run", made.store.run, "--yes")
    assert code == 1
    assert err.startswith(f"Error: the trainer of run {made.store.run!r} was seen 0.")
    assert err.endswith(" s ago: stop it first, or use --force, which ends it\n")
    assert call("runs", "rewind", "1", "--force", "--yes", "--run", made.store.run)[0] == 0


def test_reset_is_refused_while_processes_are_at_work_unless_it_is_forced(made: Run, call: Call) -> None:
    name = made.store.run
    made.store.heartbeat("worker", "math-0", {})
    made.store.heartbeat("scorer", "ref", {})
    code, _, err = call("runs", "reset", name, "--yes")
    assert (code, "batcher, scorer ref, worker math-0" in err, "--force" in err) == (1, True, True)
    assert made.store.meta().step == 3
    assert call("runs", "reset", name, "--yes", "--force")[0] == 0
    assert made.control_keys() == {}


@pytest.mark.parametrize("command", [("rewind", "1", "--run"), ("reset",)])
def test_a_run_whose_trainer_has_just_made_its_last_step_is_at_rest(
    made: Run, call: Call, command: tuple[str, ...]
) -> None:
    name = made.store.run
    made.train(1)
    trainer = made.store.trainer()
    made.store.heartbeat("rank", "0", {"step": 1})
    made.store.heartbeat("worker", "math-0", {"left": True})
    made.client.delete(made.store.keys.lease)
    assert call("runs", *command, name, "--yes")[0] == 1, "nobody knows yet"
    made.store.report(
        trainer.number, epoch=made.meta.epoch, trained=1, digest=trainer.digest, oldest_kept=0, finished=True
    )
    code, _, err = call("runs", *command, name, "--yes")
    assert code == 0, err


def test_groups_of_void_steps_are_listed_as_dropped(made: Run, call: Call) -> None:
    name = made.store.run

    def void() -> list[dict[str, Any]]:
        out = call("inspect", "--run", name, "--where", "reason:void", "--json")[1]
        return [json.loads(line) for line in out.splitlines()]

    assert call("runs", "rewind", "1", "--keep-pending", "--run", name, "--yes")[0] == 0
    assert [(r["group_id"], r["state"], r["rollouts"], r["detail"]) for r in void()] == [
        ("a.2", "dropped", 2, "step 3 was taken back"),
        ("a.1", "dropped", 2, "step 2 was taken back"),
    ]
    assert call("runs", "rewind", "1", "--run", name, "--yes")[0] == 0
    listed = void()
    assert (listed[0]["group_id"], listed[0]["detail"]) == ("a.3", "pending when the run was taken back to step 1")
    account = made.store.ledger().total()
    assert sum(r["rollouts"] for r in listed) == account.dropped["void"][0] == 6
    assert sum(r["tokens"] for r in listed) == account.dropped["void"][1]


# -- asked first -------------------------------------------------------------------------------------------------------
TAKEN_BACK = {
    (
        "runs",
        "rewind",
        "1",
        "--keep-pending",
    ): "back from step 3 to step 1 for good: it loses 2 groups (4 rollouts), 2 steps",
    ("runs", "rewind", "1"): "back from step 3 to step 1, with all that is pending, for good: it loses 3 groups "
    "(6 rollouts), 2 steps",
    ("runs", "rewind", "3"): "back from step 3 to step 3, with all that is pending, for good: it loses 1 group "
    "(2 rollouts), 0 steps",
    (
        "runs",
        "rewind",
        "0",
        "--keep-pending",
        "--force",
    ): "back from step 3 to step 0 for good: it loses 3 groups (6 rollouts), 3 steps, "
    "the use of 2 checkpoints of later steps",
    ("runs", "reset", "RUN"): "(3 steps, 2 pending rollouts) for good",
    ("drop", "--where", "env:a"): "drops 1 group (2 rollouts, ",
}


@pytest.mark.parametrize("answer", [None, "y", "n", ""])
@pytest.mark.parametrize("arguments", TAKEN_BACK, ids=" ".join)
def test_what_nobody_can_undo_is_asked_first_with_what_will_be_lost(
    made: Run, call: Call, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], answer: str | None
) -> None:
    """`answer`: what a person types at a terminal; None: there is nobody to ask."""
    if "--force" in arguments:
        for step in ("step-00000001", "step-00000003"):
            (made.home / "home" / "runs" / made.store.run / "checkpoints" / step).mkdir(parents=True)
    made.store.release_lease()
    before = made.control_keys()
    command = [argument.replace("RUN", made.store.run) for argument in arguments]
    if answer is not None:
        typed_in = io.StringIO(f"{answer}\n")
        monkeypatch.setattr(typed_in, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", typed_in)
    code, out, err = call(*command, "--run", made.store.run)
    assert TAKEN_BACK[arguments] in (err if answer is None else out)
    assert code == {None: 2, "y": 0}.get(answer, 1)
    assert answer is not None or "--yes" in err
    assert (made.control_keys() == before) == (answer != "y")


@pytest.mark.parametrize(
    "arguments", [("runs", "rewind", "1", "--keep-pending"), ("runs", "rewind", "1"), ("runs", "reset", "RUN")]
)
def test_what_will_be_refused_is_not_asked(
    made: Run, call: Call, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """A person says yes to what will be done: steps up to 2 are retired, and a batcher is at work."""
    made.client.hset(made.store.keys.meta, "retired", 2)
    before, typed_in = made.control_keys(), io.StringIO("y\n")
    monkeypatch.setattr(typed_in, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed_in)
    code, out, err = call(*[argument.replace("RUN", made.store.run) for argument in arguments], "--run", made.store.run)
    assert (code, "do it?" in out, made.control_keys() == before) == (1, False, True)
    assert ("are at work" if "reset" in arguments else "steps up to 2 of run") in err


def test_nothing_is_asked_where_nothing_would_be_lost(made: Run, call: Call) -> None:
    assert call("runs", "rewind", "3", "--run", made.store.run, "--yes")[0] == 0
    assert call("runs", "rewind", "3", "--run", made.store.run)[0] == 0
    code, _, err = call("runs", "rewind", "9", "--run", made.store.run)
    assert (code, "has no step 9" in err) == (1, True)


def test_a_file_that_a_full_server_takes_in_part_is_said_to_be_so_and_goes_on_from_there(
    made: Run, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rollout = {
        "tokens": [1, 2],
        "loss_mask": [False, True],
        "logprobs": [0.0, -0.5],
        "reward": 1.0,
        "version_spans": [[3, 1, 2]],
    }
    path = tmp_path / "groups.jsonl"
    groups = [{"group_id": f"g{n}", "env": "b", "prompt_id": "p", "planned_size": 1} for n in range(3)]
    path.write_text("".join(json.dumps(group | {"rollouts": [rollout]}) + "\n" for group in groups))
    push_from, is_full = WorkerStore._push_from, True

    def limited(store: EveryRole, source: PushOrigin, pushes: Sequence[Any], sequence: int) -> Any:
        room = max(0, 2 - sequence) if is_full else len(pushes)
        outcomes, error = push_from(store, source, pushes[:room], sequence) if room else ([], None)
        full = ServerFull("the server at memory:// refused: it is full")
        return outcomes, error or (full if room < len(pushes) else None)

    monkeypatch.setattr(WorkerStore, "_push_from", limited)
    monkeypatch.setattr(Buffer, "writer", partialmethod(Buffer.writer, patience_seconds=0.2))
    code, _, err = call("push", str(path), "--run", made.store.run)
    assert code == 4
    waiting, *rest = err.splitlines()
    assert waiting == "waiting: the server at memory:// refused: it is full"
    assert rest == [
        "Error: the server at memory:// refused: it is full",
        "  1 of 3 groups are stored; pushing the file again goes on from there",
    ]
    is_full = False
    code, out, _ = call("push", str(path), "--run", made.store.run)
    assert (code, out) == (0, f'{path}: 3 groups into run "{made.store.run}": 2 stored, 1 duplicate\n')


def test_reset_asks_for_yes_and_then_removes_everything(made: Run, call: Call) -> None:
    name = made.store.run
    made.store.release_lease()
    code, _, err = call("runs", "reset", name)
    assert code == 2
    message = f'Error: this removes run "{name}" (3 steps, 2 pending rollouts) for good: say so with --yes\n'
    assert err.endswith(message)
    code, out, _ = call("runs", "reset", name, "--yes")
    assert (code, out.startswith(f'run "{name}" (3 steps, 2 pending rollouts) is gone: ')) == (0, True)
    assert made.control_keys() == {}
    assert call("runs", "reset", name, "--yes")[0] == 1
