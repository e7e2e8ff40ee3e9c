"""What stands in for a run that no server has: for a trainer's buffer, for the reader of one rank, and for the policy,
of which nobody samples. Nothing of what it is told is kept but the place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion


class Serverless(ABC):
    """The calls of :class:`~rlbuffer.client.buffer.Buffer` and :class:`~rlbuffer.client.reader.Reader` that a trainer
    makes."""

    publishes = True
    """Versions of the policy are written."""
    has_ended = False
    warns = False
    step = 0
    """Last trained step."""

    @abstractmethod
    def reader(
        self, rank: int = 0, world_size: int = 1, *, columns: Sequence[str] = (), pad_to_multiple_of: int = 1, **_: Any
    ) -> Serverless:
        """Itself, for one rank."""

    @abstractmethod
    def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Yields step after step, as :meth:`rlbuffer.client.reader.Reader.steps` yields pulled ones."""

    def start(self, resume_step: int | None = None, *, settings: Mapping[str, Any] | None = None) -> None:
        """Continues after `resume_step`."""
        self.step = self.step if resume_step is None else resume_step

    def trained(self, step: Step) -> None:
        """Remembers the place."""
        self.step = step.number

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"step": self.step, "epoch": 0, "digest": ""}

    def is_trained(self) -> bool:
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place."""
        self.step = int(state["step"])

    def still_there(self, step: Step) -> bool:
        """Its steps can be made again at any time."""
        return True

    @property
    def policy(self) -> Serverless:
        """Itself: every version may be announced."""
        return self

    def current(self) -> PolicyVersion:
        """None was announced yet."""
        return PolicyVersion(version=-1)

    def announce(self, version: int, *, location: str, size: int, checksum: str) -> bool:
        """Nobody listens."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nobody asks."""
        return

    add_record = finished = checkpointed = waits = postpones = close = _nothing


Source = Callable[[RunSettings, int], Serverless]
"""Makes what stands in for the run, of the settings and the model's number of token ids: in each rank's own process."""
