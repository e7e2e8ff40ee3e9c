"""What was trained and dropped, by length: it adds up to the ledger whatever happens to the run."""

from __future__ import annotations

import pytest
from daemon_runs import Served
from store_runs import Run, plan_of

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import Reason
from rlbuffer.store.records import Claim, TrainedStep

pytest_plugins = ("store_fixtures",)


def by_length(run: Run, env: str = "a") -> dict[str, dict[int, tuple[int, int]]]:
    """The env's lengths, after a look at whether they add up."""
    account = run.store.ledger().envs[env]
    fates = {"packed": account.packed, "trained": account.trained, **account.dropped}
    for fate, total in fates.items():
        parts = account.lengths.get(fate, {}).values()
        assert (sum(part[0] for part in parts), sum(part[1] for part in parts)) == total, fate
    assert run.store.verify().findings == ()
    return {fate: dict(parts) for fate, parts in account.lengths.items()}


@pytest.fixture
def begun(run: Run) -> Run:
    run.lead()
    run.push("a.0", lengths=[5, 8, 9])
    run.push("a.1", lengths=[64, 65, 3])
    return run


def test_a_trained_step_is_counted_by_length(begun: Run) -> None:
    begun.commit()
    expected = {4: (1, 3), 8: (2, 13), 16: (1, 9), 64: (1, 64), 128: (1, 65)}
    assert by_length(begun) == {"packed": expected}
    begun.train(1)
    assert by_length(begun) == {"trained": expected}
    begun.train(1)
    assert by_length(begun) == {"trained": expected}


def test_what_a_step_leaves_out_and_what_drops_whole_is_counted_by_length(begun: Run) -> None:
    first, second = begun.pool()
    plan = plan_of([first], 1, drop={"a.0/1": Reason.OVERSIZED, "a.0/2": Reason.OVERSIZED})
    begun.store.commit(begun.token, plan, {first.entry_id: first}, meta=begun.store.meta(), state={})
    begun.drop("stale", [second])
    begun.drop("stale", [second])  # the answer was lost
    assert by_length(begun) == {
        "packed": {8: (1, 5)},
        "oversized": {8: (1, 8), 16: (1, 9)},
        "stale": {4: (1, 3), 64: (1, 64), 128: (1, 65)},
    }


def test_a_leader_that_takes_over_counts_by_length_what_the_first_one_left(run: Run) -> None:
    attempt = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
    run.store.announce(attempt, PolicyVersion(version=0))
    config = BatcherConfig(64, step_groups=1, max_age=8, lookahead=8)
    served = Served(run)
    try:
        run.push("a.0", lengths=[5, 100, 9])
        run.push("a.1", lengths=[7], rollout_ids=["a.1/0"], planned_size=3)
        served.serve(config)
        served.wait_for(lambda: run.store.meta().step == 1)
        served.stop()
        run.push("a.1", lengths=[64, 65], rollout_ids=["a.1/1", "a.1/2"], planned_size=3)
        run.push("a.2", lengths=[3, 2], version=10**6)
        served.serve(config)
        served.wait_for(lambda: run.store.meta().step == 2 and run.store.ledger().envs["a"].dropped.get("future"))
    finally:
        served.close()
    assert by_length(run) == {
        "packed": {8: (2, 12), 16: (1, 9), 64: (1, 64)},
        "oversized": {128: (2, 165)},
        "future": {2: (1, 2), 4: (1, 3)},
    }


def test_steps_that_are_taken_back_and_a_pool_that_is_dropped_are_counted_by_length(begun: Run) -> None:
    first, second = begun.pool()
    begun.commit(entries=[first])
    begun.train(1)
    begun.commit(entries=[second])
    begun.push("a.2", lengths=[1, 2])
    begun.store.rewind(0, force=True)
    void = {1: (1, 1), 2: (1, 2), 4: (1, 3), 8: (2, 13), 16: (1, 9), 64: (1, 64), 128: (1, 65)}
    assert by_length(begun) == {"void": void}


def test_what_is_recovered_is_counted_by_length(begun: Run) -> None:
    begun.commit(entries=begun.pool()[:1])
    meta = begun.store.meta()
    steps = tuple(
        TrainedStep(step=n, digest=digest, group_ids=(group,), envs={"a": (3, 22)})
        for n, digest, group in ((1, meta.digest, "a.0"), (2, "f" * 64, "a.1"))
    )
    claim = Claim(step=2, epoch=meta.epoch, digest="f" * 64, steps=steps)
    begun.store.attempt(uuid="trainer", world_size=2, resume_step=2, claim=claim)
    assert begun.store.recover(begun.token, begun.store.trainer(), begun.pool()) is not None
    trained = {4: (1, 3), 8: (2, 13), 16: (1, 9), 64: (1, 64), 128: (1, 65)}
    assert by_length(begun) == {"trained": trained}


@pytest.mark.parametrize("lengths", ["", "4 1 3", "3 9 9 9", "7 3 133", "x" * 5000, "4 1 -3 5 4 135"])
def test_lengths_that_do_not_add_up_to_an_entry_count_as_unknown(begun: Run, lengths: str) -> None:
    entry_id, fields = begun.client.xrange(begun.store.keys.pool)[1]
    begun.client.xdel(begun.store.keys.pool, entry_id)
    begun.client.xadd(begun.store.keys.pool, {**fields, b"lengths": lengths})
    begun.drop("stale", [begun.pool()[1]])
    assert by_length(begun) == {"stale": {0: (3, 132)}}


def test_a_part_that_is_negative_or_not_there_is_found(begun: Run) -> None:
    begun.commit()
    begun.client.hincrby(begun.store.keys.ledger, "a:packed:tokens:3", 1)
    begun.client.hincrby(begun.store.keys.ledger, "a:trained:rollouts:5", -1)
    messages = [finding.message for finding in begun.store.verify().findings]
    assert messages == [
        "env a: the ledger has 14 tokens packed of at most 8 tokens each, the untrained steps hold 13",
        "env a: the ledger has -1 tokens packed of no known length, a negative number",
        "env a: the ledger has -1 rollouts trained of at most 32 tokens each, a negative number",
    ]


def test_the_whole_ledger_has_the_lengths_of_all_envs(begun: Run) -> None:
    begun.push("b.0", lengths=[7, 30])
    begun.commit()
    assert begun.store.ledger().total().lengths == {
        "packed": {4: (1, 3), 8: (3, 20), 16: (1, 9), 32: (1, 30), 64: (1, 64), 128: (1, 65)}
    }


def test_a_trainer_of_an_older_version_moves_totals_alone_so_nothing_packed_for_it_has_a_length(begun: Run) -> None:
    number = begun.train(0)
    begun.client.hset(begun.store.keys.trainer, "lengths", number - 1)  # an older ATTEMPT leaves it as it is
    first, second = begun.pool()
    begun.commit(entries=[first])
    assert begun.client.xrange(begun.store.keys.steps, "1-0", "1-0")[0][1][b"lengths"] == b""
    begun.train(1)
    assert by_length(begun) == {"trained": {0: (3, 22)}}
    begun.store.attempt(uuid="newer", world_size=2, resume_step=1)
    begun.commit(entries=[second])
    assert by_length(begun) == {"trained": {0: (3, 22)}, "packed": {4: (1, 3), 64: (1, 64), 128: (1, 65)}}
