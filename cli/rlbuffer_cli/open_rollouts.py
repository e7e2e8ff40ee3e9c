"""Rollouts under way in agents: their table, and a group of them as any other group is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.client.agent_calls import calls_in
from rlbuffer.client.details import GroupDetail
from rlbuffer.client.group_view import group_view, numbers_of, rows_of_rollouts
from rlbuffer.client.open_groups import OpenGroup, unpushed_rollouts
from rlbuffer.client.rollout_view import RolloutView, Underway, view_of
from rlbuffer.client.spoken import ROLES
from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.gateway.rollouts import rollout_of
from rlbuffer.records.group import infos_of
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.state.text import amount, duration, plural, printable
from rlbuffer.store.open_rollouts import End, OpenCall, OpenRollout, OpenState, read_calls
from rlbuffer.store.viewer import Viewer
from rlbuffer_cli import look
from rlbuffer_cli.table import Column, Target, View, figure
from rlbuffer_cli.text import WIDE, signs, utc
from rlbuffer_cli.view import agents

MOST_TOKENS = 2**32 - 1
"""A row of numbers holds no more; who ends rollouts may write any."""
MOST_BYTES = 64 << 20
"""Calls of a group that are read; of rollouts beyond it only the numbers are shown."""


def standing(rollout: OpenRollout) -> Text:
    """Where an open rollout stands."""
    if rollout.end is not None and rollout.end.failure is not None:
        return Text(f"✕ failed: {printable(rollout.end.failure.kind)}", "dropped")
    if rollout.state is not OpenState.OPEN:
        reward = rollout.end.reward if rollout.end is not None else None
        return Text("ended" if reward is None else signs(f"ended, reward {reward:.3f}"), "ready")
    if rollout.is_void:
        return Text("✕ of a line of versions that has ended", "dropped")
    return Text("◌ frozen" if rollout.is_frozen else "◌ open", "forming")


# -- the table ---------------------------------------------------------------------------------------------------------
class OpenRow(NamedTuple):
    """An open rollout in a table."""

    underway: Underway
    version: int
    """The newest policy version."""

    @property
    def rollout(self) -> OpenRollout:
        return self.underway.rollout

    @property
    def since(self) -> float:
        """Seconds since its group was begun."""
        return max(0.0, self.underway.now - self.rollout.begun_ms / 1000)

    @property
    def heard(self) -> float:
        """Seconds since its last call, or since its engine was last known to be at work on one."""
        return max(0.0, self.underway.now - self.rollout.heard_ms / 1000)

    @property
    def left(self) -> float | None:
        """Seconds until it counts as abandoned if nothing more is heard; None of one that has ended."""
        return max(0.0, self.rollout.deadline_ms / 1000 - self.underway.now) if self.rollout.deadline_ms else None

    @property
    def age(self) -> int | None:
        """Policy versions since its oldest token; None before the first."""
        oldest = self.rollout.oldest_version
        return None if oldest is None else max(0, self.version - oldest)


def _read(run: Any, where: str, most: int) -> Sequence[OpenRow]:
    store = run.buffer.store
    version, now = max(store.policy().version, 0), store.now()
    return [OpenRow(Underway(rollout, now), version) for rollout in unpushed_rollouts(store, most)]


def _agents(run: Any, items: Sequence[OpenRow], width: int) -> Sequence[RenderableType]:
    agent_facts = list(agents(run.state(0)).values())
    return [look.across(agent_facts, width)] if agent_facts else []


def open_record(rollout: OpenRollout) -> dict[str, Any]:
    """``rlbuffer.open/1``: times in UTC; what its agent said is not in it."""
    times = {
        name: utc(ms / 1000) if ms else None
        for name, ms in (
            ("begun", rollout.begun_ms),
            ("heard", rollout.heard_ms),
            ("deadline", rollout.deadline_ms),
        )
    }
    end = rollout.end
    return {
        "schema": "rlbuffer.open/1",
        "name": rollout.name,
        "group_id": rollout.group_id,
        "env": rollout.env,
        "state": str(rollout.state),
        **{name: getattr(rollout, name) for name in ("calls", "bytes", "tokens", "oldest_version", "is_void")},
        **times,
        "reward": None if end is None else end.reward,
        "rewards": {} if end is None else dict(end.rewards),
        "failure": None if end is None or end.failure is None else end.failure._asdict(),
    }


OPEN = View(
    name="open",
    one="open rollout",
    many="open rollouts",
    press="a",
    of_server=True,
    answers="Which agents are at work, how far are they, and when was each last heard?",
    read=_read,
    key=lambda row: row.rollout.name,
    record=lambda row: open_record(row.rollout),
    opens=lambda row: Target("rollout", row.rollout.name, group=row.rollout.group_id),
    above=_agents,
    fields={
        "env": lambda row: row.rollout.env,
        "id": lambda row: row.rollout.group_id,
        "age": lambda row: row.age,
        "tokens": lambda row: row.rollout.tokens,
    },
    words=lambda row: row.rollout.name,
    filter_help="a part of its name, or env:math",
    empty="no rollout is open: agents begin them at a gateway (`rlbuffer gateway`)",
    columns=(
        Column("open rollout", lambda row: row.rollout.name),
        Column("state", lambda row: standing(row.rollout)),
        figure("calls", lambda row: row.rollout.calls, ","),
        figure("tokens", lambda row: row.rollout.tokens, amount),
        figure("heard", lambda row: row.heard, lambda seconds: f"{duration(seconds)} ago"),
        figure("age", lambda row: row.age, "d"),
        figure("begun", lambda row: row.since, lambda seconds: f"{duration(seconds)} ago", 1),
        figure("abandoned in", lambda row: row.left, duration, 2),
        Column("env", lambda row: row.rollout.env, at=WIDE),
    ),
)


# -- a group -----------------------------------------------------------------------------------------------------------
def detail_of(store: Viewer, group: OpenGroup) -> GroupDetail:
    """A group that is not pushed yet, with all that its agents have said so far."""
    now, version, room = store.now(), max(store.policy().version, 0), MOST_BYTES
    infos, members = list[RolloutInfo](), list[RolloutView]()
    for opened in group.rollouts:
        calls = _calls_of(store, opened) if opened.bytes <= room else []
        room -= opened.bytes if calls else 0
        rollout = _rollout(opened, calls) if calls else None
        infos.append(_info(opened, version) if rollout is None else infos_of([rollout])[0])
        member = view_of(infos[-1], rollout).changed(underway=Underway(opened, now))
        if rollout is None and opened.end is not None:
            member = member.changed(failure=opened.end.failure)
        members.append(member)
    about: Mapping[str, Any] = group.about
    numbers = numbers_of(
        rows_of_rollouts(infos),
        group_id=group.group_id,
        env=group.rollouts[0].env,
        planned_size=len(infos),
        tokens=sum(info.length or info.loss_tokens for info in infos),
        prompt_id=str(about.get("prompt_id") or ""),
    )
    has_age = any(rollout.oldest_version is not None for rollout in group.rollouts)
    view = group_view(numbers, state=State.FORMING, version=version if has_age else None, until=None)
    metadata = about.get("metadata")
    return GroupDetail(
        view=view,
        members=tuple(members),
        answer=about.get("answer"),
        metadata=metadata if isinstance(metadata, Mapping) else {},
    )


def _calls_of(store: Viewer, rollout: OpenRollout) -> list[OpenCall]:
    """All calls of it; none where one is damaged."""
    try:
        return read_calls(store, rollout.name)
    except PayloadError:
        return []


def _info(opened: OpenRollout, version: int) -> RolloutInfo:
    """An open rollout in numbers, where its calls are not read; `version` is the newest one."""
    end = opened.end or End()
    oldest = version if opened.oldest_version is None else opened.oldest_version
    return RolloutInfo(
        rollout_id=opened.name,
        length=0,
        prompt_tokens=0,
        loss_tokens=min(opened.tokens, MOST_TOKENS),
        reward=end.reward,
        rewards=end.rewards,
        min_version=oldest,
        max_version=oldest,
    )


def _rollout(opened: OpenRollout, calls: Sequence[OpenCall]) -> Rollout | None:
    """As it would be pushed now; None where the calls make none: anybody may have written them."""
    try:
        rollout = rollout_of(calls, opened.end or End(), rollout_id=opened.name, version=0)
    except (InvalidRollout, LookupError, TypeError, ValueError):
        return None
    text = _text(rollout, {call.number: call for call in calls})
    return replace(rollout, text=text + " " * (len(text) == rollout.length))  # else it would count as one of characters


def _text(rollout: Rollout, calls: Mapping[int, OpenCall]) -> str:
    """What its first conversation says, where no tokenizer is at hand: answers as the engine has read them."""
    parts = []
    for number, *_ in calls_in(rollout):
        call = calls[number]
        parts.append(_turn(str(call.details.get("role", "")), f"({plural(len(call.prompt), 'token')})"))
        parts.append(_turn("assistant", words_of(call.details.get("message"))))
    return "".join(parts)


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role if role in ROLES else 'user'}\n{text}<|im_end|>\n"


def words_of(message: Any) -> str:
    """An answer in words: its text, then what it calls. Anybody may have written it."""
    if not isinstance(message, Mapping):
        return ""
    words = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            words.append(f"{function.get('name')} {function.get('arguments')}")
    return "\n".join(words)
