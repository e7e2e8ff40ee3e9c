"""The file compose.yaml is one that compose itself accepts, and its services share no folder but the settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file as compose understands it."""
    programs = [["docker-compose"], ["docker", "compose"]]
    for program in programs:
        if shutil.which(program[0]) is None:
            continue
        read = subprocess.run(
            [*program, "-f", str(ROOT / "compose.yaml"), "config"],
            env=os.environ | {"RLBUFFER_REDIS_PASSWORD": "secret"},
            capture_output=True,
            text=True,
            check=False,
        )
        if read.returncode == 0:
            return _parsed(read.stdout)
        if "is not a docker command" not in read.stderr and "unknown shorthand flag" not in read.stderr:
            pytest.fail(read.stderr)
    pytest.skip("needs docker-compose or docker compose")


def _parsed(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(text)
    return json.loads(json.dumps(found))


def test_policy_versions_go_over_http_and_no_folder_is_shared(compose: dict[str, Any]) -> None:
    services = {name: service for name, service in compose["services"].items() if name != "redis"}
    assert set(services) == {"serve", "worker", "worker-repeat", "trainer"}
    for name, service in services.items():
        named = [str(volume) for volume in service.get("volumes", []) if "rlbuffer.toml" not in str(volume)]
        assert bool(named) == (name == "trainer"), named
        assert service["environment"]["RLBUFFER_WEIGHTS__URL"] == "http://trainer:9465"
