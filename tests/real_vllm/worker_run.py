"""A worker in a thread on a store in memory, with a trainer's and a batcher's hand on its run."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from every_role import EveryRole
from transformers import PreTrainedModel

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.process.logs import heard
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.wire.payload import decode_rollout
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Sampling
from rlbuffer.worker.samplers.conformance import CONTEXT, TOLERANCE
from rlbuffer.worker.samplers.selfcheck import logprobs_of

SHORTEST, APART, LENGTHS = 120, 24, 6
"""New tokens of a completion: 120, 144, ... 240. Groups of one length end together, all in one step of the engine, and
the next version is then met between two of them: some runs had no rollout of several versions at all."""
VERSIONS, CROSSED = 10, 2
"""Versions announced at most until rollouts have lived through so many loads. A worker that gets no processor for half
a second may meet a version between two groups."""
GROUP_SIZE, TEMPERATURE = 4, 0.8


class Endless(VCopy):
    """Nothing ends a completion but its limit, which differs from group to group: some are always half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_token_ids = ()  # type: ignore[assignment]

    def prompt(self, number: int) -> Prompt:
        return replace(super().prompt(number), metadata={"tokens": SHORTEST + APART * (number % LENGTHS)})

    async def play(self, prompt: Prompt, episode: Episode) -> Score:
        await episode.sample(max_new_tokens=prompt.metadata["tokens"])
        return Score(reward=0.0)


class WorkerRun:
    """A worker that samples endlessly; used as a context, which stops it."""

    def __init__(
        self,
        sampler: str,
        options: dict[str, Any],
        policies: Sequence[PolicyVersion],
        *,
        temperature: float = TEMPERATURE,
    ) -> None:
        self.policies = policies
        self.settings = WorkerSettings(
            env="vcopy",
            sampler=sampler,  # type: ignore[arg-type]
            sampler_options=options,
            group_size=GROUP_SIZE,
            groups_in_flight=LENGTHS,
            temperature=temperature,
        )
        self.raised: list[BaseException] = []
        self._events: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.buffer = connect("memory://")
        self.store: Any = self.buffer.store.role(EveryRole)
        self.store.open_run()
        self.store.lease("batcher", ttl_seconds=600)
        self._attempt = self.store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0).number
        self.store.set_allowances({"vcopy": 10_000})

    def __enter__(self) -> WorkerRun:
        self.announce(0)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.buffer.close()

    def stop(self) -> None:
        """Ends the worker; it gives back the tickets that it holds."""
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "the worker did not end"

    def announce(self, version: int) -> None:
        """Announces a version as a trainer does."""
        self.store.announce(self._attempt, self.policies[version])

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind so far."""
        return [event for event in list(self._events) if event["event"] == kind]

    def until(self, fact: Callable[[], Any], *, seconds: float, why: str) -> None:
        """Waits until `fact` holds; raises what the worker died of."""
        deadline = time.monotonic() + seconds
        while not fact():
            if self.raised:
                raise self.raised[0]
            troubles = [event["text"] for event in self.told("trouble")][-3:]
            assert time.monotonic() < deadline, f"{why} did not happen within {seconds:g} s; troubles: {troubles}"
            time.sleep(0.02)

    def until_groups(self, more: int, *, seconds: float, why: str) -> None:
        """Waits for `more` groups than there are now."""
        wanted = len(self.told("group")) + more
        self.until(lambda: len(self.told("group")) >= wanted, seconds=seconds, why=why)

    def until_version(self, version: int, *, seconds: float) -> None:
        """Waits until `version` serves."""
        served = lambda: any(event["version"] == version for event in self.told("version"))  # noqa: E731
        self.until(served, seconds=seconds, why=f"a load of version {version}")

    def compare(self, models: Sequence[PreTrainedModel]) -> Counter[tuple[int, int]]:
        """Compares every token in the pool with a forward pass of the version that its span names.

        -> (version, next version) -> rollouts that live through its change.
        """
        crossed: Counter[tuple[int, int]] = Counter()
        versions: Counter[int] = Counter()
        worst = 0.0
        sampling = Sampling(max_new_tokens=CONTEXT, temperature=self.settings.temperature)
        for entry in self.store.read_pool():
            payloads = self.store.client.hgetall(entry.payload_key)
            for index, info in enumerate(entry.info.rollouts):
                rollout = decode_rollout(payloads[str(index).encode()], expected=info)
                first = int(rollout.prompt_tokens)
                prompt, tokens = rollout.tokens[:first], rollout.tokens[first:]
                crossed.update(pairwise(span.policy_version for span in rollout.version_spans))
                for version, start, end in rollout.version_spans:
                    expected = logprobs_of(models[version], prompt, tokens, sampling)[start - first : end - first]
                    worst = max(worst, float(np.abs(rollout.logprobs[start:end] - expected).max()))
                    versions[version] += end - start
        print(f"tokens by version {dict(versions)}, rollouts across {dict(crossed)}, largest difference {worst:.1e}")
        assert worst < TOLERANCE
        assert set(versions) <= {event["version"] for event in self.told("version")}
        return crossed

    def loads_lived_through(self) -> int:
        """Version changes that rollouts in the pool have lived through."""
        rollouts = [rollout for entry in self.store.read_pool() for rollout in entry.info.rollouts]
        return len({r.max_version for r in rollouts if r.min_version < r.max_version})

    def account(self) -> None:
        """Nothing is lost and nothing doubled. The worker must have been stopped.

        Every ticket is a group, once, or can be taken again.
        """
        groups = [event["group_id"] for event in self.told("group")]
        pool = [entry.info.group_id for entry in self.store.read_pool()]
        assert sorted(pool) == sorted(groups)
        assert len(set(groups)) == len(groups)
        rollouts = sum(event["rollouts"] for event in self.told("group"))  # a group that ends early has fewer than four
        assert self.store.ledger().total().pushed[0] == rollouts
        assert self.buffer.verify().findings == ()
        pushed = [_number(group_id) for group_id in groups]
        given_back = self.store.take_tickets("vcopy", max(pushed) + 1 - len(pushed), ttl_seconds=60)
        assert sorted([*pushed, *given_back]) == list(range(max(pushed) + 1))

    def _work(self) -> None:
        try:
            with heard("rlbuffer.worker", self._note):
                run_worker(self.buffer, "w-0", self.settings, stop=self._stop, env=Endless())
        except BaseException as error:
            self.raised.append(error)

    def _note(self, event: dict[str, Any]) -> None:
        if event["event"] == "group":  # as a batcher does that has read it
            self.store.close_tickets("vcopy", [_number(event["group_id"])])
        self._events.append(event)


def _number(group_id: str) -> int:
    """Number of the ticket that a group was sampled for."""
    return int(group_id.rpartition(".")[2])


def versions_change_under_running_rollouts(run: WorkerRun, models: Sequence[PreTrainedModel]) -> None:
    """Loads one version after the other while rollouts are in flight, and checks every token."""
    with run:
        run.until_groups(1, seconds=400, why="a first group")
        for version in range(1, len(run.policies)):
            run.announce(version)
            run.until_version(version, seconds=120)
            run.until_groups(3, seconds=120, why="three groups after a load")
            if run.loads_lived_through() >= CROSSED:
                break
        run.stop()
        if run.raised:
            raise run.raised[0]
        assert run.told("checked")[0]["difference"] < TOLERANCE
        assert [event["text"] for event in run.told("trouble")] == []
        crossed = run.compare(models)
        assert len(crossed) >= CROSSED, "loads must come under running rollouts"
        run.account()
