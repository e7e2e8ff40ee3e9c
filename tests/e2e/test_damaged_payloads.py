"""Bytes that flip on the server: a few are masked on all ranks alike, too many end all ranks with one message."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from homes import Home

from rlbuffer.testing import make_group

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
        buffer.store.open_run()
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


def test_too_many_flipped_bytes_end_every_rank_with_the_same_message(home: Home) -> None:
    config, spoiled = prepare(home, every=20, world_size=3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "rlbuffer.trainer", str(config)],
            env=home.environment
            | {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home.path,
            start_new_session=True,
        )
        for rank in range(3)
    ]
    home.processes += ranks
    said = [rank.communicate(timeout=240)[1].strip().splitlines()[-1:] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1, 1], said
    assert said[0] == said[1] == said[2]
    assert said[0][0].startswith("Error: step 1: ")
    assert "trained tokens (" in said[0][0]
    assert "are missing or damaged, more than trainer.max_damaged = 0.02 allows." in said[0][0]

    # The launcher says it once, starts nothing again, and leaves no rank behind.
    launched = home.call("train", "--config", config, "--world-size", "2")
    assert launched.returncode == 1, launched.stderr
    assert launched.stderr.strip().splitlines()[-1].startswith("Error: step 1: ")
    pids = json.loads((home.path / "runs" / "tiny" / "ranks.json").read_text())
    assert [pid for pid in pids.values() if Path(f"/proc/{pid}").exists() and os.getpgid(pid)] == []
    assert home.metrics() == []
    verified = home.call("verify", "--run", "tiny", "--json")
    findings = [json.loads(line) for line in verified.stdout.splitlines()][:-1]
    with home.connect() as buffer:
        committed = {r for step in range(1, buffer.store.meta().step + 1) for r in buffer.step(step).rollout_ids}
    assert verified.returncode == 1
    assert {finding["message"].split(" ")[3] for finding in findings} == committed & set(spoiled) != set()
