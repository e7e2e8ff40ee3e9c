"""The GPUs and the Python that a worker gets, and the refusal of settings that cannot work before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlbuffer
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.run import pythons
from rlbuffer.run.loading import load


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
    assert [pythons.gpus_of(options, replica) for replica in range(replicas)] == dealt
    assert [pythons.gpus_of(options, replicas + replica) for replica in range(replicas)] == dealt


def test_a_process_without_gpus_of_its_own_sees_what_it_saw() -> None:
    assert pythons.visible(()) == {}
    assert pythons.visible((1, "GPU-5")) == {"CUDA_VISIBLE_DEVICES": "1,GPU-5"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[worker.vcopy]\nenv = "vcopy"\nreplicas = 2\ngpus = [0, 1, 2]\n',
            "worker.vcopy.gpus = [0, 1, 2] cannot be dealt equally over 2 replicas (FILE:4, :3).",
        ),
        (
            "[trainer]\nworld_size = 2\ngpus = [0]\n",
            "trainer.gpus = [0]: trainer.world_size = 2, and each rank needs one (FILE:3, :2).",
        ),
    ],
)
def test_gpus_that_cannot_be_dealt_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rlbuffer.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert str(caught.value) == message.replace("FILE", str(file))


def test_a_gpu_that_two_kinds_of_process_share_and_a_server_nobody_asks_are_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "rlbuffer.toml"
    file.write_text(
        '[trainer]\ngpus = [0]\n[weights]\nlisten = ":9465"\n'
        '[worker.vcopy]\nenv = "vcopy"\nreplicas = 2\ngpus = [0, 1]\ndevice = "cuda"'
    )
    assert load(file, environ={}).warnings == (
        (
            "weights.listen is set and weights.url is not: versions are announced as paths, and nobody will ask the "
            f"server for them ({file}:4)."
        ),
        "GPU 0 is given to trainer and worker.vcopy: they share its memory.",
    )


def test_gpus_are_counted_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, devices = tmp_path / "driver", tmp_path / "devices"
    devices.mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pythons.gpus_here(driver, devices) == 0
    script(tmp_path / "nvidia-smi", "")
    assert pythons.gpus_here(driver, devices) is None
    for bus in ("0000:01", "0000:02"):
        (driver / bus).mkdir(parents=True)
    assert pythons.gpus_here(driver, devices) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert pythons.gpus_here(driver, devices) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pythons.gpus_here(driver, devices) == 0


@pytest.mark.parametrize(
    ("there", "settings", "text"),
    [
        (0, 'device = "cuda"', "trainer.device = 'cuda': this host has no GPU"),
        (2, "world_size = 3", "trainer.world_size = 3: ranks need a GPU each, and this host has 2"),
        (1, "gpus = [1]", "trainer.gpus = [1]: this host has 1 GPU, numbered from 0"),
        (2, "world_size = 2\ngpus = [0, 1]", ""),
        (2, 'world_size = 3\ndevice = "cpu"', ""),
        (0, "world_size = 3", ""),
        (None, 'world_size = 3\ndevice = "cuda"', ""),
    ],
)
def test_more_ranks_than_gpus_are_refused_where_gpus_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int | None, settings: str, text: str
) -> None:
    monkeypatch.setattr("rlbuffer.run.host_checks.gpus_here", lambda: there)
    file = tmp_path / "rlbuffer.toml"
    file.write_text(f'[model.config]\nmodel_type = "qwen3"\n[trainer]\n{settings}\n')
    if not text:
        load(file, environ={}, parts=("train",))
        return
    with pytest.raises(ConfigError) as caught:
        load(file, environ={}, parts=("train",))
    assert str(caught.value).endswith(text)


def test_a_worker_is_started_apart_only_when_it_must_be() -> None:
    assert not pythons.is_apart(WorkerSettings(env="vcopy", replicas=2))
    assert pythons.is_apart(WorkerSettings(env="vcopy", gpus=(0,)))
    assert pythons.is_apart(WorkerSettings(env="vcopy", python="python3"))


def test_the_environment_has_the_own_variables_the_gpus_and_the_programs_beside_the_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("KEPT", "yes")
    options = WorkerSettings(env="vcopy", gpus=(3, 4), replicas=2)
    got = pythons.environment_of(options, 1, "/venv/bin/python")
    assert {name: got[name] for name in ("PATH", "KEPT", "CUDA_VISIBLE_DEVICES")} == {
        "PATH": f"/venv/bin{os.pathsep}/bin",
        "KEPT": "yes",
        "CUDA_VISIBLE_DEVICES": "4",
    }


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def with_python(python: str, sampler: str = "transformers") -> RunSettings:
    return RunSettings.model_validate({"worker": {"vcopy": {"env": "vcopy", "python": python, "sampler": sampler}}})


def test_a_python_with_this_rlbuffer_is_accepted_and_a_link_to_it_is_not_followed(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "python", f'exec {sys.executable} "$@"')
    link = tmp_path / "link"
    link.symlink_to(wrapper)
    settings = with_python(str(link))
    pythons.check_pythons(settings, sys.executable)
    assert pythons.python_of("vcopy", settings.worker["vcopy"], sys.executable) == str(link)
    assert pythons.python_of("vcopy", WorkerSettings(env="vcopy"), "/own") == "/own"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "echo 'Traceback' >&2; echo 'ModuleNotFoundError: none' >&2; exit 1",
            "cannot import rlbuffer (ModuleNotFoundError: none).",
        ),
        ("exit 3", "cannot import rlbuffer (exit code 3)."),
        ("echo 0.0.0", f"has rlbuffer 0.0.0, this is {rlbuffer.__version__}."),
    ],
)
def test_a_python_without_this_rlbuffer_is_refused_with_what_to_install(tmp_path: Path, text: str, reason: str) -> None:
    python = script(tmp_path / "python", text)
    with pytest.raises(ConfigError) as caught:
        pythons.check_pythons(with_python(python, "vllm"), sys.executable)
    assert str(caught.value) == (
        f"worker.vcopy.python = '{python}' {reason}\n"
        f"  Install it there:   {python} -m pip install 'rlbuffer[vllm]=={rlbuffer.__version__}'"
    )
    assert caught.value.setting == "worker.vcopy.python"


def test_a_python_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        pythons.check_pythons(with_python("/no/such/python"), sys.executable)
    assert str(caught.value) == "worker.vcopy.python = '/no/such/python' is not a program on this host"


RANK = """
import gc, os
from rlbuffer.config.settings import RunSettings, TrainerSettings
from rlbuffer.trainer.launch import rank
rank.train = lambda settings, **rest: print(os.environ["CUDA_VISIBLE_DEVICES"], len(gc.get_objects())) is None
rank.run_rank(RunSettings(trainer=TrainerSettings(gpus=(2, 5))))
"""


def test_a_rank_sees_the_trainers_gpus_before_it_trains_and_leaves_to_collections_what_is_new() -> None:
    answer = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=True)
    gpus, objects = answer.stdout.split()
    assert gpus == "2,5"
    assert int(objects) < 10_000  # torch alone has 200,000
