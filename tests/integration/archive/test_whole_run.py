"""`inspect` on a run whose old steps have left the server: every view reads on in the archive."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import Person, browse
from store_runs import Run
from test_archive_files import archived, settled

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer_cli.web.server import Pages
from rlbuffer_cli.whole_run import WholeRun

Call = Callable[..., tuple[int, str, str]]
STEPS, KEPT = 6, 4


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of six steps with a group each; the first four are in the archive alone."""
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    settled(made)
    for i in range(STEPS):
        group = make_group(env="a", size=2, version=i, group_id=f"a.{i}", rewards=[i / 10, 0.05])
        spoken = tuple(replace(r, text=f"said {i}/{n}") for n, r in enumerate(group.rollouts))
        made.sequence += 1
        made.store.push(
            replace(group, rollouts=spoken),
            producer="w",
            incarnation="u",
            sequence=made.sequence,
            epoch=made.meta.epoch,
        )
        made.commit()
    archived(made, tmp_path / "archive")
    made.train(STEPS - 1, oldest_kept=KEPT)
    made.store.retire(KEPT)
    assert [header.step for header in made.store.headers()] == [KEPT + 1, STEPS]
    yield made
    made.close()


@pytest.fixture
def call(run: Run, typed: Call) -> Call:
    return lambda *arguments: typed(*arguments, "--redis", run.url, "--run", run.store.run)


def test_steps_of_the_archive_stand_behind_those_of_the_server(call: Call) -> None:
    code, out, err = call("inspect", "steps", "--json", "--archive", "archive")
    assert (code, [json.loads(line)["step"] for line in out.splitlines()]) == (0, [6, 5, 4, 3, 2, 1]), err
    code, out, _ = call("inspect", "steps", "--json")
    assert (code, [json.loads(line)["step"] for line in out.splitlines()]) == (0, [6, 5])


def test_a_retired_step_shows_what_it_showed_on_the_server(run: Run, call: Call, tmp_path: Path) -> None:
    code, out, err = call("inspect", "step:5")
    assert code == 0, err
    archived(run, tmp_path / "later")
    run.train(STEPS, oldest_kept=STEPS)
    run.store.retire(STEPS)
    code, again, err = call("inspect", "step:5", "--archive", "later")
    assert (code, again) == (0, out), err


def test_a_retired_step_without_an_archive_says_where_it_could_come_from(run: Run, call: Call) -> None:
    for where in (("step:2",), ("step:2", "--json")):
        code, out, err = call("inspect", *where)
        assert (code, out) == (1, "")
        assert "step 2 " in err
        assert "--archive DIR" in err
    assert "has no step 9: the last committed one is 6." in call("inspect", "step:9", "--archive", "archive")[2]


def test_the_batcher_says_where_the_archive_is(run: Run, call: Call, tmp_path: Path) -> None:
    run.store.heartbeat("batcher", "leader", {"archive": str(tmp_path / "archive")})
    code, out, err = call("inspect", "a.1")
    assert (code, "said 1/0" in out) == (0, True), err
    run.store.heartbeat("batcher", "leader", {"archive": str(tmp_path / "not-written-yet")})
    assert call("inspect", "steps")[0] == 0


def test_a_filter_that_names_retired_steps_finds_their_groups(call: Call) -> None:
    code, out, err = call("inspect", "--where", "step<=5 rollout.reward<0.06", "--json", "--archive", "archive")
    groups = [json.loads(line) for line in out.splitlines()]
    assert (code, [(g["group_id"], g["state"], g["step"]) for g in groups]) == (
        0,
        [("a.4", "trained", 5), *((f"a.{i}", "trained", i + 1) for i in (3, 2, 1, 0))],
    ), err
    code, out, _ = call("inspect", "--where", "step:2 text:1/1", "--archive", "archive", "--plain")
    assert (code, "a.1" in out, "a.2" in out) == (0, True, False)
    code, out, _ = call("inspect", "--where", "step<=5", "--json", "--limit", "2", "--archive", "archive")
    assert [json.loads(line)["group_id"] for line in out.splitlines()] == ["a.4", "a.3"]
    code, out, _ = call("inspect", "--where", "step:2 state:dropped", "--json", "--archive", "archive")
    assert (code, out) == (0, "")
    assert call("inspect", "--where", "env:a", "--json", "--archive", "archive")[1].count("\n") == STEPS - KEPT


def test_the_browser_walks_from_the_steps_to_a_rollout_that_left_the_server(run: Run, tmp_path: Path) -> None:
    async def tour(person: Person) -> None:
        await person.press("t")
        await person.sees("step", "6")
        await person.press("G", "enter")  # the oldest, step 1
        await person.sees("step 1", "a.0")
        await person.press("enter")
        await person.sees("said 0/")
        await person.press("escape", "escape", "escape", "slash", *"step:3", "enter")
        await person.sees("a.2", "trained")
        await person.press("enter")
        await person.sees("a.2/0", "a.2/1")

    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        browse(buffer, tour, size=(120, 40), archive=str(tmp_path / "archive"))


def test_the_web_pages_read_the_archive_that_was_named(run: Run, tmp_path: Path) -> None:
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        pages = Pages(WholeRun(buffer, str(tmp_path / "archive")), 0)
        with pages:
            shown = {
                name: "".join(pages.page(name, query) or ())
                for name, query in (
                    ("step", {"n": "2"}),
                    ("group", {"id": "a.1"}),
                    ("rollout", {"id": "a.1", "rollout": "a.1/1"}),
                    ("steps", {}),
                    ("groups", {"where": "step:2"}),
                )
            }
    assert "a.1/" in shown["step"]
    assert "a.1/1" in shown["group"]
    assert "said 1/1" in shown["rollout"]
    assert "step?n=1" in shown["steps"]
    assert "group?id=a.1" in shown["groups"]


def test_a_group_of_the_archive_is_the_same_in_a_list_and_by_its_id_and_files_are_read_once(
    run: Run, tmp_path: Path
) -> None:
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        whole = WholeRun(buffer, str(tmp_path / "archive"))
        (listed,) = whole.details("step:3", 10)
        assert listed.view == whole.group("a.2").view
        assert [m.rollout_id for m in listed.members] == ["a.2/0", "a.2/1"]
        first = whole.archive()
        assert whole.archive() is first  # nothing is read twice while the files are the same
        archived(run, tmp_path / "archive")
        run.step("a.9")
        archived(run, tmp_path / "archive")
        again = whole.archive()
        assert again is not None
        assert again is not first
        assert again.steps[-1].step == STEPS + 1
