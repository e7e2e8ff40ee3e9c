"""The order of prompts: every one of a data set once an epoch, each epoch shuffled again.

Ticket n is prompt ``order(n // size)[n % size]``. Tickets are numbered on the server and neither skipped nor doubled,
so epoch and position come from there alone: a worker that is killed loses its place to nobody, and a resumed run goes
on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Passes = Annotated[int, Field(ge=0)]
"""How often every prompt is sampled before an env is done; 0: it has no end."""
KEPT_EPOCHS = 3
"""Orders that are kept: tickets of the last epoch come back while the next one has begun."""


class PromptOrder:
    """Ticket numbers to places in a data set.

    Args:
        size: prompts, >= 1.
        seed: of the shuffling; the same one in every worker of an env.
        shuffle: False: every epoch goes through the data as it lies.
        passes: epochs after which there are no more prompts; 0: there is no end.

    Example:
        >>> order = PromptOrder(3, seed=0)
        >>> sorted(order.place(n)[1] for n in range(3, 6)), order.place(4)[0]
        ([0, 1, 2], 1)
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True, passes: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a data set of {size} prompts has no order")
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.tickets = size * passes or None
        """How many there are in all; None: no end."""
        self.identity: Mapping[str, Any] = {"prompts": size, "shuffle": shuffle} | ({"seed": seed} if shuffle else {})
        """What decides the order, by name. Not `passes`: one more goes on where the last one ended."""
        self._order_of = lru_cache(KEPT_EPOCHS)(self._shuffled)

    def place(self, number: int) -> tuple[int, int]:
        """Returns (epoch, index into the data set) of ticket `number`."""
        epoch, position = divmod(number, self.size)
        if not self.shuffle:
            return epoch, position
        return epoch, int(self._order_of(epoch)[position])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # Not Generator.permutation: numpy may change what it returns, and workers with different numpy releases would
        # then disagree about the order. The raw words of a bit generator never change.
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.size)
        return np.argsort(words, kind="stable")
