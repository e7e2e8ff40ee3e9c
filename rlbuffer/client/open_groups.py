"""Groups of open rollouts for people: before their push they are in no pool and in no step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbuffer.errors import AmbiguousId, OpenRolloutUnknown
from rlbuffer.state.text import several_ids
from rlbuffer.store.open_rollouts import (
    OpenRollout,
    OpenState,
    about_of,
    names_of,
    read_rollouts,
    ticket_of,
)
from rlbuffer.store.session import number, text
from rlbuffer.store.viewer import Viewer

MOST_ROLLOUTS = 512
"""Rollouts of a group: of a larger one the server holds what no gateway has written."""
MOST_GROUPS = 1000
"""Groups among which the beginning of an id is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group that is not pushed yet."""

    group_id: str
    about: Mapping[str, Any]
    """What its opening has said of it; {} where that cannot be read."""
    rollouts: tuple[OpenRollout, ...]
    """By their place in the group: those under way, and those that have ended and wait."""


def unpushed_rollouts(store: Viewer, limit: int) -> list[OpenRollout]:
    """Rollouts of agents that are not pushed yet, at most `limit` of them; those of the newest group first."""
    groups = _groups(store, limit)
    sizes = store.paged(groups, lambda pipe, group: pipe.hget(store.keys.open_group(group), "size"))
    names = [name for group, size in zip(groups, sizes, strict=True) for name in names_of(group, _size(size))]
    found = _unpushed(store, names)
    return sorted(found, key=lambda rollout: (-rollout.begun_ms, rollout.group_id, rollout.index))[:limit]


def open_group(store: Viewer, group_id: str) -> OpenGroup | None:
    """The group with this id; None where it was never begun, or is pushed."""
    try:
        ticket_of(group_id)
    except OpenRolloutUnknown:
        return None
    (fields,) = store.piped(lambda pipe: pipe.hmget(store.keys.open_group(group_id), "size", "about"), lenient=True)
    size, about = fields or (None, None)
    rollouts = _unpushed(store, names_of(group_id, _size(size)))
    return OpenGroup(group_id=group_id, about=about_of(about), rollouts=tuple(rollouts)) if rollouts else None


def open_group_by_prefix(store: Viewer, prefix: str) -> OpenGroup | None:
    """The one open group whose id begins so; None for none. Raises AmbiguousId."""
    found = [group for group in _groups(store, MOST_GROUPS) if group.startswith(prefix)]
    if len(found) > 1:
        raise AmbiguousId(several_ids(prefix, found, f"run {store.run!r}"))
    return open_group(store, found[0]) if found else None


def _groups(store: Viewer, most: int) -> list[str]:
    keys = store.keys
    names, ended = store.piped(
        lambda pipe: pipe.zrange(keys.open, 0, most - 1).zrange(keys.open_ended, 0, most - 1), lenient=True
    )
    groups = [*(text(name).rpartition("/")[0] for name in names or ()), *map(text, ended or ())]
    return list(dict.fromkeys(groups))


def _unpushed(store: Viewer, names: Iterable[str]) -> list[OpenRollout]:
    rollouts = read_rollouts(store, list(names))
    return [rollout for rollout in rollouts if rollout is not None and rollout.state is not OpenState.PUSHED]


def _size(value: Any) -> int:
    return min(number(value) or 0, MOST_ROLLOUTS)
