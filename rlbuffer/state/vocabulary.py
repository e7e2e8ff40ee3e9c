"""The vocabulary of the built-in envs, so that one tiny model may learn them all, and how an answer in it is scored:
13 symbols (ten digits, filler, equals, end).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SYMBOLS = "0123456789_=$"
"""Token id i is written as ``SYMBOLS[i]``: a digit is its own id."""
VOCAB_SIZE = len(SYMBOLS)
FILLER = SYMBOLS.index("_")
EQUALS = SYMBOLS.index("=")
END = SYMBOLS.index("$")


def encode(text: str) -> NDArray[np.int32]:
    """Text in `SYMBOLS` as token ids.

    Raises:
        ValueError: a character is not one of `SYMBOLS`.

    Example:
        >>> encode("12=").tolist()
        [1, 2, 11]
    """
    return np.array([SYMBOLS.index(character) for character in text], np.int32)


def render(tokens: Iterable[int]) -> str:
    """Token ids as text; an id outside the vocabulary is written ``?``.

    Example:
        >>> render([1, 2, 11, 12, 40])
        '12=$?'
    """
    return "".join(SYMBOLS[t] if 0 <= t < len(SYMBOLS) else "?" for t in map(int, tokens))


def positions_right(target: NDArray[np.int32], answer: NDArray[np.int32]) -> float:
    """Share of positions at which `answer` equals `target`, over the longer of the two.

    Dense on purpose: a random policy earns something, and every single position that is put right, the end token
    included, earns more.

    Shapes: ``target`` [n], n >= 1; ``answer`` [m].

    Example:
        >>> positions_right(encode("12$"), encode("13$"))
        0.6666666666666666
    """
    shared = min(len(target), len(answer))
    right = int(np.count_nonzero(target[:shared] == answer[:shared]))
    return right / max(len(target), len(answer))
