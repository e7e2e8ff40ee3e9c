"""The part of the Store protocol that guards a run against those who may only push. The leader's."""

from __future__ import annotations

from typing import Protocol


class Guarding(Protocol):
    """Calls of :class:`rlbuffer.store.protocol.Store` by which the leader bounds what workers may write."""

    def load_scripts(self) -> None:
        """Loads the scripts that the server does not know: most users may call them and load none."""
