"""The ranks' processes: started together, ended together.

A rank that hangs in an exchange, in its data or halted does not answer when it is asked to end, and has nothing to
save: a checkpoint takes all ranks. Nothing here imports what ranks train with.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.process.files import write_whole
from rlbuffer.state.text import printable

END_SECONDS = 4.0
"""Time that ranks have to end by themselves once one has failed: to see the lost connection, and to report it."""
LEAVE_SECONDS = 60.0
"""Time that ranks have to leave once asked to, beyond their wait for a step: they finish theirs and write a checkpoint,
minutes of work in a large model, and give up an exchange that hangs."""
LOOK_SECONDS = 0.2
INTERRUPTED = 130
"""Exit code of a rank that was asked to stop, and did after a checkpoint."""
_FOLDER = "RANK_ENDS_FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of a rank, or of all of them."""

    exit_code: int
    text: str = ""
    """The message about it."""
    is_final: bool = False
    """Starting again would end the same way: the error is one of rlbuffer's own, or they were asked to stop."""
    is_consequence: bool = False
    """Another rank's end caused this one."""
    at: float = field(default_factory=time.time)

    def leave(self) -> None:
        """Leaves word for the launcher, which waits for this process's end. Where none can be left (a full disk, a
        folder that was swept from /tmp in weeks of training), it is said here."""
        try:
            write_whole(Path(os.environ[_FOLDER]) / f"{os.environ['RANK']}.json", json.dumps(asdict(self)))
        except OSError:
            print(printable(self.text, lines=True), file=sys.stderr, flush=True)


def leave_seconds(settings: RunSettings) -> float:
    """Time that the ranks of a trainer have to leave once asked to."""
    return settings.trainer.timeout_seconds + LEAVE_SECONDS


def run_ranks(
    context: ForkServerContext,
    main: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    world_size: int,
    stop: threading.Event,
    leave_seconds: float = LEAVE_SECONDS,
) -> RankEnd:
    """Runs `main` in a process for each rank, with torchrun's environment, and waits until all have ended.

    They are asked to leave when `stop` is set, and killed `leave_seconds` later, or some seconds after one of them
    failed. -> what ended them.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ranks meet there, as torchrun's do
    with tempfile.TemporaryDirectory(prefix="rlbuffer-ranks-") as folder:
        environment = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            _FOLDER: folder,
        }
        ranks = []
        for rank in range(world_size):
            rank_environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(context.Process(target=_main, args=(main, rank_environment, *arguments), name=f"rank-{rank}"))
            ranks[-1].start()
        killed: set[int] = set()
        deadline = math.inf
        is_told = has_failed = False
        while left := {rank: process for rank, process in enumerate(ranks) if process.exitcode is None}:
            wait([process.sentinel for process in left.values()], LOOK_SECONDS)
            if stop.is_set() and not is_told:
                is_told, deadline = True, min(deadline, time.monotonic() + leave_seconds)
                for process in left.values():
                    process.terminate()
            if not has_failed and any(process.exitcode not in (None, 0, INTERRUPTED) for process in ranks):
                has_failed, deadline = True, min(deadline, time.monotonic() + END_SECONDS)
            if time.monotonic() >= deadline:
                for rank, process in left.items():
                    if process.is_alive():
                        killed.add(rank)
                        process.kill()
                deadline = math.inf
        codes = {rank: process.exitcode or 0 for rank, process in enumerate(ranks)}
        words = {int(path.stem): RankEnd(**json.loads(path.read_text("utf-8"))) for path in Path(folder).glob("*.json")}
        if stop.is_set() or INTERRUPTED in codes.values():
            texts = (end.text for end in words.values() if not end.is_consequence)  # its checkpoint may be refused
            return RankEnd(exit_code=INTERRUPTED, text=next(texts, ""), is_final=True)
        return _cause(words, codes, killed)


def _cause(words: Mapping[int, RankEnd], codes: Mapping[int, int], killed: set[int]) -> RankEnd:
    """The first rank that failed by itself counts, not those that lost it, nor those that had to be killed then."""
    ends = sorted(words.values(), key=lambda end: (end.is_consequence, not end.is_final, end.at))
    if ends and not ends[0].is_consequence:
        return ends[0]
    for rank, code in codes.items():
        if code and rank not in words and rank not in killed:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return RankEnd(exit_code=1, text=f"Rank {rank} {how}.")
    if killed:
        text = f"Rank {min(killed)} did not answer: the others waited for it in an exchange, and it was ended."
        return RankEnd(exit_code=1, text=text)
    return ends[0] if ends else RankEnd(exit_code=0)


def _main(main: Callable[..., None], environment: Mapping[str, str], *arguments: Any) -> None:
    os.environ.update(environment)
    main(*arguments)
