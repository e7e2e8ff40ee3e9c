"""A trainer that was killed pulls the same bytes again, and so does one with another world size what it must."""

from __future__ import annotations

import os
import signal

from homes import Home


def start_sources(home: Home, config: object) -> None:
    """The batcher and one worker per env, each in a process of its own, as in separate terminals."""
    home.start("serve", "--config", str(config), log="serve")
    for env in ("vcopy", "repeat"):
        home.start("worker", env, "--config", str(config), log=f"worker-{env}")


def test_a_killed_trainer_reads_the_same_micro_batches_again(home: Home) -> None:
    """Takes a minute: twenty steps of two ranks, a kill, and ten of them again."""
    config = home.config(steps=20, checkpoint_every=10, keep_checkpoints=50, world_size=2)
    start_sources(home, config)
    trainer = home.start("train", "--config", config, log="train")

    def steps(n: int) -> bool:
        return any(record["step"] >= n for record in home.metrics())

    home.wait_until(lambda: steps(13), seconds=180, why="step 13")
    os.killpg(trainer.pid, signal.SIGKILL)
    home.wait_until(lambda: trainer.poll() is not None, seconds=10, why="the trainer's death")
    before = {r["step"]: r["batch_sha256"] for r in home.metrics() if r["step"] <= 13}
    again = home.start("train", "--config", config, log="train-again")
    assert home.ended(again, 180) == 0, home.logs()
    records = home.metrics()
    replayed = [r for r in records if r.get("resumed_from") == 10 and r["step"] in (11, 12, 13)]
    assert {r["step"] for r in replayed} >= {11, 12, 13}
    assert all(r["batch_sha256"] == before[r["step"]] for r in replayed)

    # An undisturbed reader, long after: the same bytes for every step and rank.
    from rlbuffer.records.step_digest import digest_step

    recorded = {r["step"]: r["batch_sha256"] for r in records}
    with home.connect() as buffer:
        for rank in (0, 1):
            reader = buffer.reader(rank, 2)
            for number in range(11, 21):
                assert digest_step(reader.pull(number)) == recorded[number][rank]
        # What it told the archive is what metrics.jsonl has, both lines of a step that was trained again among them.
        sent = [record for _, record in buffer.store.read_history("0-0", of="records").records]
        assert [(r["step"], r["loss"]) for r in sent] == [(r["step"], r["loss"]) for r in records]
        assert {name for r in sent for name in r} == {name for r in records for name in r} - {"examples"}
    assert home.call("verify", "--run", "tiny").returncode == 0
