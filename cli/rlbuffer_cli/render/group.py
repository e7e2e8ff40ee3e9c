"""One group as rows of rollouts; one rollout as rows of tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.records.states import State
from rlbuffer.state.text import amount, duration, plural, printable
from rlbuffer_cli import look
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.table import Printed, of_tuples
from rlbuffer_cli.tables import MEMBERS, group_record, member_rows
from rlbuffer_cli.text import cut, utc

if TYPE_CHECKING:
    from rlbuffer.client.texts import Texts
    from rlbuffer.client.views import GroupDetail, GroupView, RolloutView
    from rlbuffer.records.rollout import Rollout

MAX_TEXT = 60
SHOWN_PROMPT_TOKENS = 40
NAMED_MEMBERS = 8
"""Rollouts that an error names."""
TOKENS = of_tuples(
    "tokens",
    ("token", "id", "text", "mask", "logprob", "advantage"),
    {"token", "id", "logprob", "advantage"},
)


# -- JSON --------------------------------------------------------------------------------------------------------------
def detail_record(detail: GroupDetail) -> dict[str, Any]:
    """``rlbuffer.group/1`` with answer, metadata and every rollout whole."""
    members = [rollout_record(member, detail.view) for member in detail.members]
    return group_record(detail.view) | {
        "answer": as_json(detail.answer),
        "metadata": as_json(dict(detail.metadata)),
        "members": members,
    }


def rollout_record(member: RolloutView, view: GroupView) -> dict[str, Any]:
    """``rlbuffer.rollout/1``; the payload's fields are there while the payload is."""
    record: dict[str, Any] = {
        "schema": "rlbuffer.rollout/1",
        "rollout_id": member.rollout_id,
        "group_id": view.group_id,
        "env": view.env,
        "state": view.state,
        "reward": member.reward,
        "rewards": dict(member.rewards),
        "advantage": member.advantage,
        "length": member.length,
        "loss_tokens": member.loss_tokens,
        "prompt_tokens": member.prompt_tokens,
        "min_policy_version": member.min_version,
        "max_policy_version": member.max_version,
        "is_truncated": member.is_truncated,
        "finish_reason": member.finish_reason,
        "logprob_mean": member.logprob_mean,
        "step": member.step,
        "rank": member.place.rank if member.place else None,
        "row": member.place.row if member.place else None,
        "text": member.text,
    }
    rollout: Rollout | None = member.rollout
    if rollout is not None:
        record |= {
            "tokens": rollout.tokens.tolist(),
            "loss_mask": rollout.loss_mask.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            "version_spans": [list(span) for span in rollout.version_spans],
            "turns": [as_json(tuple(turn)) for turn in rollout.turns],
            "successes": dict(rollout.successes),
            "columns": {name: values.tolist() for name, values in rollout.columns.items()},
            "attachments": {name: values.tolist() for name, values in rollout.attachments.items()},
            "metadata": as_json(dict(rollout.metadata)),
        }
    return record


def as_json(value: Any) -> Any:
    """Types of msgpack as JSON types: bytes as base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if hasattr(value, "items"):
        return as_json(dict(value))
    return value


# -- tables ------------------------------------------------------------------------------------------------------------
def show_group(detail: GroupDetail, texts: Texts) -> None:
    """Prints a group: what it is, then one row per rollout."""
    prompt = shared_prompt(detail, texts)
    for line in headline(detail.view):
        say(line, indent="  ")
    for line in shared_lines(detail, prompt, 2 * MAX_TEXT):
        echo(line)
    if not detail.members:
        return
    rows = member_rows(detail, lambda member: answer(member, texts, bool(prompt)))
    look.show("", Printed(MEMBERS, rows))
    echo(f"\none rollout: rlbuffer inspect {detail.members[0].rollout_id}")


def headline(view: GroupView) -> list[str]:
    """The group in a few lines."""
    state = f"{view.state} ({view.reason}: {printable(view.detail)})" if view.reason else view.state
    where = f" in step {view.step}" if view.step else ""
    versions = f"{view.min_version}-{view.max_version}" if view.max_version > view.min_version else view.min_version
    whole = plural(view.planned_size or view.rollouts, "rollout")
    lines = [f"group {view.group_id}   env {view.env}   {state}{where}"]
    facts = [
        f"{view.rollouts} of {whole}" if view.planned_size else whole,
        f"{amount(view.tokens)} tokens",
        f"reward {view.reward:.3f}" if view.reward is not None else "not scored",
        f"used {view.uses} times" if view.uses > 1 else "",
        f"age {view.age}" if view.age is not None else "",
        f"version{'s' * (view.max_version > view.min_version)} {versions}",
        f"waited {duration(view.waited_seconds)}" if view.waited_seconds is not None else "",
        f"from {view.worker}" if view.worker else "",
        f"prompt {printable(view.prompt_id)}" if view.prompt_id else "",
    ]
    lines.append("  " + " · ".join(fact for fact in facts if fact))
    if view.detail and not view.reason:
        lines.append(f"  ! {printable(view.detail)}")
    return lines


def shared_prompt(detail: GroupDetail, texts: Texts) -> str:
    """The text that all rollouts begin with; "" where they differ, or a text cannot be laid to tokens."""
    members = [m for m in detail.members if m.rollout is not None]
    prompts = {texts.part(m.rollout, 0, m.prompt_tokens) for m in members}
    return (prompts.pop() or "") if len(prompts) == 1 and len(members) == len(detail.members) else ""


def shared_lines(detail: GroupDetail, prompt: str, most: int) -> list[str]:
    """Lines of what all rollouts share, `most` characters each: `prompt` or its token ids, answer and metadata."""
    lines = []
    if prompt:
        lines.append(f"  prompt    {cut(printable(prompt), most)}")
    elif ids := _prompt_ids(detail.members):
        lines.append(f"  prompt    {ids}")
    if detail.answer is not None:
        lines.append(f"  answer    {short(detail.answer, most)}")
    if detail.metadata:
        lines.append(f"  metadata  {short(dict(detail.metadata), most)}")
    if not detail.members:
        lines.append("  its rollouts are no longer kept")
    return lines


def _prompt_ids(members: Sequence[RolloutView]) -> str:
    """The token ids that all rollouts begin with; "" where they differ or no payload is there."""
    prompts = {tuple(m.rollout.tokens[: m.prompt_tokens].tolist()) for m in members if m.rollout is not None}
    if len(prompts) != 1 or prompts == {()}:
        return ""
    ids = prompts.pop()
    more = f" ... ({len(ids):,} tokens)" if len(ids) > SHOWN_PROMPT_TOKENS else ""
    return f"token ids {' '.join(map(str, ids[:SHOWN_PROMPT_TOKENS]))}{more}"


def answer(member: RolloutView, texts: Texts, is_prompt_shown: bool) -> str:
    """The beginning of a rollout's text; behind its prompt where that is shown for all."""
    if member.rollout is None:
        return ""
    first = member.prompt_tokens if is_prompt_shown else 0
    part = texts.part(member.rollout, first, first + MAX_TEXT)
    return (member.text or "")[:MAX_TEXT] if part is None else part


def member_of(detail: GroupDetail, identifier: str) -> RolloutView:
    """The rollout of a group by its id, by its index (``<group>/<index>``), or by a unique beginning of its id.

    Raises:
        NotFound: none of those that can be read fits, or several do.
    """
    from rlbuffer.errors import NotFound

    head, _, tail = identifier.rpartition("/")
    is_its = detail.view.group_id.startswith(head)  # an index alone, too; of another group there is nothing here
    members = detail.members if is_its else ()
    fitting = [m for m in detail.members if m.rollout_id == identifier]
    fitting = fitting or [m for m in members if m.rollout_id.rsplit("/", 1)[-1] == tail]
    fitting = fitting or [m for m in members if m.rollout_id.startswith(identifier)]
    if len(fitting) != 1:
        known = ", ".join(m.rollout_id for m in detail.members[:NAMED_MEMBERS]) or "none that can still be read"
        more = f" and {len(detail.members) - NAMED_MEMBERS:,} more" if len(detail.members) > NAMED_MEMBERS else ""
        lacking = tail if is_its else identifier
        raise NotFound(f"group {detail.view.group_id!r} has no rollout {lacking!r}. Its rollouts: {known}{more}.")
    return fitting[0]


def _stop(finish_reason: str, is_truncated: bool) -> str:
    if not is_truncated or finish_reason == "length":
        return finish_reason
    return f"{finish_reason} (truncated)".strip()


def show_rollout(detail: GroupDetail, member: RolloutView, bounds: tuple[int, int], texts: Texts) -> None:
    """Prints a rollout: reward, versions, then one row per token of the window."""
    if bounds[0] >= member.length:
        raise click.UsageError(f"--tokens {bounds[0]}:{bounds[1]} lies behind its {member.length} tokens")
    for line in headline(detail.view):
        say(line, indent="  ")
    reward = "not scored" if member.reward is None else f"reward {member.reward:.3f}"
    parts = " ".join(f"{name} {value:.3f}" for name, value in member.rewards.items())
    advantage = "" if member.advantage is None else f" · advantage {member.advantage:+.4f}"
    echo(f"rollout {member.rollout_id}   {reward}{f' ({parts})' if parts else ''}{advantage}")
    rollout: Rollout | None = member.rollout
    say("  " + " -> ".join(life(detail.view, member)), indent="    ")
    if rollout is None:
        echo("  its payload is no longer kept")
        return
    text = texts.whole(rollout)
    if text is not None:
        echo(f"  text {printable(text)}")
    start, end = bounds[0], min(bounds[1], rollout.length)
    pieces = texts.pieces(rollout, start, end) if texts.has_pieces(rollout) else [""] * (end - start)
    own = rollout.columns.get("advantages")
    rows = []
    for t in range(start, end):
        trained = bool(rollout.loss_mask[t])
        value = member.advantage if own is None else float(own[t])
        rows.append(
            [
                str(t),
                str(int(rollout.tokens[t])),
                printable(pieces[t - start]),
                "trained" if trained else "",
                f"{float(rollout.logprobs[t]):.3f}" if trained else "",
                f"{value:+.3f}" if trained and value is not None else "",
            ]
        )
    look.show("", Printed(TOKENS, rows))
    if end < rollout.length:
        echo(f"tokens {start} to {end} of {rollout.length}: --tokens {end}:{min(end + 200, rollout.length)}")


def life(view: GroupView, member: RolloutView) -> list[str]:
    """The rollout's life from sampling to training, as far as it came."""
    rollout: Rollout | None = member.rollout
    spans = [] if rollout is None else rollout.version_spans
    sampled = ", ".join(f"v{s.policy_version} [{s.start}, {s.end})" for s in spans) or f"v{member.min_version}"
    stop = "" if rollout is None else _stop(rollout.finish_reason, rollout.is_truncated)
    stages = [f"sampled by {sampled}" + (f", stop: {stop}" if stop else "")]
    if view.created is not None:
        by = f" by {printable(view.worker)}" if view.worker else ""
        stages.append(f"pushed {str(utc(view.created))[:19].replace('T', ' ')} UTC{by}")
    waited = f", {duration(view.waited_seconds)} after the push" if view.waited_seconds is not None else ""
    if member.step is not None:
        where = f", rank {member.place.rank}, row {member.place.row}" if member.place else ""
        stages.append(f"packed into step {member.step}{where}{waited}")
    if view.state == State.DROPPED:
        return [*stages, f"dropped{waited} ({view.reason}{f': {printable(view.detail)}' if view.detail else ''})"]
    return stages + ([view.state] if view.state != State.PACKED else [])


def short(value: Any, most: int = 2 * MAX_TEXT) -> str:
    """The value as JSON, of at most `most` characters."""
    text = printable(json.dumps(as_json(value), ensure_ascii=False))
    return text if len(text) <= most else text[:most] + " ..."
