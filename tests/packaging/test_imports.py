"""What is loaded when: the help and the looking commands never pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIST = "import sys; print('\\n'.join(sorted(sys.modules)))"


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules after `code` ran in a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", f"{code}\n{LIST}"], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.splitlines()}


def test_help_loads_click_and_nothing_heavy() -> None:
    loaded = loaded_after("from rlbuffer_cli.main import main; assert main(['--help']) == 0")
    assert "click" in loaded
    assert loaded & {"torch", "transformers", "numpy", "pydantic", "redis", "rich"} == set()


@pytest.mark.parametrize("name", ["serve", "push", "inspect", "verify", "config", "run", "demo", "train", "worker"])
def test_no_command_loads_torch_before_it_runs(name: str) -> None:
    loaded = loaded_after(f"from rlbuffer_cli.main import main; assert main([{name!r}, '--help']) == 0")
    assert loaded & {"torch", "transformers"} == set()


def test_the_library_and_its_server_side_load_neither_torch_nor_the_screen() -> None:
    code = "import rlbuffer, rlbuffer.daemon, rlbuffer.client, rlbuffer.processes, rlbuffer.supervise, rlbuffer.loading"
    assert loaded_after(code) & {"torch", "transformers", "click", "rich", "rlbuffer_cli"} == set()


def test_the_public_package_itself_loads_nothing() -> None:
    assert loaded_after("import rlbuffer") & {"numpy", "redis", "pydantic", "torch"} == set()
