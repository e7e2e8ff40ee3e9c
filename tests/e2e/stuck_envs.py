"""Envs whose reward does not come back, each in another way."""

from __future__ import annotations

import re
import time
from pathlib import Path

from failing_envs import Sound

from rlbuffer.process import watchdog
from rlbuffer.worker.envs import Score

# In the processes of their workers, which shall not wait for as long as others do.
watchdog.HELD_SECONDS, watchdog.GRACE_SECONDS, watchdog.WIND_SECONDS = 4.0, 1.0, 0.2
HELD = Path("held")


class Holds(Sound):
    """A regular expression that needs years, and holds the interpreter; of its first process only."""

    def score(self, prompt, tokens, *, finish_reason):
        if HELD.exists():
            return super().score(prompt, tokens, finish_reason=finish_reason)
        time.sleep(1.5)  # until the watchdog goes by the numbers above
        HELD.touch()  # behind it: a busy machine may have ended this process as one that holds its interpreter
        re.fullmatch(r"(a+)+b", "a" * 64)
        return Score(reward=1.0)


class Blocks(Sound):
    """A coroutine that blocks the worker's event loop."""

    async def score(self, prompt, tokens, *, finish_reason):
        time.sleep(3600)
        return Score(reward=1.0)


class Never(Sound):
    """A function that does not return, in a thread."""

    def score(self, prompt, tokens, *, finish_reason):
        time.sleep(3600)
        return Score(reward=1.0)
