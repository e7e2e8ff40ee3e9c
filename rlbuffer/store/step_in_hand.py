"""Step in hand: the one that rank 0's loop was given last. Rank 0 reports it; the server keeps it for the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInHand:
    """The step that rank 0's loop was given last; step 0 before the first."""

    step: int = 0
    digest: str = ""
    """Content of the step; "" once rank 0 has let go of it, as it does where ranks compare their steps and one lacks
    it."""

    def __str__(self) -> str:
        return f"{self.step} {self.digest}" if self.step else ""

    @staticmethod
    def of(data: bytes) -> StepInHand:
        """The inverse of ``str``; nothing in hand for what is none."""
        step, _, digest = data.decode("ascii", "replace").partition(" ")
        return StepInHand(int(step), digest) if step.isdigit() else StepInHand()


NOTHING = StepInHand()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZero:
    """Rank 0 as the server knows it, for the other ranks."""

    attempt: int
    """0 before the first."""
    world_size: int
    at: int
    """Last step that it has acknowledged."""
    seen_ms: int
    hand: StepInHand
