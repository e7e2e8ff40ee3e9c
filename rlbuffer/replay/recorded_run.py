"""The recorded steps of an archive, for a trainer: the same micro-batches as the server gave, without a server.

They are made by the reader's own code, over a store that reads files. A step is trained behind the one before it: a
hole is refused, and steps that were taken back are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from rlbuffer.archive.library import Archive
from rlbuffer.archive.rows import payload_of
from rlbuffer.client.serverless import Serverless
from rlbuffer.client.step_pull import StepPull
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ArchiveError, CheckpointError
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.viewer import GROUP_FIELD, Viewer


class ArchiveStore:
    """What a pull asks of a server, answered from the files of an archive. One step is in memory at a time."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._parts: Sequence[StepPart] = ()
        self._rows: dict[tuple[str, str], Mapping[str, Any]] = {}
        """(payload key, field) -> row, of the step at hand."""
        self._groups: dict[str, bytes] = {}
        """Payload key -> encoded group part of the push."""

    def header(self, number: int) -> StepHeader:
        """Goes to a step that counts. Raises NotFound; ArchiveError where it cannot be read."""
        header, self._parts = self._archive.step(number)
        rows = [row for rollout in self._archive.rollouts(number) for row in rollout.rows]
        self._rows = {(row["payload_key"], str(row["index"])): row for row in rows}
        self._groups = {r["payload_key"]: r["group_payload"] for r in rows if r["group_payload"] is not None}
        return header

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """As :meth:`rlbuffer.store.viewer.Viewer.read_parts`, of the step at hand."""
        return list(self._parts) if ranks is None else [self._parts[rank] for rank in ranks]

    def read_fields(self, request: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], bytes | None]:
        """As :meth:`rlbuffer.store.viewer.Viewer.read_fields`, of the step at hand."""
        return {(key, name): self._field(key, name) for key, names in request.items() for name in names}

    def _field(self, key: str, name: str) -> bytes | None:
        if name == GROUP_FIELD:
            return self._groups.get(key)
        row = self._rows.get((key, name))
        return None if row is None else payload_of(row)


class RecordedRun(Serverless):
    """Stands in for a run whose steps an archive has, up to step `last`; its policy versions were published long ago.

    Raises:
        ArchiveError: there is no archive, or it has no step `last`.
    """

    publishes = False

    def __init__(self, folder: str | Path, last: int | None = None) -> None:
        self.archive = Archive(folder)
        newest = self.archive.steps[-1].step if self.archive.steps else 0
        self.last = newest if last is None else last
        if not 1 <= self.last <= newest:
            raise ArchiveError(f"the archive {folder} has no step {self.last}: it ends at step {newest}")
        self._store = ArchiveStore(self.archive)
        self._digests = {step.step: step.digest for step in self.archive.steps}
        self._pull: StepPull | None = None

    def reader(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        columns: Sequence[str] = (),
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
        vocabulary: int | None = None,
        adapters: bool = True,
        **_: Any,
    ) -> RecordedRun:
        """Itself, for one rank; arguments as those of :meth:`rlbuffer.client.buffer.Buffer.reader`."""
        self._pull = StepPull(
            cast(Viewer, self._store),
            rank,
            world_size,
            Trainable(vocabulary=vocabulary, adapters=adapters, columns=tuple(columns)),
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        return self

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place of a checkpoint. Raises CheckpointError where it is of other steps than the archive's."""
        super().load_state_dict(state)
        digest, expected = state.get("digest"), self._digests.get(self.step)
        if digest and expected and digest != expected:
            raise CheckpointError(
                f"the checkpoint of step {self.step} was made behind another step {self.step} ({digest[:12]}) than the "
                f"one in the archive ({expected[:12]}): that one was taken back, or is of another run"
            )

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"step": self.step, "epoch": 0, "digest": self._digests.get(self.step, "")}

    def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Yields the recorded steps from `start` (default: the one after the last trained) to `last`. Asking for the
        next one acknowledges the one before.

        Raises:
            ArchiveError: a step is missing, or a file cannot be read.
        """
        first = self.step + 1 if start is None else start
        check_range(self.archive, first, self.last)
        pull = self._pull or self.reader()._pull
        assert pull is not None
        for number in range(first, self.last + 1):
            if until is not None and until():
                return
            header = self._store.header(number)
            step, _ = pull.step(header, pull.part(header))
            yield step
            if self.step < number:
                self.trained(step)
        self.has_ended = True


def recorded_run(folder: str, last: int, settings: RunSettings, vocabulary: int) -> RecordedRun:
    """What a trainer's ranks make of a folder and the last step: see :data:`rlbuffer.client.serverless.Source`."""
    return RecordedRun(folder, last)


def reader(
    folder: str | Path, rank: int = 0, world_size: int = 1, *, last: int | None = None, **options: Any
) -> RecordedRun:
    """The recorded steps of an archive, for a loop of one's own: what :meth:`rlbuffer.client.buffer.Buffer.reader`
    gives, without a server.

    ``start``, ``steps``, ``trained``, ``state_dict`` and ``load_state_dict`` are those of a reader; what is announced,
    checkpointed or recorded goes nowhere.

    Args:
        folder: the archive's.
        rank: as that of a reader; so are `world_size`, and the further options `pad_token_id`, `pad_to_multiple_of`,
            `vocabulary`, `adapters` and `columns`.
        last: the last step; None: the archive's newest.

    Raises:
        ArchiveError: there is no archive, or it has no step `last`.
    """
    return RecordedRun(folder, last).reader(rank, world_size, **options)


def check_range(archive: Archive, first: int, last: int) -> None:
    """Raises ArchiveError, with what is missing, where the archive does not have every step from `first` to `last`."""
    there = {step.step for step in archive.steps}
    missing = [number for number in range(first, last + 1) if number not in there]
    if missing:
        end = next(n for n in range(missing[0], last + 2) if n in there or n > last)
        hole = f"step {missing[0]}" if end == missing[0] + 1 else f"steps {missing[0]} to {end - 1}"
        raise ArchiveError(
            f"the archive {archive.folder} has no {hole}: each step is trained behind the one before it. In one piece "
            f"are {_pieces(sorted(there))}"
        )


def _pieces(numbers: Sequence[int]) -> str:
    pieces = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{piece[0]}-{piece[-1]}" for piece in pieces) or "none"
