"""verl's asynchronous trainer on a local Ray, with a journal behind its replay buffer."""

from __future__ import annotations

import importlib.metadata
import os
import random
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from door_loops import Loops
from homes import Home, a_home

from rlbuffer.doors import verl as door
from rlbuffer.errors import InvalidRollout, RlbufferError

if TYPE_CHECKING or find_spec("verl"):
    import torch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl_loop import BATCH, SAVE_EVERY, digest, output

KILLS = int(os.environ.get("RLBUFFER_VERL_KILLS", "1"))
SETTINGS = '[server]\nappendfsync = "no"\n\n[batcher]\nfeeds = "stream"\nmax_age = 8\n'
SECONDS = 240.0


@pytest.fixture
def home() -> Iterator[Home]:
    with a_home() as opened:
        yield opened


def killed_between_checkpoints(loops: Loops, kind: str, dice: random.Random) -> float:
    """Starts a trainer and kills it behind its next checkpoint, at a drawn moment. -> the moment."""
    pid = loops.start(f"100000 {kind}")
    saved = max((line["step"] for line in loops.lines("trained")), default=0) // SAVE_EVERY * SAVE_EVERY
    enough = saved + SAVE_EVERY + dice.randint(1, SAVE_EVERY - 1)

    def is_there() -> bool:
        return any(line["step"] >= enough for line in loops.lines_of(pid, "trained"))

    loops.home.wait_until(is_there, seconds=SECONDS, why=f"step {enough}")
    time.sleep(dice.uniform(0.0, 0.5))
    os.killpg(pid, signal.SIGKILL)
    return time.time()


def checkpoint(loops: Loops) -> int:
    """Step of the newest one."""
    file = loops.home.path / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def in_weights(loops: Loops, step: int) -> set[int]:
    """Prompts that are trained up to a step, in the history of the newest process that trained each."""
    steps = {line["step"]: {index for _, index, _ in line["rows"]} for line in loops.lines("trained")}
    return {index for number, rows in steps.items() if number <= step for index in rows}


def sampled_after(loops: Loops, moment: float) -> set[int]:
    return {line["index"] for line in loops.lines("sampled") if line["at"] > moment}


def finished_before(loops: Loops, moment: float) -> dict[int, float]:
    """Prompt -> seconds between the end of its group and that moment."""
    return {line["index"]: moment - line["at"] for line in loops.lines("finished") if line["at"] < moment}


def test_killed_trainers_go_on_with_every_group_that_was_finished(home: Home) -> None:
    """None of them is sampled again, and a step that is made again has the trajectories that it had, bit for bit."""
    loops, dice = Loops(home, "verl", "verl_loop.py", SETTINGS), random.Random(5)
    kills: list[tuple[float, set[int]]] = []
    for _ in range(KILLS):
        moment = killed_between_checkpoints(loops, "", dice)
        uids = {line["uid"]: line["index"] for line in loops.lines("finished")}
        with home.connect("verl") as buffer:
            kept = {uids[group.prompt_id] for group in buffer.groups(limit=100_000) if group.prompt_id in uids}
        trained = in_weights(loops, checkpoint(loops))
        lost = {index: since for index, since in finished_before(loops, moment).items() if index not in kept | trained}
        assert all(since < 5.0 for since in lost.values()), "a group waited for its push"
        assert kept - trained, "nothing to restore"
        kills.append((moment, kept))
    until = max(line["step"] for line in loops.lines("trained")) // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY
    last = loops.start(f"{until}")
    home.wait_until(lambda: loops.lines_of(last, "ended"), seconds=SECONDS, why="the end")
    loops.close()
    for moment, kept in kills:
        assert not sampled_after(loops, moment) & kept, "a finished group was sampled again"
    steps: dict[int, list[Any]] = {}
    for line in loops.lines("trained"):
        steps.setdefault(line["step"], []).append((line["rows"], line["tags"]))
    assert sorted(steps) == list(range(1, until + 1))
    assert any(len(times) > 1 for times in steps.values())
    assert all(again == first for first, *others in steps.values() for again in others)
    prompts = [{index for _, index, _ in times[-1][0]} for _, times in sorted(steps.items())]
    assert all(len(rows) == BATCH for rows in prompts)
    assert len(set.union(*prompts)) == BATCH * until, "a group is in two batches"
    with home.connect("verl") as buffer:
        report, account = buffer.verify(), buffer.ledger().envs["verl"]
    assert report.ok, report.findings
    sessions = {key.rpartition("_")[0] for times in steps.values() for key, _, _ in times[-1][0]}
    assert account.trained[0] == len(sessions)
    assert account.dropped.keys() <= {"unused"}


def test_every_field_of_a_trajectory_comes_back_bit_for_bit() -> None:
    dice = random.Random(3)
    for session in range(12):
        fields = []
        for _ in range(dice.choice([1, 1, 3])):
            made = output(dice, 4).as_dict()
            made |= {"uid": "a", "raw_prompt": [{"role": "user", "content": "é"}], "multi_modal_inputs": {}}
            made["input_ids"] = torch.cat([made["prompts"], made["responses"]])
            made["position_ids"] = torch.arange(len(made["input_ids"]))
            if session % 3 == 0:
                made["scores"] = torch.rand(3).to(torch.bfloat16)
            if session % 4 == 0:
                made["input_ids"] = made["input_ids"] + 1  # tokens that do not agree stay apart
            fields.append(made)
        rows = door.rows_of(list_of_dict_to_tensordict(fields))
        tags = [{"status": "success", "seq_len": len(row["input_ids"]), "min_global_steps": None} for row in rows]
        pushed = list(zip(rows, tags, strict=True))
        number, back = door.session_of(door.rollout_of(session, pushed, 2, "it"))
        assert number == session
        assert [digest(its) for its in back] == [digest(its) for its in pushed]
        again = door.rows_of(list_of_dict_to_tensordict([dict(its) for its, _ in back]))
        assert [digest(row) for row in again] == [digest(row) for row in rows]


def test_what_cannot_be_kept_is_refused_by_its_path() -> None:
    made = output(random.Random(1), 0).as_dict() | {"extra_fields": {"images": [object()]}}
    made["input_ids"] = torch.cat([made["prompts"], made["responses"]])
    with pytest.raises(InvalidRollout, match=r"prompt 7\['fields'\]\['extra_fields'\]\['images'\]\[0\]: a object"):
        door.rollout_of(0, [(made, {})], 0, "prompt 7")


def test_a_prompt_is_known_again_whatever_its_images_are() -> None:
    row = {"index": 3, "raw_prompt": [{"role": "user", "content": "?"}], "uid": "a", "images": object()}
    assert door.prompt_digest(row) == door.prompt_digest(row | {"uid": "b", "images": object(), "global_steps": 9})
    assert door.prompt_digest(row) != door.prompt_digest(row | {"index": 4})


def test_versions_that_it_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.10.2")
    with pytest.raises(RlbufferError, match=r"knows verl >=0\.9,<0\.10, and this is 0\.10\.2"):
        door.check()


def test_what_the_door_needs_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_buffer = door.ReplayBuffer.__mro__[1]
    with monkeypatch.context() as changed:
        changed.delattr(replay_buffer, "_stale_terminal_keys")
        with pytest.raises(RlbufferError, match=r"needs ReplayBufferAsync\._stale_terminal_keys"):
            door.check()
    trainer = Namespace(**dict.fromkeys(door.NEEDED_OF_A_TRAINER))
    del trainer._save_checkpoint
    with pytest.raises(RlbufferError, match=r"needs PPOTrainer\._save_checkpoint, and this verl"):
        door.check_trainer(trainer, "colocate_async")


def test_a_trainer_that_has_no_use_for_it_is_refused() -> None:
    trainer = Namespace(**dict.fromkeys(door.NEEDED_OF_A_TRAINER))
    with pytest.raises(RlbufferError, match="trainer_mode is sync"):
        door.check_trainer(trainer, "sync")
    with pytest.raises(RlbufferError, match=r"set trainer\.checkpoint_callback_class=rlbuffer\.doors\.verl\."):
        door.check_trainer(trainer, "colocate_async")
    trainer.checkpoint_callback = door.CheckpointCallback()
    trainer.config = Namespace(skip=Namespace(rollout_tq=Namespace(enable=True)))
    with pytest.raises(RlbufferError, match="leave one of the two out"):
        door.check_trainer(trainer, "separate_async")
