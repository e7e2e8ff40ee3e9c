"""The step that rank 0 of the trainer was given last, as it says it and as the server keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInHand:
    """The step that the loop of rank 0 was given last; step 0 before the first."""

    step: int = 0
    digest: str = ""
    """"" when rank 0 has let go of it: the ranks compare what they have before they train."""

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
    """State of rank 0 as the other ranks see it."""

    attempt: int
    """0 before the first."""
    world_size: int
    at: int
    """Last step that it has acknowledged."""
    seen_ms: int
    hand: StepInHand
