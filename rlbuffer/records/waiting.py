"""Why a process waits, and what somebody must cure: records, and their sentences with the remedy inside.

Code compares `kind` and reads fields; nobody looks into a sentence. A record travels in the heartbeat of the process
that says it, as a map of the fields that are set.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self, cast

from rlbuffer.errors import clause
from rlbuffer.records.checks import escaped
from rlbuffer.records.readable import readable


class Wait(StrEnum):
    """What is waited for; :func:`_sentence` says each. Who reads makes `UNHEARD` and `NO_BATCHER`."""

    STARTING = "starting"
    NO_TRAINER = "no_trainer"
    UNHEARD = "unheard"
    TRAINER_GONE = "trainer_gone"
    TRAINER_BUSY = "trainer_busy"
    NOT_TAKEN = "not_taken"
    TAKEOVER = "takeover"
    VERSION = "version"
    ENV_SHORT = "env_short"
    FILLING = "filling"
    SLOW = "slow"
    ENV_DEAD = "env_dead"
    NOTHING_TO_LEARN = "nothing_to_learn"
    STEP_IN_HAND = "step_in_hand"
    PAUSED = "paused"
    LAST_STEP = "last_step"
    SERVER_START = "server_start"
    BUILDING = "building"
    UNANSWERED = "unanswered"
    DISK = "disk"
    STEP = "step"
    TICKET = "ticket"
    LOADING = "loading"
    NO_SHARE = "no_share"
    PROMPT = "prompt"
    WEIGHTS = "weights"
    NO_NEED = "no_need"
    DRAINING = "draining"
    SERVER = "server"
    ENGINE = "engine"
    NO_BATCHER = "no_batcher"
    STOPPED = "stopped"
    ENDED = "ended"
    FAILED = "failed"


NORMAL = frozenset(
    {
        *(Wait.TRAINER_BUSY, Wait.NOT_TAKEN, Wait.TAKEOVER, Wait.ENV_SHORT, Wait.FILLING, Wait.SLOW, Wait.STEP_IN_HAND),
        *(
            Wait.STARTING,
            Wait.LAST_STEP,
            Wait.BUILDING,
            Wait.STEP,
            Wait.TICKET,
            Wait.LOADING,
            Wait.NO_NEED,
            Wait.DRAINING,
        ),
        *(Wait.STOPPED, Wait.ENDED),
    }
)
"""Nobody need do anything unless a problem stands beside it."""
STARTING_SECONDS = 60.0
"""Who was started less than this ago is not missing, and what a trainer owes for less than this is no trouble."""
FINAL = frozenset({Wait.STOPPED, Wait.ENDED, Wait.FAILED})
"""True although no batcher is at work."""
FOR_GROUPS = frozenset({Wait.ENV_SHORT, Wait.FILLING, Wait.ENV_DEAD})
"""Of a step for more groups: while an operator drains the run, none of these is worth a word."""
AT_REST = frozenset({Wait.STOPPED, Wait.ENDED})
"""The processes have nothing to do: that they are silent is no problem."""


class Cause(StrEnum):
    """Why no further group of an env is there: the first of these that is true, in this order. :func:`_because` says
    each. The batcher finds those of its pool, the leader those of the workers (:mod:`rlbuffer.state.env_causes`)."""

    DROPPED = "dropped"
    """What came last was dropped, and nothing has become ready since."""
    DONE = "done"
    """Nothing more comes of it."""
    SCORER = "scorer"
    """All that forms waits for a scorer."""
    GENERATING = "generating"
    """A worker of it samples."""
    LOADING = "loading"
    """Its workers load a policy version."""
    WAITING = "waiting"
    """Its workers wait for something else."""
    TROUBLE = "trouble"
    """Its workers have met a trouble."""
    AGENTS = "agents"
    """It comes from agents by a gateway."""
    WRITERS = "writers"
    """It comes from writers that send no heartbeat."""
    NO_WORKER = "no_worker"
    """No worker of it lives, and nothing has come for a while."""


UNWELL = frozenset({Cause.DROPPED, Cause.TROUBLE, Cause.NO_WORKER})
"""Somebody may have to do something."""


class _Said:
    """A record that travels in a heartbeat."""

    __slots__ = ()

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """The record in a heartbeat; None where it has no kind. Anybody may have written it."""
        found = readable(cls, value)
        return cls(**found) if "kind" in found else None

    def record(self) -> dict[str, Any]:
        """The fields that are set."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        defaults = {field.name: field.default for field in fields(cast(Any, self))}
        return {name: escaped(v) if isinstance(v, str) else v for name, v in values.items() if v != defaults[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(_Said):
    """One process's wait. Fields that a kind does not use are left at their defaults."""

    kind: Wait
    step: int = 0
    """The step that is waited for."""
    env: str = ""
    """The env that holds it up; several, with commas, for `PAUSED`."""
    adapter: str = ""
    groups: int = 0
    """Groups that are missing of `env`, that teach nothing, or that are waited for."""
    forming: int = 0
    """Groups of `env` that wait for more of their rollouts."""
    done: float = 0.0
    """Share of the step that is there, 0-1."""
    trained: int = 0
    """Last trained step."""
    version: int = -1
    """The version that is needed, or that sampled what is waited for; -1: any."""
    published: int = -1
    """The version that is published; -1: none."""
    limit: int = 0
    """`max_age`, or `lookahead`."""
    seconds: float = 0.0
    """For so long: the silence, the build, the oldest forming group, a worker's wait."""
    dropped: str = ""
    """Why the env's last group was dropped, while none has become ready since."""
    at: int = -1
    """Step that the trainer's state contains, while it has trained none since it began or trains some again."""
    checkpoint: int = 0
    """Step of the checkpoint that the trainer has gone on from; 0: its first weights."""
    cause: str = ""
    """The :class:`Cause` for which nothing more of `env` is there; "": nobody has looked."""
    detail: str = ""
    """An error's text, a log's path, or what the cause is about."""
    is_stream: bool = False
    """`step` is one group of a stream."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Equal while only numbers have changed: what is said once."""
        return self.kind, self.env, self.adapter, self.cause

    @property
    def is_normal(self) -> bool:
        """Nobody need do anything unless a problem stands beside it."""
        is_soon = self.kind is Wait.VERSION and self.seconds < STARTING_SECONDS
        return (is_soon or self.kind in NORMAL) and not self.dropped and self.cause not in UNWELL

    def __str__(self) -> str:
        return _sentence(replace(self, detail=clause(self.detail)))


class Trouble(StrEnum):
    """What somebody must cure; :func:`_problem` says each. Who reads makes `NO_WORKER`, `UNREADABLE`."""

    ENV_FAILS = "env_fails"
    ENV_HANGS = "env_hangs"
    OTHER_PROMPTS = "other_prompts"
    WORKER_ENDED = "worker_ended"
    WORKER_STUCK = "worker_stuck"
    NO_WORKER = "no_worker"
    NO_SCORER = "no_scorer"
    SCORER_STUCK = "scorer_stuck"
    GATEWAY_STUCK = "gateway_stuck"
    DAMAGED = "damaged"
    SERVER = "server"
    MEMORY = "memory"
    ARCHIVE = "archive"
    NO_LESSON = "no_lesson"
    LONG_LOST = "long_lost"
    SAMPLER_NUMERICS = "sampler_numerics"
    STUCK_WEIGHTS = "stuck_weights"
    OTHER_TEMPERATURE = "other_temperature"
    SUPPORT_MISSING = "support_missing"
    OTHER_SAMPLING = "other_sampling"
    RATE_TOO_HIGH = "rate_too_high"
    COLLAPSED = "collapsed"
    CONSTANT_REWARD = "constant_reward"
    TRUNCATION = "truncation"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(_Said):
    """One thing to cure, beside what is waited for."""

    kind: Trouble
    env: str = ""
    worker: str = ""
    """The worker's or scorer's name; several, with commas."""
    step: int = 0
    count: int = 0
    """Groups, rollouts, bytes, or tickets."""
    detail: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Equal while it is the same problem."""
        return self.kind, self.env

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, archive: str = "") -> str:
        """The sentence, with the command that shows more of it.

        `archive`: the folder that the problem was found in, with a slash; then the command needs no server.
        """
        sentence, command = _problem(replace(self, detail=clause(self.detail))), _command(self, archive)
        return f"{sentence} Look: `rlbuffer {command}`." if command else sentence


# -- in words ----------------------------------------------------------------------------------------------------------
def _groups(count: int) -> str:
    return f"{count:,} group{'' if count == 1 else 's'}"


def _long(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _sentence(w: Waiting) -> str:
    """What is waited for, with its values, and what to do."""
    if w.kind in FOR_GROUPS and w.cause == Cause.NO_WORKER and not w.dropped:
        # How full the step is matters to nobody then.
        return _because(w) + (f" To go on without it: `rlbuffer env pause {w.env}`." * (w.kind is Wait.ENV_DEAD))
    match w.kind:
        case Wait.STARTING:
            since = f", for {_long(w.seconds)} so far" if w.seconds else ""
            return f"Starting{since}{f': {w.detail}' if w.detail else ''}."
        case Wait.NO_TRAINER:
            return (
                "No trainer has joined. One that was started loads its model first; else start it (`rlbuffer train`, "
                "or your own). If one runs, compare its server and its run with those of `serve`."
            )
        case Wait.UNHEARD:
            return "The batcher has not heard of this trainer. Compare its server and its run with those of `serve`."
        case Wait.TRAINER_GONE:
            if w.seconds:
                since = f"has said nothing for over {_long(w.seconds)}"
                goes_on = "it resumes from its last checkpoint and reads the same steps."
            else:
                since = "has not come since the run was restored or taken back"
                goes_on = "it resumes from its last checkpoint. Move those of steps that were taken back away first."
            committed = (
                f"Step {w.step} is committed, but" if w.step > w.trained else "All that is committed is trained, but"
            )
            return f"{committed} the trainer {since}; it was at step {w.trained}. Start the trainer again: {goes_on}"
        case Wait.TRAINER_BUSY:
            return f"Step {w.step} is committed and waits for the trainer, {_pace(w)}"
        case Wait.NOT_TAKEN:
            return (
                f"The trainer has not taken group {w.trained + 1} yet: those up to {w.step} are committed for it "
                f"(batcher.lookahead {w.limit}). It is the slower side."
            )
        case Wait.TAKEOVER:
            return (
                f"The batcher has taken over at step {w.step} and waits a few seconds for the trainer's first report, "
                "because the server may have lost steps. If it comes again and again, see the log of `serve`."
            )
        case Wait.VERSION:
            return _for_version(w)
        case Wait.ENV_SHORT:
            return f"{w.env} is {_groups(w.groups)} short of its share of step {w.step} ({_forming(w)}). {_because(w)}"
        case Wait.FILLING if w.is_stream:
            if not w.env:
                return f"Group {w.step} is not there. No env has sent a group that can train yet. {_because(w)}"
            return f"Group {w.step} is not there: {w.env} has nothing ready ({_forming(w)}). {_because(w)}"
        case Wait.FILLING:
            full = f"Step {w.step} is {w.done:.0%} full"
            if not w.env:
                return f"{full}. No env has sent a group that can train yet. {_because(w)}"
            formed = f" ({_forming(w)})" if w.forming else ""
            return f"{full} and waits for groups of {w.env}{formed}. {_because(w)}"
        case Wait.SLOW:
            some = f", {w.forming} of them forming" if w.forming else ""
            return (
                f"Step {w.step} is full, and waits for {_groups(w.groups)} of {w.env}{some}: sampled with version "
                f"{w.version}, {'it' if w.groups == 1 else 'they'} would be too old for the next step. It has waited "
                f"for {_long(w.seconds)}; batcher.slow_wait_seconds ends it."
            )
        case Wait.ENV_DEAD:
            return (
                f"{w.env} has sent nothing for {_long(w.seconds)}, and step {w.step} needs it. {_because(w)} To go on "
                f"without it: `rlbuffer env pause {w.env}`."
            )
        case Wait.NOTHING_TO_LEARN:
            ready = "the group that is ready teaches nothing" if w.groups == 1 else f"none of {w.groups} groups teaches"
            return (
                f"Step {w.step} has waited for batcher.fill_timeout_seconds, but {ready}: all rewards of a group are "
                "equal, most often. It waits on for one that does. Take easier or harder prompts (`rlbuffer inspect`)."
            )
        case Wait.STEP_IN_HAND:
            return (
                f"Rank 0 trains step {w.step}, which the server has lost; the run goes on when it has trained it. A "
                "rank without that step ends within seconds: start the trainer again where nothing does."
            )
        case Wait.PAUSED:
            return (
                f"All that could give something is paused ({w.env}): `rlbuffer env resume ENV` lets it take part. "
                "To end without it: `rlbuffer env done ENV`, and `rlbuffer drop --where env:ENV` for what it has."
            )
        case Wait.LAST_STEP:
            return f"Every env is done: the run ends when the trainer has trained step {w.step}."
        case Wait.SERVER_START:
            failed = f" It has failed {w.groups} times." if w.groups else ""
            return (
                "The server was started anew, and its append-only file is rewritten first: half a transaction in it "
                f"would come to life at the next start.{failed} If it lasts, see the server's log: is the disk full?"
            )
        case Wait.BUILDING:
            return (
                f"Step {w.step} is being built, for {w.seconds:.0f} s so far: a large step, a slow function of yours "
                "(batcher.advantage, batcher.order), or a busy machine."
            )
        case Wait.UNANSWERED:
            return (
                f"Step {w.step} waits for the server, which has not answered the batcher for {w.seconds:.0f} s and "
                "answers others: a connection that was cut on the way, or a slow command. It asks "
                "again after a while; if it lasts, look at the network between them, and at SLOWLOG GET."
            )
        case Wait.DISK:
            return f"The trainer has to write, and {w.detail}. Make room there; it goes on by itself."
        case Wait.STEP:
            return f"Waiting for step {w.step}."
        case Wait.TICKET:
            return f"No ticket for {w.env}: enough of its groups are being sampled or in the pool."
        case Wait.LOADING:
            return f"Loading policy version {w.version}, for {_long(w.seconds)} so far."
        case Wait.NO_SHARE:
            return (
                f"No ticket for {w.env}: it has no share of a step. batcher.budgets gives all to {w.detail}; give "
                f"{w.env} a share (`rlbuffer config apply`), or stop this worker."
            )
        case Wait.PROMPT:
            return f"{w.env} skipped its last {w.groups:,} prompts ({w.detail}). If it lasts, mend the env or its data."
        case Wait.WEIGHTS:
            if w.version < 0:
                return "No policy version is announced. The trainer does it when its model is loaded."
            place = f", downloaded from {w.detail}" if w.detail else ""
            return f"Waiting for weights of policy version {w.version} that can be loaded{place}."
        case Wait.NO_NEED:
            return f"No group needs {w.detail}."
        case Wait.DRAINING:
            return "The run drains: no tickets until `rlbuffer env resume --all`."
        case Wait.SERVER:
            return w.detail
        case Wait.ENGINE:
            return f"The calls of agents wait for an engine: {w.detail}."
        case Wait.NO_BATCHER:
            return _without_batcher(w)
        case Wait.STOPPED if w.step:
            return (
                f"The run was stopped after step {w.step}. What is pending is still there: started again, it goes on."
            )
        case Wait.STOPPED:
            return "The batcher was stopped. What is pending is still there: `rlbuffer serve` goes on with it."
        case Wait.ENDED:
            return f"The run has ended after step {w.step}."
        case Wait.FAILED:
            why = f": {w.detail}" if w.detail else ""
            return f"The run was stopped after step {w.step}{why}. Started again, it goes on."


def _for_version(w: Waiting) -> str:
    if w.version < 0:
        if w.is_stream:
            return (
                "The trainer has not announced a policy version. It calls `stream.version(label)` before its first "
                "group, and after each update of its weights."
            )
        return (
            "The trainer has not announced a policy version. It does when its model is loaded; one of your own calls "
            "`buffer.policy.publish(model, reader.step)` before its first step."
        )
    who = f"{w.env} needs" if w.env else f"Step {w.step} needs"
    adapter = f" of adapter {w.adapter}" if w.adapter else ""
    there = f"version {w.published} is published" if w.published >= 0 else "none is published yet"
    return (
        f"{who} policy version {w.version}{adapter}: {there}, and step {w.step} trains nothing older (max_age "
        f"{w.limit}). The trainer publishes it after the steps before; if it never comes, lower trainer.publish.every "
        "or raise batcher.max_age."
    )


def _forming(w: Waiting) -> str:
    return f"{w.forming} forming" + (f", oldest {w.seconds:.0f} s" if w.seconds else "")


def _pace(w: Waiting) -> str:
    """How far the trainer is, and how it comes along."""
    if 0 <= w.at < w.trained:
        since = f"checkpoint {w.checkpoint}" if w.checkpoint else "its first weights"
        return f"at {w.at} of {w.trained}, from {since}: it trains those steps again first."
    pace = "The trainer is the slower side." if w.at < 0 else "It has begun there and not trained a step yet."
    return f"at step {w.trained} (batcher.lookahead {w.limit}). {pace}"


def _because(w: Waiting) -> str:
    """Why nothing more of the env is there, and what to do about it."""
    env = w.env or "any env"
    seen = f"`rlbuffer inspect --where '{f'env:{w.env} ' if w.env else ''}state:dropped'`"
    if w.dropped:
        if w.dropped.startswith("duplicate"):
            advice = "A part of a group names its rollouts by a rollout_id that no other part has."
            return f"What came last of it was dropped as {w.dropped}: see {seen}. {advice}"
        anew = " A group_id is used once: the next group takes a new one." if w.dropped.startswith("late") else ""
        return f"Its last group was dropped as {w.dropped}: see {seen}.{anew}"
    match w.cause:
        case Cause.DONE:
            return "It is done: only what forms can still come, until batcher.group_timeout_seconds are over."
        case Cause.SCORER:
            return f"What forms waits for a scorer to add {w.detail}."
        case Cause.GENERATING:
            advice = {
                Wait.FILLING: "" if w.env else f", or see {seen}",
                Wait.ENV_SHORT: ", or lower its share (batcher.budgets)",
            }.get(w.kind, "")
            return f"Its workers are generating. If it lasts, start more of them{advice}."
        case Cause.LOADING:
            return f"Its workers load weights and sample then: {w.detail}."
        case Cause.WAITING:
            return f"Its workers wait: {w.detail}."
        case Cause.TROUBLE:
            return f"Its workers are in trouble: {w.detail}."
        case Cause.AGENTS if w.detail:
            return f"Its agents are at work: {w.detail}. If it lasts, look at them (`rlbuffer inspect open`)."
        case Cause.AGENTS:
            return "No agent has a rollout of it open. Whoever runs the agents begins one at the gateway."
        case Cause.WRITERS:
            return f"It comes from writers that send no heartbeat; {w.detail}. If it lasts, look at them."
        case Cause.NO_WORKER:
            heard = f" ({w.detail})" if w.detail else ""
            return (
                f"No worker of {env} is at work{heard}: start `rlbuffer worker`, or the trainer whose workers push "
                "into the run. A writer of your own sends no heartbeat and is known by what it pushes."
            )
    if w.kind is Wait.ENV_DEAD:
        return "Start a worker for it."
    return f"If it lasts, start more workers, or see {seen}."


def _without_batcher(w: Waiting) -> str:
    if w.detail:
        return f"The batcher failed: {w.detail}. Mend it, and start `rlbuffer serve` again."
    if w.seconds:
        return (
            f"No batcher leads the run; the last one went {_long(w.seconds)} ago without a goodbye. Start `rlbuffer "
            "serve` again; what is pending is still there."
        )
    return (
        "No batcher has said anything. Start `rlbuffer serve`; if one runs, compare its --redis and --run with these."
    )


_OF_SAMPLER = {
    Trouble.SAMPLER_NUMERICS: (
        "The sampler computes other numbers than the trainer",
        "Compare dtype, quantization and kernels of both. Where older tokens are no further off, look for old weights.",
    ),
    Trouble.STUCK_WEIGHTS: (
        "New weights do not arrive in the sampler, though it says so",
        "Look at what its engine does with a load (its log), and restart it; what stays then is its numbers.",
    ),
    Trouble.OTHER_TEMPERATURE: (
        "Sampler and trainer differ in temperature",
        "Give both the same: worker.NAME.temperature and trainer.temperature, or a column temperatures.",
    ),
    Trouble.SUPPORT_MISSING: (
        "The sampler draws from fewer tokens than the trainer computes with",
        "Sample with top_p = 1, or with top_k, whose tokens are recorded, or push a column support.",
    ),
    Trouble.OTHER_SAMPLING: (
        "Tokens are not drawn as their logprobs say",
        "A temperature, top_p or penalty acts behind the logprobs: take processed ones, or sample without it.",
    ),
}
"""What is wrong, and what cures it, of those that tokens of age 0 show."""


def _problem(p: Problem) -> str:
    match p.kind:
        case Trouble.ENV_FAILS:
            return (
                f"{p.env} fails: {p.worker} has abandoned {_groups(p.count)}: {p.detail}. Mend it, and start the "
                "worker again. The run goes on without a prompt that fails time and again. The traceback: `rlbuffer "
                "inspect processes`, enter on the worker."
            )
        case Trouble.ENV_HANGS:
            return f"{p.env} may hang: {p.detail} at {p.worker}. worker.*.rollout_timeout_seconds ends it."
        case Trouble.OTHER_PROMPTS:
            passed = (
                f"go on with number {p.count:,}: what comes before it now is passed over"
                if p.count
                else "have not begun, so nothing is passed over"
            )
            return (
                f"{p.env} has other prompts than before, says {p.worker}: {p.detail}. Tickets count prompts, and "
                f"{passed}. To sample all of what it has now begin a new run, or give the env another name; else give "
                "it back what it had. All workers of an env need the same prompts."
            )
        case Trouble.WORKER_ENDED:
            return f"The worker {p.worker} of {p.env} has ended: {p.detail}. Mend it, and start it again."
        case Trouble.WORKER_STUCK:
            return f"The worker {p.worker} of {p.env} says: {p.detail}."
        case Trouble.NO_WORKER:
            heard = f" ({p.detail})" if p.detail else ""
            return (
                f"No worker of {p.env or 'any env'} is at work{heard}. One that was started loads its model first; "
                "else start `rlbuffer worker`, or the trainer whose workers push into the run"
                + (f"; or pause it: `rlbuffer env pause {p.env}`." if p.env else ".")
            )
        case Trouble.NO_SCORER:
            return f"{_groups(p.count)} of {p.env} need {p.detail}, and no scorer gives it. Start `rlbuffer score`."
        case Trouble.SCORER_STUCK:
            return f"The scorer {p.worker} says: {p.detail}."
        case Trouble.GATEWAY_STUCK:
            return f"The gateway {p.worker} says: {p.detail}."
        case Trouble.DAMAGED:
            whose = f" ({p.detail})" if p.detail else ""
            return (
                f"{p.count} rollouts were missing or damaged when step {p.step} was pulled{whose}: nothing of them "
                "trains. Stop a worker that goes on sending such."
            )
        case Trouble.SERVER:
            return f"The server was changed, and is not as a run needs it: {p.detail.rstrip('.')}."
        case Trouble.MEMORY:
            return (
                f"The server's memory is short ({p.detail}). Checkpoint more often (trainer.checkpoint.every), raise "
                "its maxmemory, or make room (`rlbuffer inspect`, `rlbuffer runs list`)."
            )
        case Trouble.ARCHIVE:
            return (
                f"The archive cannot be written, and steps go unarchived once the server's memory is short: {p.detail}."
            )
        case Trouble.NO_LESSON:
            return (
                f"Nothing to learn: {p.detail}. If that reward is the best there is, take harder prompts, or end the "
                "run. Else look at the rollouts, and take easier prompts or an earlier checkpoint."
            )
        case Trouble.LONG_LOST:
            return (
                f"{p.env} loses its long rollouts: {p.detail} of the longest tenth of its last groups were trained, "
                'the others came too late for their last step. batcher.slow = "wait" trains them, with a '
                "batcher.slow_wait_seconds that they fit into; a larger batcher.max_age loses fewer."
            )
        case (
            Trouble.SAMPLER_NUMERICS
            | Trouble.STUCK_WEIGHTS
            | Trouble.OTHER_TEMPERATURE
            | Trouble.SUPPORT_MISSING
            | Trouble.OTHER_SAMPLING
        ):
            what, cure = _OF_SAMPLER[p.kind]
            return f"{what}, by steps {p.step - 1} and {p.step}: {p.detail}. {cure}"
        case Trouble.RATE_TOO_HIGH:
            return (
                f"The learning rate is far too high, by steps {p.step - 1} and {p.step}: {p.detail}. Lower "
                "trainer.optimizer.learning_rate, and go back to a checkpoint before it."
            )
        case Trouble.COLLAPSED:
            return (
                f"The policy gives one answer, by steps {p.step - 1} and {p.step}: {p.detail}. If that reward is the "
                "best there is, end the run; else go back to a checkpoint before it, and lower the learning rate or "
                "raise trainer.loss.entropy_bonus."
            )
        case Trouble.CONSTANT_REWARD:
            return (
                f"Nothing tells rollouts of {p.env} apart, by steps {p.step - 1} and {p.step}: {p.detail}. If that is "
                "the best there is, take harder prompts; else mend what scores them."
            )
        case Trouble.TRUNCATION:
            return (
                f"Answers of {p.env} are cut off, by steps {p.step - 1} and {p.step}: {p.detail}. Raise its "
                "max_new_tokens, see that its stop tokens are the model's, or that the reward does not pay for length."
            )
        case Trouble.UNREADABLE:
            return (
                f"{p.count} entries of the run cannot be read and are left out, the first: {p.detail}. Find who else "
                "writes to this server, and remove them there."
            )


def _command(p: Problem, archive: str) -> str:
    """The command behind `rlbuffer` that shows more of a problem; "" where there is none."""
    folder, where = shlex.quote(archive) if archive else "", f"env:{p.env}"
    match p.kind:
        case kind if kind in _OF_SAMPLER or kind is Trouble.RATE_TOO_HIGH:
            return f"plot drift.0.rms {folder}" if folder else "inspect drift"
        case Trouble.COLLAPSED:
            return f"plot entropy {folder}".rstrip()
        case Trouble.CONSTANT_REWARD | Trouble.TRUNCATION:
            if p.kind is Trouble.TRUNCATION:
                where += " stop:length"
            return (
                f"export --archive {folder} --where '{where}' -o groups.html"
                if folder
                else f"inspect --where '{where}'"
            )
    return ""
