"""The server's memory: what to do when it fills up. :mod:`rlbuffer.config.memory_needs` has the needs of a run.

    below 70 %   nothing
    from 70 %    the next header asks for a checkpoint: it lets steps retire that no checkpoint holds yet
    from 85 %    payloads that no push has announced are swept (:mod:`rlbuffer.daemon.strays`); then the oldest trained
                 steps retire anyway, down to 75 %; untrained ones never
    full         pushes wait; commits, training and retirement go on

Shares are of `maxmemory`, of all that counts against it: other runs and the clients' buffers too. Those buffers come
and go with every payload, so a decision uses the smaller of two looks.
"""

from __future__ import annotations

from rlbuffer.config.memory_needs import ASK_SHARE
from rlbuffer.store.keys import EARLY_SHARE

ENOUGH_SHARE = 0.75
"""Share of maxmemory down to which early retirement goes on."""
WORTH_SHARE = 0.10
"""Share of maxmemory that a checkpoint must be able to free: it is not asked for when less could be freed."""
STORED_BYTES = 350
"""Bytes that a sequence of a committed step takes on the server beyond its payload, which has the details in it."""
WATCH_SHARE = 0.30
"""Share of maxmemory from which the server is looked at more often. A quick run fills a small one by 15 % a second."""
CAUTION = 0.75
"""Share of what is missing that steps retire early for, before the server is looked at again: with a step go the groups
that were dropped beside it, which nobody has counted."""
MEMORY_LOOKS = 2
"""A decision uses the smallest of this many looks."""


def stored_bytes(*, payload_bytes: int, sequences: int) -> int:
    """Bytes that a committed step takes on the server: its payloads and :data:`STORED_BYTES` per sequence."""
    return payload_bytes + STORED_BYTES * sequences


class Pressure:
    """Decides what is done about the server's memory. No server, no clock: what is seen goes in by :meth:`observe`.

    A checkpoint that is asked for: asked in the header of step s -> reported, or step s + 1 is trained -> the oldest
    one that is kept may let steps retire -> asked again while memory is still short.
    """

    def __init__(self) -> None:
        self.limit = 0
        """maxmemory in bytes; 0: none."""
        self.sizes: dict[int, int] = {}
        """Step -> bytes that it takes on the server; the live ones."""
        self.retired = 0
        """The last retired step."""
        self.must_ask = False
        """No checkpoint holds what was retired: the next header asks for one, whatever the memory is by then."""
        self._looks: list[int] = []
        self.is_short = False
        """Trained steps are to retire early: from :data:`EARLY_SHARE` until :data:`ENOUGH_SHARE`."""
        self._asked = 0
        """Last step whose header asked."""

    @property
    def used(self) -> int | None:
        """Bytes in use by the smallest of the last looks; None until there are enough of them."""
        return min(self._looks) if len(self._looks) >= MEMORY_LOOKS else None

    @property
    def may_be_short(self) -> bool:
        """The newest look, not the smallest, is above :data:`WATCH_SHARE`, or there are too few of them."""
        return len(self._looks) < MEMORY_LOOKS or (bool(self.limit) and self._looks[-1] >= WATCH_SHARE * self.limit)

    @property
    def share(self) -> float:
        """`used` over the limit; 0.0 when one of them is not known."""
        return self.used / self.limit if self.limit and self.used is not None else 0.0

    def observe(self, used: int, limit: int) -> None:
        """Takes in what the server said, in bytes."""
        self.limit = limit
        self._looks = [*self._looks, used][-MEMORY_LOOKS:]
        if self.used is not None and self.used >= EARLY_SHARE * limit > 0:
            self.is_short = True
        elif (self.used is not None and self.used < ENOUGH_SHARE * limit) or not limit:
            self.is_short = False

    def committed(self, step: int, size: int, *, asks: bool = False) -> None:
        """A step of `size` bytes is there; its header asks for a checkpoint, for whatever reason."""
        self.sizes[step] = size
        if asks:
            self._asked, self.must_ask = step, False

    def retire(self, up_to: int) -> None:
        """Steps are gone."""
        self.sizes = {step: size for step, size in self.sizes.items() if step > up_to}
        self.retired = up_to
        self.freed()

    def freed(self) -> None:
        """Memory comes back: where it was short, what was seen before does not count any more."""
        if self.may_be_short:
            self._looks = []

    def retires_up_to(self, done: int) -> int | None:
        """85 %: the last step to retire early now, None when nothing has to go. `done`: the last that is trained.

        As many of the oldest as it takes to come near :data:`ENOUGH_SHARE`, by what they take on the server; then, or
        after one of unknown size, it is looked at again.
        """
        used = self.used
        if used is None or not self.is_short:
            return None
        missing = CAUTION * (used - ENOUGH_SHARE * self.limit)
        last = self.retired
        while missing >= 0 and last < done:
            last += 1
            if not self.sizes.get(last):
                break
            missing -= self.sizes[last]
        return last if last > self.retired else None

    def asks(self, *, done: int, checkpoint: int = 0) -> bool:
        """70 %: True when the header of the next step asks for a checkpoint. `checkpoint`: the trainer's newest; 0 when
        it does not say."""
        if self._asked and done <= self._asked and checkpoint < self._asked:
            return False  # it is still being made
        if self.must_ask:
            return True
        could_go = sum(size for number, size in self.sizes.items() if number <= done)
        return self.share >= ASK_SHARE and could_go >= WORTH_SHARE * self.limit
