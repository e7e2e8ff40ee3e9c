"""Pauses between asks for what is not there yet, when many others ask the same server."""

from __future__ import annotations

import random
from collections.abc import Iterator

FIRST_PAUSE_SECONDS, SOON_SECONDS, SELDOM_SECONDS = 0.01, 0.1, 5.0
"""Pauses at first, after a second or two, and of one who waits for long."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state


def pauses_between_asks() -> Iterator[float]:
    """Seconds until the next ask, one after the other, for as long as the answer is that there is nothing.

    At first they are short. Later they are a twentieth of what was waited at most: where tickets flow, nobody loses
    more than that. In the end, after some two minutes, they are five seconds, so that a thousand workers ask less than
    two hundred times a second and not ten thousand times. Each has up to a quarter on top, by chance: who began
    together does not go on asking together.
    """
    waited, pause = 0.0, FIRST_PAUSE_SECONDS
    while True:
        yield pause * _RANDOM.uniform(1.0, 1.25)
        waited += pause
        pause = min(1.5 * pause, max(SOON_SECONDS, waited / 20), SELDOM_SECONDS)
