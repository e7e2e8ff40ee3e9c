"""The store's formats, without a server: scripts, keys, the ledger's fields, headers, parts and their digest."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

import msgspec
import numpy as np
import pytest
from store_runs import rollouts_of

from rlbuffer.errors import ConfigError, PayloadError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.step_plan import Normalizers, Plan, PlannedRollouts, StepPlan
from rlbuffer.store.keys import Keys
from rlbuffer.store.ledger import parse_ledger
from rlbuffer.store.records import EnvLedger, Ledger, Meta, PoolEntry
from rlbuffer.store.session import number as number_of
from rlbuffer.store.session import script_text
from rlbuffer.store.step_format import (
    age_limit,
    decode_header,
    decode_part,
    encoded_header,
    encoded_parts,
    header_record,
    step_digest,
)
from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer.wire.checksum import sealed
from rlbuffer.wire.metadata import decode_infos, encode_info

PAYLOAD_KEYS = {"push": {"stored", "payload"}, "pin": {"key"}}
"""Script -> what it calls the payload keys that it touches."""
SCRIPTS = sorted(f.name.removesuffix(".lua") for f in (resources.files("rlbuffer.store") / "scripts").iterdir())


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (b"", None), (b"0", 0), (b"9" * 15, 10**15 - 1), (b"1" * 16, None), (b"-1", None), (b"1.5", None)],
)
def test_a_number_on_the_server_is_one_of_at_most_fifteen_digits(value, expected):
    assert number_of(value) == expected


# -- scripts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCRIPTS)
def test_only_producers_are_refused_at_the_memory_limit(name):
    first = script_text(name).splitlines()[0]
    assert first.startswith("#!lua")
    assert ("allow-oom" in first) == (name not in ("push", "ticket", "begin"))


def body_of(name: str) -> str:
    """A script without its comments."""
    return re.sub(r"--[^\n]*", "", script_text(name))


def named_keys(name: str) -> list[str]:
    """Names that a script gives its keys."""
    lists = re.findall(r"local ([\w,\s]+?)\s*= (?:unpack\(KEYS|KEYS\[1\])", body_of(name))
    return [word for words in lists for word in re.findall(r"\w+", words) if word.endswith("_key")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_key_names(name):
    # A name that is not declared works on one node and fails on a cluster.
    calls = re.findall(r"redis\.p?call\('(\w+)'(?:, ([^,)]+))?", script_text(name))
    assert calls
    declared = {*named_keys(name), "'STREAM'"}
    made = {key for command, key in calls if command != "TIME" and key not in declared and "KEYS" not in key}
    assert made == PAYLOAD_KEYS.get(name, set())
    # Payload keys lie in other slots: that works on one shard, and only when the server is asked to allow it.
    assert ("allow-cross-slot-keys" in script_text(name).splitlines()[0]) == bool(made)


# -- keys --------------------------------------------------------------------------------------------------------------
def test_control_keys_share_a_slot_and_payload_keys_do_not():
    keys = Keys("r1")
    control = [key for name, key in vars(keys).items() if name not in ("run", "tag", "payload_prefix")]
    control += [keys.producer("w", "u"), keys.tickets("a"), keys.heartbeats("rank")]
    assert all(key.startswith("{rlb:r1}:") for key in control)
    assert len(set(control)) == len(control)
    assert keys.payload("a.1", "u.2") == "rlb:r1:g:a.1:u.2"


@pytest.mark.parametrize("run", ["a*", 5, None])
def test_run_name_that_could_be_a_pattern_or_is_no_text_is_refused(run: Any):
    with pytest.raises(ConfigError) as caught:
        Keys(run)
    assert str(caught.value) == f"run = {run!r} must match [a-z0-9_-][a-z0-9_.-]{{0,63}}"
    assert caught.value.setting == "run"


# -- ledger ------------------------------------------------------------------------------------------------------------
def test_ledger_is_read_from_its_fields():
    fields = {
        b"a:pushed:rollouts": b"10",
        b"a:pushed:tokens": b"100",
        b"a:packed:rollouts": b"2",
        b"a:packed:tokens": b"20",
        b"a:packed:groups": b"1",
        b"a:trained:rollouts": b"3",
        b"a:trained:tokens": b"33",
        b"a:dropped:stale:rollouts": b"1",
        b"a:dropped:stale:tokens": b"9",
        b"a:dropped:stale:groups": b"1",
        b"b.c:pushed:rollouts": b"1",
        b"damaged": b"4",
        b"lost": b"5",
    }
    account = EnvLedger(
        pushed=(10, 100),
        pending=(4, 38),
        packed=(2, 20),
        trained=(3, 33),
        dropped={"stale": (1, 9)},
    )
    other = EnvLedger(pushed=(1, 0), pending=(1, 0))
    assert parse_ledger(fields) == Ledger(envs={"a": account, "b.c": other}, damaged=4, lost=5)
    assert parse_ledger({}) == Ledger(envs={})


# -- steps -------------------------------------------------------------------------------------------------------------
def meta(**changes: object) -> Meta:
    values = {
        "schema": 1,
        "epoch": 7,
        "step": 2,
        "digest": "d",
        "retired": 0,
        "config": {"max_age": 1, "envs": {"b": {"max_age": 0}, "c": {"max_age": None}}},
        "config_digest": "",
        "error": "",
    }
    return Meta(**(values | changes))


def planned() -> tuple[StepPlan, dict[str, PoolEntry]]:
    """Step 3: three rollouts of env a at ages 1, one of env b at age 0, on two ranks."""
    entries = {}
    for number, (env, size, version) in enumerate((("a", 3, 1), ("b", 1, 2))):
        info = payload.encode_push(make_group(env=env, size=size, version=version, seed=number)).info
        entry_id = f"{number + 1}-0"
        entries[entry_id] = PoolEntry(
            entry_id=entry_id,
            info=info,
            payload_key=f"k{number}",
            env=env,
            group_id=info.group_id,
            rollouts=size,
            tokens=info.tokens,
        )
    refs = rollouts_of([*entries.values()])
    plan = StepPlan(
        step=3,
        group_ids=("a.0", "b.1"),
        rollouts=refs,
        advantages=np.array([0.5, -0.25, 0.1, 0.0], np.float32),
        plan=Plan(rows=((((3, 0),), ((1,),)), (((2,),), ((),))), world_size=2, row_tokens=64),
        normalizers=Normalizers(loss_tokens=sum(r.loss_tokens for r in refs), rollouts=4, groups=2),
        tokens=sum(r.length for r in refs),
        closed_by="fill",
    )
    return plan, entries


def with_info(plan: StepPlan, entry_id: str, info: GroupInfo) -> StepPlan:
    """The plan where this was pushed as the entry."""
    uses = [msgspec.structs.replace(use, info=info) if use.entry_id == entry_id else use for use in plan.entries]
    return replace(plan, rollouts=PlannedRollouts(uses))


def parts_of(plan: StepPlan, entries: dict[str, PoolEntry]) -> list[bytes]:
    return [*encoded_parts(plan, entries)]


def test_header_comes_back_with_the_ages_and_limits_of_its_commit():
    plan, _ = planned()
    data = encoded_header(header_record(plan, meta(), None, {}))
    header, limits = decode_header(data, digest="x", committed_ms=5)
    assert (header.step, header.epoch, header.previous_digest, header.digest, header.committed_ms) == (
        3,
        7,
        "d",
        "x",
        5,
    )
    assert (header.group_ids, header.rollouts, header.tokens) == (("a.0", "b.1"), 4, plan.tokens)
    assert (header.age, header.max_age, header.fill) == (0.75, 1, plan.tokens / (2 * 2 * 64))
    assert {env: (v["age"], v["max_age"]) for env, v in header.envs.items()} == {"a": (1.0, 1), "b": (0.0, 0)}
    assert limits == {"a": 1, "b": 0}


def test_rewards_that_are_not_there_have_no_mean():
    plan, _ = planned()
    unscored = payload.encode_push(make_group(env="b", rewards=[None], version=2, seed=1)).info
    header = header_record(with_info(plan, "2-0", unscored), meta(), None, {})
    assert header["envs"]["b"]["reward"] is None
    assert header["reward"] == header["envs"]["a"]["reward"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("config", "env", "limit"),
    [({}, "a", None), ({"max_age": 2}, "a", 2), (meta().config, "b", 0), (meta().config, "c", 1)],
)
def test_age_limit_of_an_env_is_its_own_or_the_runs(config, env, limit):
    assert age_limit(config, env) == limit


def test_parts_hold_each_ranks_rollouts_in_the_order_of_its_rows():
    plan, entries = planned()
    first, second = map(decode_part, parts_of(plan, entries))
    assert [r.info.rollout_id for r in first.rollouts] == ["b.1/0", "a.0/0", "a.0/2"]
    assert first.rows == (((0, 1),), ((2,),))
    assert [round(r.advantage, 6) for r in first.rollouts] == [0.0, 0.5, 0.1]
    assert second.rows == (((0,),), ((),))
    assert [(r.payload_key, r.index, r.env) for r in second.rollouts] == [("k0", 1, "a")]
    assert first.rollouts[1].info == entries["1-0"].info.rollouts[0]


def test_parts_name_each_push_once_in_the_order_of_its_first_rollout():
    plan, entries = planned()
    first, second = map(decode_part, parts_of(plan, entries))
    assert [r.payload_key for r in first.rollouts] == ["k1", "k0", "k0"]
    assert first.rollouts.table["source"].tolist() == [0, 1, 1]
    mixed = replace(plan, plan=replace(plan.plan, rows=((((0, 3, 1),), ((2,),)),)))
    first, second = map(decode_part, parts_of(mixed, entries))
    assert [r.payload_key for r in first.rollouts] == ["k0", "k1", "k0"]
    assert first.rollouts.table["source"].tolist() == [0, 1, 0]
    assert second.rollouts.table["source"].tolist() == [0]


@pytest.mark.parametrize("is_read", [False, True], ids=["made here", "read from the pool"])
def test_parts_hold_the_rewards_of_each_rollout_under_its_own_name(is_read):
    plan, entries = planned()
    group = make_group(env="a", rewards=[0.25, None, 1.0], version=1)
    its = [replace(r, rewards={"format": float(i)}) for i, r in enumerate(group.rollouts)]
    push = payload.encode_push(replace(group, rollouts=tuple(its)))
    info = payload.decode_infos([push.metadata])[0] if is_read else push.info
    first, second = map(decode_part, parts_of(with_info(plan, "1-0", info), entries))
    assert [(r.info.reward, dict(r.info.rewards)) for r in first.rollouts] == [
        (0.0, {}),
        (0.25, {"format": 0.0}),
        (1.0, {"format": 2.0}),
    ]
    assert [(r.info.reward, dict(r.info.rewards)) for r in second.rollouts] == [(None, {"format": 1.0})]


def test_same_step_is_always_the_same_bytes():
    (plan, entries), (again, same) = planned(), planned()
    assert parts_of(plan, entries) == parts_of(again, same)


def test_rollouts_of_a_push_that_are_not_all_of_it_are_those_that_the_plan_names():
    plan, entries = planned()
    info = entries["1-0"].info
    rollouts = PlannedRollouts([msgspec.structs.replace(plan.entries[0], places=[2, 0])])
    its = [info.rollouts[2], info.rollouts[0]]
    assert rollouts.numbers["length"].tolist() == [rollout.length for rollout in its]
    assert rollouts.numbers["checksum"].tolist() == [rollout.checksum for rollout in its]
    rows = ((((0, 1),), ((),)),)
    some = replace(plan, rollouts=rollouts, plan=replace(plan.plan, rows=rows), advantages=plan.advantages[:2])
    part = decode_part(parts_of(some, entries)[0])
    assert [(r.index, r.info.rollout_id) for r in part.rollouts] == [(2, "a.0/2"), (0, "a.0/0")]
    renamed = tuple(rollout.changed(rollout_id=f"mine-{rollout.rollout_id}") for rollout in info.rollouts)
    (named,) = decode_infos([encode_info(replace(info, rollouts=renamed))])
    part = decode_part(parts_of(with_info(some, "1-0", named), entries)[0])
    assert [r.info.rollout_id for r in part.rollouts] == ["mine-a.0/2", "mine-a.0/0"]


@pytest.mark.parametrize(
    ("previous", "header", "parts"),
    [("q", b"h", [b"ab", b"c"]), ("p", b"g", [b"ab", b"c"]), ("p", b"h", [b"a", b"bc"]), ("p", b"ha", [b"b", b"c"])],
)
def test_digest_tells_apart_every_piece_and_where_it_ends(previous, header, parts):
    assert step_digest(previous, header, parts) != step_digest("p", b"h", [b"ab", b"c"])


def whole_step() -> list[tuple[bytes, Callable[[bytes], object]]]:
    """Header and parts of a step, each with what decodes it."""
    plan, entries = planned()
    header = encoded_header(header_record(plan, meta(), None, {}))
    decode = partial(decode_header, digest="", committed_ms=0)
    return [(header, decode), *((part, decode_part) for part in parts_of(plan, entries))]


def test_every_changed_bit_of_a_header_and_of_a_part_is_noticed():
    for data, decode in whole_step():
        decode(data)
        for bit in range(8 * len(data)):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PayloadError, match="is damaged: checksum"):
                decode(bytes(changed))


def test_damaged_headers_and_parts_are_payload_errors_and_nothing_else():
    """Behind a checksum that is right, too: anybody may write there."""
    dice, step, refused = random.Random(0), whole_step(), 0
    for _ in range(3000):
        whole, decode = dice.choice(step)
        data = bytearray(whole[:-4])
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            decode(sealed(bytes(data)))
        except PayloadError:
            refused += 1
    assert refused > 1500
