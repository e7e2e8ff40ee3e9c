"""The public API as DESIGN 9 freezes it: names, signatures, fields, and what a stranger would write from it."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbuffer
from rlbuffer.errors import ConfigError
from rlbuffer.testing import FakeClock, make_group

NONE: Any = inspect.Parameter.empty
NAMES = {  # as DESIGN 9 writes them
    "Batcher",
    "BatcherConfig",
    "Buffer",
    "Decision",
    "Drop",
    "FakeClock",
    "Group",
    "GroupInfo",
    "GroupView",
    "Ledger",
    "MicroBatch",
    "Normalizers",
    "Plan",
    "Policy",
    "PolicyVersion",
    "Pushed",
    "Reader",
    "Report",
    "Rollout",
    "Sample",
    "Step",
    "StepPlan",
    "StepView",
    "Ticket",
    "Writer",
    "advantage",
    "connect",
    "make_group",
    "pack",
    "plan",
    "redeal",
}
LIBRARY = Path(rlbuffer.__file__).parent
EXAMPLES = [path for path in sorted(LIBRARY.rglob("*.py")) if ">>>" in path.read_text()]
"""Modules of the library with an example in a docstring."""


def parameters(function: Any) -> dict[str, tuple[str, Any]]:
    """name -> (p or k or * or **, default), `self` and `cls` left out."""
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "p",
        inspect.Parameter.KEYWORD_ONLY: "k",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = inspect.signature(function).parameters.items()
    return {name: (kinds[p.kind], p.default) for name, p in found if name not in ("self", "cls")}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_importable_from_the_package(name: str) -> None:
    assert name in rlbuffer.__all__
    assert getattr(rlbuffer, name).__name__ == name


def test_errors_and_testing_need_no_import_of_their_own() -> None:
    code = "import rlbuffer; rlbuffer.testing.make_group(); print(rlbuffer.errors.BatcherFailed.exit_code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_rooms_with_public_names_need_no_import_of_their_own() -> None:
    code = """import rlbuffer
print(rlbuffer.packing.pack is rlbuffer.pack, rlbuffer.records.Rollout is rlbuffer.Rollout)
print(rlbuffer.advantages.advantage is rlbuffer.advantage, rlbuffer.batcher.Batcher is rlbuffer.Batcher)
print(rlbuffer.client.connect is rlbuffer.connect, rlbuffer.config.BatcherConfig is rlbuffer.BatcherConfig)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n" * 3


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = rlbuffer.Rolout


@pytest.mark.parametrize(
    ("function", "frozen"),
    [
        (rlbuffer.connect, {"url": ("p", None), "run": ("k", "default"), "config": ("k", None)}),
        (rlbuffer.Buffer.writer, {"worker": ("p", NONE)}),
        (
            rlbuffer.Buffer.reader,
            {"rank": ("p", 0), "world_size": ("p", 1), "timeout_seconds": ("k", 300.0)},
        ),
        (rlbuffer.Buffer.policy, {}),
        (rlbuffer.Buffer.ledger, {}),
        (rlbuffer.Buffer.groups, {"where": ("p", ""), "limit": ("p", 100)}),
        (rlbuffer.Buffer.step, {"n": ("p", NONE)}),
        (rlbuffer.Buffer.verify, {}),
        (rlbuffer.Writer.take, {"env": ("p", NONE), "n": ("p", 1), "timeout_seconds": ("k", None)}),
        (rlbuffer.Writer.push, {"group": ("p", NONE)}),
        (rlbuffer.Reader.steps, {"start": ("p", None)}),
        (rlbuffer.Reader.trained, {"step": ("p", NONE)}),
        (rlbuffer.Reader.checkpointed, {"step": ("p", NONE), "oldest_kept": ("k", None)}),
        (rlbuffer.Reader.state_dict, {}),
        (rlbuffer.Policy.current, {"adapter": ("p", "")}),
        (
            rlbuffer.Policy.announce,
            {
                "version": ("p", NONE),
                "location": ("k", NONE),
                "size": ("k", NONE),
                "checksum": ("k", NONE),
                "adapter": ("k", ""),
            },
        ),
        (rlbuffer.Policy.publish, {"model": ("p", NONE), "version": ("p", NONE), "folder": ("p", None)}),
        (rlbuffer.Policy.wait, {"version": ("p", NONE), "timeout_seconds": ("k", NONE)}),
        (
            rlbuffer.plan,
            {
                "lengths": ("p", NONE),
                "row_tokens": ("k", NONE),
                "world_size": ("k", NONE),
                "rows_per_micro_batch": ("k", 1),
                "cost": ("k", (24576, 1)),
                "adapters": ("k", None),
                "pad_to_multiple_of": ("k", 1),
            },
        ),
        (rlbuffer.redeal, {"plan": ("p", NONE), "world_size": ("p", NONE)}),
        (
            rlbuffer.pack,
            {
                "rollouts": ("p", NONE),
                "advantages": ("p", None),
                "row_tokens": ("k", NONE),
                "pad_token_id": ("k", 0),
                "pad_to_multiple_of": ("k", 1),
                "ignore_index": ("k", -100),
                "normalizers": ("k", None),
            },
        ),
        (
            rlbuffer.advantage,
            {"name": ("p", NONE), "rewards": ("p", NONE), "lengths": ("k", None)},
        ),
        (rlbuffer.Batcher, {"config": ("p", NONE), "state": ("p", None)}),
        (
            rlbuffer.Batcher.add,
            {"info": ("p", NONE), "entry_id": ("k", NONE), "now": ("k", NONE), "uses": ("k", 0)},
        ),
        (rlbuffer.Batcher.remove, {"entry_id": ("p", NONE)}),
        (rlbuffer.Batcher.close, {"group_ids": ("p", NONE)}),
        (rlbuffer.Batcher.set_published, {"version": ("p", NONE), "adapter": ("p", "")}),
        (
            rlbuffer.Batcher.next,
            {"step": ("p", NONE), "world_size": ("k", NONE), "now": ("k", NONE), "rng": ("k", NONE)},
        ),
        (rlbuffer.Batcher.committed, {"plan": ("p", NONE)}),
        (rlbuffer.Batcher.refused, {"plan": ("p", NONE), "gone": ("p", NONE)}),
        (
            rlbuffer.Rollout.from_completion,
            {
                "prompt_ids": ("k", NONE),
                "token_ids": ("k", NONE),
                "logprobs": ("k", NONE),
                "reward": ("k", NONE),
                "policy_version": ("k", NONE),
                "fields": ("**", NONE),
            },
        ),
        (
            rlbuffer.Rollout.from_turns,
            {"turns": ("p", NONE), "reward": ("k", NONE), "policy_version": ("k", NONE), "fields": ("**", NONE)},
        ),
        (
            make_group,
            {
                "env": ("k", "a"),
                "size": ("k", 4),
                "rewards": ("k", None),
                "lengths": ("k", None),
                "version": ("k", 0),
                "seed": ("k", 0),
            },
        ),
        (FakeClock, {"now": ("p", 0.0)}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signatures_begin_as_frozen_and_whatever_follows_is_an_option(function: Any, frozen: dict[str, Any]) -> None:
    found = parameters(function)
    assert dict(list(found.items())[: len(frozen)]) == frozen
    more = {name: kind for name, (kind, default) in list(found.items())[len(frozen) :] if default is NONE}
    assert more == {}
    assert all(kind == "k" for kind, _ in list(found.values())[len(frozen) :])


def test_the_batcher_s_settings_are_in_the_frozen_order_with_the_frozen_defaults() -> None:
    frozen = {
        "row_tokens": NONE,
        "micro_batches_per_rank": 1,
        "rows_per_micro_batch": 1,
        "step_rollouts": None,
        "step_groups": None,
        "close_fill": 0.95,
        "lookahead": 1,
        "max_age": 1,
        "max_age_seconds": None,
        "min_group_size": 1,
        "group_timeout_seconds": 300.0,
        "flat": "keep",
        "oversized": "drop",
        "advantage": "rloo",
        "budgets": {},
        "remainder": "proportional",
        "unit": "tokens",
        "order": "newest_first",
        "spillover": "block",
        "spill_after_seconds": 60.0,
        "max_uses": 1,
        "replay_fraction": 0.5,
        "cost": (24576, 1),
        "envs": {},
    }
    parameters = inspect.signature(rlbuffer.BatcherConfig).parameters
    assert list(parameters)[: len(frozen)] == [*frozen]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in parameters if name not in frozen)
    config = rlbuffer.BatcherConfig(8192)
    assert {name: getattr(config, name) for name in frozen} == {**frozen, "row_tokens": 8192}
    assert rlbuffer.BatcherConfig(8192, 2, 3).rows_per_micro_batch == 3
    assert rlbuffer.BatcherConfig(**{**frozen, "row_tokens": 8192}) == config
    assert rlbuffer.BatcherConfig(8192, envs={"a": {"max_age": 3}}).for_env("a").max_age == 3


@pytest.mark.parametrize(
    ("record", "required", "optional"),
    [
        (
            rlbuffer.Rollout,
            "tokens loss_mask logprobs version_spans",
            {
                "rollout_id": "",
                "reward": None,
                "rewards": {},
                "successes": {},
                "turns": (),
                "finish_reason": "",
                "is_truncated": {},  # not given: as finish_reason says
                "columns": {},
                "attachments": {},
                "text": None,
                "metadata": {},
            },
        ),
        (
            rlbuffer.Group,
            "group_id env prompt_id rollouts planned_size",
            {"adapter": "", "answer": None, "metadata": {}, "needs": (), "worker": "", "created": None},
        ),
        (rlbuffer.Normalizers, "loss_tokens rollouts groups", {}),
        (
            rlbuffer.Sample,
            "rollout_id group_id env reward rewards advantage policy_versions answer prompt_tokens length",
            {},
        ),
        (rlbuffer.Step, "number epoch digest world_size normalizers rollouts groups", {"damaged": ()}),
        (rlbuffer.StepPlan, "step group_ids rollouts advantages plan normalizers tokens closed_by", {}),
        (rlbuffer.Drop, "group_id env reason rollouts tokens", {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_records_have_the_frozen_fields(record: Any, required: str, optional: dict[str, Any]) -> None:
    fields = dataclasses.fields(record)
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    assert needed == required.split()
    defaults = {
        f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
        for f in fields
        if f.name not in needed
    }
    assert {name: defaults[name] for name in optional} == optional
    assert record.__dataclass_params__.frozen
    assert "__slots__" in vars(record)


def test_a_micro_batch_has_the_frozen_names() -> None:
    names = (
        "input_ids position_ids cu_seqlens loss_mask advantages logprobs targets sample_index columns samples "
        "adapter_tokens normalizers is_dummy"
    )
    micro_batch = rlbuffer.pack(make_group().rollouts, row_tokens=256)
    assert [name for name in names.split() if not hasattr(micro_batch, name)] == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        micro_batch.targets = micro_batch.input_ids  # type: ignore[misc, assignment]


def test_a_rollout_is_made_by_keyword_only_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        rlbuffer.Rollout("id", [1, 2])  # type: ignore[misc, call-arg]
    rollout = make_group().rollouts[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.reward = 2.0  # type: ignore[misc]
    assert not hasattr(rollout, "__dict__")


def test_records_written_without_a_star_take_their_fields_by_position() -> None:
    rollouts = make_group(size=2).rollouts
    group = rlbuffer.Group("g", "math", "p", rollouts, 2)
    assert (group.group_id, group.env, group.prompt_id, group.planned_size) == ("g", "math", "p", 2)
    assert rlbuffer.Normalizers(30, 4, 2) == rlbuffer.Normalizers(loss_tokens=30, rollouts=4, groups=2)
    assert rlbuffer.Drop("g", "math", "stale", 4, 64).reason == "stale"


def test_a_rollout_of_turns_counts_what_was_sampled_and_by_which_version() -> None:
    rollout = rlbuffer.Rollout.from_turns(
        [
            {"role": "user", "tokens": [1, 2, 3]},
            {"role": "assistant", "tokens": [4, 5], "logprobs": [-0.5, -0.25]},
            {"role": "tool", "tokens": [6]},
            {"role": "assistant", "tokens": [7], "logprobs": [-1.0], "policy_version": 4},
        ],
        reward=1.0,
        policy_version=3,
        rollout_id="r",
    )
    assert (rollout.length, rollout.loss_tokens) == (7, 3)
    assert (rollout.min_policy_version, rollout.max_policy_version) == (3, 4)
    assert rollout.loss_mask.tolist() == [False, False, False, True, True, False, True]


def test_a_plan_is_indexed_by_micro_step_and_rank() -> None:
    plan = rlbuffer.plan([60, 50, 40, 30, 20], row_tokens=64, world_size=2, rows_per_micro_batch=2)
    assert all(len(step) == 2 and all(len(rows) == 2 for rows in step) for step in plan.rows)
    rows = [row for step in plan.rows for rank in step for row in rank]
    assert all(isinstance(row, tuple) for row in rows)
    assert sorted(i for row in rows for i in row) == [0, 1, 2, 3, 4]
    three = rlbuffer.redeal(plan, 3)
    assert sorted(i for step in three.rows for rank in step for row in rank for i in row) == [0, 1, 2, 3, 4]
    assert rlbuffer.plan([5], row_tokens=8, world_size=2).rows[0][1] in (((),), ((0,),))


def test_a_micro_batch_unpacks_masks_and_moves() -> None:
    group = make_group(lengths=[5, 9])
    packed = rlbuffer.pack(group.rollouts, rlbuffer.advantage("rloo", [0.0, 1.0]), row_tokens=16, pad_to_multiple_of=16)
    assert [piece.tolist() for piece in packed.unpack(packed.input_ids)] == [r.tokens.tolist() for r in group.rollouts]
    mask = packed.attention_mask()
    assert (mask.shape, mask.dtype) == ((16, 16), np.bool_)
    assert mask[4, 0]
    assert not mask[5, 4]
    assert [sample.advantage for sample in packed.samples] == [-1.0, 1.0]
    torch = pytest.importorskip("torch")
    moved = packed.to("cpu")
    assert moved.input_ids.tolist() == packed.input_ids.tolist()
    assert moved.input_ids.device == torch.device("cpu")


def test_the_batcher_works_alone_for_somebody_without_a_store() -> None:
    clock = FakeClock(now=100.0)
    batcher = rlbuffer.Batcher(rlbuffer.BatcherConfig(64, step_groups=2, max_age=1))
    batcher.set_published(0)
    rng = np.random.default_rng(0)
    decision = batcher.next(1, world_size=2, now=clock(), rng=rng)
    assert decision.plan is None
    assert decision.why is not None
    assert decision.waiting == str(decision.why)
    for seed in range(3):
        info = make_group(seed=seed, lengths=[16, 16]).info()
        batcher.add(info, entry_id=f"{seed}-0", now=clock())
    decision = batcher.next(1, world_size=2, now=clock(), rng=rng)
    assert decision.plan is not None
    assert (decision.plan.step, decision.plan.group_ids, decision.plan.closed_by) == (1, ("a.0", "a.1"), "groups")
    assert (decision.plan.tokens, decision.plan.normalizers) == (64, rlbuffer.Normalizers(48, 4, 2))
    assert decision.plan.advantages.tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert decision.waiting == ""
    batcher.refused(decision.plan, ["0-0"])
    again = batcher.next(1, world_size=2, now=clock(), rng=rng)
    assert again.plan is not None
    assert again.plan.group_ids == ("a.1", "a.2")
    batcher.committed(again.plan)
    batcher.add(make_group(seed=1, lengths=[16, 16]).info(), entry_id="9-0", now=clock())
    batcher.close(["a.7"])
    batcher.add(make_group(seed=7, lengths=[16, 16]).info(), entry_id="10-0", now=clock())
    batcher.add(make_group(seed=8, lengths=[16, 16]).info(), entry_id="11-0", now=clock())
    batcher.remove("11-0")
    late = batcher.next(2, world_size=2, now=clock(), rng=rng)
    assert late.plan is None
    assert [(drop.group_id, drop.reason, drop.rollouts, drop.tokens) for drop in late.drops] == [
        ("a.1", "late", 2, 32),
        ("a.7", "late", 2, 32),
    ]
    restarted = rlbuffer.Batcher(rlbuffer.BatcherConfig(64, step_groups=2), again.state)
    assert restarted.next(2, world_size=2, now=0.0, rng=rng).state == again.state


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"row_tokens": "x"}, "batcher.row_tokens"),
        ({}, "batcher.row_tokens"),
        ({"row_tokens": 64, "flat": "maybe"}, "batcher.flat"),
        ({"row_tokens": 64, "max_agee": 1}, "batcher.max_agee"),
        ({"row_tokens": 64, "envs": {"a": {"max_agee": 1}}}, "batcher.envs.a.max_agee"),
        ({"row_tokens": 0}, "batcher.row_tokens"),
        ({"row_tokens": 64, "budgets": {"a": 0.7, "b": 0.4}}, "batcher.budgets"),
    ],
)
def test_settings_that_cannot_be_are_config_errors_that_name_the_setting(values: Any, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rlbuffer.BatcherConfig(**values)
    assert caught.value.setting == setting


def test_a_setting_given_by_position_is_named_too() -> None:
    with pytest.raises(ConfigError) as caught:
        rlbuffer.BatcherConfig(64, "x")  # type: ignore[arg-type]
    assert caught.value.setting == "batcher.micro_batches_per_rank"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
