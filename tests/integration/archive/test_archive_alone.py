"""`inspect --archive` where the run's server is gone: the archive is browsed by itself."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from browsing import LIVE_SECONDS, Person
from store_runs import Run
from test_archive_files import archived, settled
from test_trained_records import record

from rlbuffer.state.step_record import DRIFT_NUMBERS
from rlbuffer.testing import make_group
from rlbuffer_cli.archived_run import ArchivedRun, ArchiveFolder
from rlbuffer_cli.browse.app import Browser
from rlbuffer_cli.web.server import Pages

Call = Callable[..., tuple[int, str, str]]
STEPS = 4
ALONE = "showing the archive alone: "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The archive of a run of four steps of a group each, and of a dropped group; nothing else is left of it."""
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path, "math")
    settled(run)
    for step in range(1, STEPS + 1):
        group = make_group(env="a", size=2, version=step - 1, group_id=f"a.{step}", rewards=[step / 10, 0.0])
        run.push(replace(group, rollouts=tuple(replace(r, text=f"said {r.rollout_id}") for r in group.rollouts)))
        run.commit()
        record(run, step, 0.5, entropy=1.0, drift={"0": dict.fromkeys(DRIFT_NUMBERS, 1.0)})
    run.push("a.late", size=3, rewards=[0.0, 0.0, 0.0])
    run.drop("stale", run.pool())
    archived(run, tmp_path / "archive")
    run.close()
    return tmp_path / "archive"


def test_a_step_behind_the_trainers_last_record_is_packed(folder: Path, typed: Call) -> None:
    for file in folder.glob("trained-*"):
        rows = pq.read_table(file)
        pq.write_table(rows.filter(pc.less(rows["step"], STEPS)), file)
    for words, name, found in (
        (("--where", "state:packed"), "group_id", ["a.4"]),
        (("--where", "state:trained"), "group_id", ["a.3", "a.2", "a.1"]),
        (("steps", "--where", "state:packed"), "step", [4]),
        (("a.4",), "state", ["packed"]),
    ):
        code, out, err = typed("inspect", *words, "--json", "--archive", str(folder))
        assert (code, ids(out, name)) == (0, found), (words, err)


@pytest.mark.parametrize("archive", ["empty", "torn"])
def test_of_a_run_at_work_the_server_tells_what_an_archive_cannot(
    folder: Path, tmp_path: Path, typed: Call, archive: str
) -> None:
    """A batcher's first file is not written yet, or one of them is torn."""
    if archive == "torn":
        steps = next(folder.glob("steps-*"))
        steps.write_bytes(steps.read_bytes()[:100])
    else:
        folder = tmp_path / "none"
        folder.mkdir()
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path, "math")
    run.push("b.0")
    at = ("--archive", str(folder), "--redis", run.url)
    for words, shown in ((("--json",), "b.0"), (("b.0",), "group b.0"), (("processes", "--json"), "")):
        code, out, errors = typed("inspect", *words, *at)
        assert (code, shown in out) == (0, True), (words, out, errors)
    code, _, errors = typed("inspect", "steps", *at)
    assert (code, str(folder) in errors) == (1, True), errors
    run.close()


def test_groups_of_a_file_that_is_gone_are_left_out_and_the_others_are_there(folder: Path, typed: Call) -> None:
    (gone,) = folder.glob("rollouts-*-00000003-*")
    gone.unlink()
    code, out, err = typed("inspect", "--json", "--archive", str(folder))
    assert (code, ids(out, "group_id")) == (1, ["a.2", "a.1", "a.late"])
    assert err.count(f"{gone} is missing") == 1


def ids(out: str, name: str) -> list[object]:
    return [json.loads(line)[name] for line in out.splitlines()]


def test_groups_are_listed_without_a_server_those_of_steps_before_dropped_ones(folder: Path, typed: Call) -> None:
    code, out, err = typed("inspect", "--json", "--archive", str(folder))
    assert (code, ids(out, "group_id")) == (0, ["a.4", "a.3", "a.2", "a.1", "a.late"]), err
    assert err.startswith(f"{ALONE}nothing was ever stored under ")
    assert ids(typed("inspect", "--json", "--archive", str(folder), "--limit", "2")[1], "group_id") == ["a.4", "a.3"]
    for where, found in (
        ("state:dropped", ["a.late"]),
        ("reason:stale", ["a.late"]),
        ("step<3", ["a.2", "a.1"]),
        ("rollout.reward>0.25", ["a.4", "a.3"]),
        ("text:a.2/1", ["a.2"]),
        ("env:b", []),
    ):
        code, out, _ = typed("inspect", "--json", "--archive", str(folder), "--where", where)
        assert (code, ids(out, "group_id")) == (0, found), where
    code, out, err = typed("inspect", "--plain", "--archive", str(folder))
    assert code == 0
    assert out.startswith(f'run "math" in the archive {folder}\n')
    assert "steps 1 to 4" in " ".join(out.split())
    assert "dropped 3" in " ".join(out.split())
    assert f"rlbuffer inspect a.4 --archive {folder}" in err


def test_steps_drift_groups_rollouts_and_pages_are_read_without_a_server(folder: Path, typed: Call) -> None:
    place = ("--archive", str(folder))
    assert ids(typed("inspect", "steps", "--json", *place)[1], "step") == [4, 3, 2, 1]
    assert ids(typed("inspect", "drift", "--json", *place)[1], "step") == [4, 3, 2, 1]
    for words, said in (
        (("step:2",), "step 2   trained"),
        (("a.2",), "said a.2/0"),
        (("a.2/1",), "said a.2/1"),
        (("a.2/0", "a.2/1"), "a.2/1: reward 0.000"),
        (("a.late",), "stale"),
    ):
        code, out, err = typed("inspect", "--plain", *words, *place)
        assert (code, said in out) == (0, True), (words, out, err)
    assert typed("inspect", "--html", "all.html", *place)[0] == 0
    assert "said a.3/0" in Path("all.html").read_text()


@pytest.mark.parametrize("table", ["processes", "envs", "problems", "open"])
def test_what_the_server_alone_knows_is_said_to_be_so(folder: Path, typed: Call, table: str) -> None:
    code, out, err = typed("inspect", table, "--archive", str(folder))
    assert (code, out) == (1, "")
    assert (
        "of run 'math' are known to its server alone, which is not there; its archive has groups, steps, drift" in err
    )


def test_the_run_is_that_of_the_archive_whichever_run_the_server_has(folder: Path, typed: Call, tmp_path: Path) -> None:
    other = Run(f"memory://{uuid.uuid4().hex}", tmp_path, "other")
    try:
        server = ("--redis", other.url, "--archive", str(folder))
        code, out, err = typed("inspect", "--json", *server)
        assert (code, len(out.splitlines())) == (0, STEPS + 1)
        assert f"{ALONE}there is no run 'math' on " in err
        code, _, err = typed("inspect", "--json", "--run", "other", *server)
        assert (code, f'--archive {folder} is of run "math", not of "other"' in err) == (2, True)
        again = Run(other.url, tmp_path, "math")
        again.push("a.9")
        again.close()
        other.push("b.1")
        code, out, err = typed("inspect", "--json", *server)
        assert (code, ids(out, "group_id")) == (0, ["a.9"]), err
        assert ALONE not in err
    finally:
        other.close()


def test_the_browser_walks_through_an_archive_without_a_server(folder: Path) -> None:
    async def tour(person: Person) -> None:
        await person.sees("a.4", "a.late", "steps 1 to 4")
        await person.press("t")
        await person.sees("step", "4")
        await person.press("enter")
        await person.sees("a.4/0")
        await person.press("escape", "escape", "w")
        await person.sees("known to its server alone")
        await person.press("escape", "slash", *"step:2", "enter")
        await person.sees("a.2", "trained")
        await person.press("enter")
        await person.sees("said a.2/0")

    async def run() -> None:
        app = Browser(ArchivedRun(ArchiveFolder(folder)))
        app.browsed.live_seconds = LIVE_SECONDS
        async with app.run_test(size=(120, 40)) as pilot:
            await tour(Person(app, pilot))

    asyncio.run(run())


def test_web_pages_of_an_archive_have_the_tables_that_it_has(folder: Path) -> None:
    with Pages(ArchivedRun(ArchiveFolder(folder)), 0) as pages:

        def shown(name: str, **query: str) -> str:
            return "".join(pages.page(name, query) or ())

        overview = shown("")
        assert "steps <b" in overview or "1 to 4" in overview
        assert ">steps</a>" in overview
        assert ">processes</a>" not in overview
        assert "group?id=a.2" in shown("groups")
        assert "said a.2/1" in shown("rollout", id="a.2", rollout="a.2/1")
        assert "a.3/" in shown("step", n="3")
        assert "step?n=4" in shown("drift")
