"""`rlbuffer run` on a terminal of 80 columns and 24 lines: its first seconds, and a worker that is killed."""

from __future__ import annotations

import os
import re
import signal

from homes import Home
from terminals import ANSI, typed

KILLED = b"worker vcopy was killed by SIGKILL"
TRAINED = re.compile(rb"step [1-9]\d* of")
"""The screen is drawn four times a second: no step is sure to be on it."""


def test_a_start_that_goes_well_has_no_problem_and_a_killed_worker_stands_on_the_screen(home: Home) -> None:
    given = ["run", str(home.config(steps=5000, world_size=1))]

    def kill() -> None:
        os.kill(home.pids()["worker vcopy"], signal.SIGKILL)

    drawn = typed(
        given,
        home.path,
        until=KILLED,
        keys=b"\x03",
        code=130,
        first=(TRAINED, kill),
        program=home.parent.stand_in,
        **home.environment,
    )
    shown = ANSI.sub(b"", drawn)
    trained = TRAINED.search(shown)
    assert trained is not None
    start = shown[: trained.start()].decode(errors="replace")
    sentences = [part.split("\n")[0] for part in start.split("✕ ")[1:]]
    assert [each for each in sentences if not each.startswith("dropped")] == []
    assert "T light, dark" in start
