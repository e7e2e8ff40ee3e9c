"""What a stream's trainer was given and has not trained, wherever a person or a recovery meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from daemon_runs import Served
from rolled_back import Saved
from store_runs import Run

import rlbuffer
from rlbuffer.archive.check import check_archive
from rlbuffer.archive.library import Archive
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.exporting import export_groups
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import archiving
from rlbuffer.records.states import State
from rlbuffer.testing import make_group
from rlbuffer_cli.archived_run import detail_of

pytest_plugins = ("store_fixtures",)

STREAM = rlbuffer.BatcherConfig(1024, feeds="stream", max_age=3, lookahead=2)
SIZE = 3
Call = Callable[..., tuple[int, str, str]]


def opened(run: Run) -> Buffer:
    return run.closes(Buffer(run.again(), settings=RunSettings()))


def fed(run: Run, *, groups: int, version: int = 0) -> Stream:
    """A stream's trainer that has announced versions up to `version`, and groups that wait for it."""
    stream = opened(run).stream(timeout_seconds=60.0)
    stream.resume()
    for number in range(version + 1):
        stream.version(number)
    for number in range(groups):
        push(run, number, version=version)
    return stream


def push(run: Run, number: int, *, version: int = 0) -> None:
    group = make_group(env="a", group_id=f"a.{number}", size=SIZE, seed=number, version=version)
    opened(run).writer(f"w{number}").push(group)


def ids(taken: Taken) -> list[str]:
    return [rollout.rollout_id for rollout in taken.rollouts]


def account(run: Run) -> tuple[int, int, int]:
    """Rollouts pending and packed, trained, unused."""
    its = run.store.ledger().envs["a"]
    unused = its.dropped.get("unused", (0, 0))[0]
    assert its.dropped.keys() <= {"unused"}
    return its.pushed[0] - its.trained[0] - unused, its.trained[0], unused


def marks(members: object) -> dict[str, str]:
    return {member.rollout_id: str(member.left_out) for member in members}  # type: ignore[attr-defined]


@pytest.fixture
def told(served: Served, monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[Taken], Path]:
    """Three groups of a stream that are acknowledged: the second lacks a rollout, nothing of the third is trained."""
    monkeypatch.setattr(archiving, "FILE_SECONDS", 0.2)
    folder = served.run.home / "archive"
    served.serve(STREAM, settings=RunSettings(redis_url=served.run.url, archive={"dir": str(folder)}))
    stream = fed(served.run, groups=3, version=2)
    taken = list(islice(stream, 3))
    stream.trained(3, unused=[ids(taken[1])[0], *ids(taken[2])])
    return stream, taken, folder


def test_people_see_what_was_not_trained_of_a_group(
    served: Served, told: tuple[Stream, list[Taken], Path], typed: Call, tmp_path: Path
) -> None:
    run, (_, (whole, part, none), _) = served.run, told
    buffer, at = opened(run), ("--redis", run.url, "--run", run.store.run)
    views = {view.group_id: view for view in buffer.groups("state:trained")}
    assert {name: view.rollouts for name, view in views.items()} == {whole.group_id: SIZE, part.group_id: SIZE - 1}
    dropped = {view.group_id: view for view in buffer.groups("state:dropped")}
    assert {name: (view.reason, view.rollouts, view.step) for name, view in dropped.items()} == {
        part.group_id: ("unused", 1, 2),
        none.group_id: ("unused", SIZE, 3),
    }
    left = ids(part)[0]
    assert marks(buffer.group(part.group_id).members) == {name: "unused" * (name == left) for name in ids(part)}
    lost = buffer.group(none.group_id)
    assert (lost.view.state, lost.view.reason) == (State.DROPPED, "unused")
    assert marks(lost.members) == dict.fromkeys(ids(none), "unused")
    assert all(member.rollout is not None for member in lost.members)

    code, out, _ = typed("inspect", part.group_id, *at)
    assert (code, "left out: 1 unused" in out) == (0, True), out
    code, out, _ = typed("inspect", left, *at)
    assert (code, "given to the trainer, and not trained (unused)" in out) == (0, True), out
    code, out, _ = typed("inspect", part.group_id, "--json", *at)
    assert {its["rollout_id"]: its["left_out"] for its in json.loads(out)["members"]}[left] == "unused"
    for group in (part, none):
        page = tmp_path / f"{group.group_id}.html"
        assert typed("inspect", group.group_id, "--html", str(page), *at)[0] == 0
        assert "unused" in page.read_text()
    exported = [group.group_id for group in export_groups(buffer, "", [])]
    assert sorted(exported) == sorted(its.group_id for its in (whole, part, none))
    assert buffer.verify().ok


def test_the_archive_tells_it_when_the_server_has_let_go_of_it(
    served: Served, told: tuple[Stream, list[Taken], Path]
) -> None:
    stream, (whole, part, none), folder = told
    stream.checkpointed(3)
    served.wait_for(lambda: served.run.store.meta().retired == 3, seconds=60)
    served.stop()
    archive = Archive(folder)
    details = {its.group_id: detail_of(archive, archive.find(its.group_id)) for its in (whole, part, none)}
    left = ids(part)[0]
    assert marks(details[whole.group_id].members) == dict.fromkeys(ids(whole), "")
    assert marks(details[part.group_id].members) == {name: "unused" * (name == left) for name in ids(part)}
    assert marks(details[none.group_id].members) == dict.fromkeys(ids(none), "unused")
    views = [(its.view.state, its.view.rollouts, its.view.reason, its.view.age) for its in details.values()]
    assert views == [
        (State.TRAINED, SIZE, "", whole.age),
        (State.TRAINED, SIZE - 1, "", part.age),
        (State.DROPPED, SIZE, "unused", none.age),
    ]
    assert [member.rollout_id for member in archive.rollouts(2, left_out=True)] == [left]
    assert sorted(member.rollout_id for member in archive.rollouts(2)) == sorted(set(ids(part)) - {left})
    found = [(group.group_id, len(group.members)) for group in archive.all_groups()]
    assert found == [(its.group_id, SIZE) for its in (whole, part, none)]
    assert check_archive(archive).findings == ()


@pytest.mark.parametrize("are_committed", [False, True], ids=["pending again", "committed again"])
def test_a_recovery_counts_what_was_not_trained_as_unused(served: Served, are_committed: bool) -> None:
    """The server loses its newest writes, the acknowledgement among them, and hears of them from the trainer."""
    run = served.run
    served.serve(STREAM)
    stream = fed(run, groups=1)
    first = list(islice(stream, 1))
    stream.trained(1)
    if are_committed:
        push(run, 1)
        push(run, 2)
        served.wait_for(lambda: run.store.meta().step == 3)
    served.stop()
    for number in (3,) if are_committed else (1, 2):
        push(run, number)
    saved = Saved(run)
    served.serve(STREAM)
    taken = [*first, *islice(stream, 3 if are_committed else 2)]
    last = taken[-1].place
    unused = [ids(taken[1])[1], *ids(taken[2])]
    stream.trained(last, unused=unused)
    known = account(run)
    served.stop()
    saved.put_back()
    epoch = run.store.meta().epoch
    served.wait_for(lambda: run.store.trainer().claim, seconds=60)
    served.serve(STREAM)
    served.wait_for(lambda: run.store.meta().epoch > epoch, seconds=60)
    assert account(run) == known == (0, last * SIZE - len(unused), len(unused))
    assert {view.group_id: view.rollouts for view in opened(run).groups("reason:unused")} == {
        taken[1].group_id: 1,
        taken[2].group_id: SIZE,
    }
    groups = {name: amount for name, amount in _groups(run).items() if amount}
    assert groups == {"trained": last - 1, "dropped:unused": 1}
    assert opened(run).verify().ok
    push(run, 9)
    assert [its.group_id for its in islice(stream, 1)] == ["a.9"]
    stream.trained(last + 1)
    assert opened(run).verify().ok


def _groups(run: Run) -> dict[str, int]:
    """Fate -> groups of it, as the ledger counts them."""
    fields = {name.decode(): int(value) for name, value in run.client.hgetall(run.store.keys.ledger).items()}
    return {name[2 : -len(":groups")]: value for name, value in fields.items() if name.endswith(":groups")}
