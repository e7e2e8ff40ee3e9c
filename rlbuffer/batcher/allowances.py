"""The sampling that a run needs next: the envs that the open step wants, and the tickets that each may have out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from rlbuffer.batcher import admission, budget
from rlbuffer.batcher.group import Group
from rlbuffer.batcher.selection import Limits, Trial
from rlbuffer.batcher.situation import Situation


def awaited_envs(known: Situation, trial: Trial, step: int) -> list[str]:
    """Envs that the open step waits for: those that are short, else all that have nothing more to give."""
    if trial.short:
        return trial.short + trial.lent
    selected = {g.env for g in trial.groups}
    exhausted = [e for e in trial.exhausted if e not in known.done]
    idle = known.paused | known.done | set(exhausted)
    envs = [e for e in known.known() if e not in idle and not budget.is_off(known.config, e, step)]
    unheard = [e for e in envs if e not in selected]
    return exhausted + [e for e in unheard if not known.env(e).ready_groups]


def allow(
    known: Situation,
    step: int,
    limits: Limits,
    *,
    awaited: Collection[str] = (),
    taken: Iterable[Group] = (),
) -> dict[str, int]:
    """env -> tickets that may be out while `step` is the next to be planned; ``*`` stands for envs not named.

    A ticket is an env's, and which adapter its group will have is the worker's to say. So the groups of all adapters
    count against it, each as long as it can still train, and the window is that of the adapter whose version reaches
    furthest: what is sampled now can train if it is of that one.

    Args:
        known: as after the step before.
        step: the one after the last committed, or planned.
        limits: of a step.
        awaited: envs that get at least one ticket as long as a group sampled now can still train.
        taken: groups that the step before has taken, which are not gone from the pool yet.
    """
    config = known.config
    envs = known.known()
    fractions = budget.shares(config, envs, None, step=step, paused=known.absent)
    used = Counter(group.env for group in taken)
    supply = {}
    for env in fractions:
        window = _window(known, env, step)
        if known.short and env not in known.short and config.order == "newest_first":
            # The step waits for another env. Newest first, whatever this one samples beyond a step's worth only
            # pushes its own older groups out of the next steps.
            window = min(window, 1)
        supply[env] = admission.EnvSupply(
            window=window,
            pending=max(0, known.pool.trainable(env, known.steps(step)) - used[env]),
            share=fractions[env],
            mean=known.mean(env),
            owed=known.accounts[env].deficit if env in known.accounts else 0.0,
            spread=known.spread(env),
            ready=max(0, known.env(env).ready_groups - used[env]),
            ready_mean=known.ready_mean(env),
        )
    per_step = admission.groups_per_step(supply, tokens=limits.tokens, groups=limits.groups, rollouts=limits.rollouts)
    out = admission.allowances(supply, per_step, awaited=awaited, open_step=_open_step(known, supply, limits))
    out.update(dict.fromkeys(known.paused, 0))
    window = _window(known, admission.ANY_ENV, step)
    if budget.is_open(config, step) and window > 0:
        # Where groups are counted, and can serve the open step alone, an env gets all of it at once, and no more.
        is_exact = limits.groups is not None and window == 1
        out[admission.ANY_ENV] = limits.groups if is_exact and limits.groups else admission.START_TICKETS
    return out


def _open_step(known: Situation, supply: Mapping[str, admission.EnvSupply], limits: Limits) -> dict[str, int]:
    """env -> groups that the open step still lacks, of the envs that are on policy: they can serve no later one."""
    config = known.config
    on_policy = [e for e in supply if config.for_env(e).max_age == 0]
    # Nobody knows what an env without a budget will send; in place of an excused env the others are sampled.
    if not on_policy or not all(budget.has_budget(config, e) for e in supply) or known.patience.excused(known.pool.now):
        return {}
    least = config.close_fill * limits.tokens
    needed = admission.missing(supply, tokens=least, groups=limits.groups, rollouts=limits.rollouts)
    return {e: max(needed[e], e in known.short) for e in on_policy if e in needed}


def _window(known: Situation, env: str, step: int) -> int:
    """Steps from `step` on that a group of `env` sampled now can serve at least, of the adapter that reaches furthest.

    An adapter's own steps are never more than the run's.
    """
    max_age, windows = known.config.for_env(env).max_age, [0]
    for adapter in known.sampled(env):
        own = known.own_step(adapter, step)
        # Before anyone said what is published, assume the newest that there can be.
        version = known.published.get(adapter, own - 1)
        if version >= 0:
            windows.append(admission.window(version=version, max_age=max_age, last_step=own - 1))
    return max(windows)
