"""``python -m benchmarks.curves``: do the losses learn, and what does it cost them that rollouts are k versions old?

The demo's two tasks, model and settings in one process: a sampler that holds the weights of k versions ago, groups of
16 pushed to a real batcher over ``memory://``, one reader, one update a step. So every rollout of step s is exactly
min(k, s - 1) versions old, where a real run has a mixture. What is written is the mean reward of the last ten steps up
to 50, 100 and 200, as one JSON line per run, and the reward of every step beside it.

A run of 200 steps takes about 40 CPU-seconds. Runs come in the order of what one wants to know first, so that a
measurement that is ended early still says something.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

import rlbuffer
from benchmarks.report import commit
from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.losses import LossChoice
from rlbuffer.config.schedules import learning_rate_at
from rlbuffer.config.settings import ModelSettings, RunSettings
from rlbuffer.config.trainer import OptimizerSettings, TrainerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.group import Group
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.update.update import SUMS, Updates, make_optimizer, take_step
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of
from rlbuffer.worker.envs import Score, SingleTurnEnv, make_env
from rlbuffer.worker.samplers.base import Sampling
from rlbuffer.worker.samplers.decoding import Decoder

GROUPS = {"vcopy": 20, "repeat": 12}
"""Groups of a step, per env, about what the demo's token budgets come to."""
GROUP_SIZE = 16
CHECKPOINTS = (50, 100, 200)
WINDOW = 10
"""Steps that a reward is the mean of."""
FIRST = (("clip", 0), ("dapo", 0), ("clip", 1), ("dapo", 1), ("clip", 4), ("dapo", 4))
SINGLE = ("gspo", "cispo", "dppo_tv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One curve."""

    loss: str
    delay: int
    """Policy versions."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss}:{self.delay}:{self.seed}"


def planned() -> list[Run]:
    """Every run, the most telling ones first."""
    runs = [Run(loss=loss, delay=delay, seed=0) for loss, delay in FIRST]
    runs += [Run(loss=loss, delay=delay, seed=0) for delay in (1, 4, 0) for loss in SINGLE]
    runs += [Run(loss=loss, delay=8, seed=0) for loss in ("tis", "icepop")]
    return runs + [Run(loss=loss, delay=delay, seed=seed) for seed in (1, 2) for loss, delay in FIRST]


def settings_of(run: Run, steps: int, home: Path) -> RunSettings:
    """The demo's, for one process."""
    return RunSettings(
        run=f"curve-{run.loss}-{run.delay}-{run.seed}".replace("_", "-"),
        home=home,
        seed=run.seed,
        batcher=BatcherConfig(
            row_tokens=5120,
            step_groups=sum(GROUPS.values()),
            lookahead=0,
            max_age=run.delay,
            advantage="grpo",
        ),
        model=ModelSettings(config=dict(TINY_QWEN3)),
        trainer=TrainerSettings(
            steps=steps,
            device="cpu",
            optimizer=OptimizerSettings(learning_rate=2e-3),
            loss=LossChoice(name=run.loss, entropy_bonus=0.02),
        ),
    )


def train(run: Run, steps: int) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Returns step, mean reward, sums of the update, for every step."""
    with tempfile.TemporaryDirectory(prefix="rlb-curve-") as folder:
        settings = settings_of(run, steps, Path(folder))
        torch.manual_seed(run.seed)
        policy = prepare(build_model(settings.model, seed=run.seed))
        optimizer = make_optimizer(policy, settings.trainer.optimizer)
        url = f"memory://{run.name}"
        sampler = Groups(run, Path(folder))
        with connect(url, config=settings) as buffer, batcher(url, settings):
            reader = buffer.reader()
            reader.start(0)
            sampler.publish(buffer, policy, 0)
            writer = buffer.writer("sampler")
            sampler.push(writer, 1)
            for step in reader.steps(1):
                sums = update(policy, optimizer, step, settings)
                yield step.number, float(step.header.reward or 0.0), sums
                sampler.publish(buffer, policy, step.number)
                reader.trained(step)
                if step.number == steps:
                    break
                sampler.push(writer, step.number + 1)


@contextmanager
def batcher(url: str, settings: RunSettings) -> Iterator[None]:
    """A batcher of its own thread, which leads until the block ends."""
    stop = threading.Event()

    def serve() -> None:
        with connect(url, config=settings) as buffer:
            Daemon(buffer, settings.batcher).run(stop)

    thread = threading.Thread(target=serve, name="batcher")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def update(
    policy: PackedPolicy, optimizer: torch.optim.Optimizer, step: Step, settings: RunSettings
) -> dict[str, float]:
    """Trains one step. -> sums by name."""
    trainer = settings.trainer
    ranks = Ranks(0, 1, torch.device("cpu"))
    updates = Updates(policy, step, trainer, ranks, longest=settings.batcher.row_tokens)
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    for part in updates.parts:
        sums += updates.accumulate(part)
        rate = learning_rate_at(step.number, trainer)
        clip = trainer.optimizer.gradient_clip
        take_step(policy, optimizer, learning_rate=rate, gradient_clip=clip, blame=updates.blame)
    return dict(zip(SUMS, sums.tolist(), strict=True))


class Groups:
    """The sampler: weights of `delay` versions ago, prompts in order."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._delay = run.delay
        self._folder = folder / "weights"
        self._envs = {name: cast(SingleTurnEnv, make_env(name, seed=run.seed)) for name in GROUPS}
        self._sampler = Decoder(seed=run.seed)
        self._versions: dict[int, PolicyVersion] = {}

    def publish(self, buffer: Buffer, policy: PackedPolicy, version: int) -> None:
        """Writes and announces a version, and forgets what nobody will sample from again."""
        written = publish(
            self._folder,
            version,
            state=policy.model.state_dict(),
            config=config_of(policy.model),
            keep=self._delay + 2,
        )
        self._versions[version] = PolicyVersion(
            version=version, location=str(written.location), size=written.size, checksum=written.checksum
        )
        buffer.policy().announce(version, location="", size=0, checksum="")

    def push(self, writer: Any, step: int) -> None:
        """Samples and pushes the groups of a step."""
        version = self._versions[max(0, step - 1 - self._delay)]
        if self._sampler.version != version.version:
            self._sampler.load(version)
        for name, count in GROUPS.items():
            env = self._envs[name]
            prompts = [env.prompt((step - 1) * count + i) for i in range(count)]
            sampling = Sampling(
                max_new_tokens=env.max_new_tokens, temperature=1.0, top_p=1.0, stop_token_ids=tuple(env.eos_token_ids)
            )
            drawn = self._sampler.sample([p.tokens for p in prompts], n=GROUP_SIZE, sampling=sampling)
            for i, (prompt, completions) in enumerate(zip(prompts, drawn, strict=True)):
                rollouts = tuple(
                    Rollout.from_completion(
                        prompt_ids=prompt.tokens,
                        token_ids=c.tokens,
                        logprobs=c.logprobs,
                        reward=cast(Score, env.score(prompt, c.tokens, finish_reason=c.finish_reason)).reward,
                        policy_version=version.version,
                    )
                    for c in completions
                )
                writer.push(Group(f"{name}.{step}.{i}", name, prompt.prompt_id, rollouts, GROUP_SIZE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the curves that are not in the output file yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="LOSS:DELAY:SEED", help="default: all that are planned")
    parser.add_argument("--steps", type=int, default=CHECKPOINTS[-1])
    parser.add_argument("--output", type=Path, default=Path("curves.jsonl"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done = set()
    if chosen.output.exists():
        done = {json.loads(line)["run"] for line in chosen.output.read_text().splitlines()}
    named = [Run(loss=loss, delay=int(k), seed=int(s)) for loss, k, s in (name.split(":") for name in chosen.runs)]
    for run in named or planned():
        if run.name in done:
            continue
        started, rewards = time.process_time(), []
        for number, reward, sums in train(run, chosen.steps):
            rewards.append(reward)
            if number % 10 == 0:
                clipped = sums["clipped"] / max(1.0, sums["loss_tokens"])
                mean = sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])
                print(f"{run.name} step {number} reward {mean:.3f} outside the clip {clipped:.3f}", flush=True)
        line = {
            "run": run.name,
            "loss": run.loss,
            "delay": run.delay,
            "seed": run.seed,
            "at": {str(n): round(sum(rewards[n - WINDOW : n]) / WINDOW, 3) for n in CHECKPOINTS if n <= len(rewards)},
            "cpu_seconds": round(time.process_time() - started, 1),
            "commit": commit(),
            "version": rlbuffer.__version__,
            "rewards": [round(r, 4) for r in rewards],
        }
        with chosen.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
