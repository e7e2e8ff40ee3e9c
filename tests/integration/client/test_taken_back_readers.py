"""What a trainer that has made all its steps finds when its run has been taken back, or made anew, since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_runs import Run

from rlbuffer.client.reader import Reader
from rlbuffer.errors import ResumeRefused, RlbufferError

pytest_plugins = ("store_fixtures",)
STEPS = 4


def steps(run: Run, *, first: int = 1, of: str = "a") -> None:
    for number in range(first, STEPS + 1):
        run.step(f"{of}.{number}")


def taken_back(run: Run, keep: int, move: str = "rewind") -> None:
    if move == "rewind":
        run.store.rewind(keep, force=True)
    else:
        run.store.void_from(keep + 1, force=True)
    run.meta = run.store.meta()
    run.lead("again")


def others(run: Run, *, trained: int) -> None:
    """Another trainer goes on from step 2 with other groups."""
    taken_back(run, 2)
    steps(run, first=3, of="b")
    run.store.attempt(uuid="other", world_size=1, resume_step=2)
    if trained:
        run.train(trained)


def made_anew(run: Run, *, with_steps: bool) -> None:
    run.store.delete_run()
    run.meta, run.sequence = run.store.open_run(), 0
    run.lead("anew")
    if with_steps:
        steps(run, of="c")
        run.store.attempt(uuid="other", world_size=1, resume_step=0)
        run.train(STEPS)


SITUATIONS: dict[str, tuple[Callable[[Run], object], set[int]]] = {
    "nothing": (lambda run: None, {1, 2, 3, 4}),
    "retired": (lambda run: (run.train(STEPS, oldest_kept=3), run.store.retire(3)), {1, 2, 3, 4}),
    "rewound to 2": (lambda run: taken_back(run, 2), {1, 2}),
    "rewound to 0": (lambda run: taken_back(run, 0), set()),
    "void from 4": (lambda run: taken_back(run, 3, "void"), {1, 2, 3}),
    "rewound to 4": (lambda run: taken_back(run, 4), {1, 2, 3, 4}),
    "rewound, others trained": (lambda run: others(run, trained=STEPS), {1, 2}),
    "rewound, others committed": (lambda run: others(run, trained=0), {1, 2}),
    "made anew": (lambda run: made_anew(run, with_steps=False), set()),
    "made anew, others trained": (lambda run: made_anew(run, with_steps=True), set()),
}


@pytest.mark.parametrize("checkpoint", [1, 2, 3, 4])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_checkpoint_of_steps_that_are_gone_counts_as_not_trained_and_is_refused(
    run: Run, situation: str, checkpoint: int
) -> None:
    run.store.attempt(uuid="t", world_size=1, resume_step=0)
    steps(run)
    run.train(STEPS)
    digest, epoch = next(h.digest for h in run.store.headers() if h.step == checkpoint), run.meta.epoch
    happens, there = SITUATIONS[situation]
    happens(run)
    before = run.store.trainer().number

    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.load_state_dict({"step": checkpoint, "digest": digest, "epoch": epoch, "steps": ()})
    try:
        assert reader.is_trained() == (checkpoint in there)
        assert run.store.trainer().number == before, "looking begins no attempt"
        if checkpoint in there:
            return
        with pytest.raises(ResumeRefused, match="move later ones away") as refused:
            reader.start(checkpoint)
        assert refused.value.exit_code == 6
    finally:
        reader.close()


def test_only_what_comes_again_has_the_exit_code_of_it() -> None:
    """`rlbuffer run` starts everything else again."""
    refusing: set[str] = set()
    left: list[type[RlbufferError]] = [RlbufferError]
    while left:
        error = left.pop()
        left += error.__subclasses__()
        if error.exit_code in (2, 3, 6):
            refusing.add(error.__name__)
    ours = {"ConfigError", "FilterError", "OtherCheckpoint", "PackedForwardError", "ResumeRefused", "ResumeRetired"}
    assert refusing - {"OtherFormat", "NoSuchPage"} == ours
