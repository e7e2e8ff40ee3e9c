"""`read`: the groups of somebody else's traces."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.info import ENV_NAME, GROUP_ID
from rlbuffer.records.rollout import MAX_SEQUENCES, Rollout
from rlbuffer.state.text import plural
from rlbuffer.traces.attempt import Attempt, rollout_of
from rlbuffer.traces.formats import Format, is_known, recognised
from rlbuffer.traces.values import Value
from rlbuffer.wire.jsonl import values_of_line

PARQUET, ZIP = b"PAR1", b"PK\x03\x04"
"""First bytes of a Parquet file, and of one of `torch.save` or `numpy.savez`."""


class LeftOut(NamedTuple):
    """An attempt that is no rollout: it failed and its tokens are not there, or nothing of it is trained."""

    place: str
    """File and line."""
    group_id: str
    """The group that it would be in."""
    failure: Failure
    """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What a file or an object of another framework holds."""

    format: str
    """Name of its format."""
    groups: tuple[Group, ...]
    """In the order of their first attempts; `planned_size` is how many rollouts of the group are there."""
    left_out: tuple[LeftOut, ...]
    """Attempts that are no rollout."""
    said: str
    """One sentence: the format, how lines became groups, and what was left out."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)


def read(
    source: Any,
    format: str | None = None,
    *,
    env: str = "",
    policy_version: int | None = None,
    reward: float | str | None = None,
) -> Traces:
    """Groups of the traces in a file, or in objects of the producer.

    Args:
        source: path of a JSON Lines, JSON or Parquet file; or records: a mapping, or an object of the
            producer's own that gives one (`model_dump`, `to_dict`), or a list of these.
        format: name of the format. None: what the first record's fields say.
        env: name of the groups' env. "": the producer's, else the format's.
        policy_version: the version that sampled, where the producer names none.
        reward: reward of attempts that come without; or which of several named rewards is the reward.

    Raises:
        InvalidRollout: a format that is not known or lacks token ids or logprobs, or a record that is damaged; the
            message begins with file and line, and names the field.
        ConfigError: a Parquet file, and pyarrow is not installed.

    Example:
        >>> turn = {"node_id": "1", "prompt_token_ids": [1, 2], "completion_token_ids": [3], "per_token_logps": [-0.5],
        ...         "loss_mask": [0, 0, 1]}
        >>> traces = read({"schema_version": 1, "turns": [turn], "reward": 1.0}, policy_version=7)
        >>> traces.format, traces.groups[0].rollouts[0].tokens.tolist()
        ('openenv', [1, 2, 3])
    """
    records = list(_records(source))
    if not records:
        raise InvalidRollout(f"{source if isinstance(source, str | PathLike) else 'source'}: nothing is there")
    found = recognised(records[0], format)
    members: dict[str, list[tuple[Attempt, Rollout]]] = {}
    left_out = list[LeftOut]()
    for attempt in found.attempts(records):
        name = env or _env_name(attempt.env) or found.name
        group_id = _group_id(name, attempt)
        rollout = None
        if not (failure := attempt.failure or _beyond(attempt)):
            rollout = rollout_of(_rewarded(attempt, reward), policy_version=policy_version)
        elif attempt.sequences and not _beyond(attempt):
            with suppress(InvalidRollout):  # there is not all of it
                rollout = rollout_of(attempt, policy_version=policy_version)
        if rollout is not None:
            members.setdefault(group_id, []).append((attempt, rollout))
        elif failure:
            left_out.append(LeftOut(attempt.at.place, group_id, failure))
    groups = tuple(
        _group(group_id, env or _env_name(pairs[0][0].env) or found.name, pairs) for group_id, pairs in members.items()
    )
    return Traces(format=found.name, groups=groups, left_out=tuple(left_out), said=_said(found, groups, left_out))


def is_trace(path: Path) -> bool:
    """True of a file whose first record is of a format that is known, also of one that lacks what a rollout needs."""
    try:
        first = next(_of_file(path), None)
    except InvalidRollout:
        return False
    return first is not None and isinstance(first.value, Mapping) and is_known(first)


def _beyond(attempt: Attempt) -> Failure | None:
    """What no rollout can hold: too many sequences."""
    count = len(attempt.sequences)
    return Failure("sequences", f"{count}, a rollout has {MAX_SEQUENCES} at most") if count > MAX_SEQUENCES else None


def _records(source: Any) -> Iterator[Value]:
    if isinstance(source, str | PathLike):
        yield from _of_file(Path(source))
    elif isinstance(source, Mapping) or not isinstance(source, Iterable) or hasattr(source, "model_dump"):
        yield Value(_plain(source))
    else:
        for number, item in enumerate(source):
            yield Value(_plain(item), f"record {number}")


def _plain(item: Any) -> Any:
    """The record of an object that a producer's own package made, with all its digits."""
    if hasattr(item, "model_dump"):
        return item.model_dump(mode="python")
    return item.to_dict() if hasattr(item, "to_dict") else item


def _of_file(path: Path) -> Iterator[Value]:
    with path.open("rb") as stream:
        start = stream.read(4)
        stream.seek(0)
        if start == PARQUET:
            yield from _of_parquet(path)
            return
        if start == ZIP:
            raise InvalidRollout(f"{path}: a zip archive, as torch.save and numpy.savez write: give the samples in it")
        first = next((line for line in stream if line.strip()), b"").strip()
        if first == b"{" or first.startswith(b"["):  # one document, on one line or on many
            whole = _parsed(path.read_bytes(), str(path))
            for number, item in enumerate(whole if isinstance(whole, list) else [whole]):
                yield Value(item, f"{path}[{number}]" if isinstance(whole, list) else str(path))
            return
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield Value(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _parsed(line: bytes, place: str) -> Any:
    try:
        return values_of_line(line.removeprefix(BOM_UTF8))
    except InvalidRollout as error:
        raise InvalidRollout(f"{place}  {error}") from None


def _of_parquet(path: Path) -> Iterator[Value]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "Parquet files need pyarrow: pip install 'rlbuffer[archive]'", setting="archive.dir"
        ) from None
    try:
        number = 0
        for batch in ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield Value(row, f"{path} row {number}")
    except ArrowException as error:
        raise InvalidRollout(f"{path}: {error}") from None


def _rewarded(attempt: Attempt, reward: float | str | None) -> Attempt:
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


def _group_id(env: str, attempt: Attempt) -> str:
    """The same for all attempts of a group, also when the file is read again."""
    key = attempt.group or _prompt_digest(attempt)
    name = f"{env}.{key}"
    return name if GROUP_ID.match(name) else f"{env}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _prompt_digest(attempt: Attempt) -> str:
    """Of the tokens before the first that was sampled."""
    if not attempt.sequences:
        return "none"
    main = attempt.sequences[0]
    start = int(main.loss_mask.argmax()) if main.loss_mask.any() else len(main.tokens)
    return hashlib.sha256(main.tokens[:start].tobytes()).hexdigest()[:16]


def _group(group_id: str, env: str, members: Sequence[tuple[Attempt, Rollout]]) -> Group:
    attempt = members[0][0]
    prompt = attempt.prompt if 0 < len(attempt.prompt) <= 256 else _prompt_digest(attempt)
    rollouts = [rollout for _, rollout in members]
    try:
        return Group(group_id=group_id, env=env, prompt_id=prompt, rollouts=tuple(rollouts), planned_size=len(rollouts))
    except InvalidRollout as error:
        raise attempt.at.wrong(str(error)) from None


def _said(found: Format, groups: Sequence[Group], left_out: Sequence[LeftOut]) -> str:
    rollouts = sum(len(group.rollouts) for group in groups)
    said = f"{found.is_called}: {plural(rollouts, 'rollout')} in {plural(len(groups), 'group')} by {found.grouped_by}"
    every = [rollout for group in groups for rollout in group.rollouts]
    bare = sum(rollout.reward is None and not rollout.failure for rollout in every)
    failed = [rollout.failure for rollout in every if rollout.failure]
    if bare:
        said += f"; {plural(bare, 'rollout')} of them without a reward"
    if failed:
        said += f"; {plural(len(failed), 'rollout')} of them failed ({_by_kind(failed)})"
    if left_out:
        said += f"; {plural(len(left_out), 'attempt')} left out ({_by_kind([one.failure for one in left_out])})"
    return f"{said}. {found.note[:1].upper()}{found.note[1:]}" if found.note else said


def _by_kind(failures: Sequence[Failure]) -> str:
    first = {one.kind: " ".join(one.message.split())[:80] for one in reversed(failures)}
    return ", ".join(f"{count} {kind}: {first[kind]}" for kind, count in Counter(one.kind for one in failures).items())
