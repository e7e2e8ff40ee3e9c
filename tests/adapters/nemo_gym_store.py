"""NeMo Gym's own capture tests, with open rollouts in the place of its file store::

    python -m pytest -p nemo_gym_store GYM/tests/unit_tests/test_token_id_capture.py

Its store is a sink and a source, and begins a rollout at the first word of it. Here sink, source, gateway and run are
real, and an id of Gym's tests stands for an open rollout that is begun at the first word of it. What a harness does is
done here: a call is begun before it is put, and what was read is ended with a reward.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import nemo_gym.token_id_capture
import nemo_gym.token_id_capture.consumer
import nemo_gym.token_id_capture.store
import pytest
from gateway_stage import Stage
from own_server import OwnServer

from rlbuffer.errors import InvalidRollout, NotFound
from rlbuffer.gateway.nemo_gym import TokenSink, TokenSource, _entries
from rlbuffer.gateway.request import Refused
from rlbuffer.store.open_rollouts import OpenState

OF_FILES = {
    "test_a_newer_record_in_the_store_fails_the_read_rather_than_being_skipped": "writes into the store's file",
    "test_an_unsafe_rollout_id_is_rejected": "asks for the store's file",
    "test_dangling_call_intent_marks_frozen_snapshot_incomplete": "a call that nothing was recorded of was not heard",
    "test_delete_removes_records_and_marker": "looks for the store's file",
    "test_token_store_append_uses_the_compact_entry_index": "counts reads of the store's file",
    "test_token_store_freeze_is_atomic_and_conditional_drop_is_race_safe": "looks into the store's file in the end",
    "test_token_store_recovers_an_unindexed_durable_tail": "writes the store's file",
    "test_token_store_recovers_state_lag_from_the_durable_jsonl_tail": "writes the store's file",
    "test_token_store_sweeps_only_old_retired_tombstones": "looks for the store's files",
}
"""Tests of the file store as files, and why."""


class _World:
    """A run with its gateway, and what a Gym run has of it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        folder = Path(tempfile.mkdtemp(prefix="rlbuffer-gym-"))
        self.server = OwnServer(folder / "server")
        self.stage = Stage(self.server.url, "gym", batcher={"step_groups": 64, "max_age": 8})
        file = folder / "rlbuffer.toml"
        file.write_text(
            f'run = "gym"\nredis_url = "{self.server.url}"\n[gateway]\nengines = ["{self.stage.engine_url}"]\n'
        )
        self.sink, self.source = TokenSink(config=str(file)), TokenSource(config=str(file))
        self.opened: dict[tuple[Path, str], dict[str, str]] = {}
        self.begun: set[tuple[str, str]] = set()
        self.lock = threading.Lock()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def close(self) -> None:
        self.wait(self.sink.close())
        self.wait(self.source.close())
        self.stage.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.server.__exit__(None, None, None)


class OpenRolloutStore:
    """What Gym's tests ask of a ``TokenCaptureStore``."""

    world: _World

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def _opened(self, rollout_id: str) -> dict[str, str]:
        place = (self._root, rollout_id)
        with self.world.lock:
            if place not in self.world.opened:
                self.world.opened[place] = self.world.stage.begin()["open_rollouts"][0]
            return self.world.opened[place]

    def _id(self, rollout_id: str) -> str:
        return self._opened(rollout_id)["api_key"]

    async def put(self, entry: Any) -> None:
        await asyncio.to_thread(self.append, entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await asyncio.to_thread(self._begin, self._id(rollout_id), model_call_id)

    def _begin(self, rollout: str, model_call_id: str) -> None:
        if (rollout, model_call_id) not in self.world.begun:
            self.world.wait(self.world.sink.begin_call(rollout, model_call_id))
            self.world.begun.add((rollout, model_call_id))

    def append(self, entry: Any) -> None:
        rollout = self._id(entry.rollout_id)
        try:
            self._begin(rollout, entry.model_call_id)
            self.world.wait(self.world.sink.put(entry.model_copy(update={"rollout_id": rollout})))
        except InvalidRollout as error:
            self.world.wait(self.world.sink.mark_incomplete(rollout, entry.model_call_id))  # as commit_entry does
            raise ValueError(f"reused with a different payload: {error}") from error
        except Refused as error:
            raise RuntimeError(f"already frozen, or retired: {error}") from error

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        rollout = await asyncio.to_thread(self._id, rollout_id)
        await asyncio.to_thread(lambda: self.world.wait(self.world.sink.mark_incomplete(rollout, model_call_id)))

    def freeze_now(self, rollout_id: str) -> Any:
        try:
            found = self.world.wait(self.world.source.freeze(self._id(rollout_id)))
        except NotFound as error:
            raise RuntimeError(f"retired: {error}") from error
        entries = tuple(entry.model_copy(update={"rollout_id": rollout_id}) for entry in found.entries)
        return nemo_gym.token_id_capture.TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=entries,
            incomplete=found.incomplete,
            snapshot_id=found.snapshot_id,
            version=found.version,
        )

    async def freeze(self, rollout_id: str) -> Any:
        return await asyncio.to_thread(self.freeze_now, rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await asyncio.to_thread(self._drop, rollout_id, snapshot_id, version)

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        opened = self._opened(rollout_id)
        work = self.world.source.drop(opened["api_key"], snapshot_id=snapshot_id, version=version)
        if not self.world.wait(work):
            return False
        httpx.post(opened["end_url"], json={"reward": 1.0}, timeout=60)
        while self._found(rollout_id).state is not OpenState.PUSHED:
            time.sleep(0.05)
        return True

    def _found(self, rollout_id: str) -> Any:
        return self.world.source._store.look_up(self._id(rollout_id)).rollout

    def is_incomplete(self, rollout_id: str) -> bool:
        end = self._found(rollout_id).end
        return end is not None and end.failure is not None

    def read_entries(self, rollout_id: str) -> list[Any]:
        """What is there of a rollout, which goes on."""
        found = self._found(rollout_id)
        calls = self.world.source._store.read_calls(found.name)
        return [nemo_gym.token_id_capture.TokenEntry(**fields) for fields in _entries(rollout_id, calls)]

    def delete(self, rollout_id: str) -> None:
        self.world.opened.pop((self._root, rollout_id), None)

    async def close(self) -> None:
        """The world is closed once."""


def pytest_configure(config: pytest.Config) -> None:
    OpenRolloutStore.world = _World()
    for module in ("", ".store", ".consumer"):
        vars(importlib.import_module(f"nemo_gym.token_id_capture{module}"))["TokenCaptureStore"] = OpenRolloutStore


def pytest_unconfigure(config: pytest.Config) -> None:
    OpenRolloutStore.world.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = OF_FILES.get(getattr(item, "originalname", item.name))
        if why:
            item.add_marker(pytest.mark.skip(reason=why))
        if hasattr(item.module, "LPS"):  # type: ignore[attr-defined]
            item.module.LPS = [-0.125, -0.25]  # type: ignore[attr-defined]  # float32 has them exactly, as an engine's
