"""The part of `verify` that looks at open rollouts: I14.

Which groups there are is read first, and then all of them with the counts, in one transaction. Where a group came or
went in between, both are read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rlbuffer.errors import OpenRolloutUnknown
from rlbuffer.store.open_rollouts import OpenState, counts_of, names_of, ticket_of
from rlbuffer.store.session import number, text
from rlbuffer.store.verify.snapshot import Findings
from rlbuffer.store.viewer import Viewer

TRIES = 20
"""Reads of a run at work, before what changes between two of them is let be: the next `verify` sees it."""


def check_open_rollouts(store: Viewer, findings: Findings) -> Mapping[str, int]:
    """I14: an open rollout is open, ended or pushed, as its group's state and the counts say. -> how many are which.

    Groups that were pushed are counted: their rollouts may be forgotten by now.
    """
    keys = store.keys
    for _ in range(TRIES):
        groups = _groups(*_ask(store, ()))
        sizes = store.paged(groups, lambda pipe, group: pipe.hget(keys.open_group(group), "size"))
        names = {group: names_of(group, number(size) or 0) for group, size in zip(groups, sizes, strict=True)}
        opened, waiting, counted, *hashes = _ask(store, [name for group in groups for name in names[group]], groups)
        if _groups(opened, waiting, counted) == groups:
            break
    else:
        return {}
    replies, states = iter(hashes), dict[str, str]()
    heads = list(islice(replies, len(groups)))
    for group, (size, left, sequence) in zip(groups, heads, strict=True):
        rollout_states = [text(state or b"") for state in islice(replies, len(names[group]))]
        states |= dict(zip(names[group], rollout_states, strict=True))
        count = sum(state == OpenState.OPEN for state in rollout_states)
        where = f"group {group} of open rollouts ({keys.open_group(group)})"
        findings.unless(
            bool(rollout_states), "I14", f"{where} is not there, but {keys.open} or {keys.open_ended} names it"
        )
        findings.unless(
            set(rollout_states) <= {OpenState.OPEN, OpenState.ENDED},
            "I14",
            f"{where}: its rollouts are {', '.join(state or 'missing' for state in rollout_states)}: "
            "each must be open or ended before the group is pushed",
        )
        findings.unless(
            not rollout_states or (number(left) == count and sequence is None and (group in waiting) == (count == 0)),
            "I14",
            f"{where} of {text(size)}: {count} are open, {text(left)} by the group, and "
            f"{'it waits' if group in waiting else 'it does not wait'} for its push",
        )
    odd = sorted(set(opened) ^ {name for name, state in states.items() if state == OpenState.OPEN})
    findings.unless(not odd, "I14", f"{keys.open} and the states of {', '.join(odd[:3])} disagree ({len(odd)} in all)")
    return _check_counts(keys.open_counts, counted, states, findings)


def _check_counts(
    key: str, counted: Mapping[bytes, bytes], states: Mapping[str, str], findings: Findings
) -> Mapping[str, int]:
    here: Counter[tuple[str, str]] = Counter()
    for name, state in states.items():
        here[ticket_of(name.rpartition("/")[0])[0], state] += 1
    counts = counts_of(counted)
    for env in sorted(counts.keys() | {env for env, _ in here}):
        each = counts.get(env)
        told = (each.open, each.ended) if each else (0, 0)
        found = here[env, OpenState.OPEN], here[env, OpenState.ENDED]
        findings.unless(
            told == found,
            "I14",
            f"env {env}: {found[0]} open rollouts are open and {found[1]} ended, {told[0]} and {told[1]} by {key} "
            "(begun = open + ended + pushed)",
        )
    return {
        "open_rollouts": sum(count for (_, state), count in here.items() if state == OpenState.OPEN),
        "open_rollouts_ended": sum(count for (_, state), count in here.items() if state == OpenState.ENDED),
        "open_rollouts_pushed": sum(each.pushed for each in counts.values()),
    }


def _ask(store: Viewer, names: Sequence[str], groups: Sequence[str] = ()) -> list[Any]:
    """The open rollouts, the groups that wait, and the counts; then what stands in these groups and rollouts."""
    keys = store.keys

    def ask(pipe: Any) -> None:
        pipe.zrange(keys.open, 0, -1).zrange(keys.open_ended, 0, -1).hgetall(keys.open_counts)
        for group in groups:
            pipe.hmget(keys.open_group(group), "size", "left", "sequence")
        for name in names:
            pipe.hget(keys.open_rollout(name), "state")

    opened, waiting, counted, *hashes = store.piped(ask, at_once=True, lenient=True)
    hashes[: len(groups)] = [fields or (None, None, None) for fields in hashes[: len(groups)]]
    return [[*map(text, opened or ())], [*map(text, waiting or ())], counted or {}, *hashes]


def _groups(opened: Sequence[str], waiting: Sequence[str], counted: Any) -> list[str]:
    """The groups that are not pushed; what is no name of one is left out."""
    found = {name.rpartition("/")[0] for name in opened} | set(waiting)
    return sorted(group for group in found if _is_group(group))


def _is_group(name: str) -> bool:
    try:
        ticket_of(name)
    except OpenRolloutUnknown:
        return False
    return True
