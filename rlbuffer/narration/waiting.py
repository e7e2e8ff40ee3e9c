"""The reason why there is no step yet, in one sentence for people: the env, what is missing, what is on its way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlbuffer.state.text import counted, plural

NO_TRAINER = "No trainer has joined yet. One that was started loads its model first; else start `rlbuffer train`."
UNHEARD = "The batcher has not heard of this trainer yet."
NO_VERSION = "The trainer has not announced a policy version yet; it does when its model is loaded."
STOPPED = "The batcher was stopped: start `rlbuffer serve` again."
NOTHING_YET = "No env has sent a group that can train yet."
NO_WORKER = "No worker has been heard of. One that was started loads its model first; else start `rlbuffer worker`."
SILENT_BATCHER = "No batcher has said anything: is `rlbuffer serve` running?"
DEAD_BATCHER = "No batcher leads the run, and the last one has ended without a word: start `rlbuffer serve` again."
_NORMAL = " Normal while workers generate."


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvNeed:
    """The open step's need for an env."""

    env: str
    missing: float
    """Groups that the step still lacks of it."""
    ready: int
    forming: int
    oldest_seconds: float | None
    """Seconds that the oldest forming group has been forming; None when there is none."""
    is_silent: bool
    """It never sent a group."""
    dead_seconds: float | None = None
    """Seconds that it has been silent, when they are enough to count as dead."""
    lost: str = ""
    """Reason why its last group was dropped, while none has become ready since."""


def for_version(step: int, *, needed: int, published: int, max_age: int, env: str = "", adapter: str = "") -> str:
    """Nothing that could be sampled now would still be young enough: the trainer must publish first."""
    who = f"{env} waits" if env else f"Step {step} waits"
    whose = f" of adapter {adapter}" if adapter else ""
    now = f"version {published} is published" if published >= 0 else "none is published yet"
    return (
        f"{who} for policy version {needed}{whose}: {now}, and step {step} trains nothing older than "
        f"{needed} (max_age {max_age}). The trainer publishes it when it has finished the steps before."
    )


def for_share(need: EnvNeed, published: int | None) -> str:
    """An env with a budget has nothing ready while it is owed more than a group."""
    count = max(1, math.ceil(need.missing - 1e-9))
    first = f"{need.env} is {_groups(count)} short of its share of the next step ({_forming(need)})."
    if need.dead_seconds is not None:
        return f"{first} {for_dead(need.env, need.dead_seconds)}"
    if need.is_silent:
        first += f" It has not sent a group yet: is a worker for {need.env} running?"
    return first + _trainer(published, need)


def for_groups(step: int, *, done: float, what: str, need: EnvNeed | None, published: int | None) -> str:
    """The step is not full, and nobody is short yet."""
    first = f"Step {step} is {100 * done:.0f} % full ({what})."
    if need is None:
        return f"{first} {NOTHING_YET}"
    first += f" {need.env} goes next and has nothing ready ({_forming(need)})."
    if need.dead_seconds is not None:
        return f"{first} {for_dead(need.env, need.dead_seconds)}"
    return first + _trainer(published, need)


def to_learn(step: int, groups: int, timeout: float) -> str:
    """The time to fill is over, and what is ready teaches nothing."""
    ready = "the group that is ready teaches nothing" if groups == 1 else f"none of {groups} groups teaches anything"
    return f"Step {step} has waited for fill_timeout_seconds = {timeout:g}, but {ready}: it waits on for one that does."


def not_normal(sentence: str) -> str:
    """The sentence of :func:`for_share` or :func:`for_groups` where people are warned of a worker: it calms nobody."""
    return sentence.removesuffix(_NORMAL)


def for_dead(env: str, seconds: float) -> str:
    """An env of which nothing has come for long: what to do."""
    silence = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    return (
        f"{env} has sent nothing for {silence}: start a worker for it, or go on without it "
        f"(`rlbuffer env pause {env}`)."
    )


def for_failures(env: str, kinds: Mapping[str, int], last: str, workers: Sequence[str]) -> str:
    """The groups of an env cannot be made. The last error names the line where it was raised."""
    return (
        f"{env} fails: {_groups(sum(kinds.values()))} given up by {', '.join(workers)} ({counted(kinds)}), "
        f"the last: {last}."
    )


def for_busy(env: str, worker: str, what: str) -> str:
    """A function of an env does not come back."""
    return f"{env} may hang: {what} at {worker}."


def for_silent(env: str, worker: str, doing: str) -> str:
    """A worker is not heard of any more, and was last heard of while a function of its env ran."""
    return f"{env} may have ended its worker {worker} without a word: it was last heard of while {doing} ran."


def for_worker(env: str, worker: str, said: str) -> str:
    """A worker of an env has a trouble that is not the env's."""
    return f"The worker {worker} of {env} says: {said}."


def for_scorer(env: str, need: str, groups: int, scorers: int) -> str:
    """Groups are there and lack what a scorer must add."""
    verb = "needs" if groups == 1 else "need"
    first = f"{_groups(groups)} of env {env} {verb} {need}"
    if not scorers:
        return f"{first}, and no scorer gives it: start `rlbuffer score`."
    return f"{first}: {scorers} scorer gives it." if scorers == 1 else f"{first}: {scorers} scorers give it."


def for_damaged(step: int, rollouts: int, whose: str) -> str:
    """Payloads that the ranks could not read; the trainer leaves them out."""
    verb = "rollout was" if rollouts == 1 else "rollouts were"
    named = f" ({whose})" if whose else ""
    return (
        f"{rollouts} {verb} missing or damaged when step {step} was pulled{named}: payloads are looked into before "
        "they are committed."
    )


def for_no_lesson(
    flat: tuple[int, int, int], gradient: float | None, entropy: float | None, reward: float | None
) -> str:
    """Steps go on, and nearly nothing in them has a gradient. `flat`: groups that are, all, and the steps of them."""
    count, groups, steps = flat
    facts = []
    if groups:
        share = f"({count / groups:.0%})"
        facts.append(f"{count} of the {groups} groups of the last {plural(steps, 'step')} {share} are flat")
    if gradient is not None:
        facts.append(f"the largest norm of the trainer's last gradients is {gradient:.1g}")
    if entropy is not None:
        facts.append(f"the policy's mean entropy is {entropy:.3f} nats")
    mean = "" if reward is None else f", at a mean reward of {reward:.3f}"
    return f"Nothing to learn: {', '.join(facts)}{mean}."


def all_paused(envs: list[str]) -> str:
    """Nobody may give anything."""
    return f"Every env is paused ({', '.join(envs)}): `rlbuffer env resume {envs[0]}` lets it take part again."


def for_paused(envs: list[str]) -> str:
    """Every other env is done."""
    return (
        f"The run could end but for what is paused ({', '.join(envs)}): `rlbuffer env resume {envs[0]}` lets it take "
        f"part again, `rlbuffer env done {envs[0]}` says that nothing more comes of it, and `rlbuffer drop --where "
        f"env:{envs[0]}` drops what it has."
    )


def for_end(step: int) -> str:
    """Nothing is pending, and nothing more comes; the trainer may still be at work."""
    return f"Every env is done and nothing is left to train: the run ends when step {step} is trained."


def at_end(step: int) -> str:
    """All of it is trained. A waiting process leaves with success."""
    return f"The run has ended after step {step}: every env is done, and nothing is left to train."


def for_word(step: int) -> str:
    """The sentence after a takeover: the trainer may have trained steps that the server has lost."""
    return (
        f"The batcher has just taken over at step {step} and waits until the trainer has said what it has trained, as "
        "it does every second: the server may have lost steps."
    )


def for_hand(step: int) -> str:
    """Rank 0 trains a step that the server has lost."""
    return (
        f"Rank 0 trains step {step}, which the server has lost, and the run goes on when it has trained it. A rank "
        "that has not got it ends within seconds: started again, the trainer goes on from its checkpoint."
    )


def for_file(*, failed: int) -> str:
    """The sentence after a start of the server: its append-only file may end in half a transaction."""
    first = (
        "The server was started anew: its append-only file is rewritten first, because half a transaction in it would "
        "come to life at the next start."
    )
    return first if not failed else f"{first} It has failed {plural(failed, 'time')} so far: the server's log says why."


def for_step(step: int) -> str:
    """The sentence of a rank that waits; the batcher says why."""
    return f"Waiting for step {step}."


def for_making(step: int, seconds: float) -> str:
    """The batcher is at work on one step for longer than people expect."""
    return (
        f"Step {step} is being made, for {seconds:.0f} s so far: a large step, a slow function of your own, or a "
        "machine that is busy."
    )


def for_trainer(step: int, trained: int, lookahead: int) -> str:
    """The trainer has enough committed steps before it."""
    return f"Step {step} is committed and waits for the trainer, which is at step {trained} (lookahead {lookahead})."


def absent_trainer(step: int, trained: int) -> str:
    """No trainer has come since the run was restored, or taken back by an operator."""
    return (
        f"Step {step} is committed, but no trainer has come since the run was restored or taken back; it is trained up "
        f"to step {trained}: start `rlbuffer train` to go on."
    )


def silent_trainer(step: int, trained: int, seconds: float) -> str:
    """It has enough steps and does not report."""
    # Tens of seconds: the sentence must not change at every look, or it would be said at every look.
    who = f"Step {step} is committed, but the trainer" if step else "The trainer"
    return (
        f"{who} has said nothing for over {seconds // 10 * 10:.0f} s; it was at step {trained}. It "
        "has ended, or hangs: start `rlbuffer train` again to go on."
    )


def to_trainer(sentence: str) -> str:
    """The batcher's sentence as a trainer repeats it: without the advice to start the trainer."""
    return UNHEARD if "start" in sentence and "`rlbuffer train`" in sentence else sentence


def draining() -> str:
    """An operator has asked for no more groups. The leader says another sentence after it, a worker only this one."""
    return "The run drains: no tickets are given until `rlbuffer drain --undo`."


def ended(steps: int) -> str:
    """The trainer has made the steps that it was to make."""
    return f"The run has ended: the trainer has made its {plural(steps, 'step')}."


def interrupted(step: int) -> str:
    """A supervised run was stopped by ctrl-C."""
    return f"The run was stopped after step {step}; started again, it goes on."


def failed(step: int, code: int, log: str) -> str:
    """A supervised run could not be kept alive."""
    return f"The run ended after step {step} with exit code {code}: see {log}."


def is_last_word(sentence: str) -> bool:
    """True for what is left for whoever looks later: it holds although no batcher is at work."""
    return sentence == STOPPED or sentence.startswith(("The run has ended", "The run was stopped", "The run ended"))


def _forming(need: EnvNeed) -> str:
    oldest = "" if need.oldest_seconds is None else f", oldest {need.oldest_seconds:.0f} s"
    return f"{need.forming} forming{oldest}"


def _groups(count: int) -> str:
    return plural(count, "group")


def _trainer(published: int | None, need: EnvNeed) -> str:
    version = "" if published is None else f" Policy version {published} is published."
    if need.lost:
        return f"{version} Its last group was dropped as {need.lost}."
    return version + ("" if need.is_silent else _NORMAL)


def for_archive(trouble: str) -> str:
    """The archive cannot be written, and nothing retires without it. Another sentence follows."""
    return f'The archive cannot be written ({trouble}), and archive.when_full = "wait" lets no step retire. '
