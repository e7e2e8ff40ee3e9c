"""The part of the Store protocol that guards a run against those who may only push. The leader's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Guarding(Protocol):
    """Calls of :class:`rlbuffer.store.protocol.Store` by which the leader finds what workers have left."""

    def load_scripts(self) -> None:
        """Loads the scripts that the server does not know: most users may call them and load none."""

    def payload_page(self, cursor: int) -> tuple[int, list[str]]:
        """Some of the payload keys of the run, those of no push too. -> where to go on, 0 at the end; the keys."""

    def not_garbage(self, keys: Sequence[str]) -> list[str]:
        """Those of these payload keys that no step and no drop has named for the sweep."""

    def weights(self, keys: Sequence[str]) -> list[int]:
        """Bytes that each key takes of the server's memory; 0 where that is not known."""

    def unlink_payloads(self, keys: Sequence[str], *, since: int) -> int:
        """Removes payloads that nothing names. -> how many there were. Raises LeaseLost when the server was away."""
