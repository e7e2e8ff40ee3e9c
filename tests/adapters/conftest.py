"""Other people's environments: verifiers and reasoning-gym, in an environment of their own (``make adapters-test``).

Where they are not installed everything here is skipped, unless ``RLBUFFER_ADAPTERS=1`` says that it must run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_tokenizer import save_tokenizer

HERE = Path(__file__).parent
NEEDS = {
    "test_local_engine": "aiohttp",
    "test_miles_door": "miles",
    "test_nemo_gym_capture": "nemo_gym",
    "test_reasoning_env": "reasoning_gym",
    "test_trl_door": "trl",
    "test_verl_door": "verl",
    "test_verifiers_env": "verifiers",
    "test_verifiers_run": "verifiers",
    "test_verifiers_worker": "verifiers",
}

SOURCES = {
    "miles": "the sources of radixark/miles at 31f1ca9, beside ray, pybase64 and blobfile,",
    "nemo_gym": "the sources of NVIDIA-NeMo/Gym at 07d6b0d with their tests, beside Python 3.13 and what Gym needs,",
}
"""What no package index has for these environments."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        package = NEEDS.get(item.path.stem) if HERE in item.path.parents else None
        if package is None or find_spec(package) is not None:
            continue
        if package in SOURCES:
            item.add_marker(pytest.mark.skip(reason=f"needs {SOURCES[package]} on PYTHONPATH"))
            continue
        if os.environ.get("RLBUFFER_ADAPTERS") == "1":
            raise pytest.UsageError(f"{package} is not installed")  # it must run here
        item.add_marker(pytest.mark.skip(reason=f"needs {package}: make adapters-test"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool servers are processes of their own: they find this folder's modules by PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
