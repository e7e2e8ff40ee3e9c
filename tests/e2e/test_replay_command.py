"""`rlbuffer replay`, with ranks as processes: the bits of the run at another number of ranks, lists, and refusals."""

from __future__ import annotations

import json
import shutil

from homes import Home
from recorded_runs import STEPS, record


def test_recorded_steps_are_trained_again_and_under_several_losses(home: Home) -> None:
    record(home.path)
    done = home.call("replay", "archive", "--world-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["from"], row["to"], row["begin"], row["world_size"]) == (1, STEPS, 0, 2)
    assert row["compared"]["largest"] < 1e-9  # two ranks add up in another order than one
    assert row["checkpoint"]["largest"] < 1e-9
    assert (row["checkpoint"]["tensors"] > 0, row["compared"]["damaged"]) == (True, [])

    losses = "trainer.loss.name=dapo,clip,kl_cov"
    done = home.call(
        "replay", "archive", "--from", "3", "--to", "4", "--set", losses, "-o", "kept", "--display", "none"
    )
    assert done.returncode == 0, done.stderr
    head, titles, *rows, last = done.stdout.splitlines()
    assert head == "replays steps 3-4 of run recorded (settings of attempt 1, from checkpoint 2)"
    assert titles.split()[:4] == ["loss", "k3", "at", "4"]
    assert [line.split()[0] for line in rows[:3]] == ["dapo", "clip", "kl_cov"]
    assert [line.endswith("as recorded") for line in rows[:3]] == [True, False, False]
    assert "The rollouts are those of the policy that dapo has trained" in " ".join([*rows[3:], last])
    assert sorted(path.name for path in (home.path / "kept").iterdir()) == ["1", "2", "3"]
    assert (home.path / "kept" / "1" / "checkpoints" / "step-00000004").is_dir()

    done = home.call("replay", "archive", "--score", str(STEPS), "--versions", "0,2")
    assert done.returncode == 0, done.stderr
    assert f"rollouts of step {STEPS} of run recorded, scored by 2 versions" in done.stdout

    (home.path / "a-file").touch()
    shutil.rmtree(home.path / "runs" / "recorded" / "weights")
    for arguments, why in (
        (("--set", "batcher.max_age=4"), "what a step is made of is recorded"),
        (("--set", "trainer.loss.name"), "write NAME=VALUE"),
        (("--from", "2", "--checkpoints", "kept"), "step 2 is trained behind the checkpoint of step 1"),
        (("--to", "2", "--checkpoints", "nowhere"), "Directory 'nowhere' does not exist"),
        (("--score", "2", "--checkpoints", "a-file"), "Directory 'a-file' is a file"),
        (
            ("--score", "jump"),
            f"Error: --score jump: of {STEPS} recorded steps of run recorded the gradient norm jumped at none. A jump",
        ),
        (("--score", "2", "--versions", "95"), "version 95 is not kept"),
        (("-o", "kept"), "is not empty"),
        (("-o", "a-file"), "--output a-file is a file: name a folder"),
        (("--set", "seed=1", "--set", "seed=2"), "--set seed stands there twice"),
        (("--score", str(STEPS), "--checkpoints", "kept"), ") none is kept in kept, nor published in "),
        (("--score", "2", "--to", "2"), "--score goes with --versions and --checkpoints alone"),
    ):
        done = home.call("replay", "archive", *arguments)
        assert done.returncode != 0
        assert why in " ".join(done.stderr.split()), (arguments, done.stderr)
