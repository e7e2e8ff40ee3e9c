"""The groups under way that the next commit would lose: at it they pass their last step.

Data of version v trains at step v + 1 + max_age at the latest. When that step is committed without a group that is
sampled yet, all its work is lost; the more often so the longer its rollouts take, so what is trained is no fair sample
of what was asked for. With ``slow = "wait"`` the step waits for it.

Waiting alone saves nothing: the group that comes last would stand last. So what cannot wait for another step goes
before all others (:mod:`rlbuffer.batcher.selection`), that of the lowest ticket first; and a group is waited for only
while the step has a place for it, so none that was waited for is dropped for its age: one that is left whatever else
comes, or that a later group of its env would take. That is nearly always: no more tickets are out than the steps up to
their deadline can train (:func:`places`).

Source: tinker-cookbook #822, of rollouts that take longer than `max_age` steps and are sampled again for ever.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from rlbuffer.batcher import budget
from rlbuffer.batcher.age import last_version
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.batcher.pool import ticket_order
from rlbuffer.batcher.situation import Situation
from rlbuffer.records.waiting import Wait, Waiting


def awaited(situation: Situation, step: int, groups: Sequence[PooledGroup]) -> dict[str, list[str]]:
    """env -> the groups under way that a commit of `step` with `groups` would lose, and for which it has a place.

    Under way is what holds a ticket that lives, and what is forming. A worker that died lets its tickets lapse, so
    nobody waits for those.
    """
    config = situation.config
    if config.slow != "wait":
        return {}
    accounts, _ = situation.adapters.settle(step, groups, config, situation.published)
    ready: dict[str, list[str]] = {}
    absent: dict[str, set[str]] = {}
    for env in _sending(situation, step):
        lanes, max_age = situation.pool.env(env).lanes, config.for_env(env).max_age
        last = {
            adapter: last_version(now, max_age)
            for adapter in {*lanes, *situation.sampled(env)}
            if (now := situation.steps(step)(adapter)) < accounts.own_step(adapter, step + 1, situation.published)
        }
        ready[env] = [group.group_id for a, lane in lanes.items() if a in last for group in lane.ready.of(last[a])]
        absent[env] = {group.group_id for a, lane in lanes.items() if a in last for group in lane.forming.of(last[a])}
        absent[env] |= {*_tickets(situation, env, last)}
    places = max(len(groups), config.step_groups)
    total = sum(map(len, ready.values())) + sum(map(len, absent.values()))
    out: dict[str, list[str]] = {}
    for env, names in absent.items():
        in_order = sorted([*ready[env], *names], key=ticket_order)
        free = places - (total - len(in_order))
        """Places that are left to this env where all that cannot wait of the others comes, too."""
        free = max(free, sum(group.env == env for group in groups))  # or those that its later groups would take
        if found := [name for name in in_order[: max(0, free)] if name in names]:
            out[env] = found
    return out


def reason(situation: Situation, step: int, awaited: Mapping[str, Sequence[str]], seconds: float) -> Waiting:
    """What a full step says that has waited for `seconds`."""
    env, names = max(awaited.items(), key=lambda item: (len(item[1]), item[0]))
    return Waiting(
        kind=Wait.SLOW,
        step=step,
        env=env,
        version=last_version(step, situation.config.for_env(env).max_age),
        groups=len(names),
        forming=sum(map(situation.pool.is_known, names)),
        seconds=float(round(seconds)),
    )


def places(
    situation: Situation,
    step: int,
    allowed: Mapping[str, int],
    *,
    groups: float,
    least: Collection[str],
    taken: Collection[PooledGroup] = (),
) -> dict[str, int]:
    """`allowed` (env -> tickets that may be out), so few that all of them can train in time: of what is here and under
    way no more is due by a step than the steps until then hold.

    Shares alone do not see to it: they move with what is ready, and each env's is counted by itself.

    Args:
        groups: that a step holds.
        least: envs that the open step waits for. One that is short of its share, or all where nothing is under way
            (one of them may have no worker), gets a ticket whatever is due: else the step would never be full.
        taken: groups that the step before has taken, which are not gone from the pool yet.
    """
    due: Counter[int] = Counter()
    """Last step at which a group can train -> groups."""
    sending = _sending(situation, step)
    for env in sending:
        max_age = situation.config.for_env(env).max_age
        for lane in situation.pool.env(env).lanes.values():
            for index in (lane.ready, lane.forming):
                due.update({version + 1 + max_age: count for version, count in index.counts()})
        due.update(version + 1 + max_age for version in _out(situation, env).values())
    due.subtract(
        group.min_version + 1 + situation.config.for_env(group.env).max_age for group in taken if not group.used
    )
    out = dict(allowed)
    by_deadline: dict[int, list[str]] = {}
    newest = situation.published.get("", step - 1)
    for env in allowed:
        by_deadline.setdefault(newest + 1 + situation.config.for_env(env).max_age, []).append(env)
    granted = 0
    for deadline, envs in sorted(by_deadline.items()):
        there = sum(count for last, count in due.items() if step <= last <= deadline)
        room = max(0, math.floor(groups * (deadline + 1 - step) + 1e-9) - there - granted)
        more = {env: 0 if env in situation.done else max(0, allowed[env] - len(_out(situation, env))) for env in envs}
        total = sum(more.values())
        few = {env: more[env] * room // total if total > room else more[env] for env in envs}
        # What is left goes to those that the step waits for, by turns: one of them may have no worker.
        turn = int(max(0.0, situation.pool.now)) % len(envs)  # before the first group there is no time
        for env in sorted(envs[turn:] + envs[:turn], key=lambda env: env not in least):
            few[env] += few[env] < more[env] and sum(few.values()) < room
        granted += sum(few.values())
        out |= {env: min(allowed[env], len(_out(situation, env)) + few[env]) for env in envs}
    comes = granted or any(_in_time(situation, env, step) or situation.pool.env(env).forming for env in sending)
    needed = [env for env in sorted(least) if env in situation.short] or ([] if comes else sorted(least))
    return out | {env: max(1, out[env]) for env in needed if env in out and allowed[env]}


def _sending(situation: Situation, step: int) -> list[str]:
    """The envs that `step` may take something of: not paused, and with a share where the schedule says so."""
    return [
        env
        for env in situation.known()
        if env not in situation.paused and not budget.is_off(situation.config, env, step)
    ]


def _in_time(situation: Situation, env: str, step: int) -> bool:
    """A ticket is out whose group could train at `step`."""
    max_age = situation.config.for_env(env).max_age
    return any(version + 1 + max_age >= step for version in _out(situation, env).values())


def _out(situation: Situation, env: str) -> dict[int, int]:
    """Tickets of which nothing has come -> their version."""
    tickets = situation.under_way.get(env, {})
    return {number: version for number, version in tickets.items() if not situation.pool.is_known(f"{env}.{number}")}


def _tickets(situation: Situation, env: str, last: Mapping[str, int]) -> Iterator[str]:
    """Groups of which nothing has come, that are sampled with what trains at this step for the last time. A ticket does
    not say which adapter it is for: of an env that samples others than all weights they are not known."""
    if "" not in last or situation.sampled(env) != [""]:
        return
    for number, version in _out(situation, env).items():
        if version == last[""]:
            yield f"{env}.{number}"
