"""Groups made again of their payloads; also of dropped ones, whose payloads stay until the steps beside them retire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlbuffer.client.group_view import GroupView
from rlbuffer.errors import PayloadError
from rlbuffer.records.group import Group
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire.payload import decode_group_payload, decode_rollouts


def dropped_pushes(store: Viewer, view: GroupView, keys: Sequence[str], gone: list[str]) -> Iterator[Group]:
    """A dropped group, a part per push that left its payload. The pool no longer says more than these and `view`.

    Args:
        keys: payload keys of its pushes, by :meth:`Viewer.dropped_payloads`.
        gone: takes the group's id for each rollout that cannot be read.
    """
    for fields in filter(None, map(store.read_push_payload, keys)):
        names = sorted((name for name in fields if name.isdigit()), key=int)
        further = {"prompt_id": view.prompt_id, "worker": view.worker}
        yield from group_of(view.group_id, view.env, [fields[n] for n in names], fields.get("group"), further, gone)


def group_of(
    group_id: str,
    env: str,
    payloads: Sequence[bytes | None],
    group_payload: bytes | None,
    further: Mapping[str, Any],
    gone: list[str],
) -> Iterator[Group]:
    """One group; without the rollouts that cannot be read, and none where that are all.

    Args:
        further: further fields of the group.
        gone: takes the group's id for each rollout that cannot be read.
    """
    found = [*decode_rollouts(payloads)]
    rollouts = [rollout for rollout in found if rollout is not None]
    further = {"planned_size": len(found), **further}
    gone += [group_id] * (len(found) - len(rollouts))
    if rollouts:
        try:
            answer, metadata = decode_group_payload(group_payload) if group_payload is not None else (None, {})
        except PayloadError:
            answer, metadata = None, {}
            gone.append(group_id)
        yield Group(group_id, env, rollouts=tuple(rollouts), answer=answer, metadata=metadata, **further)
