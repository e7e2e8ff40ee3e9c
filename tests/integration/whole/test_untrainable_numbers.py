"""Numbers that nobody can train: what an earlier version let through is found, dropped, and can be taken back."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from daemon_runs import Served
from store_runs import Run, changed, plan_of

from rlbuffer.client.reader import Reader
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import PayloadError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store import leader
from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer.wire.metadata import ROW
from rlbuffer_cli.main import main

pytest_plugins = ["store_fixtures"]

CONFIG = BatcherConfig(row_tokens=64, step_groups=1, max_age=1000, flat="keep")
REWARD_AT = 20
"""Offset at which the reward of a metadata row begins."""


def push_as_before(run: Run, group_id: str, rewards: list[float]) -> None:
    """Pushes a group with these rewards as a version without a limit would have written it."""
    group = make_group(group_id=group_id, env="a", rewards=[0.0] * len(rewards))
    original = payload.encode_push(group)
    values = msgpack.unpackb(original.metadata[:-4])
    rows = bytearray(values[11])
    for i, reward in enumerate(rewards):
        struct.pack_into("<d", rows, i * ROW.size + REWARD_AT, reward)
    values[11] = bytes(rows)
    data = msgpack.packb(values)
    data += struct.pack(">I", zlib.crc32(data))
    run.push(group_id, rewards=[0.0] * len(rewards))
    ((entry_id, fields),) = run.client.xrevrange(run.store.keys.pool, count=1)
    run.client.xdel(run.store.keys.pool, entry_id)
    run.client.xadd(run.store.keys.pool, {**fields, b"metadata": data})


def a_trainer(run: Run) -> int:
    number = run.store.attempt(uuid="t", world_size=2, resume_step=0).number
    run.store.announce(number, PolicyVersion(version=0))
    return number


def test_a_pending_push_whose_rewards_cannot_be_trained_is_dropped_and_the_run_goes_on(
    run: Run, served: Served
) -> None:
    push_as_before(run, "a.0", [-1.7e308, 1.7e308])
    run.push("a.1")
    store = served.serve(CONFIG)
    a_trainer(run)
    header = served.wait_for(lambda: run.store.meta().step >= 1 and run.store.wait_step(1, block_seconds=0))
    assert header.group_ids == ("a.1",)
    (record,) = [r for r in store.history() if r["event"] == "drop"]
    assert (record["group_id"], record["reason"]) == ("a.0", "invalid")
    assert "is beyond the limit of 1e+12, either sign" in record["detail"]
    served.stop()
    assert run.store.verify().ok


def commit_as_before(run: Run, monkeypatch: pytest.MonkeyPatch, *, bad_header: bool = False) -> None:
    """Commits what is pending as a version would have that did not look at its numbers: advantages are infinite."""
    entries = run.pool()
    meta = run.store.meta()
    plan = plan_of(entries, meta.step + 1)
    plan = changed(plan, advantages=np.full(len(plan.rollouts), np.inf, np.float32))
    run.store.pin(plan.rollouts, {e.entry_id: e for e in entries})
    with monkeypatch.context() as patch:
        patch.setattr(leader, "check_numbers", lambda header, plan: None)
        if bad_header:
            record = leader.header_record
            patch.setattr(leader, "header_record", lambda *args: record(*args) | {"bytes": float("inf")})
        run.store.commit(plan, {e.entry_id: e for e in entries}, meta=meta, columns={}, state={})


@pytest.mark.parametrize("bad_header", [False, True], ids=["a part", "a header"])
@pytest.mark.parametrize("move", ["void", "rewind"])
def test_a_run_with_a_step_that_cannot_be_read_is_taken_back_and_goes_on(
    run: Run, served: Served, monkeypatch: pytest.MonkeyPatch, move: str, bad_header: bool
) -> None:
    run.step("a.0")
    run.train(1)
    run.push("a.1", version=1)
    commit_as_before(run, monkeypatch, bad_header=bad_header)
    run.step("a.2")
    reader = run.closes(Reader(run.again(), rank=0, world_size=2, timeout_seconds=5.0))
    with pytest.raises(PayloadError) as error:
        reader.pull(2)
    reader.close()
    what = "step header" if bad_header else "step part"
    assert str(error.value).startswith(f"step 2 of run {run.store.run!r} cannot be read: {what}: ")
    assert str(error.value).endswith(
        ". Take it back, and what follows it, with `rlbuffer runs rewind 1 --keep-pending`"
    )

    found = run.store.void_from(2, force=True) if move == "void" else run.store.rewind(1, force=True)
    assert found["steps"] == 2
    record = run.store.history()[0]
    assert [row[0] for row in record["groups"]] == ["a.2"]  # what can be read is listed, all is accounted for
    assert run.store.ledger().envs["a"].dropped["void"][0] == 4
    assert run.store.verify().findings == ()

    run.client.delete(run.store.keys.state)  # these steps were committed by hand, with no state of a batcher
    served.serve(CONFIG)
    run.meta = run.store.meta()
    group = make_group(group_id="a.9", env="a", version=1)
    run.store.push(group, producer="w", incarnation="again", sequence=1, epoch=run.meta.epoch)
    number = run.store.attempt(uuid="again", world_size=2, resume_step=1).number
    run.store.announce(number, PolicyVersion(version=1))
    header = served.wait_for(lambda: run.store.meta().step >= 2 and run.store.wait_step(2, block_seconds=0))
    assert header.group_ids == ("a.9",)
    served.stop()
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_step_that_could_never_be_read_is_not_committed(run: Run, number: float) -> None:
    run.lead()
    run.push("a.0")
    plan: dict[str, Any] = {"advantages": np.array([0.0, number], np.float32)}
    with pytest.raises(PayloadError, match=r"^step 1 is not committed, because it could never be read: .*not finite$"):
        run.commit(**plan)
    assert run.store.meta().step == 0


@pytest.mark.parametrize("bad_header", [False, True], ids=["a part", "a header"])
def test_inspect_shows_the_rest_of_a_run_with_a_step_that_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad_header: bool
) -> None:
    run.step("a.0")
    run.train(1)
    run.push("a.1", version=1)
    commit_as_before(run, monkeypatch, bad_header=bad_header)
    run.push("b.5", version=1)

    def inspect(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["inspect", *arguments, "--redis", run.url, "--run", run.store.run])
        return code, *capsys.readouterr()

    cure = f"Error: step 2 of run {run.store.run!r} cannot be read: "
    for arguments in ((), ("--json",)):
        code, out, err = inspect(*arguments)
        assert ("a.0" in out, "b.5" in out, "a.1" in out) == (True, True, False)
        assert (code, cure in err) == (1, True)
        assert err.endswith("with `rlbuffer runs rewind 1 --keep-pending`\n")
    assert inspect("envs")[0] == 0
    for known in ("a.0", "b.5"):
        code, out, _ = inspect(known)
        assert (code, known in out) == (0, True)
    code, _, err = inspect("a.1")  # it may be in the step that cannot be read
    assert (code, err.startswith(cure)) == (1, True)
