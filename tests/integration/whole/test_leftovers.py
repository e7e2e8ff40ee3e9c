"""The fixture that looks for what tests leave behind, on tests that do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[2]
MESSY = """
import os, random, signal, subprocess, sys, threading, time
import pytest

SLEEPS = [sys.executable, "-c", "import time; time.sleep(3600)"]

@pytest.fixture(scope="module")
def lasting():
    stop = threading.Event()
    helper = subprocess.Popen(SLEEPS)
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()
    helper.kill()
    helper.wait()

def draw():
    while True:
        random.random()
        time.sleep(0.001)

def test_thread(lasting):
    def beget():
        threading.Thread(target=draw, name="drawing", daemon=True).start()
    threading.Thread(target=beget).start()

def test_after_the_thread():
    state = random.getstate()
    time.sleep(0.1)
    assert random.getstate() == state

def test_process(lasting):
    # Its parent is gone by the end of the test.
    orphan = "import subprocess; print(subprocess.Popen(%r, stdout=-3, stderr=-3).pid)" % SLEEPS
    pid = subprocess.run([sys.executable, "-c", orphan], check=True, capture_output=True, text=True).stdout
    with open("orphan", "w") as file:
        file.write(pid)

def test_server(tmp_path):
    from rlbuffer.config.settings import ServerSettings
    from rlbuffer.store.server import embedded
    import tempfile
    from pathlib import Path
    server = embedded.ensure(Path(tempfile.mkdtemp()), ServerSettings())
    Path("server").write_text(str(server.pid))

def test_variable():
    os.environ["LEFT"] = "1"

def test_after_the_variable():
    assert "LEFT" not in os.environ

def test_signal():
    with pytest.raises(AssertionError, match="no test has started that process"):
        os.kill(int(os.environ["STRANGER"]), signal.SIGTERM)

def test_tidy(lasting, monkeypatch):
    monkeypatch.setenv("LEFT", "2")
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    child = subprocess.Popen(SLEEPS)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
"""


def test_a_test_that_leaves_something_fails_with_its_name_and_the_next_one_is_safe(tmp_path: Path) -> None:
    (tmp_path / "test_messy.py").write_text(MESSY)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "leftovers", "-p", "no:cacheprovider", "-rE", "test_messy.py"],
            env=os.environ
            | {"PYTHONPATH": str(TESTS / "support"), "STRANGER": str(stranger.pid), "PYTEST_LEFTOVERS_SECONDS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    errors = dict(re.findall(r"^ERROR test_messy.py::(\w+) - (.*)$", done.stdout, re.M))
    assert errors.keys() == {"test_thread", "test_process", "test_server", "test_variable"}, done.stdout
    assert "E           thread drawing (draw)\n" in done.stdout
    orphan = int((tmp_path / "orphan").read_text())
    assert f"E           process {orphan}: {sys.executable} -c import time; time.sleep(3600)\n" in done.stdout
    # What it is called depends on the program: one that is started through a loader of its own cannot set its title.
    assert f"E           process {(tmp_path / 'server').read_text()}: " in done.stdout
    assert "E           environment variable LEFT: None before, '1' after\n" in done.stdout
    assert "8 passed" in done.stdout
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
