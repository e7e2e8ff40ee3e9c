"""A run as its server and its archive have it together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.filters import parse
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.groups import GroupSource
from rlbuffer.client.open_groups import open_group, open_group_by_prefix
from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.searching import list_details, list_groups, shortest_rollouts
from rlbuffer.client.step_view import StepView, step_view
from rlbuffer.client.texts import Texts, tokenizer_directory
from rlbuffer.client.trainer_values import KeptValues
from rlbuffer.errors import ArchiveError, NotFound, StepRetired
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.heartbeats import archive_folder
from rlbuffer.state.run_state import RunState
from rlbuffer_cli.archived_run import MOST_HEADERS, ArchiveFolder, detail_of, details_in, first_rollout
from rlbuffer_cli.open_rollouts import detail_of as open_detail
from rlbuffer_cli.plots import METRICS_FILE, RECENT_BYTES, metrics_of
from rlbuffer_cli.run_tables import READ_RECORDS
from rlbuffer_cli.shown_run import ShownRun, Standing
from rlbuffer_cli.view import alerts, figures, run_head, run_title

if TYPE_CHECKING:
    from rlbuffer.archive.library import Archive
    from rlbuffer.client.buffer import Buffer


class WholeRun(ShownRun):
    """Reads from the server, and what that has let go from the archive.

    Args:
        buffer: the run on its server.
        archive: the archive's folder; None: the one that the run's batcher writes, where this machine has it.
    """

    def __init__(self, buffer: Buffer, archive: str | None = None) -> None:
        self.buffer = buffer
        settings = buffer.settings
        super().__init__(buffer.run, Texts(tokenizer_directory(settings)), KeptValues(settings.output_dir))
        self._given = archive
        self._archive: ArchiveFolder | None = None
        """The one that was read last."""

    def archive(self) -> Archive | None:
        """The archive as it is now; None where there is none.

        Raises:
            ArchiveError: the one that was named cannot be read. ConfigError: pyarrow is missing.
        """
        path = self._folder()
        if path is None:
            return None
        if self._archive is None or self._archive.path != path:
            self._archive = ArchiveFolder(path)
        try:
            return self._archive.archive()
        except ArchiveError:
            if self._given is not None:
                raise
            return None  # its first file is not written yet

    def state(self, records: int = READ_RECORDS) -> RunState:
        """How it stands, with so many of the newest records of its history."""
        return read_run_state(self.buffer.store, history=records)

    def title(self) -> Text:
        return run_title(self.state(0))

    def figures(self) -> dict[str, Text]:
        return figures(self.state())

    def head(self, width: int) -> Sequence[RenderableType]:
        return run_head(self.state(), width)

    def standing(self, records: int, *, is_brief: bool) -> Standing:
        state = self.state(records)
        facts = figures(state, is_brief=is_brief)
        waits = list(alerts(state, most=1 if is_brief else None))[:1]
        return Standing([*(facts[name] for name in ("step", "reward") if name in facts), *waits], len(state.problems))

    def now(self) -> float:
        return self.buffer.store.now()

    def wait_at_most(self, seconds: float) -> None:
        self.buffer.store.patience_seconds = seconds

    def trained(self) -> int:
        return self.buffer.store.trainer().trained

    def records(self, most: int) -> Iterable[Mapping[str, Any]]:
        return self.buffer.store.history(most, of="records")

    def measured(self) -> Sequence[Mapping[str, Any]]:
        """As the trainer's output folder has them on this host."""
        try:
            return metrics_of(self.buffer.settings.output_dir / METRICS_FILE, RECENT_BYTES)
        except NotFound:
            return ()

    def config(self) -> Mapping[str, Any]:
        return self.buffer.store.meta().config

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
            self.learn(detail.view.group_id, first_rollout(detail))
        return [*(view for view, _ in chosen), *(detail.view for detail in older)]

    def _ask(self, chosen: Sequence[tuple[GroupView, GroupSource]]) -> None:
        """Reads the questions of groups that are listed for the first time."""
        new = self.unasked(view.group_id for view, _ in chosen)
        for group_id, rollout in shortest_rollouts(
            self.buffer.store, [each for each in chosen if each[0].group_id in new]
        ):
            self.learn(group_id, rollout)

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
        if not any(term.field == "step" for term in chosen.terms):
            return
        archive = self.archive()
        if archive is None:
            return
        retired = self.buffer.store.meta().retired
        steps = [step for step in archive.steps if step.step <= retired]
        yield from details_in(archive, steps, chosen, self.texts.decoded, self.problems)

    def _folder(self) -> Path | None:
        if self._given is not None:
            return Path(self._given)
        named = archive_folder(self.buffer.store.heartbeats("batcher"))
        return Path(named) if named and Path(named).is_dir() else None
