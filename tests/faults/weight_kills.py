"""Publisher, relay and worker of weights on their own, killed at drawn moments: no version is ever wrong.

The publisher publishes versions with deltas, each with other weights. The relay downloads the newest from it and serves
what it has. The worker downloads from the relay. Each is a process of its own; whoever is killed is started again.
"""

from __future__ import annotations

import hashlib
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from outcome import Outcome, Say

from rlbuffer.weights.layout import DELTA_FILE, LIST_FILE, VERSION, WEIGHTS_FILE, parse_list

WORDS = 500_000
SHARE = 0.01
DEADLINE_SECONDS = 120.0

PUBLISHER = """
import sys, time
from pathlib import Path
import torch
from rlbuffer.process.files import write_whole
from rlbuffer.weights.files import publish
from rlbuffer.weights.layout import versions
from rlbuffer.weights.serving import FileServer, make_app
folder, listen, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
weights = torch.randn({words}, generator=torch.Generator().manual_seed(0))
with FileServer(make_app(folder), listen):
    at = max(versions(folder), default=-1)
    for version in range(last + 1):
        dice = torch.Generator().manual_seed(version)
        weights = torch.where(torch.rand({words}, generator=dice) < {share}, weights * 1.01, weights)
        if version > at:
            publish(folder, version, state={{"a": weights.to(torch.bfloat16)}}, config={{}}, keep=6, with_delta=True)
            time.sleep(0.05)
    time.sleep(3600)
"""

READER = """
import re, sys, time
from dataclasses import replace
from pathlib import Path
import httpx
from rlbuffer.errors import WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.serving import FileServer, make_app
folder, source, listen = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder.mkdir(exist_ok=True)
cache = VersionCache(folder, keep=4)
def go_on():
    while True:
        try:
            name = httpx.get(source, timeout=5).json()["versions"][-1]
            entry = httpx.get(f"{source}/{name}/files.json", timeout=5).json()["files"]["model.safetensors"]
            policy = PolicyVersion(
                version=int(name[1:9]), location=f"{source}/{name}", size=entry["size"], checksum=entry["sha256"]
            )
            cache.localized(policy)
        except (httpx.HTTPError, WeightsError, LookupError, ValueError):
            pass
        time.sleep(0.02)
with FileServer(make_app(folder), listen):
    go_on()
"""


class _Role:
    """A process that is started again after each kill."""

    def __init__(self, name: str, program: str, words: list[str], log: Path, *, listen: str) -> None:
        self.name, self.log, self.listen = name, log, listen
        self._command = [sys.executable, "-c", program, *words]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def await_service(self) -> None:
        """Waits until it serves what it has: from then on a kill can tear something."""
        host, _, port = self.listen.rpartition(":")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.05)
        raise TimeoutError(f"the {self.name} does not serve: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def run_weight_kills(folder: Path, *, seed: int, kills: int, say: Say) -> Outcome:
    """Kills each of the three `kills` times, one at a time, in a drawn order at drawn moments."""
    outcome, began, dice = Outcome(name="weights"), time.monotonic(), random.Random(seed)
    last = 6 * kills
    trainer, relay, worker = (folder / name for name in ("publisher", "relay", "worker"))
    trainer.mkdir()
    ports = _free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    listens = [f"127.0.0.1:{port}" for port in ports]
    publisher = PUBLISHER.format(words=WORDS, share=SHARE)
    roles = [
        _Role(
            "publisher", publisher, [str(trainer), listens[0], str(last)], folder / "publisher.log", listen=listens[0]
        ),
        _Role("relay", READER, [str(relay), urls[0], listens[1]], folder / "relay.log", listen=listens[1]),
        _Role("worker", READER, [str(worker), urls[1], listens[2]], folder / "worker.log", listen=listens[2]),
    ]
    try:
        order = [role for role in roles for _ in range(kills)]
        dice.shuffle(order)
        for role in order:
            role.await_service()
            time.sleep(dice.uniform(0.0, 1.0))
            role.kill()
            outcome.faults[role.name] += 1
            for place in (trainer, relay, worker):
                outcome.findings += [f"after a kill of the {role.name}: {line}" for line in wrong_versions(place)]
            role.start()
            if sum(outcome.faults.values()) % 15 == 0:
                say(f"  {sum(outcome.faults.values())} kills, the worker has version {newest(worker)}")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while newest(worker) < last and time.monotonic() < deadline:
            time.sleep(0.1)
        if newest(worker) < last:
            outcome.findings.append(f"the worker has version {newest(worker)} at the end, published were {last}")
        outcome.findings += wrong_versions(worker)
        outcome.facts["versions"] = last + 1
        outcome.facts["rebuilt at the worker, of those it has"] = (
            sum((path / DELTA_FILE).exists() for path in versions(worker)),
            len(versions(worker)),
        )
    finally:
        for role in roles:
            role.kill()
    outcome.seconds = time.monotonic() - began
    return outcome


def versions(folder: Path) -> list[Path]:
    """The directories that a reader would take for complete versions, the newest last."""
    return sorted(path for path in folder.glob("v*") if VERSION.match(path.name))


def newest(folder: Path) -> int:
    found = versions(folder)
    return int(found[-1].name[1:9]) if found else -1


def wrong_versions(folder: Path) -> list[str]:
    """What is not as its name and its list say."""
    found = []
    for path in versions(folder):
        try:
            for file in parse_list((path / LIST_FILE).read_text(), name=path.name):
                digest = hashlib.sha256((path / file.name).read_bytes()).hexdigest()
                if digest != file.sha256:
                    found.append(f"{folder.name}/{path.name}/{file.name} has sha256 {digest}")
        except FileNotFoundError:
            if path.is_dir() and (path / WEIGHTS_FILE).exists():
                found.append(f"{folder.name}/{path.name} lacks a file")
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
