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
NAMES = """connect Buffer Writer Reader Policy PolicyVersion Ticket Group Rollout TokenSequence Turn VersionSpan Step
MicroBatch Failure BatcherConfig RlbufferError Stream"""
"""What a worker and a trainer are written with; everything else is in the package of its room."""
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


def test_the_package_has_the_names_that_workers_and_trainers_are_written_with() -> None:
    assert rlbuffer.__all__ == ["__version__", *sorted(NAMES.split())]
    assert [getattr(rlbuffer, name).__name__ for name in NAMES.split()] == NAMES.split()


def test_what_a_type_checker_sees_is_there() -> None:
    (block,) = [node for node in ast.parse((LIBRARY / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*seen} >= {*rlbuffer.__all__} - {"__version__"}
    assert [name for name in seen if not hasattr(rlbuffer, name)] == []


ROOMS = {
    "advantages": "advantage",
    "batcher": "Batcher advantage",
    "client": "GroupView Ledger Report StepView connect",
    "config": "AdapterConfig BatcherConfig EnvConfig",
    "errors": "BatcherFailed",
    "packing": "pack plan redeal",
    "records": "AdapterProgress Decision Drop GroupInfo Normalizers Plan Pushed Rollout Sample StepPlan",
    "testing": "FakeClock make_group",
    "traces": "LeftOut Traces is_trace read",
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_with_public_names_needs_no_import_of_its_own(room: str) -> None:
    names = " ".join(f"rlbuffer.{room}.{name}.__name__," for name in ROOMS[room].split())
    code = f"import rlbuffer; print(*({names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ROOMS[room].split()


FROZEN = [
    (rlbuffer.connect, "url=None, *, run='default', config=None"),
    (rlbuffer.Buffer.writer, "worker"),
    (rlbuffer.Buffer.reader, "rank=0, world_size=1, *, timeout_seconds=300.0"),
    (rlbuffer.Buffer.ledger, ""),
    (rlbuffer.Buffer.groups, "where='', limit=100"),
    (rlbuffer.Buffer.step, "n"),
    (rlbuffer.Buffer.verify, ""),
    (rlbuffer.Writer.take, "env, n=1, *, timeout_seconds=None"),
    (rlbuffer.Writer.push, "group, rollouts=None, *, sequence=None, **fields"),
    (rlbuffer.Reader.steps, "start=None"),
    (rlbuffer.Reader.trained, "step"),
    (rlbuffer.Reader.checkpointed, "step, *, oldest_kept=None"),
    (rlbuffer.Reader.state_dict, ""),
    (rlbuffer.Policy.current, "adapter=''"),
    (rlbuffer.Policy.announce, "version, *, location, size, checksum, adapter=''"),
    (rlbuffer.Policy.publish, "model, version, folder=None"),
    (rlbuffer.Policy.wait, "version, *, timeout_seconds"),
    (
        rlbuffer.packing.plan,
        """lengths, *, row_tokens, world_size, rows_per_micro_batch=1, cost=(24576, 1), adapters=None,
        pad_to_multiple_of=1""",
    ),
    (rlbuffer.packing.redeal, "plan, world_size"),
    (
        rlbuffer.packing.pack,
        """rollouts, advantages=None, *, row_tokens, pad_token_id=0, pad_to_multiple_of=1, ignore_index=-100,
        normalizers=None""",
    ),
    (rlbuffer.advantages.advantage, "name, rewards, *, lengths=None"),
    (rlbuffer.batcher.Batcher, "config, state=None"),
    (rlbuffer.batcher.Batcher.add, "info, *, entry_id, now, uses=0"),
    (rlbuffer.batcher.Batcher.remove, "entry_id"),
    (rlbuffer.batcher.Batcher.close, "group_ids"),
    (rlbuffer.batcher.Batcher.set_published, "version, adapter=''"),
    (rlbuffer.batcher.Batcher.next, "step, *, world_size, now, rng"),
    (rlbuffer.batcher.Batcher.committed, "plan"),
    (rlbuffer.batcher.Batcher.refused, "plan, gone"),
    (rlbuffer.Rollout.from_completion, "*, prompt_ids, token_ids, logprobs, reward, policy_version, **fields"),
    (rlbuffer.Rollout.from_turns, "turns, *, reward, policy_version, **fields"),
    (make_group, "*, env='a', size=4, rewards=None, lengths=None, version=0, seed=0"),
    (FakeClock, "now=0.0"),
]


@pytest.mark.parametrize(("function", "text"), FROZEN, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures_begin_as_frozen_and_whatever_follows_is_an_option(function: Any, text: str) -> None:
    found, frozen = parameters(function), parameters(eval(f"(lambda {text}: None)"))
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
        (rlbuffer.records.Normalizers, "loss_tokens rollouts groups", {}),
        (
            rlbuffer.records.Sample,
            "rollout_id group_id env reward rewards advantage policy_versions answer prompt_tokens length",
            {},
        ),
        (rlbuffer.Step, "number epoch digest world_size normalizers rollouts groups", {"damaged": ()}),
        (rlbuffer.records.StepPlan, "step group_ids rollouts advantages plan normalizers tokens closed_by", {}),
        (rlbuffer.records.Drop, "group_id env reason rollouts tokens", {}),
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
