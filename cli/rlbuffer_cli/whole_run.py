"""A run as its server and its archive have it together: what `inspect` looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlbuffer.client.details import view_of
from rlbuffer.client.filters import parse
from rlbuffer.client.open_groups import open_group, open_group_by_prefix
from rlbuffer.client.searching import list_details, list_sources, shortest_rollouts
from rlbuffer.client.spoken import question_among
from rlbuffer.client.texts import Texts, tokenizer_directory
from rlbuffer.client.views import (
    GroupDetail,
    GroupSource,
    GroupView,
    RolloutView,
    StepPlace,
    StepView,
    dropped_view,
    left_out_in_words,
    step_view,
)
from rlbuffer.errors import ArchiveError, NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.records.group import infos_of
from rlbuffer.records.info import RolloutInfo, RolloutNumbers, folded
from rlbuffer.records.states import State
from rlbuffer_cli.open_rollouts import detail_of as open_detail

if TYPE_CHECKING:
    from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.records.rollout import Rollout
    from rlbuffer.records.step_header import StepHeader

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
        chosen = list_sources(store, where=where, limit=limit, problems=self.problems, text_of=text_of)
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
                for group in archive.groups(step.step):
                    detail = detail_of(archive, group)
                    if chosen.matches(detail.view, detail.members):
                        yield detail

    def _folder(self) -> Path | None:
        if self._given is not None:
            return Path(self._given)
        said = [beat.get("archive") for beat in self.buffer.store.heartbeats("batcher").values()]
        named = next((folder for folder in said if folder and isinstance(folder, str)), "")
        return Path(named) if named and Path(named).is_dir() else None


def detail_of(archive: Archive, group: ArchivedGroup) -> GroupDetail:
    """A group of the archive as `inspect` shows groups."""
    rows = {} if group.step is None else archive.row_numbers(group.step)
    members = tuple(_member(member, rows) for member in group.members)
    return GroupDetail(
        view=_view(archive, group, members), members=members, answer=group.answer, metadata=group.metadata
    )


def _view(archive: Archive, group: ArchivedGroup, members: Sequence[RolloutView]) -> GroupView:
    """By its record in the history, as a server shows a dropped group, and by the rollouts that are there."""
    used = [member for member in members if not member.left_out]
    unused = "" if used else next((member.left_out for member in members), "")
    used = used or [*members]
    oldest = min((member.min_version for member in used), default=0)
    if (dropped := group.dropped) is not None:
        record = {**dropped.record, **asdict(dropped), "at": dropped.at_ms / 1000}
        view = dropped_view(record, dropped.committed)
    else:
        view = GroupView(
            group_id=group.group_id,
            env=group.env,
            state=State.DROPPED if unused else State.TRAINED,
            reason=unused,
            rollouts=len(used),
            age=None if group.step is None else archive.version_trained(group.step, _adapter(group)) - oldest,
            tokens=sum(member.length for member in used),
            step=group.step,
            detail=left_out_in_words(members),
            min_version=oldest,
            max_version=0,
        )
    if not members:
        return view
    row, scored = group.members[0].row, tuple(member.reward for member in used if member.reward is not None)
    pushed = min(int(member.row["pushed_ms"]) for member in group.members) / 1000
    return replace(
        view,
        prompt_id=view.prompt_id or row.get("prompt_id") or "",
        planned_size=view.planned_size or row.get("planned_size") or 0,
        reward=fmean(scored) if scored else view.reward,
        rewards=scored,
        created=view.created or pushed or None,
        worker=view.worker or row.get("worker") or "",
        max_version=max((member.max_version for member in used), default=view.max_version),
        adapter=_adapter(group),
    )


def _adapter(group: ArchivedGroup) -> str:
    return next((str(member.row.get("adapter") or "") for member in group.members), "")


def _member(archived: ArchivedRollout, rows: Mapping[tuple[int, int], int]) -> RolloutView:
    row, rows_of = archived.row, archived.rows
    number = rows.get((row["rank"], row["place"]))
    try:
        rollout = archived.rollout
    except PayloadError:
        rollout = None
    info = infos_of([rollout])[0] if rollout is not None else folded([RolloutInfo(**_numbers(its)) for its in rows_of])
    place = None if number is None else StepPlace(row["rank"], number)
    return replace(
        view_of(info, rollout, row["advantage"], row["step"], place),
        finish_reason=row["finish_reason"],
        text=row["text"],
        left_out=row.get("left_out") or "",
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Those that an archived sequence has."""
    return {part.name: row[part.name] for part in fields(RolloutNumbers) if part.name in row}
