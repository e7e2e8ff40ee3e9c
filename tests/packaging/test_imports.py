"""Imports by command: the help and the looking commands never pay for torch."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest

LIST = "import sys; print('\\n'.join(sorted(sys.modules)))"


def loaded_after(code: str, folder: Path | None = None) -> set[str]:
    """Top-level packages in sys.modules after `code` ran in a fresh interpreter."""
    program = [sys.executable, "-c", f"{code}\n{LIST}"]
    result = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.splitlines()}


def test_help_loads_click_and_nothing_heavy() -> None:
    loaded = loaded_after("from rlbuffer_cli.main import main; assert main(['--help']) == 0")
    assert "click" in loaded
    assert loaded & {"torch", "transformers", "numpy", "pydantic", "redis", "rich"} == set()


def test_no_command_loads_torch_before_it_runs() -> None:
    code = "from rlbuffer_cli.main import COMMANDS, main; assert [main([name, '--help']) for name in COMMANDS] == "
    assert loaded_after(f"{code}[0] * len(COMMANDS)") & {"torch", "transformers"} == set()


def test_the_library_its_server_side_and_envs_load_neither_torch_nor_the_screen() -> None:
    modules = ("daemon", "client", "run.members", "run.supervisor", "checks.server", "checks.loading", "worker.loop")
    code = "".join(f"import rlbuffer.{name}\n" for name in modules)
    code += "from rlbuffer.worker.envs import make_env; make_env('vcopy').prompt(0)"
    assert loaded_after(code) & {"torch", "transformers", "safetensors", "click", "rich", "rlbuffer_cli"} == set()


def test_the_public_package_itself_loads_nothing_and_made_groups_need_no_server() -> None:
    assert loaded_after("import rlbuffer") & {"numpy", "redis", "pydantic", "torch"} == set()
    assert loaded_after("import rlbuffer.testing") & {"pytest", "fakeredis", "redis", "torch"} == set()


@pytest.mark.parametrize(
    ("who", "field"),
    [("worker vcopy", "workers vcopy"), ("gateway-1", "gateways gateway-1"), ("batcher", "batchers leader")],
)
def test_a_health_check_that_finds_everything_well_loads_no_settings_and_no_numpy(
    tmp_path: Path, who: str, field: str
) -> None:
    """It is asked every few seconds, on every host. The stand-in that answers here says what a server would."""
    beat = b"990000 \x81\xa1a\x01"
    asked_for: list[str] = []
    replies = {b"HGET": b"$%d\r\n%s\r\n" % (len(beat), beat), b"TIME": b"*2\r\n$4\r\n1000\r\n$1\r\n0\r\n"}

    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                words = []
                for _ in range(int(head[1:])):
                    words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
                if words[0].upper() == b"HGET":
                    asked_for.append(" ".join(word.decode().rpartition(":")[2] for word in words[1:]))
                self.wfile.write(replies.get(words[0].upper(), b"-ERR unknown command\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"redis://127.0.0.1:{server.server_address[1]}"
        asked = ["alive", *who.split(), "--redis", url, "--run", "m", "--within", "30"]
        try:
            loaded = loaded_after(f"from rlbuffer_cli.main import main; assert main({asked}) == 0", tmp_path)
        finally:
            server.shutdown()
            thread.join()
    assert asked_for == [field]
    assert "redis" in loaded
    assert loaded & {"numpy", "pydantic", "torch", "rich"} == set()
