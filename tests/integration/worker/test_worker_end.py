"""A worker whose data ends: it stays while anything of it may have to be sampled again, and ends by itself."""

from __future__ import annotations

from worker_stage import PATIENCE_SECONDS, Stage, eventually


def start(stage: Stage, tickets: int) -> None:
    stage.env.tickets = tickets  # type: ignore[attr-defined]
    stage.allow(9)
    stage.announce(0)
    stage.start()


def read(stage: Stage) -> set[str]:
    """Reads the pool and closes its tickets, as the leader does. -> the groups that have come."""
    groups = set(stage.groups())
    stage.store.close_tickets("counting", [int(group.split(".")[1]) for group in groups])
    return groups


def ended(stage: Stage) -> bool:
    assert stage.thread is not None
    stage.thread.join(PATIENCE_SECONDS)
    assert stage.raised is None, stage.raised
    return not stage.thread.is_alive() and not stage.stop.is_set()


def test_a_worker_samples_every_prompt_once_and_ends_when_all_its_groups_were_read(stage: Stage) -> None:
    start(stage, 4)
    eventually(lambda: len(stage.groups()) == 4)
    assert sorted(stage.groups()) == [f"counting.{n}" for n in range(4)]
    assert stage.told("done") == []
    stage.store.close_tickets("counting", [0, 1, 2, 3])  # as the leader does that has read them
    assert ended(stage)
    assert [event.env for event in stage.told("done")] == ["counting"]
    assert len(stage.groups()) == 4


def test_an_env_without_a_prompt_is_done_at_once(stage: Stage) -> None:
    start(stage, 0)
    assert ended(stage)
    assert (stage.groups(), stage.store.sources().done) == ([], {"counting"})


def test_what_another_worker_began_and_never_finished_is_sampled_before_the_end(stage: Stage) -> None:
    stage.allow(1)
    assert stage.store.take_tickets("counting", 1, ttl_seconds=1, size=2) == [0]  # and it is killed
    start(stage, 2)
    eventually(lambda: read(stage) == {"counting.0", "counting.1"})
    assert ended(stage)


def test_a_prompt_that_always_fails_is_left_out_and_does_not_keep_the_env_from_its_end(stage: Stage) -> None:
    stage.env.bad_prompts = {1}
    start(stage, 3)
    eventually(lambda: read(stage) == {"counting.0", "counting.2"} and len(stage.told("trouble")) == 3)
    assert stage.troubles() == [
        "group counting.1 abandoned: prompt failed: KeyError: 1",
        "group counting.1 abandoned: prompt failed: KeyError: 1",
        "group counting.1 abandoned: prompt failed: KeyError: 1 (3 times; its prompt is left out)",
    ]
    assert ended(stage)
