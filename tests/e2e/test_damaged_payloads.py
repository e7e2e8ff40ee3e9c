"""A payload that is not what was pushed: it is masked on all ranks alike, and never ends the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from homes import Home

from rlbuffer.store.member import Member
from rlbuffer.testing import make_group

pytestmark = pytest.mark.timeout(900)
"""A machine may be four times as slow as this one."""

GROUPS = 40
"""Enough for three steps of two ranks."""


def prepare(home: Home) -> tuple[Path, str]:
    """Pushes groups and flips one byte of the first rollout's payload. -> the config, the spoiled rollout."""
    config = home.config(steps=2)
    config.write_text(config.read_text().replace("vocab_size = 16", "vocab_size = 256"))
    with home.connect() as buffer:
        buffer.store.role(Member).open_run()
        writer = buffer.writer("by-hand")
        for i in range(GROUPS):
            env = "repeat" if i % 3 == 2 else "vcopy"
            writer.push(make_group(env=env, size=8, seed=i))
        entry = buffer.store.read_pool()[0]
        data = bytearray(buffer.store.client.hget(entry.payload_key, "0"))
        data[len(data) // 2] ^= 0x10
        buffer.store.client.hset(entry.payload_key, "0", bytes(data))
    home.start("serve", "--config", config, log="serve")
    return config, entry.info.rollouts[0].rollout_id


def test_a_rollout_with_a_flipped_byte_is_masked_on_all_ranks_and_counted_once(home: Home) -> None:
    config, spoiled = prepare(home)
    trainer = home.start("train", "--config", config, log="train")
    assert home.ended(trainer, 240) == 0, home.logs()
    first, second = home.metrics()
    with home.connect() as buffer:
        (victim,) = [r for _, r in buffer.step(1).rollouts if r.info.rollout_id == spoiled]
        assert (first["damaged_tokens"], second["damaged_tokens"]) == (victim.info.loss_tokens, 0)
        assert first["loss_tokens"] == buffer.step(1).header.normalizers["loss_tokens"]
        assert len(set(first["parameters_sha256"])) == len(set(second["parameters_sha256"])) == 1
        assert buffer.ledger().damaged == 1
    assert home.call("verify", "--run", "tiny").returncode == 0  # it was treated alike by all, and is counted


def test_ranks_go_on_while_a_hostile_producer_gives_every_rollout_of_every_step(home: Home) -> None:
    steps = 12
    config = home.config(steps=steps)
    config.write_text(
        config.read_text()
        .replace("vocab_size = 16", "vocab_size = 256")
        .replace("step_groups = 0", "step_groups = 2")
        .replace("max_age = 4", "max_age = 20")
    )
    with home.connect() as buffer:
        buffer.store.role(Member).open_run()
        writer = buffer.writer("hostile")
        for i in range(2 * steps):
            writer.push(make_group(env="repeat" if i % 3 == 2 else "vcopy", size=8, seed=i))
        for entry in buffer.store.read_pool():
            fields = buffer.store.client.hgetall(entry.payload_key)
            spoiled = {name: bytes([*data[:-1], data[-1] ^ 1]) for name, data in fields.items() if name != b"group"}
            buffer.store.client.hset(entry.payload_key, mapping=spoiled)
    home.start("serve", "--config", config, log="serve")
    trainer = home.start("train", "--config", config, log="train")
    assert home.ended(trainer, 240) == 0, home.logs()
    records = home.metrics()
    assert [record["damaged_tokens"] for record in records] == [record["loss_tokens"] for record in records]
    assert len(records) == steps
    assert len(set(records[-1]["parameters_sha256"])) == 1
    with home.connect() as buffer:
        assert buffer.ledger().damaged == 2 * steps * 8
    assert home.call("verify", "--run", "tiny").returncode == 0
