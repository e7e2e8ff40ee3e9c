"""Pauses between asks for what is not there yet, when many others ask the same server."""

from __future__ import annotations

import random
from collections.abc import Iterator

FIRST_PAUSE_SECONDS, SOON_SECONDS, SELDOM_SECONDS = 0.01, 0.1, 5.0
"""Pauses at first, after a second or two, and of one who waits for long."""
TOGETHER_SECONDS = 0.5
"""Idle workers ask at multiples of this on the clock, where hosts have the same one."""
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


def together(pause: float, now: float) -> float:
    """A long pause, up to TOGETHER_SECONDS longer, so that it ends when those of others end; `now` is Unix time.

    A server that sleeps between two asks spends more on waking, with cold caches, than on the asks: 135 us each for 180
    a second that come one by one, 51 for as many that come twice a second.
    """
    return pause + -(now + pause) % TOGETHER_SECONDS
