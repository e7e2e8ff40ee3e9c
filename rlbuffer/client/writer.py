"""The worker's side: take tickets, push groups, exactly once (:mod:`rlbuffer.client.producer`)."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, overload

from rlbuffer.client.arguments import duration, env_name, items_of, whole_number
from rlbuffer.client.asking import pauses_between_asks
from rlbuffer.client.producer import Producer
from rlbuffer.client.refusals import LongWait
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import (
    EnvDone,
    InvalidArgument,
    InvalidRollout,
    RlbufferError,
    ServerRefused,
    UnknownLabel,
)
from rlbuffer.process.logs import RateLimited
from rlbuffer.records.checks import as_integer, as_items, shown
from rlbuffer.records.group import Group, Pushed, Ticket
from rlbuffer.records.rollout import Rollout, without_logprobs
from rlbuffer.records.states import PushStatus
from rlbuffer.records.truncation import truncated_group
from rlbuffer.state.text import plural
from rlbuffer.store.records import WorkerAnswers
from rlbuffer.store.worker import LONGEST_TICKET_SECONDS, WorkerStore

_log = logging.getLogger(__name__)

TICKET_SECONDS = 60.0
"""The usual time that a ticket stays out without renewal: after that a dead worker's prompt is taken again."""
CONFIG_SECONDS = 30.0
"""Seconds between a writer's looks whether the run cuts rollouts that are longer than a row."""
TIMED_TICKETS = 10_000
"""Tickets of which a writer remembers when it took them: of those that it abandons it never hears again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings that a writer works under."""

    config: BatcherConfig | None = None
    """The batcher's, where the run says none: whether rollouts longer than a row are cut."""
    ticket_seconds: float | None = None
    """Seconds that tickets stay out without renewal; None: the usual time."""
    section: str = ""
    """The ``[worker.NAME]`` that it was started for."""
    known_end: str = ""
    """What the run's meta said of its trainer's last step when the writer was made: one that is made behind it waits
    for the next trainer."""


class Writer:
    """Pushes groups into the buffer. Made by :meth:`rlbuffer.client.buffer.Buffer.writer`; safe from several
    threads.

    While the server is away its methods wait, up to `patience_seconds`, whatever timeout they are given, and raise
    ServerUnreachable then. They raise RunGone when the run was reset or removed meanwhile.

    Example:
        A batcher gives tickets once a trainer has announced a policy version. Here both are in this process.

        >>> import threading
        >>> import rlbuffer
        >>> from rlbuffer.daemon import Daemon
        >>> buffer = rlbuffer.connect("memory://", run="writer")
        >>> buffer.reader().start()
        >>> buffer.policy.announce(0, location="", size=0, checksum="")
        True
        >>> daemon, stop = Daemon(buffer, rlbuffer.BatcherConfig(8192, step_groups=8)), threading.Event()
        >>> batcher = threading.Thread(target=daemon.run, args=(stop,), daemon=True)
        >>> batcher.start()

        >>> writer = buffer.writer("worker-0")
        >>> first, second, third = writer.take("math", 3, timeout_seconds=30.0)
        >>> first.group_id, second.group_id, third.group_id
        ('math.0', 'math.1', 'math.2')
        >>> writer.renew([first, second])
        >>> rollouts = rlbuffer.testing.make_group(rollout_ids=["", ""]).rollouts
        >>> str(writer.push(first, rollouts, answer="42").status)
        'stored'
        >>> writer.release([second])
        >>> writer.take("math", timeout_seconds=30.0) == [second]
        True
        >>> more = [rlbuffer.testing.make_group(env="math", group_id=f"extra.{number}") for number in range(3)]
        >>> [str(pushed.status) for pushed in writer.push_many(more)]
        ['stored', 'stored', 'stored']
        >>> writer.skip([second, third])
        >>> writer.done("math")

        >>> stop.set()
        >>> batcher.join()
        >>> buffer.close()
    """

    def __init__(
        self,
        store: WorkerStore,
        worker: str,
        *,
        epoch: int,
        incarnation: str | None = None,
        patience_seconds: float = 300.0,
        on_retry: Callable[[RlbufferError], None] | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._store = store
        self.worker = worker
        self._producer = Producer(
            store,
            worker,
            incarnation,
            epoch=epoch,
            patience_seconds=patience_seconds,
            on_retry=on_retry,
            fit=self._fitted,
        )
        self._on_retry = on_retry
        terms = terms or Terms()
        self._config = terms.config
        self.ticket_seconds = TICKET_SECONDS if terms.ticket_seconds is None else terms.ticket_seconds
        """How long tickets stay out without renewal."""
        if not 0 < self.ticket_seconds <= LONGEST_TICKET_SECONDS:
            raise InvalidArgument(
                f"writer: ticket_seconds = {self.ticket_seconds:g} must be above 0 and at most "
                f"{LONGEST_TICKET_SECONDS:g}: renew tickets (`renew`) while you sample for longer"
            )
        self._section, self._known_end = terms.section, terms.known_end
        self._out: dict[str, dict[int, float]] = {}
        """Env -> its tickets that this writer has out, each with the moment when it expires."""
        self._taken: OrderedDict[str, float] = OrderedDict()
        """Group id of a ticket -> when this writer took it, monotonic; the newest last."""
        self._limit: int | None = None
        """Tokens that a longer rollout is cut to; None: it is left to the batcher."""
        self._limit_at = float("-inf")
        self._zeros_said: set[str] = set()
        """Envs of which it has said that logprobs are missing."""
        self._run_config: Mapping[str, Any] = {}
        self._lasting = RateLimited()

    @property
    def incarnation(self) -> str:
        """The producer's uuid: sequences of pushes count under it."""
        return self._producer.incarnation

    @property
    def sequence(self) -> int:
        """Sequence of the last push that is settled, 0 before the first."""
        return self._producer.sequence

    def take(
        self,
        env: str,
        n: int = 1,
        *,
        timeout_seconds: float | None = None,
        size: int | None = None,
        hold: int = 0,
        wait: bool = True,
    ) -> list[Ticket]:
        """Waits for leave to sample, and takes up to `n` tickets of `env`; none when the timeout passes.

        The batcher sets how many may be out, so that what is sampled now can still be trained in time. A ticket stays
        out for `ticket_seconds`; its group is pushed under its ``group_id``.

        `size` is how many tickets the env has in all (prompts x passes), for data that ends: no number from `size` on
        is ever given, and what another worker leaves unfinished is given again. None: it has no end.

        `hold` is for a loop that needs several groups open at once to get on: while tickets are given at all, this
        writer may have that many out, whatever others have. `wait` = False asks once and returns, for a loop that must
        not stand still: an empty list says that there is no leave at this moment.

        Raises:
            EnvDone: the env has an end, all its tickets were given, and none is out: leave the loop.
            RunEnded: an EnvDone; the trainer has made its last step.
            ServerUnreachable: the server stayed away for longer than the writer's patience.
            RunGone: the run was removed while this writer was at work.
            InvalidArgument: an argument is of another kind, or outside its range.
        """
        env, n = env_name("take: env", env), whole_number("take: n", n, low=1)
        size = None if size is None else whole_number("take: size", size, low=0)
        hold = whole_number("take: hold", hold, low=0)
        seconds = None if timeout_seconds is None else duration("take: timeout_seconds", timeout_seconds)
        if not wait:
            seconds = 0.0
        deadline = None if seconds is None else time.monotonic() + seconds
        pauses, long = pauses_between_asks(), LongWait(self._store)
        while True:
            numbers = self._take(env, n, size, max(0, hold - self._still_out(env)))
            if numbers:
                self._out.setdefault(env, {}).update(dict.fromkeys(numbers, time.monotonic() + self.ticket_seconds))
                return self._timed(_tickets(env, numbers))
            pause = next(pauses)
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return []
            long.warn(f"a ticket of {env}")
            time.sleep(left)

    def tickets(self, env: str, *, size: int | None = None) -> Iterator[Ticket]:
        """Yields ticket after ticket of `env`, each as :meth:`take` gives it, until there is none any more: the env is
        done, or the trainer has made its last step.

        Raises:
            ServerUnreachable, RunGone, InvalidArgument: as :meth:`take`.
        """
        with suppress(EnvDone):
            while True:
                yield from self.take(env, size=size)

    def ask(
        self, env: str, n: int, *, beat: dict[str, Any], size: int | None = None
    ) -> tuple[list[Ticket], WorkerAnswers] | None:
        """Asks once, for a worker that has waited for long: its heartbeat `beat`, the newest policy version and an
        operator's wishes share the round trip. -> None when the server refuses.

        Raises:
            EnvDone: as `take`.
        """
        try:
            ttl, section = self.ticket_seconds, self._section
            asked = self._store.ask(
                env,
                n,
                worker=self.worker,
                beat=beat,
                ttl_seconds=ttl,
                size=size,
                section=section,
                known_end=self._known_end,
            )
        except ServerRefused as error:
            self._refused(error)
            return None
        return self._timed(_tickets(env, asked.numbers)), asked

    def _timed(self, tickets: list[Ticket]) -> list[Ticket]:
        """Remembers when these tickets were taken: now."""
        for ticket in tickets:
            self._taken.pop(ticket.group_id, None)  # what was taken again is the newest
            self._taken[ticket.group_id] = time.monotonic()
        while len(self._taken) > TIMED_TICKETS:
            self._taken.popitem(last=False)
        return tickets

    def _take(self, env: str, n: int, size: int | None, least: int = 0) -> list[int]:
        try:
            return self._store.take_tickets(
                env,
                n,
                ttl_seconds=self.ticket_seconds,
                size=size,
                section=self._section,
                least=least,
                known_end=self._known_end,
            )
        except ServerRefused as error:
            self._refused(error)
            return []

    def _still_out(self, env: str) -> int:
        """Tickets of `env` that this writer has taken, and neither pushed a group for nor given back nor lost."""
        now, out = time.monotonic(), self._out.get(env, {})
        self._settled(env, [number for number, until in [*out.items()] if until <= now])
        return len(out)

    def _settled(self, env: str, numbers: Iterable[int]) -> None:
        out = self._out.get(env, {})
        for number in numbers:
            out.pop(number, None)

    def _have_left(self, groups: Iterable[Group]) -> None:
        """The groups are stored: their tickets are not this writer's any more."""
        for group in groups:
            env, _, number = group.group_id.rpartition(".")
            if number.isdigit():
                self._settled(env, [int(number)])

    def _refused(self, error: ServerRefused) -> None:
        """A server at its memory limit gives no tickets: no new groups are wanted until steps retire."""
        if self._on_retry is not None:
            self._on_retry(error)

    def renew(self, tickets: Iterable[Ticket]) -> None:
        """Keeps tickets out for another `ticket_seconds`; a worker does so while it samples."""
        until = time.monotonic() + self.ticket_seconds
        for env, numbers in _by_env("renew", tickets).items():
            self._store.renew_tickets(env, numbers, ttl_seconds=self.ticket_seconds)
            out = self._out.get(env, {})
            out.update((number, until) for number in numbers if number in out)

    def release(self, tickets: Iterable[Ticket]) -> None:
        """Gives tickets back unused: their prompts are taken first by whoever asks next."""
        for env, numbers in _by_env("release", tickets).items():
            self._store.release_tickets(env, numbers)
            self._settled(env, numbers)

    def skip(self, tickets: Iterable[Ticket]) -> None:
        """Closes tickets without a group: nothing is sampled for their numbers, now or later."""
        for env, numbers in _by_env("skip", tickets).items():
            self._store.close_tickets(env, numbers)
            self._settled(env, numbers)

    @overload
    def push(self, group: Group, *, sequence: int | None = None) -> Pushed: ...

    @overload
    def push(
        self, group: Ticket, rollouts: Iterable[Rollout], *, sequence: int | None = None, **fields: Any
    ) -> Pushed: ...

    def push(
        self,
        group: Group | Ticket,
        rollouts: Iterable[Rollout] | None = None,
        *,
        sequence: int | None = None,
        **fields: Any,
    ) -> Pushed:
        """Stores the rollouts of a ticket, or a group that is made by hand, exactly once; waits while the server is
        away.

        A ticket's rollouts are its whole group. Ticket and writer know the other fields of a :class:`Group`; `fields`
        are further ones (`answer`, `metadata`, `needs` ...), or take the place of these: `prompt_id` is the ticket's
        number where it is not given, `planned_size` the number of `rollouts`. Fewer of them than planned are a part.

        `sequence` is for producers that number their own pushes (``rlbuffer push`` uses the line of the file).

        Raises:
            InvalidRollout: it is no group, or too large for the wire; `sequence` is no integer from 1 to 2**53 - 1.
                Nothing was stored.
            ServerUnreachable, ServerRefused: the server stayed away, or full, for longer than the writer's patience.
                The group may be stored or not; pushing it again is safe, and the next push settles it first.
            PushBroken: a ServerUnreachable whose server answers others: the group's size may be the cause. Pushing it
                again tries again; a push of another group leaves it behind, and what is not stored counts as lost.
            PushRefused: the server, or a proxy before it, refuses this push for a reason that does not pass, as its
                size. Nothing was stored, and nothing counts as lost; the next push goes on without it.
            RunGone: the run was reset while this writer was at work.
        """
        whole = self._group(group, rollouts, fields)
        (pushed,) = self._aged([whole], self._producer.push([(whole, "")], _sequence("push", sequence)))
        self._have_left([whole])
        return pushed

    def push_many(self, groups: Iterable[Group], *, sequence: int | None = None) -> list[Pushed]:
        """Stores several groups as :meth:`push` does one after the other, with far fewer round trips.

        -> their outcomes, in order. All are encoded before the first is sent, and then take their size in memory once
        more; up to 16 of them, or 8 MiB, share a round trip. `sequence` is the first one's.

        Raises:
            InvalidRollout: one of them, which is named, is no group or too large for the wire. Nothing of them was
                stored; unless the server's limits have changed meanwhile, and then those before it are.
            ServerUnreachable, ServerRefused: as :meth:`push`. Some may be stored: call it again with the same groups,
                which settles the others first and answers for all.
            PushBroken, PushRefused: as :meth:`push`, with the `group`. Call it again without that one for the others'
                outcomes.
            RunGone: the run was reset while this writer was at work.
        """
        pushes = [(_checked(group, "push_many"), "") for group in as_items("push_many", groups)]
        outcomes = self._producer.push(pushes, _sequence("push_many", sequence))
        outcomes = self._aged([group for group, _ in pushes], outcomes)
        self._have_left(group for group, _ in pushes)
        return outcomes

    def version(self, label: str | int, *, adapter: str = "") -> int:
        """The run's version of the weights that the trainer of a stream calls `label`: for the rollouts' spans.

        Raises:
            UnknownLabel: the trainer has announced no such version, or so long ago that nothing sampled by it trains.
        """
        there = self._store.policy(adapter)
        found = there.labels.get(str(label))
        if found is None:
            labels = ", ".join(repr(name) for name, _ in sorted(there.labels.items(), key=lambda item: -item[1]))
            raise UnknownLabel(
                f"run {self._store.run!r} knows no policy version of the label {str(label)!r}: its trainer has "
                f"announced {f'these, the newest first: {labels}' if labels else 'none with a label'}. It calls "
                "`stream.version(label)` after each update, and labels are kept for max_age + 2 versions"
            )
        return found

    def done(self, env: str) -> None:
        """Says that `env` sends nothing more except its pushes and the tickets that are out: no further ticket is
        given. When every env of the run is done, its steps take what is left, and it ends with success.

        Say it once, after the last push of all producers of the env. Later pushes train all the same, as long
        as the run has not ended or is started again; ``rlbuffer env resume`` takes it back.

        Raises:
            ServerUnreachable, ServerRefused: as :meth:`push`, which settles what was left first.
            RunGone: the run was reset while this writer was at work.
        """
        env = env_name("done: env", env)
        self._producer.say_last(lambda epoch: self._store.say_done(env, epoch=epoch))

    def _group(self, given: Group | Ticket, rollouts: Iterable[Rollout] | None, fields: Mapping[str, Any]) -> Group:
        """The group to push: what was given, or the ticket's."""
        if not isinstance(given, Ticket):
            if rollouts is not None or fields:
                raise InvalidRollout(
                    f"push: rollouts and fields go with a Ticket, got {shown(given)}: push(ticket, rollouts), or "
                    "push(group) alone"
                )
            return _checked(given, "push")
        if rollouts is None:
            raise InvalidRollout(f"push: ticket {given.group_id} comes without rollouts: push(ticket, rollouts)")
        if unknown := fields.keys() - _GROUP_FIELDS:
            raise InvalidRollout(f"push: {min(unknown)!r} is no field of a Group: {', '.join(_GROUP_FIELDS)}")
        made = tuple(as_items("push: rollouts", rollouts))
        defaults = {"prompt_id": str(given.number), "planned_size": len(made) or 1, "worker": self.worker}
        return Group(group_id=given.group_id, env=given.env, rollouts=made, **{**defaults, **fields})

    def _aged(self, groups: Sequence[Group], outcomes: Sequence[Pushed]) -> list[Pushed]:
        """The outcomes, with how much too old their groups are; warns of it."""
        out = []
        for group, pushed in zip(groups, outcomes, strict=False):
            stale_by = self._stale_by(group) if pushed.status is PushStatus.STORED else 0
            out.append(replace(pushed, stale_by=stale_by) if stale_by else pushed)
        return [*out, *outcomes[len(out) :]]

    def _stale_by(self, group: Group) -> int:
        config, step = self._run_config, self._store.step_heard
        of_env = ((config.get("envs") or {}).get(group.env) or {}).get("max_age")
        max_age = config.get("max_age") if of_env is None else of_env
        if group.adapter or config.get("feeds") == "stream" or not isinstance(max_age, int):
            return 0
        version = min(rollout.min_policy_version for rollout in group.rollouts)
        stale_by = max(0, step - version - max_age)
        if stale_by and self._lasting.is_due(f"stale {group.env}", time.monotonic()):
            _log.warning(
                "group %s of env %s is too old to train, by %s: policy version %d sampled it, and step %d takes "
                "versions from %d on (max_age = %d). Load the newest version before each "
                "ticket (buffer.policy.version), push sooner, or raise max_age. Said once a minute",
                group.group_id,
                group.env,
                plural(stale_by, "version"),
                version,
                step + 1,
                step - max_age,
                max_age,
            )
        return stale_by

    def _fitted(self, group: Group) -> Group:
        """What is stored of a group: with its seconds since its ticket, and as `oversized = "truncate"` of the run's
        config makes it, or of this process's while no batcher has served the run."""
        now = time.monotonic()
        if now - self._limit_at >= CONFIG_SECONDS:
            given_config = self._config.as_dict() if self._config is not None else {}
            self._run_config = config = self._store.meta().config or given_config
            self._limit = config.get("row_tokens") if config.get("oversized") == "truncate" else None
            self._limit_at = now
        self._say_zeros(group)
        taken = self._taken.get(group.group_id)
        if taken is not None and group.seconds is None:
            group = replace(group, seconds=now - taken)
        return group if self._limit is None else truncated_group(group, self._limit)

    def _say_zeros(self, group: Group) -> None:
        """Says once of an env that a sequence has no logprobs: zeros are right for greedy sampling, and wrong ratios
        elsewhere. One token that is certain is no sign: a group is looked at whole."""
        if group.env in self._zeros_said:
            return
        bare = [(rollout, number) for rollout in group.rollouts for number in without_logprobs(rollout)]
        if sum(int(rollout.sequences[number].loss_mask.sum()) for rollout, number in bare) > 1:
            self._zeros_said.add(group.env)
            first, number = bare[0]
            which = f"sequence {number} of " if first.further else ""
            _log.warning(
                "group %s of env %s: every trained logprob of %srollout %s is 0 (probability 1), as greedy sampling "
                "has them, or an engine that was not asked for logprobs. The ratio of a loss, or the weight of a "
                "correction, is then the policy's own probability, which clips or shrinks most of the gradient. Push "
                "the logprobs that the tokens were sampled with. Said once of an env by this writer",
                group.group_id,
                group.env,
                which,
                first.rollout_id,
            )


_GROUP_FIELDS = tuple(f.name for f in fields(Group) if f.name not in ("group_id", "env", "rollouts"))
"""Those that a ticket does not decide."""


def _checked(group: Group, method: str) -> Group:
    if not isinstance(group, Group):
        raise InvalidRollout(f"{method}: expected a Group, got {shown(group)}")
    return group


def _sequence(method: str, sequence: int | None) -> int | None:
    return None if sequence is None else as_integer(f"{method}: sequence", sequence, low=1)


def _tickets(env: str, numbers: Iterable[int]) -> list[Ticket]:
    return [Ticket(env=env, number=i, group_id=f"{env}.{i}") for i in numbers]


def _by_env(method: str, tickets: Iterable[Ticket]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for ticket in items_of(method, tickets, Ticket):
        numbers.setdefault(ticket.env, []).append(ticket.number)
    return numbers
