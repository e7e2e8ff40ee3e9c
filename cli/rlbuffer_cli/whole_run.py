"""A run as its server and its archive have it together: what `inspect` looks at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbuffer.archive.library import Archive
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.views import GroupDetail, GroupView, StepView
    from rlbuffer.errors import RlbufferError
    from rlbuffer.records.step_header import StepHeader

MOST_HEADERS = 1000
"""Archived steps that are listed, the newest ones."""


class WholeRun:
    """Reads from the server, and what that has let go from the archive.

    Args:
        buffer: the run on its server.
        archive: the archive's folder; None: the one that the run's batcher writes, where this machine has it.
    """

    def __init__(self, buffer: Buffer, archive: str | None = None) -> None:
        self.buffer = buffer
        self._given = archive
        self.problems: list[RlbufferError] = []
        """Steps that could not be read when a table was read last."""
        self._read: tuple[tuple[str, ...], Archive] | None = None
        """The archive as it was read last, with its files; what is read stays while there are no others."""

    def archive(self) -> Archive | None:
        """The archive as it is now; None where there is none.

        Raises:
            ArchiveError: the one that was named cannot be read. ConfigError: pyarrow is missing.
        """
        folder = self._folder()
        if folder is None:
            return None
        from rlbuffer.archive import Archive
        from rlbuffer.errors import ArchiveError

        files = tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()
        if self._read is None or self._read[0] != files:
            try:
                self._read = files, Archive(folder)
            except ArchiveError:
                if self._given is not None:
                    raise
                return None  # its first file is not written yet
        return self._read[1]

    def group(self, identifier: str) -> GroupDetail:
        """A group whole, by its id, a rollout's id, or a unique prefix. Raises NotFound."""
        from rlbuffer.errors import NotFound
        from rlbuffer_cli.archived import detail_of

        try:
            detail = self.buffer.group(identifier)
        except NotFound:
            if (archive := self.archive()) is None:
                raise
            return detail_of(archive, archive.find(identifier))
        if detail.members or (archive := self.archive()) is None:
            return detail
        try:
            return detail_of(archive, archive.find(detail.view.group_id))
        except NotFound:
            return detail

    def step(self, number: int) -> StepView:
        """A committed step. Raises NotFound; RunGone when the server has no run of this name."""
        from rlbuffer.client.views import step_view
        from rlbuffer.errors import NotFound, StepRetired

        try:
            return self.buffer.step(number)
        except StepRetired:
            archive = self.archive()
            if archive is None:
                raise NotFound(
                    f"step {number} of run {self.buffer.run!r} was trained and has left the server, and no archive is "
                    "known here: --archive DIR names one, `rlbuffer serve --archive DIR` keeps steps"
                ) from None
            return step_view(*archive.step(number))

    def headers(self, problems: list[RlbufferError]) -> list[StepHeader]:
        """The headers of the steps that can be read, the oldest first; of the archive's the last thousand."""
        live = list(self.buffer.store.headers(problems=problems))
        archive = self.archive()
        if archive is None:
            return live
        first = live[0].step if live else self.buffer.store.meta().step + 1
        old = [step for step in archive.steps if step.step < first][-MOST_HEADERS:]
        return [*archive.headers(old), *live]

    def groups(self, where: str, limit: int, problems: list[RlbufferError]) -> list[GroupView]:
        """Groups that match `where`, as :meth:`rlbuffer.client.buffer.Buffer.groups`; where it names steps, with those
        of the archive behind the server's."""
        from rlbuffer.client.searching import list_groups

        store, text_of = self.buffer.store, self.buffer.texts.decoded
        views = list_groups(store, where=where, limit=limit, problems=problems, text_of=text_of)
        older = islice(self._older(where), limit - len(views))
        return [*views, *(detail.view for detail in older)]

    def details(self, where: str, limit: int, problems: list[RlbufferError]) -> Iterator[GroupDetail]:
        """The groups of :meth:`groups`, whole; one at a time is read."""
        from rlbuffer.client.searching import list_details

        store, text_of, count = self.buffer.store, self.buffer.texts.decoded, 0
        for detail in list_details(store, where=where, limit=limit, problems=problems, text_of=text_of):
            count += 1
            yield detail
        yield from islice(self._older(where), limit - count)

    def _older(self, where: str) -> Iterator[GroupDetail]:
        """Groups of archived steps that the server does not have, the newest first. A filter that names no step would
        read the whole archive, so it finds none."""
        from rlbuffer.client.filters import parse
        from rlbuffer.records.states import State
        from rlbuffer_cli.archived import detail_of

        chosen = parse(where)
        if not any(term.field == "step" for term in chosen.terms) or not chosen.allows("state", State.TRAINED):
            return
        archive = self.archive()
        if archive is None:
            return
        retired = self.buffer.store.meta().retired
        for step in reversed(archive.steps):
            if step.step <= retired and chosen.allows("step", step.step):
                for group in archive.groups(step.step):
                    detail = detail_of(archive, group)
                    if chosen.matches(detail.view, detail.members):
                        yield detail

    def _folder(self) -> Path | None:
        if self._given is not None:
            return Path(self._given)
        beats = self.buffer.store.heartbeats("batcher").values()
        named = next(
            (beat["archive"] for beat in beats if isinstance(beat.get("archive"), str) and beat["archive"]), ""
        )
        return Path(named) if named and Path(named).is_dir() else None
