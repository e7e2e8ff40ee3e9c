"""A worker while a newer version is downloaded: what serves goes on as long as what it samples is young enough."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_places import Place, make_version, place

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.weights.cache import VersionCache
from rlbuffer.worker import versions
from rlbuffer.worker.versions import Versions


class Loads:
    """A sampler that remembers what it loaded."""

    vocab_size = 13

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def load(self, policy: PolicyVersion) -> None:
        assert (Path(policy.location) / "model.safetensors").stat().st_size == policy.size
        self.paths.append(policy.location)


async def check(policy: PolicyVersion) -> None:
    assert Path(policy.location).is_dir()


class Scene:
    def __init__(self, tmp_path: Path, trainer: Place, max_age: int) -> None:
        self.cache = tmp_path / "cache"
        self.trainer = trainer
        self.current = PolicyVersion(version=-1)
        self.sampler = Loads()
        self.troubles: list[str] = []
        self.waits: list[str] = []

        policy: Any = SimpleNamespace(current=lambda: self.current)
        sampler: Any = self.sampler
        env: Any = SimpleNamespace(vocab_size=13, name="vcopy")
        messages: Any = SimpleNamespace(
            trouble=self.troubles.append,
            waits=self.waits.append,
            loading=lambda version: nullcontext(),
            loaded=lambda version, took, size=0: None,
        )
        self.versions = Versions(
            policy,
            sampler,
            env,
            messages,
            check=check,
            on_load=lambda: None,
            cache=VersionCache(self.cache),
            max_age=max_age,
        )

    def announce(self, version: int) -> str:
        """Publishes a version under its URL. -> where it will be on this host."""
        policy = make_version(self.trainer.folder, version)
        name = Path(policy.location).name
        self.current = replace(policy, location=f"{self.trainer.url}/{name}")
        return str(self.cache / name)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path / "trainer") as found:
        yield found


def test_what_serves_goes_on_while_a_newer_version_is_downloaded(tmp_path: Path, trainer: Place) -> None:
    scene = Scene(tmp_path, trainer, max_age=1)

    async def run() -> None:
        first = scene.announce(0)
        assert await scene.versions.refresh()
        second = scene.announce(1)
        trainer.gate = threading.Event()
        for _ in range(3):
            assert await asyncio.wait_for(scene.versions.refresh(), 60)  # with the download stuck
        assert scene.sampler.paths == [first]
        trainer.gate.set()
        while len(scene.sampler.paths) < 2:
            assert await scene.versions.refresh()
            await asyncio.sleep(0.01)
        assert scene.sampler.paths == [first, second]

    asyncio.run(run())
    assert scene.troubles == []
    assert len(trainer.starts()) == 2


def test_whoever_waits_to_hold_a_version_keeps_nobody_from_going_on_with_it(tmp_path: Path, trainer: Place) -> None:
    scene = Scene(tmp_path, trainer, max_age=0)

    async def run() -> None:
        scene.announce(0)
        assert await scene.versions.refresh()
        lock = scene.versions.held()
        await lock.acquire()

        async def evaluate() -> None:
            async with lock:
                await asyncio.Event().wait()

        evaluating = asyncio.create_task(evaluate())
        await asyncio.sleep(0)
        lock.release()  # the evaluation has it next, and has it not yet
        async with asyncio.timeout(10):
            assert await scene.versions.refresh()
        evaluating.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(("max_age", "newer"), [(0, 1), (1, 2), (2, 3)])
def test_what_serves_is_too_old_for_the_next_step_so_the_download_is_waited_for(
    tmp_path: Path, trainer: Place, max_age: int, newer: int
) -> None:
    scene = Scene(tmp_path, trainer, max_age=max_age)

    async def run() -> None:
        first = scene.announce(0)
        assert await scene.versions.refresh()
        second = scene.announce(newer)
        trainer.gate = threading.Event()
        waiting = asyncio.create_task(scene.versions.refresh())
        while len(trainer.starts()) < 2:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        assert scene.sampler.paths == [first]
        trainer.gate.set()
        assert await waiting
        assert scene.sampler.paths == [first, second]

    asyncio.run(run())


def test_a_version_that_came_while_another_was_downloaded_is_the_one_that_is_loaded(
    tmp_path: Path, trainer: Place
) -> None:
    scene = Scene(tmp_path, trainer, max_age=1)

    async def run() -> None:
        scene.announce(0)
        assert await scene.versions.refresh()
        scene.announce(1)
        trainer.gate = threading.Event()
        assert await scene.versions.refresh()
        last = scene.announce(2)
        waiting = asyncio.create_task(scene.versions.refresh())
        trainer.gate.set()
        assert await waiting
        assert scene.sampler.paths[1:] == [last]

    asyncio.run(run())


def test_a_failed_download_is_said_and_tried_again_with_the_next_version(
    tmp_path: Path, trainer: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RELOAD_SECONDS", 0.0)
    scene = Scene(tmp_path, trainer, max_age=5)

    async def run() -> None:
        first = scene.announce(0)
        assert await scene.versions.refresh()
        scene.announce(1)
        good, scene.current = scene.current, replace(scene.current, location=scene.current.location + "0")
        while not scene.troubles:
            assert await scene.versions.refresh()
            await asyncio.sleep(0.01)
        scene.current = good
        while len(scene.sampler.paths) < 2:
            assert await scene.versions.refresh()
            await asyncio.sleep(0.01)
        assert scene.sampler.paths[0] == first

    asyncio.run(run())
    assert scene.troubles[0].startswith("version 1 was announced at ")
    assert scene.troubles[0].endswith("; version 0 goes on sampling")


def test_nothing_serves_yet_so_the_sentence_says_what_is_downloaded(tmp_path: Path, trainer: Place) -> None:
    scene = Scene(tmp_path, trainer, max_age=5)

    async def run() -> None:
        scene.announce(4)
        assert await scene.versions.refresh()

    asyncio.run(run())
    assert scene.waits == [Waiting(kind=Wait.WEIGHTS, version=4, detail=scene.current.location)]
