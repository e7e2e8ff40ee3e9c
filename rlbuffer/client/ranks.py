"""The ranks of one trainer, kept together where its loop is the user's own and compares nothing.

A rank above 0 is given a step only when rank 0 was given the same one: same number, same digest. A server that comes
back without its newest writes may get another step of a number that one rank has already. So each rank waits here for
the word of rank 0, which stands on the server before rank 0's loop gets the step.

Rank 0 looks whether the others train the same steps at the same time. A rank that makes fewer backward passes than
another (a micro-batch left out, the model called inside of its wrapper) has the other wait in an exchange, or exchanges
gradients of another step. Only the steps that the ranks acknowledge tell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rlbuffer.client.refusals import refused_for
from rlbuffer.errors import BatchTimeout
from rlbuffer.store.step_in_hand import StepInHand
from rlbuffer.store.trainer import TrainerStore

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.02
"""Between two looks for rank 0's word. The ranks ask for a step at about the same time."""
CHECK_SECONDS = 1.0
LOST_SECONDS = 5.0
"""Seconds for which rank 0 has a step that is not on the server, until nobody waits for it any more. Where the ranks
compare what they have, rank 0 lets go of it within two."""
APART = 2
"""Ranks that exchange gradients are at most one acknowledged step apart."""
SKEW_LOOKS = 3
"""Looks in a row that must find them apart: one heartbeat may have been on its way for long."""
PEER_FRESH_SECONDS = 2.0
"""Ranks beat every second."""
SLACK_SECONDS = 0.5
REMEMBERED = 16


class RankZeroWatch:
    """What rank 0 has, as another rank of a job of `world_size` sees it."""

    def __init__(self, store: TrainerStore, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._lost: tuple[StepInHand, float] | None = None
        """A step that only rank 0 can have, and since when."""

    def has(self, step: int, digest: str, *, silence_seconds: float, check: Callable[[], str]) -> bool:
        """Waits until rank 0 was given step `step`. -> False when that is another one than this of `digest`, which is
        then to be pulled again.

        Without a word of rank 0 on this very step (no attempt is registered, it has trained the step, or it has let go
        of it, which it does where the ranks compare), the step must be on the server.

        Args:
            silence_seconds: how long rank 0 may be silent.
            check: is called about once a second, and raises when there is nothing to wait for any more. -> why the
                server takes no writes now, rank 0's neither; "" while it does.

        Raises:
            BatchTimeout: rank 0 is silent, or has a step that nobody else can have.
        """
        pause, checked = FIRST_PAUSE_SECONDS, time.monotonic()
        heard, heard_at = -1, checked
        while True:
            rank_0 = self._store.rank_0()
            hand, is_ours = rank_0.hand, rank_0.world_size == self._world_size
            if is_ours and hand == StepInHand(step, digest):
                self._lost = None
                return True
            is_given = hand.step >= step or rank_0.at >= step
            if not rank_0.attempt or (is_ours and is_given and (hand.step != step or not hand.digest)):
                header = self._store.wait_step(step, block_seconds=0.0)
                return header is not None and header.digest == digest
            if is_ours and hand.step == step:
                self._note(hand)
                time.sleep(LONGEST_PAUSE_SECONDS)
                return False
            now = time.monotonic()
            if rank_0.seen_ms != heard:
                heard, heard_at = rank_0.seen_ms, now
            if now - heard_at > silence_seconds:
                if refusal := check():
                    raise BatchTimeout(refused_for(silence_seconds, refusal))
                raise BatchTimeout(
                    f"rank 0 has not got step {step}, which this rank has, and has said nothing for "
                    f"{silence_seconds:g} s. It has ended, or hangs: see its message, and start the trainer again"
                )
            if now - checked >= CHECK_SECONDS:
                checked = now
                check()
            time.sleep(pause)
            pause = min(1.25 * pause, LONGEST_PAUSE_SECONDS)

    def check(self, step: int, last: int) -> None:
        """Step `step` is waited for, the newest one is `last`. Raises BatchTimeout when only rank 0 can have it."""
        rank_0 = self._store.rank_0() if last < step else None
        if rank_0 is None or rank_0.hand.step != step or not rank_0.hand.digest:
            self._lost = None
        elif rank_0.world_size == self._world_size:
            self._note(rank_0.hand)

    def _note(self, hand: StepInHand) -> None:
        now = time.monotonic()
        if self._lost is None or self._lost[0] != hand:
            self._lost = hand, now
        if now - self._lost[1] >= LOST_SECONDS:
            raise BatchTimeout(
                f"rank 0 trains a step {hand.step} (digest {hand.digest[:12]}) that the server has lost, so no other "
                "rank can get it. Start the trainer again: it goes on from its newest checkpoint, and another step "
                f"{hand.step} is made"
            )


class Skew:
    """The other ranks' passes as rank 0 sees them. `rank`, `world_size`: of this reader."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.watches = rank == 0 and world_size > 1
        """Rank 0 looks for all."""
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        """When (monotonic) this rank had acknowledged which step."""
        self._apart = 0
        self._is_told = False

    def fault(self, step: int, beats: Mapping[str, Mapping[str, Any]], *, now: float) -> str:
        """Returns the fault, once; "" while there is none.

        Args:
            step: the last one that this rank has acknowledged.
            beats: the ranks' heartbeats.
            now: monotonic seconds.
        """
        self._seen.append((now, step))
        apart = [
            sentence for name, beat in beats.items() if name != "0" and (sentence := self._of(name, beat, step, now))
        ]
        self._apart = self._apart + 1 if apart else 0
        if self._apart < SKEW_LOOKS or self._is_told:
            return ""
        self._is_told = True
        return (
            f"{apart[0]}: their passes do not match, so they wait for each other or exchange gradients of different "
            "steps. Every rank makes one forward and backward pass of the wrapped model (DDP, FSDP) per micro-batch, "
            "dummies too"
        )

    def _of(self, name: str, beat: Mapping[str, Any], step: int, now: float) -> str:
        theirs, ago = beat.get("step"), float(beat["seconds_ago"])
        if not isinstance(theirs, int) or ago > PEER_FRESH_SECONDS:
            return ""
        # When the other rank said so this one was at least as far; now it is at least as far as then.
        before = max((s for at, s in self._seen if at <= now - ago - SLACK_SECONDS), default=0)
        if before >= theirs + APART or theirs >= step + APART:
            return f"rank 0 has trained step {step}, rank {name} step {theirs}"
        return ""
