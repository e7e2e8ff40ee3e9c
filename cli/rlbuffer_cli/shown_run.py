"""What the screens of `inspect` ask of a run, wherever it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.spoken import question_among
from rlbuffer.client.step_view import StepView
from rlbuffer.client.texts import Texts
from rlbuffer.client.trainer_values import KeptValues
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_header import StepHeader

if TYPE_CHECKING:
    from rlbuffer.records.rollout import Rollout

MOST_QUESTIONS, MOST_OF_A_QUESTION = 20_000, 200
"""Groups whose questions are kept, and characters of each."""


class Standing(NamedTuple):
    """How a run stands, in a line."""

    facts: Sequence[Text]
    problems: int
    """What somebody must cure."""


class ShownRun(ABC):
    """A run that is looked at.

    Args:
        name: the run's.
        texts: decode its rollouts for people.
        kept: values per token that its trainer keeps on this host.
    """

    has_server = True
    """False where nobody knows its processes, envs, problems and open rollouts."""
    flags = ""
    """Stand behind a command that is to show more of it."""

    def __init__(self, name: str, texts: Texts, kept: KeptValues) -> None:
        self.name = name
        self.texts = texts
        self.kept = kept
        self.problems: list[RlbufferError] = []
        """Steps that could not be read when steps or groups were read last."""
        self._questions: dict[str, str] = {}
        """Group id -> what its prompt asks: it never changes."""

    # -- how it stands ---------------------------------------------------------------------------------------------
    @abstractmethod
    def title(self) -> Text:
        """Which run this is, and where it is read."""

    @abstractmethod
    def figures(self) -> dict[str, Text]:
        """The run in numbers, by name."""

    @abstractmethod
    def head(self, width: int) -> Sequence[RenderableType]:
        """The run above the table of groups, in lines of `width` columns."""

    @abstractmethod
    def standing(self, records: int, *, is_brief: bool) -> Standing:
        """How it stands, by so many records of its history; `is_brief`: in numbers alone."""

    @abstractmethod
    def now(self) -> float:
        """Unix seconds, by the clock of where it is read."""

    def wait_at_most(self, seconds: float) -> None:  # noqa: B027 (files are never waited for)
        """A server that is away is said to be so after this time."""

    # -- what it trained -------------------------------------------------------------------------------------------
    @abstractmethod
    def group(self, identifier: str) -> GroupDetail:
        """A group whole, by its id, a rollout's id, or a unique prefix. Raises NotFound."""

    @abstractmethod
    def groups(self, where: str, limit: int) -> list[GroupView]:
        """Groups that match `where`: those in the pool, then those in steps, then dropped ones, newest first."""

    @abstractmethod
    def details(self, where: str, limit: int) -> Iterator[GroupDetail]:
        """The groups of :meth:`groups`, whole; one at a time is read."""

    @abstractmethod
    def step(self, number: int) -> StepView:
        """A committed step. Raises NotFound."""

    @abstractmethod
    def headers(self) -> list[StepHeader]:
        """The headers of the steps that can be read, the oldest first."""

    @abstractmethod
    def trained(self) -> int:
        """The last trained step."""

    @abstractmethod
    def records(self, most: int) -> Iterable[Mapping[str, Any]]:
        """The trainer's newest records, the newest first."""

    @abstractmethod
    def measured(self) -> Sequence[Mapping[str, Any]]:
        """The trainer's records of many steps, the oldest first; none where they cannot be read here."""

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The batcher's settings."""

    def cost(self) -> tuple[int, int]:
        """The cost of a token and of a token's square, as the batcher weighs them."""
        given = self.config().get("cost")
        pair = given if isinstance(given, list | tuple) and len(given) == 2 else BatcherConfig.cost
        return int(pair[0]), int(pair[1])

    # -- what its prompts ask --------------------------------------------------------------------------------------
    def question(self, view: GroupView) -> str:
        """What the prompt of a listed group asks, for a line; its id where no text says it."""
        asked = self._questions.get(view.group_id, "")
        return view.prompt_id if asked in ("", view.prompt_id) else f"{view.prompt_id} {asked}".strip()

    def unasked(self, group_ids: Iterable[str]) -> set[str]:
        """Those of which the question is not kept yet."""
        if len(self._questions) > MOST_QUESTIONS:
            self._questions.clear()
        return {group_id for group_id in group_ids if group_id not in self._questions}

    def learn(self, group_id: str, rollout: Rollout | None) -> None:
        """Keeps what the prompt of a group asks, by one of its rollouts."""
        if rollout is not None:
            asked = question_among(self.texts.prompt(rollout))
            self._questions[group_id] = "" if asked is None else " ".join(asked.text.split())[:MOST_OF_A_QUESTION]
