"""A killed job of eight ranks goes on with eight, four and three: the same steps, dealt again."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from homes import Home
from test_replay import start_sources

from rlbuffer.records.step_digest import digest_step
from rlbuffer.records.step_plan import Normalizers

pytestmark = pytest.mark.timeout(900)
"""A machine may be four times as slow as this one."""

CHECKPOINT, KILLED_AT, LAST = 3, 6, 8


def test_after_a_kill_any_world_size_trains_the_same_rollouts(home: Home) -> None:
    """Takes minutes on two cores: four jobs, of eight, eight, four and three ranks, train one after the other."""
    config = home.config(steps=LAST, world_size=8, checkpoint_every=CHECKPOINT, keep_checkpoints=50)
    start_sources(home, config)
    trainer = home.start("train", "--config", config, log="train-8")
    home.wait_until(
        lambda: any(record["step"] >= KILLED_AT for record in home.metrics()), seconds=280, why=f"step {KILLED_AT}"
    )
    os.killpg(trainer.pid, signal.SIGKILL)
    home.wait_until(lambda: trainer.poll() is not None, seconds=10, why="the trainer's death")
    before = {record["step"]: record["batch_sha256"] for record in home.metrics()}
    folder = f"step-{CHECKPOINT:08d}"
    recorded: dict[int, dict[int, list[str]]] = {}
    for world_size in (8, 4, 3):
        output = home.path / f"w{world_size}"
        shutil.copytree(home.path / "runs" / "tiny" / "checkpoints" / folder, output / "checkpoints" / folder)
        arguments = ("train", "--config", config, "--world-size", str(world_size), "--output", output)
        again = home.start(*arguments, log=f"again-{world_size}")
        assert home.ended(again, 280) == 0, home.logs()
        records = home.metrics(folder=output)
        assert [r["step"] for r in records] == list(range(CHECKPOINT + 1, LAST + 1))
        assert {r["resumed_from"] for r in records} == {CHECKPOINT}
        recorded[world_size] = {r["step"]: r["batch_sha256"] for r in records}
    replayed = [step for step in before if step > CHECKPOINT]
    assert set(replayed) >= set(range(CHECKPOINT + 1, KILLED_AT + 1))
    assert [recorded[8][step] for step in replayed] == [before[step] for step in replayed]

    # Undisturbed readers hold what the ranks recorded, and show what is in it.
    contents = {world_size: contents_of(home, world_size, recorded[world_size]) for world_size in recorded}
    assert contents[8] == contents[4] == contents[3]
    assert home.call("verify", "--run", "tiny").returncode == 0


def contents_of(
    home: Home, world_size: int, recorded: dict[int, list[str]]
) -> dict[int, tuple[set[tuple[str, float]], Normalizers]]:
    """step -> every (rollout, advantage) over all ranks, and the normalisers."""
    steps: dict[int, tuple[set[tuple[str, float]], Normalizers]] = {}
    with home.connect() as buffer:
        readers = [buffer.reader(rank, world_size) for rank in range(world_size)]
        for reader in readers:
            reader.start(CHECKPOINT)
        for number, digests in recorded.items():
            parts = [reader.pull(number) for reader in readers]
            assert [digest_step(part) for part in parts] == digests
            assert len({len(part) for part in parts}) == 1
            samples = [
                (sample.rollout_id, sample.advantage)
                for part in parts
                for micro_batch in part
                for sample in micro_batch.samples
            ]
            rollouts = [rollout_id for rollout_id, _ in samples if rollout_id]
            assert len(set(rollouts)) == len(rollouts) == parts[0].rollouts
            assert len({part.normalizers for part in parts}) == 1
            steps[number] = {sample for sample in samples if sample[0]}, parts[0].normalizers
        for reader in readers:
            reader.close()
    return steps
