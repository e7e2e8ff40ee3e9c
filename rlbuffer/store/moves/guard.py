"""What the leader does against those who may only push: scripts for users that load none."""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import Any

from rlbuffer.store.server.script import Script
from rlbuffer.store.session import Session


class GuardMoves(Session):
    """See :class:`rlbuffer.store.guarding.Guarding`."""

    def load_scripts(self) -> None:
        folder = resources.files("rlbuffer.store") / "scripts"
        names = sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
        digests = [self.script(name).sha for name in names]
        known = self.look(lambda client: client.script_exists(*digests))
        for name, is_known in zip(names, known, strict=True):
            if not is_known:
                self.look(partial(_load, script=self.script(name)))


def _load(client: Any, script: Script) -> None:
    client.script_load(script.text)
