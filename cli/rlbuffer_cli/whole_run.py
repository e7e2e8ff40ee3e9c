"""A run as its server and its archive have it together: what `inspect` looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.filters import parse
from rlbuffer.client.group_view import GroupView, consumed_view, dropped_view
from rlbuffer.client.groups import GroupSource
from rlbuffer.client.open_groups import open_group, open_group_by_prefix
from rlbuffer.client.rollout_view import RolloutView, StepPlace, left_out_in_words, places_of, view_of
from rlbuffer.client.searching import list_details, list_groups, shortest_rollouts
from rlbuffer.client.spoken import question_among
from rlbuffer.client.step_view import StepView, step_view
from rlbuffer.client.texts import Texts, tokenizer_directory
from rlbuffer.errors import ArchiveError, NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.records.info import folded
from rlbuffer.records.states import State
from rlbuffer_cli.open_rollouts import detail_of as open_detail

if TYPE_CHECKING:
    from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.records.rollout import Rollout
    from rlbuffer.records.step_header import StepHeader
    from rlbuffer.store.records import PartRollout

MOST_QUESTIONS, MOST_OF_A_QUESTION = 20_000, 200
"""Groups whose questions are kept, and characters of each."""
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
        self.texts = Texts(tokenizer_directory(buffer.settings))
        """Decodes rollouts for people, with the tokenizer of the settings' model where that is on this host."""
        self._given = archive
        self.problems: list[RlbufferError] = []
        """Steps that could not be read when steps or groups were read last."""
        self._questions: dict[str, str] = {}
        """Group id -> what its prompt asks: it never changes."""
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
        """A group whole, by its id, a rollout's id, or a unique prefix; also one that agents are at work on. Raises
        NotFound."""
        store, group_id = self.buffer.store, identifier.rsplit("/", 1)[0]
        if (opened := open_group(store, group_id)) is not None:
            return open_detail(store, opened)
        try:
            detail = self.buffer.group(identifier)
        except NotFound:
            if (opened := open_group_by_prefix(store, group_id)) is not None:
                return open_detail(store, opened)
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

    def headers(self) -> list[StepHeader]:
        """The headers of the steps that can be read, the oldest first; of the archive's the last thousand."""
        self.problems = []
        live = list(self.buffer.store.headers(problems=self.problems))
        archive = self.archive()
        if archive is None:
            return live
        first = live[0].step if live else self.buffer.store.meta().step + 1
        old = [step for step in archive.steps if step.step < first][-MOST_HEADERS:]
        return [*archive.headers(old), *live]

    def groups(self, where: str, limit: int) -> list[GroupView]:
        """Groups that match `where`, as :meth:`rlbuffer.client.buffer.Buffer.groups`; where it names steps, with those
        of the archive behind the server's."""
        self.problems = []
        store, text_of = self.buffer.store, self.texts.decoded
        chosen = list_groups(store, where=where, limit=limit, problems=self.problems, text_of=text_of)
        self._ask(chosen)
        older = [*islice(self._older(where), limit - len(chosen))]
        for detail in older:
            self._learn(detail.view.group_id, next((m.rollout for m in detail.members if m.rollout is not None), None))
        return [*(view for view, _ in chosen), *(detail.view for detail in older)]

    def question(self, view: GroupView) -> str:
        """What the prompt of a listed group asks, for a line; its id where no text says it."""
        asked = self._questions.get(view.group_id, "")
        return view.prompt_id if asked in ("", view.prompt_id) else f"{view.prompt_id} {asked}".strip()

    def _ask(self, chosen: Sequence[tuple[GroupView, GroupSource]]) -> None:
        """Reads the questions of groups that are listed for the first time."""
        new = [(view, sources) for view, sources in chosen if view.group_id not in self._questions]
        if len(self._questions) > MOST_QUESTIONS:
            self._questions.clear()
        for group_id, rollout in shortest_rollouts(self.buffer.store, new):
            self._learn(group_id, rollout)

    def _learn(self, group_id: str, rollout: Rollout | None) -> None:
        if rollout is not None:
            asked = question_among(self.texts.prompt(rollout))
            self._questions[group_id] = "" if asked is None else " ".join(asked.text.split())[:MOST_OF_A_QUESTION]

    def details(self, where: str, limit: int) -> Iterator[GroupDetail]:
        """The groups of :meth:`groups`, whole; one at a time is read."""
        self.problems = []
        store, text_of = self.buffer.store, self.texts.decoded
        live = list_details(store, where=where, limit=limit, problems=self.problems, text_of=text_of)
        yield from islice(chain(live, self._older(where)), limit)

    def _older(self, where: str) -> Iterator[GroupDetail]:
        """Groups of archived steps that the server does not have, the newest first. A filter that names no step would
        read the whole archive, so it finds none."""
        chosen = parse(where)
        if not any(term.field == "step" for term in chosen.terms) or not chosen.allows("state", State.TRAINED):
            return
        archive = self.archive()
        if archive is None:
            return
        retired = self.buffer.store.meta().retired
        for step in reversed(archive.steps):
            if step.step <= retired and chosen.allows("step", step.step):
                for _, detail in details_of(archive, archive.groups(step.step)):
                    if chosen.matches(detail.view, detail.members):
                        yield detail

    def _folder(self) -> Path | None:
        if self._given is not None:
            return Path(self._given)
        folders = [beat.get("archive") for beat in self.buffer.store.heartbeats("batcher").values()]
        named = next((folder for folder in folders if folder and isinstance(folder, str)), "")
        return Path(named) if named and Path(named).is_dir() else None


def detail_of(archive: Archive, group: ArchivedGroup) -> GroupDetail:
    """A group of the archive as `inspect` shows groups."""
    ((_, detail),) = details_of(archive, [group])
    return detail


def details_of(archive: Archive, groups: Iterable[ArchivedGroup]) -> Iterator[tuple[ArchivedGroup, GroupDetail]]:
    """Each with what `inspect` shows of it; those of one step stand together, and it is read once."""
    for step, of_step in groupby(groups, key=lambda group: group.step):
        header, parts = (None, ()) if step is None else archive.step(step)
        places = places_of(parts)
        for group in of_step:
            yield group, _detail(group, header, places)


def _detail(
    group: ArchivedGroup, header: StepHeader | None, places: Mapping[tuple[str, int], StepPlace]
) -> GroupDetail:
    rollouts = [archived.refs for archived in group.members]
    members = tuple(_member(archived, refs, places) for archived, refs in zip(group.members, rollouts, strict=True))
    if group.dropped is not None:
        infos = [folded([ref.info for ref in refs]) for refs in rollouts]
        view = dropped_view(group.dropped.whole_record, group.dropped.committed, infos)
    else:
        assert header is not None  # of a group that was not dropped
        used = [refs for refs, member in zip(rollouts, members, strict=True) if not member.left_out]
        view = consumed_view(chain.from_iterable(used or rollouts), header, trained=header.step)
        view = view if used else replace(view, state=State.DROPPED, reason=members[0].left_out)
        view = replace(view, detail=left_out_in_words(members))
    return GroupDetail(view=view, members=members, answer=group.answer, metadata=group.metadata)


def _member(
    archived: ArchivedRollout, refs: Sequence[PartRollout], places: Mapping[tuple[str, int], StepPlace]
) -> RolloutView:
    row = archived.row
    try:
        rollout = archived.rollout
    except PayloadError:
        rollout = None
    view = view_of(
        folded([ref.info for ref in refs]),
        rollout,
        row["advantage"],
        None if row["rank"] is None else row["step"],
        places.get((refs[0].payload_key, refs[0].index)),
    )
    return view.changed(left_out=row.get("left_out") or "")
