"""The public API as DESIGN 9 freezes it: names, signatures, fields, and what a stranger would write from it."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    "Failure",
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
    "TokenSequence",
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


def test_what_a_type_checker_sees_is_there() -> None:
    (block,) = [node for node in ast.parse((LIBRARY / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*seen} >= {*rlbuffer.__all__} - {"__version__"}
    assert [name for name in seen if not hasattr(rlbuffer, name)] == []


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
                "failure": None,
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
