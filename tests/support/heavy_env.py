"""``heavy``: vcopy with long texts beside few tokens, so that a step of little arithmetic takes a megabyte."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.worker.envs.vcopy import VCopy

TEXT_CHARACTERS = 64_000
"""Length of every text: 64 kB a rollout."""


class Heavy(VCopy):
    """The env vcopy with texts that are filled up with dots."""

    def render(self, tokens: NDArray[np.int32]) -> str:
        return super().render(tokens).ljust(TEXT_CHARACTERS, ".")


def make(**options: Any) -> Heavy:
    """The factory that the config names."""
    return Heavy(**options)
