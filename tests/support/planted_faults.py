"""A small asynchronous loop on the project's own sampler, losses, packing and updates, with a fault planted in it.

    python tests/support/planted_faults.py             each fault with three seeds, and thirty clean runs
    python tests/support/planted_faults.py table noise the table by age of one run

Each step trains groups that versions of several ages sampled. The fault begins after some clean steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbuffer.batcher.advantages import advantage
from rlbuffer.config.settings import ModelSettings
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.planner import plan
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.micro_batch import Sample, Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.verdicts import signs, verdicts
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.tally import Tally
from rlbuffer.trainer.update.stopwatch import Stopwatch
from rlbuffer.trainer.update.update import Updates, make_optimizer, take_step
from rlbuffer.weights.model import TINY_QWEN3, build_model
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.samplers.base import Completion, Sampling
from rlbuffer.worker.samplers.decoding import Decoder, nucleus

State = Mapping[str, torch.Tensor]
ENV = "vcopy"
ALONE = Ranks(0, 1, torch.device("cpu"))
WARM = 12
"""Clean steps before a fault begins."""
PLANTED = 6
"""Steps with it."""
SHARP = 300.0
"""Factor of the last norm's weights with which a policy answers always the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a loop trains."""

    seed: int = 0
    loss: str = "dapo"
    learning_rate: float = 2e-3
    groups: int = 28
    size: int = 16
    ages: Sequence[int] = (0, 0, 1, 2)
    """Groups are sampled by versions of these ages, in turn: about 1,000 tokens a step are of age 0."""


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def _noisy(value: torch.Tensor) -> torch.Tensor:
    """Rounding to bfloat16 is off by up to 2^-9 of a number; this by ten times as much."""
    return value * (1 + 10 * 2.0**-8 * (torch.rand_like(value) - 0.5))


FAULTS: dict[str, str] = {
    "noise": "sampler_numerics",
    "no_load": "stuck_weights",
    "temperature": "other_temperature",
    "top_p": "support_missing",
    "temperature_raw": "other_sampling",
    "top_p_raw": "other_sampling",
    "rate": "rate_too_high",
    "constant": "constant_reward",
    "truncates": "truncation",
    "collapsed": "collapsed",
}
"""Fault -> the problem that names it."""
CLEAN: tuple[Mapping[str, Any], ...] = (
    {},
    {"loss": "cispo"},
    {"learning_rate": 5e-3},
    {"groups": 56, "size": 8},
    {"ages": (0, 1, 2, 3)},
    {"loss": "gspo", "ages": (0,)},
)
"""Six configurations of clean runs."""


class FaultySampler(Decoder):
    """The project's decoder, with weights from memory, and with a fault once it is planted."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._tiny = build_model(ModelSettings(config=dict(TINY_QWEN3)), seed=seed).train(False).requires_grad_(False)
        self._model = self._tiny
        self.fault = ""

    def use(self, state: State, version: int) -> None:
        """Loads a version, or says so."""
        self._version = version
        if self.fault == "no_load":
            return
        change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"bfloat16": _rounded, "noise": _noisy}
        change["bfloat16_engine"] = _rounded
        self._tiny.float().load_state_dict({k: change.get(self.fault, torch.clone)(v) for k, v in state.items()})
        if self.fault == "bfloat16_engine":
            self._tiny.bfloat16()

    def groups(self, prompts: Sequence[NDArray[np.int32]], size: int) -> list[list[Completion]]:
        """Completions of each prompt; the last in order of a faulty one's logprobs are not of what was drawn from."""
        kind = self.fault.partition("_")[0] if self.fault != "top_p_raw" else "top_p"
        temperature = 0.9 if kind == "temperature" else 1.0
        top_p = 0.9 if self.fault.startswith("top_p") else 1.0
        stop = () if self.fault == "truncates" else (12,)
        sampling = Sampling(max_new_tokens=6, temperature=temperature, top_p=top_p, stop_token_ids=stop)
        made = self.sample(prompts, n=size, sampling=sampling)
        if self.fault in ("top_p", "temperature_raw"):
            self._relabel(prompts, made, top_p)
        return made

    def _relabel(
        self, prompts: Sequence[NDArray[np.int32]], made: Sequence[Sequence[Completion]], top_p: float
    ) -> None:
        """Logprobs of the renormalised nucleus, as engines process them; at another temperature the raw ones."""
        for prompt, group in zip(prompts, made, strict=True):
            for done in group:
                ids = torch.tensor(np.concatenate([prompt, done.tokens]))[None].long()
                with torch.inference_mode():
                    probabilities = torch.softmax(self._tiny(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
                if self.fault == "top_p":
                    probabilities = nucleus(probabilities, top_p)
                    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
                drawn = probabilities.gather(1, torch.tensor(done.tokens).long()[:, None])[:, 0]
                done.logprobs[:] = drawn.clamp(min=1e-30).log().numpy()


class Loop:
    """Samples, packs and trains, a step at a time."""

    def __init__(self, load: Load) -> None:
        torch.manual_seed(load.seed)
        self.load, self.number, self.prompts = load, 0, 0
        self.settings = TrainerSettings(loss={"name": load.loss}, device="cpu")
        self.policy: PackedPolicy = prepare(
            build_model(ModelSettings(config=dict(TINY_QWEN3)), seed=load.seed), longest=64
        )
        self.optimizer = make_optimizer(self.policy, self.settings.optimizer)
        self.utilization = Utilization(self.policy.model, 0, ALONE.device, passes=1)
        self.sampler, self.env = FaultySampler(load.seed), VCopy(seed=load.seed)
        self.kept: dict[int, State] = {0: self._state()}
        self.bfloat16_rms: float | None = None

    def _state(self) -> State:
        return {name: value.detach().clone() for name, value in self.policy.model.state_dict().items()}

    def plant(self, fault: str) -> None:
        """From here on."""
        self.sampler.fault = fault
        if fault == "collapsed":
            with torch.no_grad():
                self.policy.model.get_parameter("model.norm.weight").mul_(SHARP)
            self.kept = dict.fromkeys(self.kept, self._state())

    def step(self) -> StepRecord:
        """Trains one."""
        self.number += 1
        step = self._packed(self._sampled())
        tally = Tally(ALONE, step, self.settings.loss)
        updates = Updates(self.policy, step, self.settings, ALONE, longest=64, ratios=tally.ratios, drift=tally.drift)
        if self.bfloat16_rms is None:
            self.bfloat16_rms = updates.bfloat16_rms()
        tally.bfloat16_rms = self.bfloat16_rms
        rate = self.load.learning_rate * (100 if self.sampler.fault == "rate" else 1)
        for part in updates.parts:
            tally.sums += updates.accumulate(part)
            tally.learning_rate = rate
            tally.gradient_norm = take_step(
                self.policy, self.optimizer, learning_rate=rate, gradient_clip=1.0, step=self.number
            )
        self.kept[self.number] = self._state()
        self.kept.pop(self.number - 5, None)
        return tally.record(Stopwatch(), self.utilization)

    def _sampled(self) -> list[PackItem]:
        load, items = self.load, list[PackItem]()
        ages = [min(self.number - 1, load.ages[g % len(load.ages)]) for g in range(load.groups)]
        for age in sorted(set(ages), reverse=True):
            version = self.number - 1 - age
            self.sampler.use(self.kept[version], version)
            prompts = [self.env.prompt(self.prompts + i) for i in range(ages.count(age))]
            self.prompts += len(prompts)
            made = self.sampler.groups([p.tokens for p in prompts], load.size)
            for i, (prompt, group) in enumerate(zip(prompts, made, strict=True)):
                scores = [self.env.score(prompt, done.tokens, finish_reason=done.finish_reason) for done in group]
                rewards = [0.5 if self.sampler.fault == "constant" else float(score.reward or 0.0) for score in scores]
                credits = advantage("grpo", rewards, lengths=[len(done.tokens) for done in group])
                for done, reward, credit in zip(group, rewards, credits, strict=True):
                    name = f"{ENV}.{self.number}.{age}.{i}"
                    items.append(_item(name, len(items), prompt.tokens, done, reward, float(credit), version))
        return items

    def _packed(self, items: list[PackItem]) -> Step:
        planned = plan(
            [item.sample.length for item in items],
            row_tokens=2048,
            world_size=1,
            rows_per_micro_batch=1,
            cost=(24576, 1),
        )
        counts = Normalizers(
            loss_tokens=sum(int(item.rollout.loss_mask.sum()) for item in items if item.rollout is not None),
            rollouts=len(items),
            groups=self.load.groups,
        )
        rows = assemble([m[0] for m in planned.rows], items, row_tokens=2048, normalizers=counts)
        step = Step(
            number=self.number,
            epoch=0,
            digest="",
            world_size=1,
            micro_batches=rows,
            normalizers=counts,
            rollouts=len(items),
            groups=self.load.groups,
        )
        rewards = [item.sample.reward or 0.0 for item in items]
        env = {"reward": float(np.mean(rewards)), "tokens": step.header.tokens, "age": 0.0, "rollouts": len(items)}
        return replace(step, header=replace(step.header, envs={ENV: env}, reward=env["reward"]))


def _item(
    name: str, place: int, prompt: NDArray[np.int32], done: Completion, reward: float, credit: float, version: int
) -> PackItem:
    rollout = Rollout.from_completion(
        prompt_ids=prompt,
        token_ids=done.tokens,
        logprobs=np.minimum(done.logprobs, 0),
        reward=reward,
        policy_version=version,
        is_truncated=done.finish_reason == "length",
    )
    info = RolloutInfo(
        rollout_id=f"{name}/{place}",
        length=rollout.length,
        prompt_tokens=rollout.prompt_tokens,
        loss_tokens=rollout.loss_tokens,
        reward=reward,
        min_version=version,
        max_version=version,
        is_truncated=rollout.is_truncated,
    )
    sample = Sample(
        rollout_id=f"{name}/{place}",
        group_id=name,
        env=ENV,
        reward=reward,
        rewards={},
        advantage=credit,
        policy_versions=(version, version),
        answer=None,
        prompt_tokens=rollout.prompt_tokens,
        length=rollout.length,
        rollout=place,
        rollout_loss_tokens=rollout.loss_tokens,
        is_truncated=rollout.is_truncated,
        info=info,
    )
    return PackItem(rollout=rollout, sample=sample)


def records_of(fault: str = "", load: Load | None = None, *, warm: int = WARM, steps: int = 4) -> list[StepRecord]:
    """The records of a run: `warm` clean steps, then `steps` with the fault."""
    loop = Loop(load or Load())
    return [*clean(loop, warm), *planted(loop, fault, steps)]


def clean(loop: Loop, steps: int) -> list[StepRecord]:
    """Steps without a fault."""
    return [loop.step() for _ in range(steps)]


def planted(loop: Loop, fault: str, steps: int) -> list[StepRecord]:
    """Steps with it."""
    loop.plant(fault)
    return clean(loop, steps)


def named(records: Sequence[StepRecord]) -> list[set[str]]:
    """What is named after each step."""
    return [{str(p.kind) for p in verdicts(records[: n + 1])} for n in range(len(records))]


def table(records: Sequence[StepRecord]) -> str:
    """The table by age of each step."""
    lines = []
    for record in records:
        lines.append(
            f"step {record.step} entropy {record.entropy:.3f} reward {record.reward:.3f} grad {record.grad_norm:.3f} "
            f"truncated {record.truncated:.2f} bfloat16 {record.bfloat16_rms:.5f}"
        )
        for age, row in record.drift.items():
            lines.append(f"  {age:>4} " + " ".join(f"{name} {value:.4g}" for name, value in row.items()))
    return "\n".join(lines)


def _apart(work: Callable[[], list[StepRecord]]) -> list[StepRecord]:
    """Does `work` in a fork of this process, which is left as it is: faults of one seed begin from the same steps."""
    read, write = os.pipe()
    if not os.fork():
        with os.fdopen(write, "w") as out:
            out.write(json.dumps([record.as_object() for record in work()]))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as given:
        records = [StepRecord.read(line) for line in json.loads(given.read())]
    os.wait()
    return records


def main(words: Sequence[str]) -> int:
    torch.set_num_threads(1)
    if words[:1] == ["table"]:
        records = records_of(words[1] if len(words) > 1 else "")
        print(table(records[-6:]))
        print(named(records)[-4:])
        return 0
    missed = alarms = 0
    for seed in range(3):
        loop = Loop(Load(seed=seed))
        warm = clean(loop, WARM)
        for fault, kind in FAULTS.items():
            records = [*warm, *_apart(partial(planted, loop, fault, PLANTED))]
            seen = next((n for n in range(PLANTED) if (kind, _env_of(kind)) in signs(records[: WARM + n + 1])), None)
            found = named(records)[WARM:]
            at = next((n for n, kinds in enumerate(found) if kind in kinds), None)
            is_named = at is not None and seen is not None and at - seen <= 3
            missed += not is_named
            others = sorted(set[str]().union(*found) - {kind})
            print(
                f"seed {seed} {fault:<15} seen in step {'-' if seen is None else seen + 1}, named in "
                f"{'-' if at is None else at + 1} as {kind}; beside it {', '.join(others) or 'nothing'}",
                flush=True,
            )
        for fault in ("bfloat16", "bfloat16_engine"):
            records = [*warm, *_apart(partial(planted, loop, fault, PLANTED))]
            kinds = set[str]().union(*named(records))
            alarms += bool(kinds)
            rms, own = records[-1].drift["0"]["rms"], records[-1].bfloat16_rms or 0.0
            print(f"seed {seed} {fault:<15} rms {rms:.4f}, the model's {own:.4f}; alarms {sorted(kinds)}", flush=True)
    for config in CLEAN:
        for seed in range(10, 15):
            records = _apart(partial(records_of, "", Load(seed=seed, **config), warm=16, steps=0))
            kinds = set[str]().union(*named(records))
            alarms += bool(kinds)
            moved = max(record.drift.get("1", {"rms": 0.0})["rms"] for record in records)
            print(
                f"clean {dict(config)} seed {seed}: most rms at age 1 {moved:.2f}; alarms {sorted(kinds)}", flush=True
            )
    print(f"faults missed: {missed}; runs without one and with an alarm: {alarms}")
    return 1 if missed or alarms else 0


def _env_of(kind: str) -> str:
    return ENV if kind in ("constant_reward", "truncation") else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
