import random

import numpy as np
import pytest

from rlbuffer.batcher.budget import (
    CHARGED_AT_ONCE,
    MEAN_WINDOW,
    ROUNDING,
    Deficits,
    EnvAccount,
    dump,
    known_envs,
    load,
    settle,
    shares,
)
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RlbufferError


def config(**settings):
    return BatcherConfig(row_tokens=100, **settings)


@pytest.mark.parametrize(
    ("settings", "ready", "expected"),
    [
        ({}, {"a": 30, "b": 10}, {"a": 0.75, "b": 0.25}),
        ({}, {}, {"a": 0, "b": 0}),
        ({}, None, {"a": 0.5, "b": 0.5}),
        ({"remainder": "equal"}, {"a": 30}, {"a": 0.5, "b": 0.5}),
        ({"remainder": "b"}, {"a": 30}, {"a": 0, "b": 1}),
        ({"budgets": {"a": 0.7, "b": 0.3}}, {}, {"a": 0.7, "b": 0.3}),
        ({"budgets": {"a": 0.5}}, {"b": 10}, {"a": 0.5, "b": 0.5}),
        ({"budgets": {"a": 0.5}}, {"a": 10}, {"a": 1, "b": 0}),
        ({"budgets": {"a": 0.5}, "remainder": "a"}, {"b": 10}, {"a": 1, "b": 0}),
        ({"budgets": {"a": 0.25, "c": 0.25}, "remainder": "equal"}, {}, {"a": 0.25, "b": 0.5, "c": 0.25}),
        ({"budgets": {"a": 1.0}}, {"b": 99}, {"a": 1, "b": 0}),
    ],
)
def test_the_rest_goes_where_remainder_says(settings, ready, expected):
    made = config(**settings)
    assert shares(made, known_envs(made, ["a", "b"]), ready) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_many_envs_take_turns_as_each_would_by_itself_to_the_last_bit(seed):
    """Written out env by env, as it is meant: sums in another order would let ties come out otherwise."""
    dice = random.Random(seed)
    parts = {f"e{i}": dice.choice((1.0, dice.random())) for i in range(dice.randrange(1, 40))}
    shares = {env: part / sum(parts.values()) for env, part in parts.items()}
    owed = {env: dice.choice((0.0, dice.uniform(-50, 50))) for env in shares}
    sizes = {env: dice.choice((16, dice.randrange(1, 60))) for env in shares}
    deficits = Deficits(owed, shares)
    for env, size in sizes.items():
        deficits.offer(env, size)
    while sizes:
        env = min(
            sizes,
            key=lambda e: (
                owed[e] + shares[e] * sizes[e] <= ROUNDING * sizes[e],
                (sizes[e] - owed[e]) / shares[e],
                -shares[e],
                e,
            ),
        )
        assert deficits.turn() == env
        for other in owed:
            owed[other] += shares[other] * sizes[env]
        owed[env] -= sizes[env]
        deficits.charge(env, sizes[env])
        assert deficits.all() == owed
        sizes[env] = dice.choice((None, 16, dice.randrange(1, 60)))
        deficits.offer(env, sizes[env])
        if sizes[env] is None:
            del sizes[env]
    assert deficits.turn() is None


@pytest.mark.parametrize(
    ("deficit", "share", "largest", "expected"),
    [(50, 40, 10, 50), (51, 40, 10, 50), (-51, 40, 10, -50), (7, 0.5, 8, 7), (9, 0.5, 8, 8.5)],
)
def test_deficits_are_clamped_to_one_steps_share_beyond_a_group(deficit, share, largest, expected):
    account = EnvAccount(deficit=deficit)
    account.clamp(share, largest)
    assert account.deficit == expected


def test_means_are_exact_at_first_and_then_follow():
    account = EnvAccount()
    for tokens in (10, 20, 60):
        account.learn(tokens, 4, tokens)
    assert (account.tokens, account.rollouts, account.largest) == (30, 4, 60)
    assert account.variance == pytest.approx(((10 - 30) ** 2 + (20 - 30) ** 2 + (60 - 30) ** 2) / 3)
    for _ in range(20 * MEAN_WINDOW):
        account.learn(100, 8, 100)
    assert account.tokens == pytest.approx(100, rel=1e-6)
    account.learn(100 + MEAN_WINDOW, 8, 0)
    assert account.tokens == pytest.approx(101, rel=1e-6)


@pytest.mark.parametrize(("unit", "first", "second"), [("tokens", 150, 250), ("rollouts", 6, 10), ("groups", 1.5, 2.5)])
def test_a_committed_step_moves_new_accounts_and_clamps_them(unit, first, second):
    before = {"a": EnvAccount()}
    groups, fractions = [("a", 100, 4)] * 3, {"a": 0.5, "b": 0.5}
    once = settle(before, groups, fractions, unit)
    assert before == {"a": EnvAccount()}
    assert (once["a"].deficit, once["b"].deficit) == (-first, first)
    assert (once["a"].groups, once["a"].tokens, once["a"].rollouts, once["b"].groups) == (3, 100, 4, 0)
    twice = settle(once, groups, fractions, unit)  # unclamped it would be owed as much again
    assert (twice["a"].deficit, twice["b"].deficit) == (-second, second)


def test_accounts_survive_being_saved_exactly():
    accounts = {"b": EnvAccount(0.1 + 0.2, 3, 1 / 3, 2 / 3, 7.0, 4.5), "a": EnvAccount()}
    assert load(dump(accounts)) == accounts
    assert list(dump(accounts)["envs"]) == ["a", "b"]
    assert load(None) == {}


def test_the_state_of_another_version_is_refused():
    with pytest.raises(RlbufferError, match="saved state has schema 7, this version reads 1"):
        load({"schema": 7})


def test_many_charges_at_once_are_the_same_ones_to_the_last_bit() -> None:
    dice = np.random.default_rng(3)
    shares = dict(zip("abc", (0.5, 0.3, 0.2), strict=True))
    one, other = (Deficits({"a": 1e9, "b": 0.1}, shares) for _ in range(2))
    groups = [("abc"[dice.integers(3)], float(dice.integers(1, 100_000)) / 7) for _ in range(2 * CHARGED_AT_ONCE + 3)]
    for env, size in groups:
        one.charge(env, size)
    other.charge_all(groups)
    other.charge_all([])
    assert one.all() == other.all()
