"""The GPUs and the Python that a worker gets, and the refusal of settings that cannot work before anything starts."""

from __future__ import annotations

import os
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from forked import Parent

import rlbuffer
from rlbuffer.checks.check import Context, Finding
from rlbuffer.checks.host import devices, functions
from rlbuffer.config import placement
from rlbuffer.config.loading import Loaded
from rlbuffer.config.settings import RunSettings, WorkerSettings


@pytest.mark.parametrize(
    ("gpus", "replicas", "dealt"),
    [
        ((), 2, [(), ()]),
        ((0, 1), 1, [(0, 1)]),
        ((0, 1), 2, [(0,), (1,)]),
        ((2, 3, "GPU-5", 7), 2, [(2, 3), ("GPU-5", 7)]),
    ],
)
def test_gpus_are_dealt_over_the_replicas_in_order(
    gpus: tuple[int | str, ...], replicas: int, dealt: list[tuple[int | str, ...]]
) -> None:
    options = WorkerSettings(env="vcopy", gpus=gpus, replicas=replicas)
    assert [placement.gpus_of(options, replica) for replica in range(replicas)] == dealt
    assert [placement.gpus_of(options, replicas + replica) for replica in range(replicas)] == dealt


def test_gpus_are_counted_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, devices = tmp_path / "driver", tmp_path / "devices"
    devices.mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert placement.gpus_here(driver, devices) == 0
    script(tmp_path / "nvidia-smi", "")
    assert placement.gpus_here(driver, devices) is None
    for bus in ("0000:01", "0000:02"):
        (driver / bus).mkdir(parents=True)
    assert placement.gpus_here(driver, devices) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert placement.gpus_here(driver, devices) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.gpus_here(driver, devices) == 0


@pytest.mark.parametrize(
    ("there", "settings", "setting"),
    [
        (0, 'device = "cuda"', "trainer.device"),
        (0, "gpus = [7]", "trainer.gpus"),
        (0, 'gpus = [7]\ndevice = "cpu"', ""),
        (2, "world_size = 3", "trainer.world_size"),
        (1, "gpus = [1]", "trainer.gpus"),
        (2, "world_size = 2\ngpus = [0, 1]", ""),
        (2, 'world_size = 3\ndevice = "cpu"', ""),
        (0, "world_size = 3", ""),
        (None, 'world_size = 3\ndevice = "cuda"', ""),
    ],
)
def test_more_ranks_than_gpus_are_refused_where_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, there: int | None, settings: str, setting: str
) -> None:
    monkeypatch.setattr("rlbuffer.checks.host.gpus_here", lambda **_: there)
    assert of_gpus(settings) == [(setting,)] * bool(setting)


@pytest.mark.parametrize(
    ("visible", "settings", "setting"),
    [
        ("2,3", "world_size = 2\ngpus = [2, 3]", ""),
        ("", "gpus = [3]", ""),
        ("", "gpus = [4]", "trainer.gpus"),
        ("2,3", "world_size = 3", "trainer.world_size"),
        ("", 'device = "cuda"', "trainer.device"),
    ],
)
def test_gpus_that_are_named_need_not_be_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, settings: str, setting: str
) -> None:
    for bus in range(4):
        (tmp_path / f"0000:0{bus}").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("rlbuffer.checks.host.gpus_here", partial(placement.gpus_here, tmp_path))
    assert of_gpus(settings) == [(setting,)] * bool(setting)


def of_gpus(trainer: str) -> list[tuple[str, ...]]:
    """The settings of what is found wrong with the devices of a trainer."""
    made = RunSettings.model_validate({"trainer": tomllib.loads(trainer)})
    found = devices(Context(loaded=Loaded(settings=made, sources={}), parts=frozenset({"train"})))
    return [finding.settings for finding in found]


def test_the_environment_has_the_own_variables_the_gpus_and_the_programs_beside_the_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("KEPT", "yes")
    options = WorkerSettings(env="vcopy", gpus=(3, 4), replicas=2)
    got = placement.environment_of(options, 1, "/venv/bin/python")
    assert {name: got[name] for name in ("PATH", "KEPT", "CUDA_VISIBLE_DEVICES")} == {
        "PATH": f"/venv/bin{os.pathsep}/bin",
        "KEPT": "yes",
        "CUDA_VISIBLE_DEVICES": "4",
    }


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def refused(python: str) -> list[Finding]:
    worker = {"vcopy": {"env": "vcopy", "python": python}}
    settings = RunSettings.model_validate({"worker": worker})
    return [*functions(Context(loaded=Loaded(settings=settings, sources={}), parts=frozenset({"run", "worker"})))]


def test_a_python_with_this_rlbuffer_is_accepted_and_a_link_to_it_is_not_followed(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "python", f'exec {sys.executable} "$@"')
    link = tmp_path / "link"
    link.symlink_to(wrapper)
    assert refused(str(link)) == []
    options = WorkerSettings(env="vcopy", python=str(link))
    assert placement.python_of("vcopy", options, sys.executable) == str(link)
    assert placement.python_of("vcopy", WorkerSettings(env="vcopy"), "/own") == "/own"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'Traceback' >&2; echo 'ModuleNotFoundError: none' >&2; exit 1", "ModuleNotFoundError: none"),
        ("exit 3", "exit code 3"),
        ("echo 0.0.0", f"has rlbuffer 0.0.0, this is {rlbuffer.__version__}"),
    ],
)
def test_a_python_without_this_rlbuffer_is_refused_with_what_to_install(tmp_path: Path, text: str, reason: str) -> None:
    (finding,) = refused(script(tmp_path / "python", text))
    assert (finding.settings, reason in finding.text) == (("worker.vcopy.python",), True)
    assert rlbuffer.__version__ in finding.fix


RANK = """
import gc, os
from rlbuffer.config.settings import RunSettings, TrainerSettings
from rlbuffer.trainer.launch import rank
rank.train = lambda settings, **rest: print(os.environ["CUDA_VISIBLE_DEVICES"], len(gc.get_objects())) is None
rank.run_rank(RunSettings(trainer=TrainerSettings(gpus=(2, 5))))
"""


def test_a_rank_sees_the_trainers_gpus_before_it_trains_and_leaves_to_collections_what_is_new(
    parent: Parent, tmp_path: Path
) -> None:
    rank = parent.start(["-c", RANK], environment=parent.environment, folder=tmp_path)
    gpus, objects = rank.communicate(timeout=120)[0].split()
    assert gpus == "2,5"
    assert int(objects) < 10_000  # torch alone has 200,000
