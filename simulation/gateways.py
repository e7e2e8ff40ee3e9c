"""Gateways and the agents that call them: the real :class:`~rlbuffer.store.gateway.GatewayStore`, with an engine that
only takes time.

An agent outlives every gateway. What it asks is a task of some gateway's process. So it may end at every round trip,
hang, or be answered when nobody waits any more; then the agent asks again, mostly another one. The order of a request
(look up, sample, record, answer, note that it was heard) is written out here as rlbuffer/gateway has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlbuffer.errors import (
    EnvDone,
    EpochChanged,
    NotFound,
    OpenRolloutEnded,
    OpenRolloutFull,
    OpenRolloutUnknown,
    OtherEnd,
    PushFailed,
    RlbufferError,
    RunGone,
    ServerFull,
    TicketGone,
)
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import Begun, End, OpenCall, OpenState, WaitingGroup
from simulation.host import AWAY, Host, World
from simulation.opened import FIRST_SAMPLE
from simulation.scheduler import Process

ANSWER_SECONDS = (0.1, 0.5, 3.0)
"""An agent waits for so long, then it asks again: also while its first request is being sampled."""
IDLE_SECONDS = 1.5
"""Idle limit of the open rollouts."""
PROMPT = 7
REFUSED = "refused"
"""An answer: the gateway cannot do it now."""
GONE = "gone"
"""An answer: the open rollout takes no calls any more, or is not there."""
ODD_AGENT = 0.15
"""Share of what agents do that no careful agent does."""


class Gateway:
    """The process of a gateway."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host, self.world, self.process = host, host.world, process
        self.store = host.store(process, GatewayStore)
        self._is_done: set[str] = set()

    def run(self) -> None:
        """Ends what was abandoned, and pushes what waits."""
        world = self.world
        self.store.open_run()
        world.gateways.append(self)
        while True:
            world.scheduler.wait(world.dice.uniform(0.1, 0.5))
            try:
                self.store.end_abandoned()
                for waiting in self.store.waiting(4):
                    self._push(waiting)
            except (RunGone, OpenRolloutUnknown, PushFailed, *AWAY):
                continue  # the next turn tries again

    def _push(self, waiting: WaitingGroup) -> None:
        rollouts = [self._rollout_of(waiting, index) for index in range(waiting.size)]
        group = Group(
            group_id=waiting.group_id,
            env=waiting.env,
            prompt_id=waiting.group_id,
            rollouts=rollouts,
            planned_size=waiting.size,
            metadata={"by": self.process.name},
        )
        try:
            self.store.push_rollouts(waiting, group)
        except ServerFull:
            self.world.scheduler.wait(self.world.dice.uniform(0.0, 1.0))  # another one may push it meanwhile
            self.store.drop_calls(waiting, "full")
            raise

    def _rollout_of(self, waiting: WaitingGroup, index: int) -> Rollout:
        """One sequence of all calls: what they share is not what is looked at here."""
        rollout = waiting.rollouts[index]
        calls = self.store.read_calls(rollout.name)
        tokens, mask, logprobs, spans = [PROMPT], [False], [0.0], list[VersionSpan]()
        for call in calls:
            at = len(tokens) + len(call.prompt)
            tokens += [*call.prompt.tolist(), *call.tokens.tolist()]
            mask += [False] * len(call.prompt) + [True] * len(call.tokens)
            logprobs += [0.0] * len(call.prompt) + call.logprobs.tolist()
            spans += [VersionSpan(span.policy_version, at + span.start, at + span.end) for span in call.version_spans]
        end = rollout.end or End()
        failure = end.failure if calls else Failure("empty")
        return Rollout(
            tokens=np.array(tokens, np.int32),
            loss_mask=np.array(mask, np.bool_),
            logprobs=np.array(logprobs, np.float32),
            version_spans=tuple(spans) or (VersionSpan(0, 0, 1),),
            rollout_id=rollout.name,
            reward=end.reward,
            failure=Failure("stale") if waiting.is_void else failure,
        )

    # -- requests --------------------------------------------------------------------------------------------------
    def begin(self, key: str, env: str, size: int) -> Begun | str:
        """Open rollouts for a key: those that it has, else of a new ticket."""
        plan = self.world.plan
        begun = self.store.begun(key)
        if begun is not None:
            return begun
        if not self.store.may_sample():
            return REFUSED
        try:
            taken = self.store.take_tickets(env, 1, ttl_seconds=3.0, size=plan.ends or None)
        except EnvDone:
            return GONE
        if not taken:
            return REFUSED
        ticket = Ticket(env=env, number=taken[0], group_id=f"{env}.{taken[0]}")
        begun = self.store.begin(key, ticket, size=size, about={"env": env}, idle_seconds=IDLE_SECONDS)
        if begun.number != ticket.number:
            self.store.release_tickets(env, taken)
        return begun

    def call(self, capability: str, request: str, histories: Sequence[str], is_retry: bool, heard: Heard) -> None:
        """A request of an agent: what was recorded for it, or a new sample."""
        world = self.world
        found = self.store.look_up(capability, request=request, histories=histories)
        name = found.rollout.name
        if found.rollout.state is not OpenState.OPEN:
            heard(GONE)
            return
        oldest, version = found.rollout.oldest_version, max(0, self.store.policy().version)
        if found.rollout.is_void or (oldest is not None and version - oldest > world.plan.config.max_age + 1):
            self.store.fail(name, Failure("stale", "too old"))
            heard(GONE)
            return
        if found.request_call and (is_retry or not found.is_heard):
            calls = self.store.read_calls(name, [found.request_call])
            if not calls:
                heard(REFUSED)
                return
            answer = calls[0]
        else:
            if not self.store.may_sample():
                heard(REFUSED)
                return
            before = next(iter(self.store.read_calls(name, [found.history_call] if found.history_call else [])), None)
            world.scheduler.wait(world.dice.expovariate(1 / world.plan.sample_seconds))
            if world.dice.random() < ODD_AGENT:
                self.store.touch(capability)  # as for an engine that takes long
            world.samples += 1
            sampled = OpenCall(
                after=before.number if before is not None else 0,
                after_id=before.id if before is not None else "",
                prompt=np.array([PROMPT], np.int32),
                tokens=np.array([FIRST_SAMPLE + world.samples], np.int32),
                logprobs=np.array([-0.5], np.float32),
                version_spans=(VersionSpan(version, 0, 1),),
            )
            history = f"{histories[0]} {request}" if histories else request
            try:
                recorded = self.store.record(
                    capability, sampled, request=request, seen=found.request_call, history=history, line=found.line
                )
            except EpochChanged:
                heard(REFUSED)  # asked again, it is stale, or sampled again
                return
            answer = recorded.call
        heard(name, answer.number, int(answer.tokens[0]))
        self.store.heard(capability, request, answer.number, call_id=answer.id)

    def freeze(self, capability: str) -> str:
        """No call of it is recorded from now on."""
        self.store.freeze(capability)
        return ""

    def end(self, capability: str, end: End) -> str:
        """The end of an open rollout."""
        try:
            return self.store.end(capability, end)
        except OtherEnd:
            return GONE


class Heard:
    """The answer to a call, as its agent hears it, where it waits for it still."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.answer: Any = None
        self.losses = world.losses
        self._agent = world.scheduler.current
        self.waits = True

    def __call__(self, *answer: Any) -> None:
        if not self.waits:
            return
        self.answer = answer
        if len(answer) == 3:
            name, number, sample = answer
            self.world.invariants.hears(name, number, sample, may_be_lost=self.losses != self.world.losses)
        if self._agent is not None:
            self.world.scheduler.wake(self._agent)


class Agent:
    """One agent after the other, with its rollouts in parallel or in turn: who it is does not matter here."""

    def __init__(self, host: Host, index: int) -> None:
        self.host, self.world, self.index = host, host.world, index
        self._groups = 0

    def run(self, process: Process) -> None:
        """Begins a group, does its calls, ends it; then the next one."""
        world, envs = self.world, ["a", "b"]
        while envs:
            world.scheduler.wait(world.dice.uniform(0.05, 0.4))
            env = world.dice.choice(envs)
            self._groups += 1
            key = f"agent {self.index} {self._groups} {world.dice.getrandbits(64)}"
            begun = self._begin(key, env, world.dice.choice((1, 2, 2, 3)))
            if begun is None:
                envs.remove(env)
                continue
            if world.dice.random() < ODD_AGENT:
                self._ask(lambda gateway, key=key, env=env: gateway.begin(key, env, 2))
            for capability in begun.capabilities:
                self._rollout(capability)

    def _begin(self, key: str, env: str, size: int) -> Begun | None:
        while True:
            begun = self._ask(lambda gateway: gateway.begin(key, env, size))
            if begun == GONE:
                return None
            if isinstance(begun, Begun):
                return begun
            self.world.scheduler.wait(self.world.dice.uniform(0.1, 0.5))

    def _rollout(self, capability: str) -> None:
        dice = self.world.dice
        histories: list[str] = []
        for turn in range(dice.choice((0, 1, 2, 2, 3, 6))):
            request = f"r{dice.choice((turn, turn, turn, 0))}"
            if not self._call(capability, request, histories):
                break
            if dice.random() < ODD_AGENT:
                histories = []  # a helper, or a compaction
            else:
                histories.insert(0, f"{histories[0]} {request}" if histories else request)
        if dice.random() < ODD_AGENT:
            return  # it dies: nobody ends what it began
        if dice.random() < ODD_AGENT:
            self._ask(lambda gateway: gateway.freeze(capability))
            self._call(capability, "behind it", histories, tries=1)
        end = End(reward=float(dice.randrange(2))) if dice.random() < 0.8 else End(failure=Failure("tool", "away"))
        for _ in range(20):
            if self._ask(lambda gateway: gateway.end(capability, end)) is not None:
                break
        if dice.random() < ODD_AGENT:
            other = End(reward=float(dice.randrange(2)))
            self._ask(lambda gateway: gateway.end(capability, dice.choice((end, other))))
        if dice.random() < ODD_AGENT:
            self._call(capability, "late", histories, tries=1)

    def _call(self, capability: str, request: str, histories: Sequence[str], tries: int = 20) -> bool:
        """Asks until it hears an answer. -> whether it has one, and may go on."""
        asked = list(histories)
        for attempt in range(tries):
            heard = Heard(self.world)
            outcome = self._ask(
                lambda gateway, heard=heard, retry=attempt > 0: gateway.call(capability, request, asked, retry, heard),
                until=heard,
            )
            heard.waits = False
            if heard.answer is not None and heard.answer[0] != REFUSED:
                return len(heard.answer) == 3
            if outcome == GONE:
                return False
            self.world.scheduler.wait(self.world.dice.uniform(0.02, 0.2))
        return False

    def _ask(self, what: Callable[[Gateway], Any], until: Heard | None = None) -> Any:
        """The answer of some gateway; None for none. What fails there is answered as a failure."""
        world = self.world
        alive = [gateway for gateway in world.gateways if not gateway.process.is_dead]
        if not alive:
            world.scheduler.wait(0.1)
            return None
        gateway = world.dice.choice(alive)

        def body() -> Any:
            try:
                return what(gateway)
            except (OpenRolloutUnknown, OpenRolloutEnded, OpenRolloutFull):
                return GONE
            except (RunGone, TicketGone, NotFound, *AWAY):
                return REFUSED

        task = world.scheduler.spawn(gateway.process, body)
        task.joiners.append(world.scheduler.current)
        deadline = world.scheduler.now + world.dice.choice(ANSWER_SECONDS)
        while not task.is_done and world.scheduler.now < deadline and (until is None or until.answer is None):
            world.scheduler.wait(deadline - world.scheduler.now)
        if task.is_done and isinstance(task.error, RlbufferError) and not world.was_disturbed:
            world.invariants.fail("end", f"{gateway.process.name} fails at a request: {task.error!r}")
        return task.result if task.is_done else None


def gateway(host: Host, process: Process) -> None:
    """The process of a gateway."""
    Gateway(host, process).run()
