"""The half of the Store protocol that people and monitors look through. Nothing in it writes, except signs of life."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.hand import RankZero
from rlbuffer.store.records import HistoryOf, HistoryPage, Ledger, Report, StepBytes


class Seeing(Protocol):
    """A run as it is seen; any process may call all of it at any time."""

    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Telemetry: kind ``worker`` | ``scorer`` | ``rank`` | ``batcher``; decides nothing. -> the record that stood
        under the name before."""

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        """Name -> its last record, with ``seconds_ago`` added by the server's clock; anything else is left out.

        Any process of the kind writes there: no field of a record is certain to be there, nor of a type.
        """

    def errors(self) -> Mapping[str, int]:
        """Kind of call -> attempts of this process that the server did not answer, or refused, since it connected."""

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Keeps what the trainer measured in a step, until the archive has it: ``step``, ``digest``, and any figures.

        Of several of a step the last one counts. A server that does not allow it is told of once, in the log.
        """

    def rank_0(self) -> RankZero:
        """Rank 0 of the registered attempt, for the other ranks: one small read."""

    def ledger(self) -> Ledger:
        """The whole account."""

    def allowances(self) -> Mapping[str, int]:
        """Tickets that may be out, by env."""

    def headers(
        self, first: int | None = None, last: int | None = None, *, problems: list[RlbufferError] | None = None
    ) -> Iterator[StepHeader]:
        """Headers of the live steps in [first, last], oldest first; what is retired meanwhile is left out.

        One that cannot be read is added to `problems`; None: PayloadError.
        """

    def history(self, count: int = 1000, *, of: HistoryOf = "history") -> list[Mapping[str, Any]]:
        """Newest first: a record per dropped group (``event: drop``) and per committed step (``event: step``); or what
        the trainer measured in its steps (:meth:`add_record`)."""

    def verify(self) -> Report:
        """Recomputes the ledger and every invariant that can be seen from outside."""

    # -- archive -----------------------------------------------------------------------------------------------------
    def read_step_bytes(self, step: int) -> StepBytes | None:
        """A live step as it stands; None when it was retired, taken back, or never committed. Raises PayloadError."""

    def read_history(self, after: str, *, count: int = 1000, of: HistoryOf = "history") -> HistoryPage:
        """Records of the history, or of the trainer, behind the id `after` ("0-0": from the first that is there), the
        oldest first."""

    def dropped_payloads(self, group_ids: Sequence[str]) -> dict[str, list[str]]:
        """Group id -> payload keys of its pushes that left the pool and were not swept yet."""

    def read_push_payload(self, payload_key: str) -> Mapping[str, bytes]:
        """Every field of a push's payload: rollout i is ``str(i)``, answer and metadata ``group``. Empty when gone."""
