"""A server that comes back without its newest writes, and a batcher in a thread that lives through it."""

from __future__ import annotations

import threading
import time
from typing import Any

from every_role import EveryRole
from logged import Logged
from store_runs import Run

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, lookahead=1)


class Saved:
    """The control keys at one moment, and putting them back: what a rolled-back server comes back with."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._dumps = {key: run.client.dump(key) for key in run.control_keys()}

    def put_back(self) -> None:
        with self._run.client.pipeline() as pipe:
            pipe.delete(*self._run.control_keys())
            for key, data in self._dumps.items():
                pipe.restore(key, 0, data, replace=True)
            pipe.execute()


def roll_back(store: Any, writer: Writer, *, to: int) -> None:
    """Removes the pushes of this writer after number `to`: payloads, entries, account and the producer's memory."""
    lost = [entry for entry in store.read_pool() if int(entry.payload_key.rpartition(".")[2]) > to]
    for entry in lost:
        store.client.delete(entry.payload_key)
        for name, amount in (("rollouts", entry.rollouts), ("tokens", entry.tokens)):
            store.client.hincrby(store.keys.ledger, f"{entry.env}:pushed:{name}", -amount)
    store.client.xdel(store.keys.pool, *[entry.entry_id for entry in lost])
    store.client.hset(store.keys.producer(writer.worker, writer.incarnation), "sequence", to)


class Loop:
    """A daemon and whatever it says, until closed."""

    def __init__(self, store: EveryRole, config: rlbuffer.BatcherConfig = CONFIG) -> None:
        self.store, self._config = store, config
        self._logged = Logged("rlbuffer.daemon")
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._lead)
        self._thread.start()

    def _lead(self) -> None:
        buffer = Buffer(self.store, settings=RunSettings())
        try:
            Daemon(buffer, self._config, lease_seconds=1.0).run(self._stop)
        except BaseException as error:
            self.errors.append(error)

    def wait_for(self, kind: str) -> Any:
        deadline = time.monotonic() + 20
        while True:
            if found := self._logged.told(kind):
                return found[-1]
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, self._logged.lines[-3:]
            time.sleep(0.02)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=20)
        self._logged.close()
