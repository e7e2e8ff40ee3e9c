"""`read`: the groups of somebody else's traces."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, NamedTuple

from rlbuffer.errors import ConfigError, InvalidRollout, installed_by
from rlbuffer.process.inputs import Input, opened
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.info import ENV_NAME, GROUP_ID
from rlbuffer.records.rollout import MAX_SEQUENCES, Rollout
from rlbuffer.state.text import plural
from rlbuffer.traces.attempt import TraceAttempt, rollout_of
from rlbuffer.traces.formats import Format, is_known, recognised
from rlbuffer.traces.values import Value
from rlbuffer.wire.jsonl import Record, records_in

PARQUET = b"PAR1"
"""First bytes of a Parquet file."""
DAMAGED = "damaged"
"""Kind of failure of a record that cannot be read."""
Limits = Literal["fail", "score"]


class LeftOut(NamedTuple):
    """An attempt that is no rollout: it failed and its tokens are not there, nothing of it is trained, or its record
    cannot be read."""

    place: str
    """File and line."""
    group_id: str
    """The group that it would be in; "" where its record does not say so any more."""
    failure: Failure
    """Why. Of a record that cannot be read the kind is ``damaged``, the message one sentence with file, line, field."""
    is_damaged: bool = False
    """Its record cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What a file or an object of another framework holds."""

    format: str
    """Name of its format."""
    groups: tuple[Group, ...]
    """In the order of their first attempts; `planned_size` is how many rollouts of the group are there."""
    left_out: tuple[LeftOut, ...]
    """Attempts that are no rollout, and records that cannot be read."""
    summary: str
    """One sentence: the format, how lines became groups, and what was left out."""

    @property
    def damaged(self) -> tuple[str, ...]:
        """A sentence for each record that cannot be read."""
        return tuple(one.failure.message for one in self.left_out if one.is_damaged)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)


def read(
    source: Any,
    format: str | None = None,
    *,
    env: str = "",
    policy_version: int | None = None,
    reward: float | str | None = None,
    limits: Limits = "fail",
) -> Traces:
    """Groups of the traces in a file, or in objects of the producer.

    A record that cannot be read takes its rollout with it, and nothing else: it stands in `left_out`.

    Args:
        source: path of a JSON Lines, JSON or Parquet file, which may be compressed (gzip, bzip2, xz); or records: a
            mapping, or an object of the producer's own that gives one (`model_dump`, `to_dict`), or a list of these.
        format: name of the format. None: what the first record's fields say.
        env: name of the groups' env. "": the producer's, else the format's.
        policy_version: the version that sampled, where the producer names none.
        reward: reward of attempts that come without; or which of several named rewards is the reward.
        limits: what an attempt is that came to a limit (time, turns, context) and was scored all the same: "fail", a
            failed attempt, or "score", a truncated one with its reward. Harbor has such.

    Raises:
        InvalidRollout: a file that cannot be read, a format that is not known, or no record is left that can be read;
            the message begins with file and line, and names the field.
        ConfigError: a Parquet file, and pyarrow is not installed.

    Example:
        >>> turn = {"node_id": "1", "prompt_token_ids": [1, 2], "completion_token_ids": [3], "per_token_logps": [-0.5],
        ...         "loss_mask": [0, 0, 1]}
        >>> traces = read({"schema_version": 1, "turns": [turn], "reward": 1.0}, policy_version=7)
        >>> traces.format, traces.groups[0].rollouts[0].tokens.tolist()
        ('openenv', [1, 2, 3])
    """
    records, left_out = list[Value](), list[LeftOut]()
    for record in _records(source):
        if record.wrong is None:
            records.append(Value(record.value, record.place))
        else:
            left_out.append(_damaged(record.place, record.wrong))
    if not records:
        where = source.name if isinstance(source, Input) else source if isinstance(source, str | PathLike) else "source"
        raise InvalidRollout(left_out[0].failure.message if left_out else f"{where}: nothing is there")
    found = _format(records, format)
    members: dict[str, list[tuple[TraceAttempt, Rollout]]] = {}
    for unit in rollouts_in(found, records, left_out):
        try:
            attempts = list(found.attempts(unit))
            made = [
                _rollout(attempt, policy_version=policy_version, reward=reward, limits=limits) for attempt in attempts
            ]
        except (InvalidRollout, RecursionError) as error:
            left_out.append(_damaged(unit[0].place, error))
            continue
        for attempt, rollout in zip(attempts, made, strict=True):
            group_id = _group_id(env or _env_name(attempt.env) or found.name, attempt)
            if isinstance(rollout, Rollout):
                members.setdefault(group_id, []).append((attempt, rollout))
            else:
                left_out.append(LeftOut(attempt.at.place, group_id, rollout))
    groups = list[Group]()
    for group_id, pairs in members.items():
        try:
            groups.append(_group(group_id, env or _env_name(pairs[0][0].env) or found.name, pairs))
        except InvalidRollout as error:
            left_out += [_damaged(attempt.at.place, error)._replace(group_id=group_id) for attempt, _ in pairs]
    traces = Traces(
        format=found.name, groups=tuple(groups), left_out=tuple(left_out), summary=_summary(found, groups, left_out)
    )
    if len(traces.damaged) == len(left_out) and not groups:
        raise InvalidRollout(traces.damaged[0])
    return traces


def is_trace(source: str | PathLike[str] | Input) -> bool:
    """True of a file of a format that is known.

    The first record that says so decides, since those before it may be damaged; a group of rlbuffer's own says no.
    """
    try:
        for record in _records(source):
            if isinstance(record.value, Mapping):
                if is_known(Value(record.value, record.place)):
                    return True
                if "group_id" in record.value and record.value.keys() & {"rollouts", "payload_key"}:
                    return False
    except InvalidRollout:
        pass
    return False


def _damaged(place: str, error: InvalidRollout | RecursionError) -> LeftOut:
    why = f"{place}  it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return LeftOut(place, "", Failure(DAMAGED, why), is_damaged=True)


def _format(records: Sequence[Value], name: str | None) -> Format:
    """The format of the first record that has one: those before it may be damaged."""
    refused = list[InvalidRollout]()
    for record in records:
        try:
            return recognised(record, name)
        except InvalidRollout as error:
            refused.append(error)
    raise refused[0]


def rollouts_in(found: Format, records: Iterable[Value], left_out: list[LeftOut]) -> list[list[Value]]:
    """The records of each rollout; `left_out` gets those that do not say which one is theirs."""
    rollouts: dict[Hashable, list[Value]] = {}
    for record in records:
        try:
            parts = list(found.parts(record))
        except InvalidRollout as error:
            left_out.append(_damaged(record.place, error))
            continue
        for number, part in enumerate(parts):
            try:
                key = found.rollout(part)
            except InvalidRollout as error:
                left_out.append(_damaged(record.place, error))
            else:
                rollouts.setdefault((record.place, number) if key is None else (key,), []).append(part)
    return list(rollouts.values())


def _rollout(
    attempt: TraceAttempt, *, policy_version: int | None, reward: float | str | None, limits: Limits
) -> Rollout | Failure:
    """The rollout of an attempt, or why there is none. Raises InvalidRollout: its record cannot be read."""
    if attempt.at_limit and limits == "score":
        attempt = replace(attempt, failure=None, is_truncated=True)
    if (beyond := _beyond(attempt)) is not None:
        return attempt.failure or beyond
    if attempt.failure is None:
        return rollout_of(_rewarded(attempt, reward), policy_version=policy_version)
    if attempt.sequences:
        with suppress(InvalidRollout):  # there is not all of it
            return rollout_of(attempt, policy_version=policy_version)
    return attempt.failure


def _beyond(attempt: TraceAttempt) -> Failure | None:
    """What no rollout can hold: too many sequences."""
    count = len(attempt.sequences)
    return Failure("sequences", f"{count}, a rollout has {MAX_SEQUENCES} at most") if count > MAX_SEQUENCES else None


def _records(source: Any) -> Iterator[Record]:
    if isinstance(source, Input):
        yield from _of_file(source)
    elif isinstance(source, str | PathLike):
        with opened(source) as file:
            yield from _of_file(file)
    elif isinstance(source, Mapping) or not isinstance(source, Iterable) or hasattr(source, "model_dump"):
        yield Record("", _plain(source))
    else:
        for number, item in enumerate(source):
            yield Record(f"record {number}", _plain(item))


def _plain(item: Any) -> Any:
    """The record of an object that a producer's own package made, with all its digits."""
    if hasattr(item, "model_dump"):
        return item.model_dump(mode="python")
    return item.to_dict() if hasattr(item, "to_dict") else item


def _of_file(file: Input) -> Iterator[Record]:
    file.stream.seek(0)
    if file.stream.read(len(PARQUET)) == PARQUET:
        return _of_parquet(file)
    return records_in(file.stream, file.name)


def _of_parquet(file: Input) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"Parquet files need pyarrow: {installed_by('archive')}", setting="archive.dir") from None
    file.stream.seek(0)
    try:
        number = 0
        for batch in ParquetFile(file.stream).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Record(f"{file.name} row {number}", row)
    except (ArrowException, OSError) as error:
        raise InvalidRollout(f"{file.name}: {error}") from None


def _rewarded(attempt: TraceAttempt, reward: float | str | None) -> TraceAttempt:
    """The attempt with its scalar reward: its own, or one of its named ones, or the caller's."""
    if isinstance(reward, str):
        if reward not in attempt.rewards:
            raise attempt.at.wrong(f"no reward is named {reward}; named are {', '.join(attempt.rewards) or 'none'}")
        return replace(attempt, reward=attempt.rewards[reward])
    if attempt.reward is not None:
        return attempt
    if len(attempt.rewards) == 1:
        return replace(attempt, reward=next(iter(attempt.rewards.values())))
    if attempt.rewards:
        raise attempt.at.wrong(f"rewards are {', '.join(attempt.rewards)}: say which one is the reward")
    return replace(attempt, reward=reward)


def _env_name(name: str) -> str:
    """`name` as the name of an env, with what is not allowed in one replaced."""
    cut = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in name)[:64]
    return cut if ENV_NAME.match(cut) else ""


def _group_id(env: str, attempt: TraceAttempt) -> str:
    """The same for all attempts of a group, also when the file is read again."""
    key = attempt.group or _prompt_digest(attempt)
    name = f"{env}.{key}"
    return name if GROUP_ID.match(name) else f"{env}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _prompt_digest(attempt: TraceAttempt) -> str:
    """Of the tokens before the first that was sampled."""
    if not attempt.sequences:
        return "none"
    main = attempt.sequences[0]
    start = int(main.loss_mask.argmax()) if main.loss_mask.any() else len(main.tokens)
    return hashlib.sha256(main.tokens[:start].tobytes()).hexdigest()[:16]


def _group(group_id: str, env: str, members: Sequence[tuple[TraceAttempt, Rollout]]) -> Group:
    attempt = members[0][0]
    prompt = attempt.prompt if 0 < len(attempt.prompt) <= 256 else _prompt_digest(attempt)
    rollouts = [rollout for _, rollout in members]
    try:
        return Group(group_id=group_id, env=env, prompt_id=prompt, rollouts=tuple(rollouts), planned_size=len(rollouts))
    except InvalidRollout as error:
        raise attempt.at.wrong(str(error)) from None


def _summary(found: Format, groups: Sequence[Group], left_out: Sequence[LeftOut]) -> str:
    rollouts = sum(len(group.rollouts) for group in groups)
    sentence = (
        f"{found.is_called}: {plural(rollouts, 'rollout')} in {plural(len(groups), 'group')} by {found.grouped_by}"
    )
    every = [rollout for group in groups for rollout in group.rollouts]
    bare = sum(rollout.reward is None and not rollout.failure for rollout in every)
    failed = [rollout.failure for rollout in every if rollout.failure]
    if bare:
        sentence += f"; {plural(bare, 'rollout')} of them without a reward"
    if failed:
        sentence += f"; {plural(len(failed), 'rollout')} of them failed ({_by_kind(failed)})"
    not_made = [one.failure for one in left_out if not one.is_damaged]
    damaged = [one.failure for one in left_out if one.is_damaged]
    if not_made:
        sentence += f"; {plural(len(not_made), 'attempt')} left out ({_by_kind(not_made)})"
    if damaged:
        sentence += f"; {plural(len(damaged), 'damaged record')} left out ({damaged[0].message})"
    return f"{sentence}. {found.note[:1].upper()}{found.note[1:]}" if found.note else sentence


def _by_kind(failures: Sequence[Failure]) -> str:
    first = {one.kind: " ".join(one.message.split())[:80] for one in reversed(failures)}
    return ", ".join(f"{count} {kind}: {first[kind]}" for kind, count in Counter(one.kind for one in failures).items())
