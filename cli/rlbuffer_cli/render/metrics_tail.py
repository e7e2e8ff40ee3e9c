"""Following ``metrics.jsonl`` while the trainer writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.narration.numbers import amount, percent
from rlbuffer_cli.options import echo

POLL_SECONDS = 0.2
ASK_SECONDS = 1.0


class MetricsTail:
    """New step records since the last look; a step that was trained again after a restart is told once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.last_step = 0
        self._rest = b""
        self._at = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Records of whole lines that appeared since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = []
        for line in lines:
            record = _parsed(line)
            if record is not None and record["step"] > self.last_step:
                self.last_step = record["step"]
                records.append(record)
        return records


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # a line that a killed trainer left half-written
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def train_line(record: Mapping[str, Any], planned: int) -> str:
    """A trained step as one line."""
    seconds = record.get("seconds", {})
    total = seconds.get("total") or 1e-9
    reward = record.get("reward")
    parts = [
        f"step {record['step']}/{planned}",
        f"reward {reward:.3f}" if reward is not None else "",
        f"loss {record['loss']:+.4f}" if record.get("loss") is not None else "",
        f"entropy {record['entropy']:.3f}" if record.get("entropy") is not None else "",
        f"grad {record['grad_norm']:.2f}" if record.get("grad_norm") is not None else "",
        f"age {record['age']:.1f} max {record['max_age']}" if record.get("age") is not None else "",
        f"{amount(record['tokens'])} tok",
        f"{amount(record['tokens'] / total)} tok/s",
        f"wait {percent(seconds.get('wait', 0.0) / total)}",
    ]
    return "  ".join(part for part in parts if part)


def follow_train(settings: RunSettings, shown: str, done: threading.Event, has_server: bool = True) -> None:
    """Shows new steps until `done`: one object per line, or a live view."""
    tail = MetricsTail(settings.output_dir / "metrics.jsonl", from_end=True)
    if shown == "json":
        while True:
            is_last = done.wait(POLL_SECONDS)
            for record in tail.new():
                echo(json.dumps(record))
            if is_last:
                return
    from rlbuffer_cli.render.run_view import TrainView

    with TrainView(settings.trainer.steps) as view:
        asking = threading.Thread(target=_ask, args=(settings, done, view.wait_for), name="ask", daemon=True)
        if has_server:
            asking.start()
        while True:
            is_last = done.wait(POLL_SECONDS)
            view.add(tail.new())
            if is_last:
                return


def _ask(settings: RunSettings, done: threading.Event, tell: Callable[[str], None]) -> None:
    """Asks the server once a second what the batcher waits for; in a thread, because it may be away."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.errors import RlbufferError
    from rlbuffer.narration.waiting import to_trainer

    while not done.wait(ASK_SECONDS):
        try:
            with connect(settings.redis_url, run=settings.run, config=settings, name="train view") as buffer:
                while not done.wait(ASK_SECONDS):
                    tell(to_trainer(buffer.store.waiting().get("batcher", "")))
        except RlbufferError as error:
            tell(str(error).splitlines()[0])
