"""Why no step comes, in situations made of real processes: everybody says the same sentence, and it is true.

``pytest -s tests/e2e/test_said_situations.py`` prints each situation with its sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from holding_engine import HoldingEngine
from homes import Home

import rlbuffer
from rlbuffer.client.refusals import no_batch
from rlbuffer.client.run_state import read_run_state
from rlbuffer.weights.files import publish

WAIT_SECONDS = 120.0
CONFIG = """
run = "tiny"
[batcher]
row_tokens = 64
step_groups = 2
{batcher}
[worker.vcopy]
env = "vcopy"
sampler = "openai"
sampler_options = {{ servers = ["{url}"] }}
self_check = "never"
group_size = 2
max_new_tokens = 4
groups_in_flight = 1
"""


class Stage:
    """A run that is served, a trainer's and a writer's hand on it, and an engine for workers."""

    def __init__(self, home: Home, engine: HoldingEngine, batcher: str) -> None:
        self.home, self.engine = home, engine
        self.config = home.path / "said.toml"
        self.config.write_text(CONFIG.format(batcher=batcher, url=engine.url))
        self.serve = home.start("serve", "--config", self.config, log="serve")
        self.buffer = home.connect()
        self.reader = self.buffer.reader(timeout_seconds=60)
        self.reader.start()
        self.writer = self.buffer.writer("mine")
        self.announce(0)

    def announce(self, number: int) -> None:
        state = {"number": torch.full((2,), float(number))}
        weights = publish(self.home.path / "weights", number, state=state, config={"vocab_size": 13}, keep=9)
        self.reader.announce(weights)

    def push(
        self, *names: str, version: int = 0, length: int = 2, rewards: tuple[float, ...] = (0.0, 1.0), **more: Any
    ) -> None:
        for name in names:
            rollouts = [
                rlbuffer.Rollout.from_completion(
                    prompt_ids=[1], token_ids=[2] * length, logprobs=[-1.0] * length, reward=r, policy_version=version
                )
                for r in rewards
            ]
            group = rlbuffer.Group(group_id=name, env="a", prompt_id=name, rollouts=rollouts, planned_size=2)
            self.writer.push(replace(group, **more))

    def worker(self) -> Any:
        return self.home.start("worker", "vcopy", "--config", self.config, log="worker")

    def train(self, steps: int) -> None:
        made = self.reader.steps()
        for _ in range(steps):
            self.reader.trained(next(made))
        made.close()


def nothing(stage: Stage) -> None:
    pass


def one_of_two(stage: Stage) -> None:
    stage.push("p0")


def again_by_the_same_name(stage: Stage) -> None:
    stage.push("p0", "p1")
    stage.train(1)
    stage.announce(1)
    stage.push("p0", "p1", version=1)


def again_by_the_same_name_in_parts(stage: Stage) -> None:
    stage.push("p0", "p1")
    stage.train(1)
    stage.announce(1)
    for reward in (0.0, 1.0):
        stage.push("p0", version=1, rewards=(reward,))


def too_long(stage: Stage) -> None:
    stage.push("p0", "p1", length=70)


def of_the_future(stage: Stage) -> None:
    stage.push("p0", "p1", version=9)


def too_old(stage: Stage) -> None:
    for step in range(3):
        stage.push(f"s{step}.0", f"s{step}.1", version=step)
        stage.train(1)
        stage.announce(step + 1)
    stage.push("p0", "p1", version=0)


def flat(stage: Stage) -> None:
    stage.push("p0", "p1", rewards=(1.0, 1.0))


def half_a_group(stage: Stage) -> None:
    stage.push("p0", rewards=(1.0,))


def in_parts(stage: Stage, kinds: str, *, first: int = 0, last: int = 99, names: bool = True) -> None:
    """Pushes the rollouts of a group, each by itself, or some of them; "F" has failed."""
    for place, kind in [*enumerate(kinds)][first:last]:
        fate: dict[str, Any] = {"reward": float(place)}
        if kind == "F":
            fate = {"reward": None, "failure": rlbuffer.Failure("timeout")}
        rollout = rlbuffer.Rollout.from_completion(
            prompt_ids=[1],
            token_ids=[2, 3],
            logprobs=[-1.0, -1.0],
            policy_version=0,
            rollout_id=f"p0/{place}" if names else "",
            **fate,
        )
        group = rlbuffer.Group(group_id="p0", env="a", prompt_id="p0", rollouts=[rollout], planned_size=len(kinds))
        stage.writer.push(group)


def the_first_failed_in_parts(stage: Stage) -> None:
    in_parts(stage, "Fv")


def the_last_failed_in_parts(stage: Stage) -> None:
    in_parts(stage, "vvF")


def all_failed_in_parts(stage: Stage) -> None:
    in_parts(stage, "FF")


def one_failed_in_parts_over_a_takeover(stage: Stage) -> None:
    in_parts(stage, "Fvv", last=1)
    stage.home.wait_until(lambda: "1 forming" in said_now(stage), seconds=WAIT_SECONDS, why="a part that failed")
    stage.serve.kill()
    stage.serve.wait()
    stage.serve = stage.home.start("serve", "--config", stage.config, log="serve")
    in_parts(stage, "Fvv", first=1)


def in_parts_that_name_no_rollout(stage: Stage) -> None:
    in_parts(stage, "Fv", names=False)


def without_a_scorer(stage: Stage) -> None:
    stage.push("p0", needs=("ref_logprobs",))


def paused(stage: Stage) -> None:
    stage.push("p0")
    stage.home.call("env", "pause", "a", "--run", "tiny")


def drained(stage: Stage) -> None:
    stage.push("p0")
    stage.home.call("env", "pause", "--all", "--run", "tiny")


def generating(stage: Stage) -> None:
    stage.engine.request_seconds = 60.0
    stage.worker()


def loading(stage: Stage) -> None:
    stage.engine.load_seconds = 60.0
    stage.worker()


def held_paused(stage: Stage) -> None:
    stage.engine.runs.clear()
    stage.engine.refuses["/resume"] = 999
    stage.worker()


def killed(stage: Stage) -> None:
    stage.engine.request_seconds = 60.0
    worker = stage.worker()
    stage.home.wait_until(lambda: stage.engine.under_way["/inference/v1/generate"], seconds=60, why="a request")
    worker.kill()


def from_a_checkpoint(stage: Stage) -> None:
    stage.push("p0", "p1")
    stage.train(1)
    stage.announce(1)
    for step in (1, 2, 3):
        stage.push(f"s{step}.0", f"s{step}.1", version=1)
    stage.reader.close()
    stage.reader = stage.buffer.reader(timeout_seconds=60)
    stage.reader.start(resume_step=0)


def behind(stage: Stage) -> None:
    stage.push("p0", "p1")
    stage.train(1)
    stage.announce(1)
    for step in (1, 2, 3):
        stage.push(f"s{step}.0", f"s{step}.1", version=1)


SITUATIONS: list[tuple[Callable[[Stage], None], str, str, str]] = [
    (nothing, "", "No worker of any env is at work", "are generating"),
    (one_of_two, "", "It comes from writers that send no heartbeat", "are generating"),
    (one_of_two, "silent", "No worker of a is at work (the last push came 1", "are generating"),
    (again_by_the_same_name, "", "dropped as late", "are generating"),
    (again_by_the_same_name_in_parts, "", "dropped as late", "are generating"),
    (too_long, "", "dropped as oversized", "are generating"),
    (of_the_future, "", "dropped as future", "are generating"),
    (too_old, "max_age = 1", "dropped as stale", "are generating"),
    (flat, 'flat = "drop"', "dropped as flat", "are generating"),
    (half_a_group, "", "1 forming", "are generating"),
    (the_first_failed_in_parts, "", "50% full", "1 forming"),
    (the_last_failed_in_parts, "", "50% full", "1 forming"),
    (one_failed_in_parts_over_a_takeover, "", "50% full", "1 forming"),
    (all_failed_in_parts, "", "dropped as failed: timeout 1", "are generating"),
    (in_parts_that_name_no_rollout, "", "dropped as duplicate: rollout p0/0 came before", "are generating"),
    (without_a_scorer, "", "What forms waits for a scorer to add ref_logprobs", "are generating"),
    (paused, "", "is paused (a)", "are generating"),
    (drained, "", "The run drains", "are generating"),
    (generating, "", "workers are generating", "load"),
    (loading, "", "Loading policy version 0, for ", "are generating"),
    (held_paused, "", "in trouble: The worker vcopy of vcopy says: no server can sample", "are generating"),
    (killed, "", "No worker of any env is at work (vcopy was last seen 1", "are generating"),
    (from_a_checkpoint, "lookahead = 1", "at 0 of 1, from its first weights", "slower"),
    (behind, "lookahead = 1", "The trainer is the slower side", "checkpoint"),
]


@pytest.mark.parametrize(("make", "batcher", "said", "never"), SITUATIONS)
def test_everybody_says_what_is_true(
    home: Home, make: Callable[[Stage], None], batcher: str, said: str, never: str
) -> None:
    with HoldingEngine() as engine:
        stage = Stage(home, engine, "" if batcher == "silent" else batcher)
        with stage.buffer:
            make(stage)
            sentence = sentence_of(stage, said)
            print(f"\n| {make.__name__.replace('_', ' ')}{' for 12 s' * (batcher == 'silent')} | {sentence} |")
            assert never not in sentence
            kind = read_run_state(stage.buffer.store).waiting
            assert kind is not None
            assert said in no_batch(stage.buffer.store, 1, 5.0)
            shown = home.call("inspect", "--run", "tiny").stdout
            assert said[:20] in " ".join(shown.split())
            stage.reader.close()


def said_now(stage: Stage) -> str:
    """The leader's sentence."""
    return str(read_run_state(stage.buffer.store).waiting)


def sentence_of(stage: Stage, expected: str) -> str:
    """The leader's sentence, once it is the one that is expected; it must say so again a little later."""
    deadline, said = time.monotonic() + WAIT_SECONDS, ""
    while time.monotonic() < deadline:
        said = said_now(stage)
        if expected in said:
            return said
        time.sleep(0.1)
    raise AssertionError(
        f"expected {expected!r}; it says: {said}\n{(stage.home.path / 'serve.log').read_text()[-2000:]}"
    )
