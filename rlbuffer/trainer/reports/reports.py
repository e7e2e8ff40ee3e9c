"""The reports of a run: ``metrics.jsonl`` always, lines on the console, TensorBoard and W&B where asked for."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rlbuffer.client.serverless import Serverless
from rlbuffer.errors import RlbufferError, ServerRefused, ServerUnreachable
from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.process.room import lack_of_room
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.state.heartbeats import LEADER
from rlbuffer.state.run_state import buffer_record
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import plural
from rlbuffer.state.trained import RECENT_STEPS, example_lines, masked_words, nothing_left, waited
from rlbuffer.trainer.checkpoints.resuming import Place
from rlbuffer.trainer.publishing import Published
from rlbuffer.trainer.ranks.parallel import digest_parameters
from rlbuffer.trainer.reports.examples import examples_of, text_decoder
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.outlet import CLOSE_SECONDS, Outlet
from rlbuffer.trainer.reports.sinks import MetricsFile, finite, sinks_of
from rlbuffer.trainer.reports.tally import Tally, rounded
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.trainer.update.stopwatch import Stopwatch

UNSENT_RECORDS = 1000
"""Records that wait for a server that is away; the server keeps about as many."""
HURRIED_SECONDS = 5.0
"""Time that a trainer which was asked to stop, or has failed, waits for TensorBoard and W&B."""
_log = logging.getLogger(__name__)


class Reports:
    """Every rank has one and counts; rank 0 writes."""

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
        self._metrics: MetricsFile | None = None
        self._outlets: list[Outlet] = []
        if session.is_first:
            created = 0 if isinstance(session.buffer, Serverless) else session.buffer.store.meta().created
            sinks = sinks_of(session.settings, created=created)
            self._metrics = MetricsFile(session.settings.output_dir)
            self._outlets = [Outlet(name, opened) for name, opened in sinks.items()]
        self._unsent: deque[dict[str, Any]] = deque(maxlen=UNSENT_RECORDS)
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._lasting = RateLimited()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._parameters = sum(p.numel() for p in session.policy.parameters())
        self._utilization = Utilization(
            session.policy.model,
            self._parameters,
            session.ranks.device,
            passes=session.settings.trainer.optimizer.passes,
        )

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._send()
        is_hurried = error is not None or self._session.stop.is_set
        deadline = time.monotonic() + (HURRIED_SECONDS if is_hurried else CLOSE_SECONDS)
        for outlet in self._outlets:
            outlet.close(max(0.0, deadline - time.monotonic()))

    def warn(self, message: str) -> None:
        """Something that a person should know, and that stops nothing."""
        self._log_line(logging.WARNING, message, "warning")

    def start(self, place: Place) -> None:
        """Training is about to begin, or to go on."""
        session, origin = self._session, f"the checkpoint of step {place.step}" if place.step else "step 0"
        ranks, device = session.ranks, str(session.ranks.device)
        steps, output = session.settings.trainer.steps, str(session.settings.output_dir)
        self._log_line(
            logging.INFO,
            f"training {self._parameters:,} parameters on {plural(ranks.world_size, 'rank')} ({device}, "
            f"{session.policy.attention}), from {origin} to {steps}; output in {output}",
            "start",
            step=place.step,
            steps=steps,
            world_size=ranks.world_size,
            device=device,
            attention=session.policy.attention,
            parameters=self._parameters,
            output=output,
        )
        if session.policy.refused and session.policy.layout == "packed":
            self.warn(
                f"the library's {session.policy.attention} attention needs a mask of a row's tokens squared, and time "
                f"for it: {session.policy.refused}"
            )
        if session.policy.no_replay:
            self.warn(f"the model's router chooses again, whatever rollouts record: {session.policy.no_replay}")

    def step(
        self, step: Step, tally: Tally, watch: Stopwatch, place: Place, published: Published | None = None
    ) -> None:
        """A step was trained, and its version is on its way. All ranks call it; `published`: the newest one that is
        announced, on rank 0.

        Raises:
            RlbufferError: the ranks' parameters differ (only where ``check_ranks`` is set).
        """
        record = tally.record(watch, self._utilization)
        self._recent.append((watch.seconds.get("wait", 0.0), record.seconds["total"]))
        slow = waited([w for w, _ in self._recent], [t for _, t in self._recent])
        record = replace(
            record,
            slow_side=slow.text if slow.is_long else "",
            resumed_from=place.resumed_from,
            checkpointed=place.checkpointed,
            published=-1 if published is None else published.version,
            publish_seconds=rounded({} if published is None else published.seconds),
            buffer=self._buffer_record(),
            examples=self._examples(step),
            **self._proofs(step),
        )
        for outlet in self._outlets:
            outlet.add(record)
        if self._metrics is not None:
            self._metrics.add(record)
            self._write()
            self._unsent.append(finite(replace(record, examples=()).as_object()))
            self._send()
        self._log_line(logging.INFO, step_lines(record), **finite(record.as_object()))
        if slow.is_long and step.number % RECENT_STEPS == 0:
            self._log_line(logging.INFO, slow.text, "notice")
        if len(set(record.parameters_sha256)) > 1:
            raise RlbufferError(f"step {step.number}: the ranks' parameters differ: {record.parameters_sha256}")

    def _send(self) -> None:
        """Hands the records to the archive's writer, by the server; those that it does not take now go with the next.

        A step that no checkpoint holds is trained again after a kill, and its record sent again.
        """
        while self._unsent:
            try:
                self._session.reader.add_record(self._unsent[0])
            except (ServerUnreachable, ServerRefused):
                return
            self._unsent.popleft()

    def _write(self) -> None:
        """Writes to ``metrics.jsonl`` what there is room for: the rest waits until :meth:`written`."""
        try:
            if self._metrics is not None:
                self._metrics.write()
        except OSError as error:
            if not lack_of_room(error):
                raise

    def written(self) -> None:
        """Waits until ``metrics.jsonl`` has the record of every step. All ranks call it."""
        metrics = self._metrics
        self._session.when_there_is_room(lambda: None if metrics is None else metrics.write())

    def checkpoint(self, place: Place, path: Path) -> None:
        """A checkpoint was written."""
        self._log_line(
            logging.INFO, f"checkpoint of step {place.step} in {path}", "checkpoint", step=place.step, path=str(path)
        )

    def end(self, place: Place, *, finished: bool, has_ended: bool = False) -> None:
        """Training is over: the planned steps are made, or (`has_ended`) all that the run had to train is trained."""
        why = str(Waiting(kind=Wait.ENDED, step=place.step)) if has_ended else ""
        text = f"{'finished' if finished else 'stopped'} at step {place.step}{why and f': {why[:1].lower()}{why[1:]}'}"
        self._log_line(logging.INFO, text, "end", step=place.step, finished=finished)

    def _log_line(self, level: int, text: str, event: str, **values: Any) -> None:
        if self._session.is_first:
            _log.log(level, "%s", text, extra=fields(event, **values))

    def _examples(self, step: Step) -> Sequence[Mapping[str, Any]]:
        """A few rollouts, on rank 0 of every step that shall show some."""
        every = self._session.settings.trainer.reports.example_every
        if not self._session.is_first or not every or step.number % every:
            return ()
        try:
            self._decode = self._decode or text_decoder(self._session.settings)
            return examples_of(step, self._decode)
        except BaseException as error:  # a tokenizer in Rust panics with what is no Exception
            why = f"{type(error).__name__}: {error}"
            if self._lasting.is_due(why, time.monotonic()):
                self.warn(f"step {step.number} is shown without examples ({why}). Training goes on")
            return ()

    def _buffer_record(self) -> Mapping[str, Any]:
        """The leader's numbers of the envs as it last said them, on rank 0; {} where it has said none, or the server is
        away."""
        buffer = self._session.buffer
        if not self._session.is_first or isinstance(buffer, Serverless):
            return {}
        try:
            return buffer_record(buffer.store.heartbeats("batcher").get(LEADER, {}))
        except RlbufferError:  # the next step is waited for with a message
            return {}

    def _proofs(self, step: Step) -> dict[str, Any]:
        """Hashes of all ranks, where they are asked for."""
        ranks = self._session.ranks
        if not self._session.settings.trainer.reports.check_ranks:
            return {}
        return {
            "parameters_sha256": ranks.gather_digests(digest_parameters(self._session.policy)),
            "batch_sha256": ranks.gather_digests(digest_step(step)),
        }


def step_lines(record: StepRecord) -> str:
    """A trained step for people: one line; a sentence where nothing of it trains; a line for each of its examples."""
    masked = masked_words(record)
    nothing = nothing_left(record)
    reward = "-" if record.reward is None else f"{record.reward:.3f}"
    rewards = " ".join(f"{env} {r:.3f}" for env, r in record.rewards.items() if r is not None)
    return (
        f"step {record.step}  reward {reward} ({rewards})  loss {record.loss:+.4f}  "
        f"entropy {record.entropy:.3f}  kl {record.kl:.4f}  clipped {record.clip_fraction:.1%}  "
        f"{masked}{'  ' * bool(masked)}"
        f"grad {record.grad_norm:.2f}  age {record.age:.2f}  tokens {record.tokens}  "
        f"{record.seconds['total']:.2f} s  wait {record.wait:.0%}"
        + "".join(f"\n  {line}" for line in [*([nothing] if nothing else []), *example_lines(record.examples)])
    )
