"""``rlbuffer push``."""

from __future__ import annotations

import hashlib
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from rlbuffer.errors import InvalidRollout, PayloadError, ServerRefused, ServerUnreachable
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.session import connected

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.records.group import Group
    from rlbuffer.records.rollout import TokenSequence

SAY_SECONDS = 5.0
"""Seconds between two words about what is waited for."""
MOST_GROUPS, MOST_TOKENS = 16, 2**20
"""Groups of one call, and their tokens, unless a single group has more."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is parsed: what one rollout may weigh on the wire; more would only cost memory to refuse."""
PARQUET_MAGIC = b"PAR1"
"""First bytes of a Parquet file."""
_Sequence = TypeVar("_Sequence", bound="TokenSequence")
Ages = tuple[str, str, int, int]
"""Env, adapter, oldest and newest policy version of a group."""


@click.command("push")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@options.common
@click.option("--worker", default="push", show_default=True, metavar="NAME", help="Name that the groups come from.")
@click.option("--done", is_flag=True, help="Nothing more comes of the file's envs: say so after the last group.")
@click.option(
    "--version",
    metavar="N|current",
    callback=lambda context, option, value: _version(value),
    help="Push the groups as sampled by this policy version of the run; current: its newest, 0 before the first.",
)
@click.option("--env", default="", metavar="NAME", help="Env of groups that are read from traces.")
@click.option(
    "--reward", metavar="NAME|N", help="Which named reward of a trace is its reward; a number: of those without."
)
@options.json_lines("The counts as one object.")
def command(
    file: str,
    given: options.Given,
    worker: str,
    done: bool,
    version: int | str | None,
    env: str,
    reward: str | None,
) -> int:
    """Push groups, or another framework's traces, from a JSON, JSON Lines or Parquet file.

    One group per line, with the field names of Group and Rollout, arrays as lists; or what `rlbuffer export` wrote,
    of which the same rollouts are stored, byte for byte. The whole file is read and checked first: one bad line, and
    nothing is stored. Pushing the same file again changes nothing: every group is answered as a duplicate. With --done
    the run trains what is left and ends, once all its envs are done.

    Groups keep the policy versions of the file, which are those of the run that sampled them. Those that this run has
    not made, or that are too old for it, are dropped: a sentence says how many. --version makes them this run's own.

    Traces are recognised by their fields: of verifiers and prime-rl, OpenEnv, Harbor, NeMo Gym, Agent Lightning, slime,
    open-instruct. A sentence says which, how they became groups, and what was left out.

    \b
    A line (shown wrapped; a group of 2 planned rollouts):
      {"group_id": "g1", "env": "math", "prompt_id": "p1", "planned_size": 2,
       "rollouts": [
        {"tokens": [5, 6, 7], "loss_mask": [false, true, true],
         "logprobs": [0, -0.5, -0.1], "reward": 1.0,
         "version_spans": [[0, 1, 3]]}, ...]}

    \b
    Example:
      rlbuffer push groups.jsonl --run math
    """
    from rlbuffer.records.states import PushStatus
    from rlbuffer.wire.payload import encode_push

    loaded = given.load()
    statuses: Counter[PushStatus] = Counter()
    with Path(file).open("rb") as stream:
        traces = _traces(Path(file), env, reward, version)
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        ages = Counter(map(_ages_of, read_groups(stream, file, traces, check=encode_push)))
        envs = sorted({env for env, *_ in ages})
        if not ages:
            raise InvalidRollout(f"{file} holds no group")
        with connected(loaded, "push") as buffer:
            writer = buffer.writer(worker, incarnation=checksum, on_retry=_teller())
            current = {adapter: newest_version(buffer, adapter) for _, adapter, *_ in ages}
            own = current if version == "current" else None if version is None else dict.fromkeys(current, version)
            if sentence := _said_of_versions(buffer, ages, current, own):
                say(f"{file}: {sentence}", err=True)
            for first, groups in _together(_as_sampled_by(own, read_groups(stream, file, traces))):
                try:
                    statuses.update(one.status for one in writer.push_many(groups, sequence=first))
                except (ServerRefused, ServerUnreachable) as error:
                    raise type(error)(
                        f"{error}\n  {writer.sequence} of {plural(ages.total(), 'group')} are stored; pushing the file "
                        "again goes on from there"
                    ) from error
            for env in envs if done else ():
                writer.done(env)
    run, stored, duplicate = buffer.run, statuses[PushStatus.STORED], statuses[PushStatus.DUPLICATE]
    record = {"schema": "rlbuffer.push/1", "run": run, "stored": stored, "duplicate": duplicate}
    text = f'{file}: {plural(ages.total(), "group")} into run "{run}": {stored} stored, {duplicate} duplicate'
    if done:
        record["done"] = envs
        text += f"\ndone: nothing more comes of {', '.join(envs)}"
    answer(record, text)
    return 0


def _traces(path: Path, env: str, reward: str | None, version: int | str | None) -> tuple[Group, ...] | None:
    """The groups of somebody else's traces, told about; None of a file of groups."""
    from rlbuffer.traces import is_trace, read

    if not is_trace(path):
        return None
    named: str | float | None = reward
    with suppress(ValueError):
        named = named if reward is None else float(reward)
    found = read(path, env=env, reward=named, policy_version=None if version is None else 0)
    if not found.groups:
        raise InvalidRollout(f"{path}: {found.said}")
    say(f"{path}: {found.said}", err=True)
    return found.groups


def _ages_of(group: Group) -> Ages:
    """What a run asks of a group before it takes it."""
    oldest = min(rollout.min_policy_version for rollout in group.rollouts)
    return group.env, group.adapter, oldest, max(rollout.max_policy_version for rollout in group.rollouts)


def _version(value: str | None) -> int | str | None:
    if value is None or value == "current":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value} is no policy version: a number from 0 on, or current")
    return int(value)


def newest_version(buffer: Buffer, adapter: str) -> int:
    """The newest policy version of the run that may have sampled: the one of its last step, where none is announced."""
    return max(0, buffer.policy().current(adapter).version, 0 if adapter else buffer.store.meta().step)


def _as_sampled_by(versions: Mapping[str, Any] | None, groups: Iterator[Group]) -> Iterator[Group]:
    """The groups as sampled by a version, which each adapter has its own of; as they are where there are none."""
    for group in groups:
        if versions is None:
            yield group
            continue
        number = versions[group.adapter]
        rollouts = [
            replace(_sampled_by(r, number), further=tuple(_sampled_by(s, number) for s in r.further))
            for r in group.rollouts
        ]
        yield replace(group, rollouts=tuple(rollouts))


def _sampled_by(sequence: _Sequence, number: int) -> _Sequence:
    spans = tuple(span._replace(policy_version=number) for span in sequence.version_spans)
    return replace(sequence, version_spans=spans)


def _said_of_versions(
    buffer: Buffer, ages: Mapping[Ages, int], current: Mapping[str, int], own: Mapping[str, Any] | None
) -> str:
    """A sentence about the groups that the run drops by their versions, and those that it may; "" when there are none.

    Args:
        current: adapter -> the run's newest version.
        own: adapter -> the version that the groups are pushed as; None: those of the file.
    """
    from rlbuffer.config.batcher import BatcherConfig

    held = buffer.store.meta().config
    config = BatcherConfig(**held) if held else buffer.settings.batcher
    dropped: dict[str, Counter[int]] = {"future": Counter(), "stale": Counter()}
    last = 0
    for (env, adapter, oldest, newest), count in ages.items():
        oldest, newest = (own[adapter], own[adapter]) if own else (oldest, newest)
        limit = config.for_env(env).max_age
        last = max(last, oldest + limit + 1)
        if newest > current[adapter]:
            dropped["future"][newest] += count
        elif current[adapter] - oldest > limit:
            dropped["stale"][oldest] += count
    said = [
        f"{plural(found.total(), 'group')} of policy versions {min(found)} to {max(found)} will be dropped as {reason}"
        for reason, found in dropped.items()
        if found
    ]
    if said:
        where = f'run "{buffer.run}" is at version {max(current.values())}, batcher.max_age is {config.max_age}'
        return f"{', '.join(said)}: {where}. --version current pushes them as this run's own"
    return f"what no step up to {last} trains will be dropped as stale" if own else ""


def _together(groups: Iterator[Group]) -> Iterator[tuple[int, list[Group]]]:
    """Groups for one call, and the number of the first: few enough that large ones do not fill the memory."""
    first, together, tokens = 1, list[Any](), 0
    for group in groups:
        together.append(group)
        tokens += sum(rollout.length for rollout in group.rollouts)
        if len(together) == MOST_GROUPS or tokens >= MOST_TOKENS:
            yield first, together
            first, together, tokens = first + len(together), [], 0
    if together:
        yield first, together


def _teller() -> Callable[[Exception], None]:
    """Says now and then what the push waits for: it may be for minutes."""
    said = float("-inf")

    def tell(error: Exception) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= SAY_SECONDS:
            said = now
            say(f"waiting: {str(error).splitlines()[0]}", err=True)

    return tell


def read_groups(
    stream: IO[bytes],
    file: str,
    traces: Sequence[Group] | None = None,
    *,
    check: Callable[[Group], Any] = lambda group: None,
) -> Iterator[Group]:
    """The groups of `traces`, else of the file: one per line that is not blank. `check` gets every group.

    Raises:
        InvalidRollout: the first bad one; the message begins with its place.
    """
    from rlbuffer.wire.jsonl import group_from_line

    stream.seek(0)
    groups: Iterable[Group] | None = traces
    if groups is None and stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
        from rlbuffer.archive.groups import read_group_file

        groups = read_group_file(Path(file))
    stream.seek(0)
    if groups is not None:
        try:
            for group in groups:
                check(group)
                yield group
        except InvalidRollout as error:
            raise InvalidRollout(f"{file}  {error}") from None
        return
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        place = f"{file}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise InvalidRollout(
                f"{place}  the line is longer than {MAX_LINE_BYTES // 2**20} MiB, the most that one rollout may take; "
                "push large rollouts from Python"
            )
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            continue
        try:
            group = group_from_line(line)
            check(group)
        except (InvalidRollout, PayloadError) as error:
            raise InvalidRollout(f"{place}  {error}") from None
        yield group
