"""Each role on a server with the users of deploy/users.acl: its user may make its calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from own_server import OwnServer
from store_call_rows import ROWS, calls_of
from store_runs import Run

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import EpochChanged
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.session import Session, open_store
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.viewer import Viewer
from rlbuffer.store.worker import WorkerStore

USERS = Path(__file__).parents[3] / "deploy" / "users.acl"
ADMIN = "user root on >root ~* &* +@all"
TRIED = {"config|get", "rlb:runs"}
"""What roles try and do without: the server's limits for pushes, and the list of runs for people."""
USER_OF: dict[type[Session], str] = {
    Viewer: "viewer",
    WorkerStore: "worker",
    GatewayStore: "gateway",
    ScorerStore: "scorer",
    LeaderStore: "operator",
    TrainerStore: "trainer",
    OperatorStore: "operator",
}
CALLS = [
    pytest.param(role, call, id=f"{role.__name__}.{call}")
    for role in USER_OF
    for call in sorted(calls_of(role) - (set() if role is Viewer else calls_of(Viewer)))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    folder = tmp_path_factory.mktemp("server")
    users = folder / "users.acl"
    users.write_text(f"{USERS.read_text().rstrip()}\n{ADMIN}\n")
    with OwnServer(folder / "own", options={"aclfile": str(users)}) as made:
        run = Run(made.url.replace("//", "//root:root@"), folder)
        run.store.load_scripts()
        run.close()
        yield made


@pytest.mark.server
@pytest.mark.parametrize(("role", "call"), CALLS)
def test_the_user_of_a_role_may_make_its_calls(
    role: type[Session], call: str, server: OwnServer, tmp_path: Path
) -> None:
    run = Run(server.url.replace("//", "//root:root@"), tmp_path)
    ROWS[call].prepare(run)
    run.client.acl_log_reset()
    user = USER_OF[role]
    address = server.url.replace("//", f"//{user}:CHANGE-{user}@")
    store = open_store(role, address, run=run.store.run, home=tmp_path, server=ServerSettings())
    if isinstance(store, LeaderStore):
        store.token = run.token
    ROWS[call].call(store, run)
    assert {entry["object"] for entry in run.client.acl_log()} <= TRIED
    store.close()
    run.close()


@pytest.mark.server
def test_a_trainer_with_weights_of_a_lost_server_may_begin_a_new_line(server: OwnServer, tmp_path: Path) -> None:
    run = Run(server.url.replace("//", "//root:root@"), tmp_path)
    ROWS["report"].prepare(run)
    address = server.url.replace("//", "//trainer:CHANGE-trainer@")
    store = open_store(TrainerStore, address, run=run.store.run, home=tmp_path, server=ServerSettings())
    attempt = run.store.trainer().number
    with pytest.raises(EpochChanged):
        store.report(attempt, epoch=run.meta.epoch, trained=2, digest="", oldest_kept=1, newest=99)
    store.close()
    run.close()
