"""The server's memory: what to do when it fills up. :mod:`rlbuffer.config.memory_needs` has the needs of a run.

    below 70 %   nothing
    from 70 %    the next header asks for a checkpoint: it lets steps retire that no checkpoint holds yet
    from 85 %    the oldest trained steps retire anyway, down to 75 %; untrained ones never
    full         pushes wait; commits, training and retirement go on

Shares are of `maxmemory`, of all that counts against it: other runs and the clients' buffers too. Those buffers come
and go with every payload, so a decision uses the smaller of two looks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.memory_needs import ASK_SHARE, Forecast, is_by_capacity, mib
from rlbuffer.state.text import plural
from rlbuffer.store.keys import EARLY_SHARE

ENOUGH_SHARE = 0.75
"""Share of maxmemory down to which early retirement goes on."""
FULL_SHARE = 0.97
"""Share of maxmemory from which pushes may be refused."""
MACHINE_SHARE = 0.50
"""Share of its machine's memory that a server without maxmemory is taken to have, so that a trainer that never writes a
checkpoint does not fill the machine."""
WORTH_SHARE = 0.10
"""Share of maxmemory that a checkpoint must be able to free: it is not asked for when less could be freed."""
STORED_BYTES = 350
"""The same beyond its payload, which has the details in it."""
WATCH_SHARE = 0.30
"""Share of maxmemory from which the server is looked at more often. A quick run fills a small one by 15 % a second."""
CAUTION = 0.75
"""Share of what is missing that steps retire early for, before the server is looked at again: with a step go the groups
that were dropped beside it, which nobody has counted."""
MEMORY_LOOKS = 2
"""A decision uses the smallest of this many looks."""
LAST_GAP = 64
"""Most steps between two checkpoints that are asked for without effect."""


def stored_bytes(*, payload_bytes: int, rollouts: int) -> int:
    """Bytes that a committed step takes on the server: its payloads and :data:`STORED_BYTES` per rollout."""
    return payload_bytes + STORED_BYTES * rollouts


def mean_step_bytes(config: BatcherConfig, steps: Mapping[int, tuple[int, int]], world_size: int) -> int | None:
    """Mean bytes of the committed `steps` (step -> bytes, planned world size), as they would be at `world_size`.

    Steps that close by their rows grow with the number of ranks, the others do not. None when there are no steps.
    """
    scaled = [
        size * world_size / max(1, planned) if is_by_capacity(config) else float(size)
        for size, planned in steps.values()
        if size
    ]
    return round(sum(scaled) / len(scaled)) if scaled else None


class Pressure:
    """Decides what is done about the server's memory. No server, no clock: what is seen goes in by :meth:`look`.

    Lifecycle of an asked-for checkpoint: asked in the header of step s -> reported, or step s + 1 is trained ->
    the oldest kept one may let steps retire -> asked again if memory is still short. Without any effect the time
    between two doubles: a trainer that keeps many checkpoints would otherwise write one after every step.
    """

    def __init__(self) -> None:
        self.limit = 0
        """maxmemory in bytes; 0: none."""
        self._looks: list[int] = []
        self._is_retiring = False
        self._asked = 0
        """Last step whose header asked."""
        self._retired_then = -1
        """Last retired step when it was asked."""
        self._gap = 1
        self._must_ask = False

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

    def look(self, used: int, limit: int) -> None:
        """Takes in what the server said, in bytes."""
        self.limit = limit
        self._looks = [*self._looks, used][-MEMORY_LOOKS:]

    def freed(self) -> None:
        """Something was unlinked: what was seen before does not count any more."""
        self._looks = []

    # -- 85 % ------------------------------------------------------------------------------------------------------
    def retires_up_to(self, *, retired: int, done: int, sizes: Mapping[int, int]) -> int | None:
        """The last step to retire early now, None when nothing has to go.

        As many of the oldest as it takes to come near :data:`ENOUGH_SHARE`, by what they take on the server; then it is
        looked at again, when memory has been given back.

        Args:
            retired: last retired step.
            done: last step that the trainer is through with.
            sizes: step -> bytes; after one that is not named, the server is looked at again.
        """
        used = self.used
        if used is None or not self.limit:
            return None
        if used >= EARLY_SHARE * self.limit:
            self._is_retiring = True
        elif used < ENOUGH_SHARE * self.limit:
            self._is_retiring = False
        if not self._is_retiring:
            return None
        missing = CAUTION * (used - ENOUGH_SHARE * self.limit)
        last = retired
        while missing >= 0 and last < done:
            last += 1
            if not sizes.get(last):
                break
            missing -= sizes[last]
        return last if last > retired else None

    def must_ask(self) -> None:
        """No checkpoint holds what was retired: the next header asks for one, whatever the memory is by then."""
        self._must_ask = True

    # -- 70 % ------------------------------------------------------------------------------------------------------
    def asks(self, step: int, *, retired: int, done: int, sizes: Mapping[int, int], checkpoint: int = 0) -> bool:
        """True when the header of `step` asks for a checkpoint.

        Args:
            step: the one to be committed.
            retired, done, sizes: as in :meth:`retires_up_to`.
            checkpoint: the trainer's newest; 0 when it does not say.
        """
        if self._asked and done <= self._asked and checkpoint < self._asked:
            return False  # it is still being made
        if self._must_ask:
            return True
        if self.share < ASK_SHARE:
            return False
        freeable = sum(size for number, size in sizes.items() if retired < number <= done)
        if freeable < WORTH_SHARE * self.limit:
            return False
        return retired != self._retired_then or step > self._asked + self._gap

    def has_asked(self, step: int, *, retired: int) -> None:
        """The header of `step` has asked for a checkpoint, for whatever reason."""
        self._gap = min(2 * self._gap, LAST_GAP) if retired == self._retired_then else 1
        self._asked, self._retired_then, self._must_ask = step, retired, False


# -- in words ----------------------------------------------------------------------------------------------------------
NO_LIMIT = (
    "The server has no memory limit (maxmemory 0), so it refuses no push: producers without tickets can fill its "
    "machine's memory. Set one, for example `redis-cli config set maxmemory 8gb`."
)


def assumed_limit(maxmemory: int, machine: int) -> int:
    """Bytes that the shares are of: maxmemory, else :data:`MACHINE_SHARE` of the machine's memory; 0: not known.

    Example:
        >>> assumed_limit(0, 64 * 2**30) // 2**30
        32
    """
    return maxmemory or int(MACHINE_SHARE * machine)


def no_limit(limit: int) -> str:
    """The server has no maxmemory; `limit` is what it is taken to have."""
    if not limit:
        return f"{NO_LIMIT} Until then trained steps go with the trainer's checkpoints alone."
    return f"{NO_LIMIT} Until then trained steps go as if it were {mib(limit)}, half of that machine's."


def checkpoints_often(forecast: Forecast, checkpoint_every: int) -> str:
    """The trainer's own checkpoints come too seldom for this server."""
    return (
        f"Checkpoints every {plural(checkpoint_every, 'step')} (trainer.checkpoint.every) do not fit the server's "
        f"memory ({mib(forecast.step_bytes)} a step, {mib(forecast.limit)} in all): the trainer will be asked for one "
        f"about every {plural(forecast.kept_steps, 'step')}."
    )


def checkpoint_asked(step: int) -> str:
    """The sentence above :data:`ASK_SHARE`."""
    return (
        f"The server's memory is above {100 * ASK_SHARE:.0f} %: step {step} asks the trainer for a checkpoint, so that "
        "steps can retire."
    )


def steps_retired_early(first: int, last: int, used: int, limit: int, *, checkpoint: int) -> str:
    """The sentence above :data:`EARLY_SHARE`. `checkpoint`: the trainer's newest."""
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    first_words = (
        f"The server's memory was {100 * used / limit:.0f} % full ({used / 2**20:.1f} of {mib(limit)}): {steps}"
    )
    if last <= checkpoint:
        return f"{first_words} retired early; the trainer's newest checkpoint, of step {checkpoint}, holds them."
    return (
        f"{first_words} retired early, and no checkpoint holds them. A trainer that starts again needs one of step "
        f"{last} or later; the next step asks for it."
    )


def archive_stuck(trouble: str) -> str:
    """The archive cannot be written."""
    return (
        f"The archive cannot be written: {trouble}. Training goes on; steps stay on the server while it has memory, "
        "and then go unarchived. Make room there."
    )
