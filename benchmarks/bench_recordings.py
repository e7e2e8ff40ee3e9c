"""What the batcher decides and what ranks receive, on fixed seeds, against a recording of both.

A change that only moves code leaves every decision and every tensor as it was: this finds the first that differs.

    python -m benchmarks recordings                                 compares with recordings.json
    python -m benchmarks.bench_recordings --show decisions/reuse 7  prints what is hashed of one, as JSON
    python -m benchmarks.bench_recordings --write                   records anew

Only values are hashed, in an order of their own: names of classes and fields may change. Floats are compared exactly,
so a recording holds for one version of numpy on one kind of machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import rlbuffer
from benchmarks.report import Report, commit, machine
from rlbuffer.daemon import Daemon

FILE = Path(__file__).with_name("recordings.json")
DECISIONS = 20
"""Of each scenario."""
TAIL = 6
"""Decisions at the end of a scenario before which every env has said that it sends nothing more."""
WORLD_SIZES = (1, 3)
STEP_GROUPS, GROUPS = 4, 14

SCENARIOS: dict[str, dict[str, Any]] = {
    "budgets": {"micro_batches_per_rank": 2, "budgets": {"a": 0.4, "b": 0.3}, "remainder": "equal", "max_age": 3},
    "schedules": {
        "budgets": {"a": [[1, 0.9], [12, 0.1]], "b": 0.1},
        "unit": "groups",
        "spillover": "borrow",
        "on_dead_env": "borrow",
    },
    "counts": {"step_rollouts": 12, "spillover": "partial", "budgets": {"c": 0.6}, "min_group_size": 2},
    "adapters": {
        "step_groups": 5,
        "max_age": 4,
        "adapters": {"x": {"batch_size": 9}, "y": {"batch_size": 9}},
        "unit": "rollouts",
    },
    "reuse": {"max_uses": 3, "replay_fraction": 0.8, "max_age": 9, "step_groups": 9, "budgets": {"a": 0.4}},
    "stale": {"max_age": 1, "max_age_seconds": 90.0, "order": "oldest_first", "group_timeout_seconds": 20.0},
    "flat": {"flat": 0.25, "advantage": "grpo", "min_group_size": 2, "truncated": "mask"},
    "flat dropped": {"flat": "drop", "advantage": "max_rl", "step_groups": 2, "max_age": 3, "flat_by": "right"},
    "priority": {"order": "priority", "step_groups": 3, "max_age": 6, "advantage_scale": "batch"},
    "closing": {"micro_batches_per_rank": 6, "fill_timeout_seconds": 30.0, "advantage": "length_penalty"},
}
"""Name -> settings."""
COMMON = {"step_groups": 0, "group_timeout_seconds": 60.0, "spill_after_seconds": 20.0, "env_dead_after_seconds": 30.0}


class Workload:
    """Pushes and other events of a scenario, drawn, between the decisions of a batcher."""

    def __init__(self, name: str) -> None:
        self.draws, self.settings = Random(name), SCENARIOS[name]
        self.adapters = ("", "x", "y") if name == "adapters" else ("", "", "", "x")
        self.batcher = rlbuffer.batcher.Batcher(rlbuffer.BatcherConfig(100, **COMMON | self.settings))
        self.now, self.step, self.groups, self.entries = 1000.0, 1, 0, 0
        self.rest: list[rlbuffer.Group] = []
        """Later parts of groups, and scored ones in place of others."""
        self.replaced: dict[str, str] = {}
        self.pending: list[str] = []

    def decisions(self) -> Iterator[Any]:
        """Every decision as JSON types."""
        for number in range(DECISIONS):
            if number == DECISIONS - TAIL:
                self.batcher.set_sources(done={"a", "b", "c"}, declared={"a", "b"})
            elif number < DECISIONS - TAIL:
                self.happen()
            self.now += self.draws.choice((0.0, 1.0, 10.0, 35.0))
            decision = self.batcher.next(
                self.step, world_size=1 + self.step % 3, now=self.now, rng=np.random.default_rng(self.step)
            )
            yield decided(decision)
            if self.draws.random() < 0.8:
                self.batcher.dropped(decision.drops)
            if decision.plan is None:
                continue
            if self.draws.random() < 0.1:
                self.batcher.refused(decision.plan, [decision.plan.rollouts[0].entry_id])
                continue
            self.batcher.committed(decision.plan)
            if self.draws.random() < 0.8:
                self.batcher.set_published(self.step)
            self.step += 1

    def happen(self) -> None:
        """What comes before a decision: pushes, mostly."""
        draws = self.draws
        for _ in range(draws.randrange(2, 9)):
            self.begin()
        for group in self.rest[: draws.randrange(3)]:
            self.rest.remove(group)
            self.add(group, replaces=self.replaced.pop(group.group_id, ""))
        if self.pending and draws.random() < 0.2:
            self.batcher.remove(self.pending.pop(draws.randrange(len(self.pending))))
        if draws.random() < 0.1:
            self.batcher.close([f"g{draws.randrange(self.groups)}"])
        {1: self.batcher.pause, 2: self.batcher.resume}.get(draws.randrange(6), str)(draws.choice("abc"))

    def begin(self) -> None:
        """The first push of a group, or all of it."""
        draws, name = self.draws, f"g{self.groups}"
        self.groups += 1
        env, adapter, size = draws.choice("aabbc"), draws.choice(self.adapters), draws.randrange(1, 7)
        is_flat, half = draws.random() < 0.3, draws.choice((size, size, size, 1 + size // 2))
        version = max(0, self.step - draws.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 0))) if not adapter else 0
        group = rlbuffer.testing.make_group(
            env=env,
            lengths=[min(112, 3 + int(draws.expovariate(1 / 18))) for _ in range(size)],
            rewards=[1.0 if is_flat else draws.choice((0.0, 0.25, 1.0)) for _ in range(size)],
            version=version,
            seed=self.groups,
            group_id=name,
            adapter=adapter,
            rollout_ids=[f"{name}/{i}" for i in range(size)],
        )
        marked = tuple(
            replace(r, rewards={"right": float((r.reward or 0.0) > 0.5)}, is_truncated=draws.random() < 0.2)
            for r in group.rollouts
        )
        if draws.random() < 0.1:  # scored later
            self.replaced[name] = self.add(
                replace(group, rollouts=tuple(replace(r, reward=None, rewards={}) for r in marked), needs=("reward",))
            )
            self.rest.append(replace(group, rollouts=marked))
            return
        self.add(replace(group, rollouts=marked[:half]))
        if half < size:
            again = draws.randrange(2)  # one that came before
            self.rest.append(replace(group, rollouts=marked[half - again :]))

    def add(self, group: rlbuffer.Group, *, replaces: str = "") -> str:
        """-> the entry's id."""
        self.entries += 1
        entry_id = f"{self.entries}-0"
        pushed = self.now - self.draws.choice((0.0, 0.0, 5.0))
        self.batcher.add(group.info(), entry_id=entry_id, now=self.now, pushed=pushed, replaces=replaces)
        self.pending.append(entry_id)
        return entry_id


def decided(decision: Any) -> Any:
    """A decision's values."""
    plan = decision.plan
    drops = [[d.group_id, d.env, str(d.reason), d.rollouts, d.tokens, list(d.entry_ids)] for d in decision.drops]
    about = [drops, dict(decision.allowances), sorted(decision.dead), decision.is_over, decision.waiting_for_version]
    if plan is None:
        return [None, *about]
    uses = []
    for use in plan.entries:
        left: dict[str, list[int]] = {}
        for reason, rollouts, tokens in use.dropped:
            sums = left.setdefault(str(reason), [0, 0])
            left[str(reason)] = [sums[0] + rollouts, sums[1] + tokens]
        uses.append([use.entry_id, use.packed_rollouts, use.packed_tokens, left, use.uses, use.is_kept])
    step = [
        plan.step,
        list(plan.group_ids),
        [[r.entry_id, r.index, r.rollout_id, r.group_id, r.env, r.adapter] for r in plan.rollouts],
        plan.advantages.tolist(),
        plan.plan.rows,
        [plan.normalizers.loss_tokens, plan.normalizers.rollouts, plan.normalizers.groups],
        [plan.tokens, str(plan.closed_by), plan.flat],
        uses,
        {name: [p.samples, p.tokens, p.step, p.ready_to_update, p.version] for name, p in plan.adapters.items()},
    ]
    return [step, *about]


def recorded_groups() -> Iterator[rlbuffer.Group]:
    """Groups with everything that reaches a rank: columns, attachments, named rewards, parts, an adapter."""
    for number in range(GROUPS):
        name, rng = f"g{number:02}", np.random.default_rng(number)
        lengths = rng.integers(5, 50, 5).tolist()
        group = rlbuffer.testing.make_group(
            env="ab"[number % 2],
            lengths=lengths,
            seed=number,
            group_id=name,
            adapter="x" if number % 7 == 3 else "",
            answer={"right": number},
            columns=[{"ref_logprobs": -rng.random(n, np.float32), "own": rng.integers(0, 9, (n, 2))} for n in lengths],
            rollout_ids=[f"r{i}" for i in range(5)],
        )
        rollouts = tuple(
            replace(
                r,
                rewards={"form": i / 4},
                is_truncated=i == 2,
                attachments={"image": rng.integers(0, 255, (2, i), np.uint8)} if i else {},
            )
            for i, r in enumerate(group.rollouts)
        )
        if number % 3:
            yield replace(group, rollouts=rollouts)
        else:
            yield from (replace(group, rollouts=rollouts[:2]), replace(group, rollouts=rollouts[2:]))


def received(world_size: int) -> list[Any]:
    """Every step of a run as its ranks received it, as JSON types."""
    config = rlbuffer.BatcherConfig(64, rows_per_micro_batch=2, step_groups=STEP_GROUPS, max_age=GROUPS)
    steps: dict[int, list[Any]] = {}
    with rlbuffer.connect("memory://", run="recorded") as buffer:
        writer = buffer.writer("worker")
        for group in recorded_groups():
            writer.push(group)
        for env in "ab":
            writer.done(env)

        def read(rank: int) -> None:
            reader = buffer.reader(rank, world_size, timeout_seconds=60.0)
            reader.start()
            for step in reader.steps():
                steps.setdefault(step.number, [None] * world_size)[rank] = [micro_batch(part) for part in step]
                reader.trained(step)
            reader.close()

        work = [threading.Thread(target=Daemon(buffer, config).run, args=(threading.Event(),))]
        work += [threading.Thread(target=read, args=(rank,)) for rank in range(world_size)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    return [steps[number] for number in sorted(steps)]


def micro_batch(part: Any) -> Any:
    """A micro-batch's values."""
    arrays = [part.input_ids, part.position_ids, part.cu_seqlens, part.loss_mask, part.advantages, part.logprobs]
    arrays += [part.targets, part.sample_index, part.policy_versions]
    normalizers = [part.normalizers.loss_tokens, part.normalizers.rollouts, part.normalizers.groups]
    return [
        [array(a) for a in arrays],
        {name: array(column) for name, column in part.columns.items()},
        [normalizers, part.is_dummy, dict(part.adapter_tokens)],
        [sample(s) for s in part.samples],
    ]


def sample(s: Any) -> Any:
    """A sample's values."""
    return [
        [s.rollout_id, s.group_id, s.env, s.adapter, s.reward, dict(s.rewards), s.advantage, list(s.policy_versions)],
        [s.answer, s.prompt_tokens, s.length, s.is_truncated, {n: array(a) for n, a in s.attachments.items()}],
    ]


def array(values: Any) -> list[Any]:
    """An array as its kind, its shape and its bytes."""
    made = np.ascontiguousarray(values)
    return [made.dtype.str, list(made.shape), made.tobytes().hex()]


def record() -> dict[str, list[Any]]:
    """Name -> what is recorded under it, in order."""
    made = {f"decisions/{name}": list(Workload(name).decisions()) for name in SCENARIOS}
    return made | {f"tensors/ranks {world_size}": received(world_size) for world_size in WORLD_SIZES}


def hashes(values: list[Any]) -> dict[str, str]:
    """One hash of all, and the first letters of each one's."""
    each = [hashlib.sha256(json.dumps(v, sort_keys=True).encode()).hexdigest() for v in values]
    return {"all": hashlib.sha256("".join(each).encode()).hexdigest(), "each": " ".join(one[:12] for one in each)}


def first_difference(made: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The first value that is not as recorded; "" when all are."""
    for name in [*kept, *(made.keys() - kept.keys())]:
        now, then = (some.get(name, {"all": "", "each": ""}) for some in (made, kept))
        if now["all"] != then["all"]:
            each = enumerate(zip_longest(now["each"].split(), then["each"].split()))
            return f"{name} {next(i for i, (a, b) in each if a != b)}"
    return ""


def run(report: Report) -> None:
    """Compares with the file."""
    report.begin(
        "recordings",
        measures=f"the hashes of {DECISIONS * len(SCENARIOS)} decisions of the batcher, and of the arrays of the steps "
        f"that {' and '.join(map(str, WORLD_SIZES))} ranks receive, against {FILE.name}",
        not_measured="time; sentences; what a batcher saves",
    )
    kept = json.loads(FILE.read_text())
    made = {name: hashes(values) for name, values in record().items()}
    for name, its in made.items():
        report.line(f"{name}: {len(its['each'].split())} recorded, {its['all'][:12]}")
    different = first_difference(made, kept["hashes"])
    if different:
        report.line(f"the first that differs: {different}")
    report.target(f"as recorded at {kept['commit']}", not different)


def main() -> None:
    """Records, or shows one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_recordings", description="see the module's docstring"
    )
    parser.add_argument("--show", nargs=2, metavar=("NAME", "NUMBER"))
    parser.add_argument("--write", action="store_true", help=f"makes {FILE.name}")
    chosen, made = parser.parse_args(), record()
    if chosen.show:
        print(json.dumps(made[chosen.show[0]][int(chosen.show[1])], sort_keys=True))
    if chosen.write:
        about = {"commit": commit(), "machine": machine(), "numpy": np.__version__}
        FILE.write_text(json.dumps(about | {"hashes": {n: hashes(v) for n, v in made.items()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
