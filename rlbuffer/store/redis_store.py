"""The one implementation of the Store protocol, composed from one module per concern.

``memory://`` is this code and these Lua files over an in-process model of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlbuffer.config.settings import ServerSettings
from rlbuffer.packing.arena import Arena
from rlbuffer.store.moves.archive_reading import ArchiveReads
from rlbuffer.store.moves.attempts import TrainerMoves
from rlbuffer.store.moves.evaluations import EvaluationMoves
from rlbuffer.store.moves.lease import LeaseMoves
from rlbuffer.store.moves.operator import OperatorMoves
from rlbuffer.store.moves.push import PushMoves
from rlbuffer.store.moves.recovery import RecoveryMoves
from rlbuffer.store.moves.scoring import ClaimMoves
from rlbuffer.store.moves.telemetry import Telemetry
from rlbuffer.store.moves.tickets import TicketMoves
from rlbuffer.store.moves.visits import Visits
from rlbuffer.store.records import Report
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.session import DEFAULT_PATIENCE_SECONDS
from rlbuffer.store.verify.verify import verify


class RedisStore(
    RecoveryMoves,
    OperatorMoves,
    PushMoves,
    TicketMoves,
    LeaseMoves,
    TrainerMoves,
    EvaluationMoves,
    ClaimMoves,
    Visits,
    Telemetry,
    ArchiveReads,
):
    """A run on a Redis or Valkey server; see :class:`rlbuffer.store.protocol.Store` for every move."""

    def __init__(self, connection: Connection, run: str, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        super().__init__(connection, run, patience_seconds=patience_seconds)
        self._fresh = {}
        self._evaluated = {}
        self._tokens = {}
        self._refused = set()
        self._arena = Arena()

    def verify(self) -> Report:
        return verify(self)

    def close(self) -> None:
        self.connection.close()


def open_store(
    url: str | None,
    *,
    run: str,
    home: Path,
    server: ServerSettings,
    name: str = "",
    origin: str = "",
    password: Callable[[], str] | None = None,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> RedisStore:
    """Connects to the server of a run; creates nothing there.

    `url` None: the embedded server under `home`, started when it does not run. ``memory://``: in process. `name` is
    what the server shows for the connection, `origin` says in messages where the url came from.
    `password` is asked at every new connection, where the url has none.

    Raises:
        ServerUnreachable, ServerUnsuitable, ConfigError: see :class:`rlbuffer.store.server.connection.Connection`.
    """
    connection = Connection(url, home=home, server=server, name=name, origin=origin, password=password)
    return RedisStore(connection, run, patience_seconds=patience_seconds)
