"""Failed attempts from the push to the pull, on a real server: trained by nobody, accounted, and shown to people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from daemon_runs import pulled

import rlbuffer
from rlbuffer.client.exporting import export_groups
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server

Call = Callable[..., tuple[int, str, str]]
REWARDS = [0.0, 1.0, 0.25, 0.0, 1.0, 0.7, 0.1, 0.9]
CONFIG = rlbuffer.BatcherConfig(64, step_groups=1, order="oldest_first", min_group_size=2)
FAILED = {2: rlbuffer.Failure("timeout", "no answer within 30 s"), 5: rlbuffer.Failure("tool", "404 \x1b[2J")}


@pytest.fixture
def buffer(redis_url: str, run_name: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(redis_url, run=run_name) as made:
        yield made


def group_of(number: int, failed: dict[int, rlbuffer.Failure]) -> rlbuffer.Group:
    group = make_group(env="a", size=8, rewards=REWARDS, lengths=[9] * 8, group_id=f"a.{number}")
    rollouts = tuple(replace(r, failure=failed.get(i)) for i, r in enumerate(group.rollouts))
    return replace(group, rollouts=rollouts)


def trained_by(step: rlbuffer.Step) -> dict[str, bytes]:
    """Rollout -> its advantages, bit by bit."""
    its = {}
    for mb in step:
        for sample, advantages in zip(mb.samples, mb.unpack(mb.advantages), strict=True):
            its[sample.rollout_id] = advantages.tobytes()
    return its


def test_six_of_eight_train_as_a_group_of_six_and_two_are_accounted_as_failed(
    buffer: rlbuffer.Buffer, redis_url: str, run_name: str
) -> None:
    step = pulled(buffer, CONFIG, group_of(0, FAILED))
    with rlbuffer.connect(redis_url, run=f"{run_name}-alone") as other:
        whole = group_of(0, {})
        kept = tuple(rollout for i, rollout in enumerate(whole.rollouts) if i not in FAILED)
        alone = pulled(other, CONFIG, replace(whole, rollouts=kept, planned_size=6))
    assert trained_by(step) == trained_by(alone)
    assert len(trained_by(step)) == 6
    assert (step.rollouts, step.normalizers, step.damaged) == (6, alone.normalizers, ())
    account = buffer.ledger().total()
    assert (account.pushed, account.packed, account.dropped, account.pending) == (
        (8, 72),
        (6, 54),
        {"failed": (2, 18)},
        (0, 0),
    )
    report = buffer.verify()
    assert report.ok, report


def test_a_group_of_which_all_failed_is_dropped_and_holds_nobody_up(buffer: rlbuffer.Buffer) -> None:
    every = dict.fromkeys(range(8), FAILED[2]) | {5: FAILED[5]}
    pulled(buffer, CONFIG, group_of(0, every), group_of(1, {}))
    assert buffer.ledger().total().dropped == {"failed": (8, 72)}
    (view,) = buffer.groups("state:dropped")
    assert (view.reason, view.detail, view.rollouts, view.reward) == ("failed", "timeout 7, tool 1", 8, None)
    assert buffer.verify().ok


def test_a_rollout_that_came_again_is_seen_once(buffer: rlbuffer.Buffer) -> None:
    whole = replace(group_of(0, FAILED), planned_size=8)
    first = replace(whole, rollouts=whole.rollouts[:6])
    again = replace(whole, rollouts=(whole.rollouts[1], whole.rollouts[5], *whole.rollouts[6:]))
    pulled(buffer, CONFIG, first, again)
    detail = buffer.group("a.0")
    members = [(member.rollout_id, member.left_out) for member in detail.members]
    assert sorted(members) == [(f"a.0/{i}", "failed" if i in FAILED else "") for i in range(8)]
    assert buffer.ledger().total().dropped.keys() == {"failed", "duplicate"}
    exported = [rollout.rollout_id for push in export_groups(buffer, "", []) for rollout in push.rollouts]
    assert sorted(exported) == sorted(rollout.rollout_id for push in (first, again) for rollout in push.rollouts)


def test_a_part_of_which_all_failed_is_seen_with_its_group(buffer: rlbuffer.Buffer) -> None:
    whole = replace(group_of(0, dict.fromkeys((6, 7), FAILED[5])), planned_size=8)
    parts = [replace(whole, rollouts=whole.rollouts[:6]), replace(whole, rollouts=whole.rollouts[6:])]
    pulled(buffer, CONFIG, *parts)
    detail = buffer.group("a.0")
    assert {member.rollout_id: member.left_out for member in detail.members} == {
        f"a.0/{i}": "failed" if i > 5 else "" for i in range(8)
    }
    assert detail.view.detail == "left out: 2 failed (tool 2)"
    exported = [push.rollouts for push in export_groups(buffer, "", [])]
    assert sorted(exported, key=len) == sorted((part.rollouts for part in parts), key=len)


@pytest.mark.parametrize("is_packed", [False, True])
def test_people_see_who_failed_and_why(
    buffer: rlbuffer.Buffer, redis_url: str, run_name: str, typed: Call, is_packed: bool
) -> None:
    if is_packed:
        pulled(buffer, CONFIG, group_of(0, FAILED))
    else:
        buffer.writer("outside").push(group_of(0, FAILED))
    at = ("--redis", redis_url, "--run", run_name)
    code, out, _ = typed("inspect", "a.0", *at)
    assert code == 0
    assert f"group a.0   {'◆ packed in step 1' if is_packed else '● ready'}   env a\n" in out
    assert ("left out: 2 failed (timeout 1, tool 1)" if is_packed else "failed: timeout 1, tool 1") in out
    assert [kind for kind in ("failed: timeout ", "failed: tool ") if kind not in out] == []
    code, out, _ = typed("inspect", "a.0/5", *at)
    assert "failed: tool: 404 \\x1b[2J" in out
    assert "\x1b" not in out
    code, out, _ = typed("inspect", "a.0", "--json", *at)
    members = {its["rollout_id"]: its for its in json.loads(out)["members"]}
    assert {name: its["failure"] for name, its in members.items() if its["failure"]} == {
        f"a.0/{i}": failure._asdict() for i, failure in FAILED.items()
    }
    assert [(members[f"a.0/{i}"]["reward"], members[f"a.0/{i}"]["left_out"]) for i in FAILED] == [
        (None, "failed" if is_packed else "")
    ] * 2
    (exported,) = export_groups(buffer, "", [])
    assert (exported.rollouts, exported.planned_size) == (group_of(0, FAILED).rollouts, 8)
