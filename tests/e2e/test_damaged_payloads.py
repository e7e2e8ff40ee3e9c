"""Payloads that are not what was pushed: they are masked on all ranks alike, and never end the trainer."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from homes import Home

import rlbuffer
from rlbuffer.store.member import Member
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytestmark = pytest.mark.timeout(900)
"""A machine may be four times as slow as this one."""

GROUPS = 40
"""Enough for three steps of two ranks."""


def prepare(home: Home, *, every: int, world_size: int = 2) -> tuple[Path, list[str]]:
    """Pushes groups and flips one byte of every `every`-th rollout's payload. -> the config, the spoiled rollouts."""
    config = home.config(steps=2, world_size=world_size, checkpoint_every=50)
    config.write_text(config.read_text().replace("vocab_size = 16", "vocab_size = 256"))
    spoiled = []
    with home.connect() as buffer:
        buffer.role(Member).open_run()
        writer = buffer.writer("by-hand")
        for i in range(GROUPS):
            env = "repeat" if i % 3 == 2 else "vcopy"
            writer.push(make_group(env=env, size=8, seed=i))
        entries = buffer.store.read_pool()
        rollouts = [(entry.payload_key, i, info) for entry in entries for i, info in enumerate(entry.info.rollouts)]
        for key, i, info in rollouts[::every]:
            data = bytearray(buffer.store.client.hget(key, str(i)))
            data[len(data) // 2] ^= 0x10
            buffer.store.client.hset(key, str(i), bytes(data))
            spoiled.append(info.rollout_id)
    home.start("serve", "--config", config, log="serve")
    return config, spoiled


def test_a_rollout_with_a_flipped_byte_is_masked_on_all_ranks_and_counted_once(home: Home) -> None:
    config, (spoiled,) = prepare(home, every=10**6)
    trainer = home.start("train", "--config", config, log="train")
    assert home.ended(trainer, 240) == 0, home.logs()
    first, second = home.metrics()
    with home.connect() as buffer:
        (victim,) = [r for _, r in buffer.step(1).rollouts if r.info.rollout_id == spoiled]
        assert (first["damaged_tokens"], second["damaged_tokens"]) == (victim.info.loss_tokens, 0)
        assert first["loss_tokens"] == buffer.step(1).header.normalizers["loss_tokens"]
        assert len(set(first["parameters_sha256"])) == len(set(second["parameters_sha256"])) == 1
        assert buffer.ledger().damaged == 1
        # Trained again from the start, by another trainer: the same bytes, and still one damaged rollout.
        again = home.start("train", "--config", config, "--output", home.path / "again", log="again")
        assert home.ended(again, 240) == 0, home.logs()
        assert [r["batch_sha256"] for r in home.metrics(folder=home.path / "again")] == [
            first["batch_sha256"],
            second["batch_sha256"],
        ]
        assert buffer.ledger().damaged == 1
    assert home.call("verify", "--run", "tiny").returncode == 0  # it was treated alike by all, and is counted


def test_a_producer_whose_payloads_are_never_sound_does_not_end_the_trainer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all groups are its own, and the first steps hold nothing else. Everything has its default."""
    config = home.config(steps=8, checkpoint_every=3)
    config.write_text(config.read_text().replace("vocab_size = 16", "vocab_size = 256"))
    with home.connect() as buffer:
        buffer.role(Member).open_run()
        honest, odd = (buffer.writer(name) for name in ("honest", "odd"))
        numbers = count()

        def push(writer: rlbuffer.Writer, worker: str) -> None:
            number = next(numbers)
            version = max(0, buffer.policy().current().version)
            env = "repeat" if number % 3 == 2 else "vcopy"
            writer.push(make_group(env=env, size=8, seed=number, version=version, worker=worker))

        def push_odd() -> None:
            encode = payload.encode_push

            def damaged(*args: Any, **options: Any) -> payload.EncodedPush:
                made = encode(*args, **options)
                return replace(made, payloads=tuple(bytes([*p[:-1], p[-1] ^ 1]) for p in made.payloads))

            with monkeypatch.context() as patched:
                patched.setattr(payload, "encode_push", damaged)
                push(odd, "odd")

        for _ in range(GROUPS):
            push_odd()
        home.start("serve", "--config", config, log="serve")
        trainer = home.start("train", "--config", config, log="train")
        deadline = time.monotonic() + 240
        while trainer.poll() is None and time.monotonic() < deadline:
            if sum(env.pending[0] for env in buffer.ledger().envs.values()) < 8 * GROUPS:
                push(honest, "honest")
                push_odd()
            else:
                time.sleep(0.05)
        assert home.ended(trainer, 60) == 0, home.logs()
        steps = home.metrics()
        assert [record["step"] for record in steps] == list(range(1, 9))
        assert steps[0]["damaged_tokens"] == steps[0]["loss_tokens"], "nothing of it could be read"
        assert steps[-1]["damaged_tokens"] == 0
        assert all(len(set(record["parameters_sha256"])) == 1 for record in steps)
        assert buffer.ledger().damaged > 0
        assert sum(env.dropped.get("invalid", (0, 0))[0] for env in buffer.ledger().envs.values()) > 0
        assert not [finding for finding in buffer.verify().findings if finding.invariant == "I10"]
    said = home.logs()
    assert "rollouts were missing or damaged when step 1 was pulled (" in said
    assert "by odd" in said
