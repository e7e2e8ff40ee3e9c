"""A primary and a replica behind one address, which follows the primary as a VIP or a service does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from faults import CuttingProxy
from own_server import OwnServer


class Node(OwnServer):
    """One server of a pair."""

    def follow(self, primary: Node) -> None:
        """Becomes a replica of `primary`, and waits until it has all that is there."""
        self.ask("REPLICAOF", "127.0.0.1", primary.port)
        self.wait_for(lambda ask: ask("INFO", "replication")["master_link_status"] == "up")


class Pair:
    """Connections that are open at a failover stay open: to the server that is a replica then."""

    def __init__(self, directory: Path, *, options: Mapping[str, str] | None = None) -> None:
        told = {"repl-diskless-sync-delay": "0"} | dict(options or {})
        self.primary = Node(directory / "a", options=told)
        try:
            self.replica = Node(directory / "b", options=told)
            self.replica.follow(self.primary)
            self._address = CuttingProxy(self.primary.url)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.url = self._address.url

    @property
    def servers(self) -> list[Node]:
        return [self.primary, self.replica]

    def fail_over(self) -> None:
        """A planned failover, which loses nothing: the servers exchange their roles, then the address is switched."""
        before, after = self.primary, self.replica
        before.wait_for(lambda ask: ask("INFO", "replication")["slave0"]["state"] == "online")
        before.ask("FAILOVER", "TO", "127.0.0.1", after.port)
        before.wait_for(lambda ask: ask("ROLE")[0] == b"slave")
        after.wait_for(lambda ask: ask("ROLE")[0] == b"master")
        self._lead_to(after, before)

    def settle(self) -> None:
        """Waits until the old primary has all that the new one has."""
        self.replica.wait_for(lambda ask: ask("INFO", "replication")["master_link_status"] == "up")

    def cut(self) -> None:
        """The replica hears nothing of the primary any more; what that acknowledges from now on dies with it."""
        self.replica.ask("REPLICAOF", "NO", "ONE")

    def promote(self) -> None:
        """The replica becomes the primary with what it has. The old primary is no part of the pair until `mend`."""
        self.replica.ask("REPLICAOF", "NO", "ONE")
        self._lead_to(self.replica, self.primary)

    def mend(self) -> None:
        """Starts the killed server again, as a replica."""
        self.replica.start()
        self.replica.follow(self.primary)

    def _lead_to(self, primary: Node, replica: Node) -> None:
        self.primary, self.replica = primary, replica
        self._address.lead_to(primary.url)

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in ("_address", "replica", "primary"):
            if hasattr(self, part):
                getattr(self, part).__exit__(kind, error, trace)
