"""A run with AsyncGRPO: engine, batcher, and the user's script as processes; and what its lines of JSON say."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homes import Home
from trl_parts import make_model

HERE = Path(__file__).parent
RUN = "trl"
SETTINGS = """
run = "trl"

[server]
appendfsync = "no"

[batcher]
feeds = "stream"
max_age = 40
"""
"""`max_age`: nothing goes for its age here, so that what is scored and what is trained can be compared."""


@dataclass
class TrlRun:
    """One run in a home."""

    home: Home
    mode: str = "door"
    options: tuple[str, ...] = ()
    ranks: int = 1
    samples: bool = True
    """The trainer's own rollout process does; False: a host's alone."""
    port: int = field(init=False)
    url: str = field(init=False, default="-")

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.home.environment |= {"TRL_FOLDER": str(self.home.path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        if not (self.home.path / "model").exists():
            make_model(self.home.path / "model")
        self.start_engine()
        (self.home.path / "trl.toml").write_text(SETTINGS)
        if self.mode == "door":
            self.serving = self.serve()
            with self.home.connect(RUN) as buffer:
                self.url = buffer.store.server()["address"]
        self.home.wait_until(self._answers, seconds=120, why="the engine")

    def start_engine(self) -> None:
        """What samples."""
        self.python("trl_parts.py", "engine", self.home.path / "model", self.port, log="engine")

    def serve(self) -> Any:
        """A batcher."""
        return self.home.start(
            "serve",
            "--config",
            self.home.path / "trl.toml",
            "--display",
            "plain",
            log=f"serve-{len(self.home.processes)}",
        )

    def python(self, script: str, *arguments: object, log: str) -> Any:
        return self.home.start_python(str(HERE / script), *map(str, arguments), log=log)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def train(self, steps: int) -> list[Any]:
        """The user's script, on each rank; started again, it goes on."""
        alone, started = self.home.environment, []
        with socket.create_server(("127.0.0.1", 0)) as free:
            meets = free.getsockname()[1]
        for rank in range(self.ranks):
            if self.ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_PORT": meets}
                place["MASTER_ADDR"] = "127.0.0.1"
                self.home.environment = alone | {name: str(value) for name, value in place.items()}
            given = (self.mode, self.port if self.samples else 0, steps, self.url, RUN, *self.options)
            started.append(self.python("trl_user.py", *given, log=f"user-{len(self.home.processes)}"))
        self.home.environment = alone
        return started

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """What the script has written down."""
        file = self.home.path / f"{kind}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def step(self) -> int:
        """The newest optimizer step of the newest process."""
        (newest,) = [line["pid"] for line in self.lines("started")][-1:] or [0]
        return max((line["step"] for line in self.lines("trained") if line["pid"] == newest), default=0)

    def scored(self) -> list[str]:
        """Digests of all samples in the order in which their groups were scored."""
        return [digest for line in self.lines("scored") for digest in line["digests"]]

    def history(self) -> list[str]:
        """Digests of what the weights have seen: of a step that was trained again the last time counts."""
        return self._last("digests")

    def places(self) -> list[tuple[int, int]]:
        """Group's place in the stream and number in it, of the samples of `history`."""
        return [(place, number) for place, number in self._last("places")]

    def _last(self, what: str) -> list[Any]:
        steps = {line["step"]: line[what] for line in self.lines("trained")}
        return [its for step in sorted(steps) for its in steps[step]]

    def trained_again(self) -> list[bool]:
        """For each step that was trained again: with the same samples."""
        times: dict[int, list[list[str]]] = {}
        for line in self.lines("trained"):
            times.setdefault(line["step"], []).append(line["digests"])
        return [all(other == first for other in others) for first, *others in times.values() if others]

    def child(self) -> int:
        """The newest process that has scored a group."""
        return int(self.lines("scored")[-1]["pid"])


def check(run: TrlRun) -> None:
    """No pushed group is lost or trained twice in the weights' history, and the ledger counts what TRL has trained."""
    history, scored, places = run.history(), run.scored(), run.places()
    assert len(places) == len(history)
    assert places == sorted(set(places)), "a sample is twice in the weights' history, or not in its place"
    # Two answers of a group may be the same, token for token.
    assert not Counter(history) - Counter(scored), "more was trained than was scored"
    assert all(run.trained_again()), "a step was trained again with other samples"
    with run.home.connect(RUN) as buffer:
        report = buffer.verify()
        assert report.ok, report.findings
        account = buffer.ledger().envs["trl"]
        assert set(account.dropped) <= {"unused"}, account
        packed = [its for step in buffer.store.history() if step["event"] == "step" for its in [step["step"]]]
        trained = buffer.store.trainer().trained
    groups = {line["group"]: line["digests"] for line in run.lines("scored")}
    whole = [number for number, digests in groups.items() if set(digests) <= set(history)]
    assert len(whole) == trained <= max(packed), "the ledger's groups are those that TRL has trained whole"
