"""A run as its archive has it: what is left when its server is gone."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.filters import Filter, parse
from rlbuffer.client.group_view import GroupView, consumed_view, dropped_view
from rlbuffer.client.lessons import LAST_STEPS
from rlbuffer.client.rollout_view import RolloutView, StepPlace, left_out_in_words, places_of, view_of
from rlbuffer.client.searching import TextOf, with_text
from rlbuffer.client.step_view import StepView, step_view
from rlbuffer.client.texts import Texts
from rlbuffer.client.trainer_values import KeptValues
from rlbuffer.errors import ArchiveError, NotFound, PayloadError, RlbufferError
from rlbuffer.records.info import folded
from rlbuffer.records.states import State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import amount, plural, printable
from rlbuffer_cli import look
from rlbuffer_cli.shown_run import ShownRun, Standing
from rlbuffer_cli.view import reward_fact

if TYPE_CHECKING:
    from rlbuffer.archive.library import Archive, ArchivedGroup, ArchivedRollout, ArchivedStep, DroppedGroup
    from rlbuffer.records.rollout import Rollout
    from rlbuffer.store.records import PartRollout

MOST_HEADERS = 1000
"""Steps that are listed, the newest ones."""


class ArchiveFolder:
    """The folder of an archive, which may grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[tuple[str, ...], Archive] | None = None
        """The archive as it was read last, with its files; what is read stays while there are no others."""

    def archive(self) -> Archive:
        """The archive as it is now. Raises ArchiveError; ConfigError: pyarrow is missing."""
        from rlbuffer.archive import Archive

        files = tuple(sorted(path.name for path in self.path.iterdir())) if self.path.is_dir() else ()
        if self._read is None or self._read[0] != files:
            self._read = files, Archive(self.path)
        return self._read[1]


class ArchivedRun(ShownRun):
    """A run without its server: its steps, their groups, what was dropped, and what the trainer measured.

    Args:
        folder: its archive.
    """

    has_server = False

    def __init__(self, folder: ArchiveFolder) -> None:
        self.folder = folder
        archive = folder.archive()
        super().__init__(archive.run, Texts(_tokenizer_directory(archive)), KeptValues(folder.path))
        self.flags = f" --archive {shlex.quote(str(folder.path))}"
        self._figures: tuple[Archive, dict[str, Text]] | None = None
        """The archive that was counted last, and its numbers."""

    def title(self) -> Text:
        place = (f" in the archive {printable(str(self.folder.path))}", "faint")
        return Text.assemble((f'run "{printable(self.name)}"', "accent"), place)

    def head(self, width: int) -> Sequence[RenderableType]:
        return [look.across(list(self.figures().values()), width)]

    def standing(self, records: int, *, is_brief: bool) -> Standing:
        facts = self.figures()
        return Standing([facts[name] for name in ("steps", "reward") if name in facts], 0)

    def figures(self) -> dict[str, Text]:
        archive = self.folder.archive()
        if self._figures is None or self._figures[0] is not archive:
            self._figures = archive, figures_of(archive)
        return self._figures[1]

    def now(self) -> float:
        return time.time()

    def group(self, identifier: str) -> GroupDetail:
        archive = self.folder.archive()
        return detail_of(archive, archive.find(identifier), self.trained())

    def groups(self, where: str, limit: int) -> list[GroupView]:
        views = []
        for detail in self.details(where, limit):
            views.append(detail.view)
            for group_id in self.unasked([detail.view.group_id]):
                self.learn(group_id, first_rollout(detail))
        return views

    def details(self, where: str, limit: int) -> Iterator[GroupDetail]:
        self.problems = []
        return islice(self._matching(parse(where)), limit)

    def _matching(self, chosen: Filter) -> Iterator[GroupDetail]:
        archive, text_of = self.folder.archive(), self.texts.decoded
        for detail in details_in(archive, archive.steps, chosen, text_of, self.problems, self.trained()):
            if detail.view.state is not State.DROPPED:  # that is among the drops
                yield detail

        def takes(drop: DroppedGroup) -> bool:
            """False where no payload need be read."""
            step = drop.record.get("step")  # anybody may have written the record
            values = {"env": drop.env, "reason": drop.reason, "step": step if isinstance(step, int) else None}
            return all(chosen.allows(name, value) for name, value in values.items())

        if chosen.allows("state", State.DROPPED):
            for _, detail in details_of(archive, archive.dropped_groups(takes)):
                if _matches(chosen, detail, text_of):
                    yield detail

    def step(self, number: int) -> StepView:
        return step_view(*self.folder.archive().step(number))

    def headers(self) -> list[StepHeader]:
        archive = self.folder.archive()
        return archive.headers(archive.steps[-MOST_HEADERS:])

    def trained(self) -> int:
        """By the trainer's records; of one that sends none the last step."""
        archive = self.folder.archive()
        return int(archive.trained[-1]["step"]) if archive.trained else archive.steps[-1].step if archive.steps else 0

    def records(self, most: int) -> Iterable[Mapping[str, Any]]:
        return islice(reversed(self.folder.archive().trained), most)

    def measured(self) -> Sequence[Mapping[str, Any]]:
        return self.folder.archive().trained

    def config(self) -> Mapping[str, Any]:
        archive = self.folder.archive()
        try:
            config = json.loads(archive.settings(archive.steps[-1].revision)["config"]) if archive.steps else None
        except NotFound:
            config = None  # `verify` says so
        return config if isinstance(config, dict) else {}


def figures_of(archive: Archive) -> dict[str, Text]:
    """What an archive holds, in numbers by name."""
    steps, pending = archive.steps, sum(1 for _ in archive.pending())
    rewards = [{"reward": step.reward} for step in reversed(steps)]
    return look.pairs(
        {
            "steps": f"{steps[0].step} to {steps[-1].step}" if steps else "none",
            "reward": reward_fact(rewards[:LAST_STEPS], is_brief=True),
            "rollouts": f"{sum(step.rollouts for step in steps):,}",
            "tokens": amount(sum(step.tokens for step in steps)),
            "dropped": f"{sum(drop.rollouts for drop in archive.dropped()):,}",
            "pending": plural(pending, "push", "pushes") if pending else None,
        }
    )


def first_rollout(detail: GroupDetail) -> Rollout | None:
    """The first of a group that is kept."""
    return next((member.rollout for member in detail.members if member.rollout is not None), None)


def _tokenizer_directory(archive: Archive) -> Path | None:
    """The directory of the model that the trainer says it trained; None where it says none."""
    for attempt in reversed(archive.attempts):
        settings = attempt.get("settings")
        model = settings.get("model") if isinstance(settings, Mapping) else None
        path = model.get("path") if isinstance(model, Mapping) else None
        if path and isinstance(path, str):
            return Path(path)
    return None


def details_in(
    archive: Archive,
    steps: Sequence[ArchivedStep],
    chosen: Filter,
    text_of: TextOf,
    problems: list[RlbufferError],
    trained: int | None = None,
) -> Iterator[GroupDetail]:
    """The groups of these steps that match, the newest first. What was left out of a step is among them.

    A file that cannot be read is added to `problems`, once, and its steps are left out. `trained`: as of
    :func:`details_of`.
    """
    for step in reversed(steps):
        if chosen.allows("step", step.step) and chosen.allows("state", _state_of(step.step, trained)):
            try:
                for _, detail in details_of(archive, archive.groups(step.step), trained):
                    if _matches(chosen, detail, text_of):
                        yield detail
            except ArchiveError as error:
                if str(error) not in map(str, problems):
                    problems.append(error)


def _matches(chosen: Filter, detail: GroupDetail, text_of: TextOf) -> bool:
    is_about_text = any(term.field == "text" for term in chosen.terms)
    members = [with_text(member, text_of) for member in detail.members] if is_about_text else detail.members
    return chosen.matches(detail.view, members)


def _state_of(step: int, trained: int | None) -> State:
    return State.TRAINED if trained is None or step <= trained else State.PACKED


def detail_of(archive: Archive, group: ArchivedGroup, trained: int | None = None) -> GroupDetail:
    """A group of the archive as `inspect` shows groups. `trained`: as of :func:`details_of`."""
    ((_, detail),) = details_of(archive, [group], trained)
    return detail


def details_of(
    archive: Archive, groups: Iterable[ArchivedGroup], trained: int | None = None
) -> Iterator[tuple[ArchivedGroup, GroupDetail]]:
    """Each with what `inspect` shows of it; those of one step stand together, and it is read once. `trained`: the last
    trained step; None: every step is, as those that have left the server are."""
    for step, of_step in groupby(groups, key=lambda group: group.step):
        header, parts = (None, ()) if step is None else archive.step(step)
        places = places_of(parts)
        for group in of_step:
            yield group, _detail(group, header, places, trained)


def _detail(
    group: ArchivedGroup,
    header: StepHeader | None,
    places: Mapping[tuple[str, int], StepPlace],
    trained: int | None,
) -> GroupDetail:
    rollouts = [archived.refs for archived in group.members]
    members = tuple(_member(archived, refs, places) for archived, refs in zip(group.members, rollouts, strict=True))
    if group.dropped is not None:
        infos = [folded([ref.info for ref in refs]) for refs in rollouts]
        view = dropped_view(group.dropped.whole_record, group.dropped.committed, infos)
    else:
        assert header is not None  # of a group that was not dropped
        used = [refs for refs, member in zip(rollouts, members, strict=True) if not member.left_out]
        last = header.step if trained is None else trained
        view = consumed_view(chain.from_iterable(used or rollouts), header, trained=last)
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
