"""The leader's guard against those who may only push: scripts for users that load none, and payloads of nobody."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import resources
from typing import Any

from rlbuffer.store.server.cluster import CLUSTER_SLOTS
from rlbuffer.store.server.script import Script
from rlbuffer.store.session import Session, answers, text

SCAN_KEYS = 1000
"""Keys of the server, other runs' too, that one page looks at."""


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

    def payload_page(self, cursor: int) -> tuple[int, list[str]]:
        # A run's name may hold no character that a pattern gives a meaning, so the prefix matches itself only.
        pattern = f"{self.keys.payload_prefix}*"
        at, shard = divmod(cursor, CLUSTER_SLOTS)

        def scan(_: Any) -> tuple[int, list[Any]]:
            servers = self.connection.servers()
            after, keys = servers[min(shard, len(servers) - 1)].scan(at, match=pattern, count=SCAN_KEYS)
            if int(after):
                return int(after) * CLUSTER_SLOTS + shard, keys
            return (shard + 1) % len(servers) if shard < len(servers) else 0, keys

        after, keys = self.look(scan)
        return after, [text(key) for key in keys]

    def not_garbage(self, keys: Sequence[str]) -> list[str]:
        if not keys:
            return []

        def ask(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.zscore(self.keys.garbage, key)
                return answers(pipe)

        scores = self.look(ask)
        return [key for key, score in zip(keys, scores, strict=True) if score is None]

    def weights(self, keys: Sequence[str]) -> list[int]:
        if self.connection.is_memory or not keys:  # the model of a server has no memory to speak of
            return [0] * len(keys)

        def weigh(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.memory_usage(key, samples=0)
                return answers(pipe)

        return [int(size or 0) for size in self.look(weigh)]

    def unlink_payloads(self, keys: Sequence[str], *, since: int) -> int:
        def unlink(client: Any) -> int:
            self.stay(since)
            with client.pipeline(transaction=False) as pipe:
                for key in keys:  # they lie in different slots of a cluster
                    pipe.unlink(key)
                return sum(int(gone) for gone in answers(pipe))

        return self.look(unlink) if keys else 0


def _load(client: Any, script: Script) -> None:
    client.script_load(script.text)
