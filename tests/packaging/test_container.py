"""The container's files: what goes to the builder, which torch, and that nothing runs without a password."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_builder_gets_what_the_image_copies_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    wanted = {name for line in copied for name in line.split()}
    assert {line[1:] for line in lines if line.startswith("!")} == wanted
    assert all((ROOT / name).exists() for name in wanted)


def test_the_image_takes_the_cpu_build_of_torch_unless_it_is_told_another() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "ARG TORCH_BACKEND=cpu" in text
    assert '--torch-backend "$TORCH_BACKEND"' in text
    assert "pip install --no-cache-dir --constraint" not in text


def test_the_image_takes_the_bytes_that_the_lock_file_names() -> None:
    """Of every package but torch, whose builds differ; what is installed has no needs that are looked up."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert len(installs) == 3
    assert "--no-deps --require-hashes --requirement requirements.lock" in installs[0]
    assert " torch " in installs[1]
    assert "--no-deps --no-build-isolation ." in installs[2]
    lock = (ROOT / "deploy" / "requirements.lock").read_text()
    assert "://" not in lock
    packages = re.findall(
        r"^([a-z0-9.-]+)==\S+((?: ; .*)? \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", lock, re.MULTILINE
    )
    assert len(packages) == len(re.findall(r"^[a-z0-9]", lock, re.MULTILINE)) > 30
    names = {name for name, _ in packages}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["weights"], "hatchling", "uv"]
    assert {re.match(r"[A-Za-z0-9.-]+", need)[0].lower() for need in wanted} - {"torch"} <= names  # type: ignore[index]
    pins = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock, re.MULTILINE))
    constraints = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pins[name] for name in constraints if name in pins}.items() <= constraints.items()


def test_compose_has_a_password_that_no_command_line_shows() -> None:
    yaml = pytest.importorskip("yaml")
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    redis = services.pop("redis")
    assert redis["environment"]["REDISCLI_AUTH"].startswith("${RLBUFFER_REDIS_PASSWORD:?")
    assert "--requirepass" not in str(redis)
    for service in services.values():
        assert service["environment"]["RLBUFFER_REDIS_PASSWORD"].startswith("${RLBUFFER_REDIS_PASSWORD:?")
        assert "@" not in service["environment"]["RLBUFFER_REDIS_URL"]
    if shutil.which("sh") is None:
        pytest.skip("needs a shell")
    script = redis["command"][0].replace("$$", "$")
    subprocess.run(["sh", "-n", "-c", script], check=True, capture_output=True, timeout=30)
