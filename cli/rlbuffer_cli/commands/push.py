"""``rlbuffer push``."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlbuffer.errors import InvalidRollout, PayloadError, ServerRefused, ServerUnreachable
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.session import connected

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.process.inputs import Input
    from rlbuffer.records.group import Group
    from rlbuffer.records.rollout import TokenSequence
    from rlbuffer.traces.reading import Limits

SAY_SECONDS = 5.0
"""Seconds between two words about what is waited for."""
MOST_GROUPS, MOST_TOKENS = 16, 2**20
"""Groups of one call, and their tokens, unless a single group has more."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is parsed: what one rollout may weigh on the wire; more would only cost memory to refuse."""
PARQUET_MAGIC = b"PAR1"
"""First bytes of a Parquet file."""
MOST_SENTENCES = 5
"""Records left out of which each is told about."""
_Sequence = TypeVar("_Sequence", bound="TokenSequence")
Ages = tuple[str, str, int, int]
"""Env, adapter, oldest and newest policy version of a group."""
Wrong = Callable[[str, InvalidRollout], None]
"""Gets the id of a group that is damaged, "" where its line does not say it, and what is wrong, with its place."""


@options.command("push")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
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
@click.option(
    "--limits",
    type=click.Choice(["fail", "score"]),
    default="fail",
    show_default=True,
    help="What an attempt of a trace is that came to a limit and was scored: a failed one, or one with that reward.",
)
@options.json_lines("The counts as one object.")
def command(
    file: str,
    given: options.RunFlags,
    worker: str,
    done: bool,
    version: int | str | None,
    env: str,
    reward: str | None,
    limits: Limits,
) -> int:
    """Push groups, or another framework's traces, from a JSON, JSON Lines or Parquet file.

    The file may be compressed (gzip, bzip2, xz) or a pipe; - is standard input. One group per line, with the field
    names of Group and Rollout, arrays as lists; or what `rlbuffer export` wrote, of which the same rollouts are stored,
    byte for byte. The whole file is read and checked first. A line that is damaged is left out with all of its group,
    the others are stored, and the exit code is 1. Pushing the same file again changes nothing: every group is answered
    as a duplicate. With --done the run trains what is left and ends, once all its envs are done.

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
    from rlbuffer.process.inputs import opened
    from rlbuffer.records.states import PushStatus

    loaded = given.load()
    statuses: Counter[PushStatus] = Counter()
    left_out = list[str]()
    with ExitStack() as stack:
        with _told(f"waiting for the end of {file}: what is compressed, or comes through a pipe, is copied first"):
            source = stack.enter_context(opened(file))
        traces = _traces(source, env, reward, version, limits, left_out)
        source.stream.seek(0)
        binary: Any = source.stream  # to mypy an IO[bytes] has no `readinto`
        checksum = hashlib.file_digest(binary, "sha256").hexdigest()
        ages, damaged = _checked(source, traces, left_out)
        if not ages:
            more = f"; so are {len(left_out) - 1} more, and nothing is stored" if len(left_out) > 1 else ""
            raise InvalidRollout(left_out[0] + more if left_out else f"{source.name} holds no group")
        _tell(left_out)
        envs = sorted({env for env, *_ in ages})
        buffer = stack.enter_context(connected(loaded, "push"))
        writer = buffer.writer(worker, incarnation=checksum, on_retry=_teller())
        current = {adapter: newest_version(buffer, adapter) for _, adapter, *_ in ages}
        given_versions = (
            current if version == "current" else None if version is None else dict.fromkeys(current, version)
        )
        if sentence := _said_of_versions(buffer, ages, current, given_versions):
            say(f"{source.name}: {sentence}", err=True)
        whole = (group for group in read_groups(source, traces, wrong=_passed_over) if group.group_id not in damaged)
        for first, groups in _together(_as_sampled_by(given_versions, whole)):
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
    record["left_out"] = len(left_out)
    text = f'{source.name}: {plural(ages.total(), "group")} into run "{run}": {stored} stored, {duplicate} duplicate'
    if left_out:
        text += f"; {plural(len(left_out), 'damaged record')} left out"
    if done:
        record["done"] = envs
        text += f"\ndone: nothing more comes of {', '.join(envs)}"
    answer(record, text)
    return 1 if left_out else 0


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says now and then what is waited for, while it lasts."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(SAY_SECONDS):
            say(what, err=True)

    teller = threading.Thread(target=tell, name="push-teller", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def _traces(
    source: Input, env: str, reward: str | None, version: int | str | None, limits: Limits, left_out: list[str]
) -> tuple[Group, ...] | None:
    """The groups of somebody else's traces, told about; None of a file of groups. `left_out` gets damaged records."""
    from rlbuffer.traces import is_trace, read

    if not is_trace(source):
        return None
    named: str | float | None = reward
    with suppress(ValueError):
        named = named if reward is None else float(reward)
    found = read(source, env=env, reward=named, policy_version=None if version is None else 0, limits=limits)
    if not found.groups:
        raise InvalidRollout(f"{source.name}: {found.summary}")
    say(f"{source.name}: {found.summary}", err=True)
    left_out += found.damaged
    return found.groups


def _checked(
    source: Input, traces: Sequence[Group] | None, left_out: list[str]
) -> tuple[Counter[Ages], frozenset[str]]:
    """What a run asks of the groups that are whole, and the ids of those that are damaged.

    Every group is encoded once, as it will be sent. `left_out` gets a sentence for each record that is left out: what
    is wrong with it, or that another part of its group is damaged.
    """
    from rlbuffer.wire.payload import encode_push

    seen, damaged = Counter[tuple[str, Ages]](), set[str]()

    def wrong(group_id: str, error: InvalidRollout) -> None:
        damaged.add(group_id)
        left_out.append(str(error))

    for group in read_groups(source, traces, check=encode_push, wrong=wrong):
        seen[group.group_id, _ages_of(group)] += 1
    ages = Counter[Ages]()
    for (group_id, its_ages), count in seen.items():
        if group_id in damaged:
            left_out += [f"{source.name}: group {group_id}: another record of it is damaged"] * count
        else:
            ages[its_ages] += count
    return ages, frozenset(damaged)


def _tell(left_out: Sequence[str]) -> None:
    for sentence in left_out[:MOST_SENTENCES]:
        say(f"left out: {sentence}", err=True)
    if len(left_out) > MOST_SENTENCES:
        say(f"left out: {len(left_out) - MOST_SENTENCES} more", err=True)


def _passed_over(group_id: str, error: InvalidRollout) -> None:
    """What is damaged was told about when the file was checked."""


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
    return max(0, buffer.policy.current(adapter).version, 0 if adapter else buffer.store.meta().step)


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
    buffer: Buffer, ages: Mapping[Ages, int], current: Mapping[str, int], given_versions: Mapping[str, Any] | None
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
        oldest, newest = (given_versions[adapter], given_versions[adapter]) if given_versions else (oldest, newest)
        limit = config.for_env(env).max_age
        last = max(last, oldest + limit + 1)
        if newest > current[adapter]:
            dropped["future"][newest] += count
        elif current[adapter] - oldest > limit:
            dropped["stale"][oldest] += count
    sentences = [
        f"{plural(found.total(), 'group')} of policy versions {min(found)} to {max(found)} will be dropped as {reason}"
        for reason, found in dropped.items()
        if found
    ]
    if sentences:
        where = f'run "{buffer.run}" is at version {max(current.values())}, batcher.max_age is {config.max_age}'
        return f"{', '.join(sentences)}: {where}. --version current pushes them as this run's own"
    return (
        f"groups that are not trained by step {last} will be dropped as stale (batcher.max_age)"
        if given_versions
        else ""
    )


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
    told_at = float("-inf")

    def tell(error: Exception) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at >= SAY_SECONDS:
            told_at = now
            say(f"waiting: {str(error).splitlines()[0]}", err=True)

    return tell


def read_groups(
    source: Input,
    traces: Sequence[Group] | None = None,
    *,
    check: Callable[[Group], Any] = lambda group: None,
    wrong: Wrong,
) -> Iterator[Group]:
    """The groups of `traces`, else of the file, that are whole. `check` gets each, and `wrong` those that are not."""
    from rlbuffer.wire.jsonl import group_from_dict, records_in

    def is_right(group: Group, place: str) -> bool:
        try:
            check(group)
        except (InvalidRollout, PayloadError) as error:
            wrong(group.group_id, InvalidRollout(f"{place}  {error}"))
            return False
        return True

    source.stream.seek(0)
    groups: Iterable[Group] | None = traces
    if groups is None and source.stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
        from rlbuffer.archive.groups import read_group_file

        groups = read_group_file(source.stream, name=source.name, wrong=wrong)
    if groups is not None:
        yield from (group for group in groups if is_right(group, source.name))
        return
    for record in records_in(source.stream, source.name, most=MAX_LINE_BYTES):
        try:
            if record.wrong is not None:
                raise record.wrong
            group = group_from_dict(record.value)
        except InvalidRollout as error:
            group_id = record.value.get("group_id") if isinstance(record.value, Mapping) else None
            why = error if record.wrong is not None else InvalidRollout(f"{record.place}  {error}")
            wrong(group_id if isinstance(group_id, str) else "", why)
            continue
        if is_right(group, record.place):
            yield group
