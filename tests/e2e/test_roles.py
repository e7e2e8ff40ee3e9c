"""A whole run as docs/guide/deploy.md has it: every process is a user of its own of deploy/users.acl, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path

from homes import Home
from own_server import OwnServer

from rlbuffer.store.server.binary import find_binary

USERS = Path(__file__).parents[2] / "deploy" / "users.acl"
SCORER = """
[score.ref]
model = "initial"
device = "cpu"
"""


def test_a_run_whose_processes_have_only_the_rights_of_their_roles(home: Home) -> None:
    """Takes a minute: all roles of a run, each a process of its own, until the run has trained its steps."""
    shutil.copy(USERS, home.path / "users.acl")
    path = home.config(steps=4, world_size=1)
    text = (
        path.read_text()
        .replace("[trainer]\n", "[trainer]\nloss = { kl_beta = 0.1 }\n")
        .replace("vocab_size = 16", "vocab_size = 13")
    )
    path.write_text(text + SCORER)
    options = {"aclfile": str(home.path / "users.acl")}
    with OwnServer(home.path / "own", options=options, program=str(find_binary().path)) as server:

        def as_user(role: str) -> None:
            address = server.url.replace("//", f"//{role}:CHANGE-{role}@")
            home.environment["RLBUFFER_REDIS_URL"] = home.url = address

        def says(role: str, *arguments: str | Path) -> str:
            as_user(role)
            ended = home.call(*arguments)
            assert ended.returncode == 0, ended.stdout + ended.stderr + home.logs()
            return ended.stdout

        as_user("operator")
        serving = home.start("serve", "--config", path, log="serve")
        home.wait_until(lambda: "serving" in home.printed() or "ready" in home.printed(), seconds=60, why="the batcher")
        as_user("worker")
        working = [home.start("worker", env, "--config", path, log=env) for env in ("vcopy", "repeat")]
        as_user("scorer")
        working.append(home.start("score", "ref", "--config", path, log="scorer"))
        as_user("trainer")
        trainer = home.start("train", "--config", path, "--display", "plain", log="train")
        assert home.ended(trainer, 240) == 0, home.logs()
        assert [process.poll() for process in (serving, *working)] == [None] * 4, home.logs()
        assert [record["step"] for record in home.metrics()] == [1, 2, 3, 4]

        assert "4" in says("viewer", "inspect", "--run", "tiny")
        assert "ok: everything adds up" in says("viewer", "verify", "--run", "tiny")
        says("viewer", "runs", "list")
        says("operator", "drain", "--run", "tiny")
        says("operator", "env", "pause", "repeat", "--run", "tiny")
        with home.connect() as buffer:
            step = buffer.store.meta().step
        says("operator", "runs", "void", str(step), "--force", "--run", "tiny")
        assert "ok: everything adds up" in says("viewer", "verify", "--run", "tiny")
        assert "does not allow" not in home.printed()
        assert "not written to" not in home.printed()
        as_user("worker")
        assert home.call("env", "pause", "vcopy", "--run", "tiny").returncode != 0
