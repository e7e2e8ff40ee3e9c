from types import SimpleNamespace

import pytest

from rlbuffer.batcher import selection
from rlbuffer.batcher.adapters import Queue
from rlbuffer.batcher.closing import longest_fit, needs_more_rows
from rlbuffer.batcher.selection import Limits, select
from rlbuffer.records.step_plan import Plan


def group(name, *lengths, adapter=""):
    infos = [SimpleNamespace(length=n) for n in lengths]
    return SimpleNamespace(
        group_id=name,
        env=name[0],
        adapter=adapter,
        infos=infos,
        lengths=lengths,
        tokens=sum(lengths),
        rollouts=len(lengths),
        used=0,
    )


def groups(env, count, *lengths):
    return [group(f"{env}{i}", *lengths) for i in range(count)]


def run(ready, *, fractions=None, deficits=None, limits=None, budgeted=(), means=None, close_fill=0.95, unit="tokens"):
    fractions = fractions or {env: 1 / len(ready) for env in ready}
    return select(
        candidates={env: Queue({"": iter(items)}) for env, items in ready.items()},
        deficits=deficits or {},
        fractions=fractions,
        means=means or dict.fromkeys(fractions, 10.0),
        budgeted=budgeted,
        limits=limits or Limits(rows=10, row_tokens=10),
        unit=unit,
        close_fill=close_fill,
        teaches=lambda group: True,
    )


def names(trial):
    return [g.group_id for g in trial.groups]


def test_the_env_that_would_first_be_owed_a_whole_group_gives_the_next_one():
    trial = run({"a": groups("a", 9, 10), "b": groups("b", 9, 10)}, fractions={"a": 0.75, "b": 0.25})
    assert "".join(n[0] for n in names(trial)) == "aaabaaabaa"
    assert trial.ended == "full"


def test_what_is_owed_from_before_comes_first():
    trial = run({"a": groups("a", 9, 10), "b": groups("b", 9, 10)}, deficits={"b": 25.0, "a": -25.0})
    assert "".join(n[0] for n in names(trial)) == "bbbbbababa"


def test_an_env_ahead_of_its_share_by_more_than_its_next_group_waits_while_others_have_any():
    ready = {"a": groups("a", 2, 10), "b": [group("b0", *[10] * 6)]}
    trial = run(ready, fractions={"a": 0.9, "b": 0.1}, deficits={"a": -10.0, "b": 10.0})
    assert names(trial)[0] == "b0"  # though a's next group would be owed sooner: 20 / 0.9 against 50 / 0.1
    alone = run({"a": groups("a", 2, 10)}, fractions={"a": 0.9, "b": 0.1}, deficits={"a": -10.0, "b": 10.0})
    assert names(alone) == ["a0", "a1"]


@pytest.mark.parametrize("budgeted", [True, False])
def test_a_group_costs_no_look_at_every_other_env(monkeypatch, budgeted):
    looks, sizes = [], selection.size_of
    monkeypatch.setattr(selection, "size_of", lambda *args, **values: looks.append(1) or sizes(*args, **values))
    ready = {f"{i:03}": [group(f"{i:03}.{n}", 10) for n in range(2)] for i in range(200)}
    for env, items in ready.items():
        for item in items:
            item.env = env
    trial = run(ready, limits=Limits(rows=400, row_tokens=10), budgeted=list(ready) if budgeted else ())
    assert len(trial.groups) == 400
    assert len(looks) <= 2 * (len(trial.groups) + len(ready))


@pytest.mark.parametrize(("count", "ended", "selected"), [(9, "empty", 9), (10, "full", 10), (11, "full", 10)])
def test_a_step_is_full_at_its_tokens(count, ended, selected):
    trial = run({"a": groups("a", count, 4, 6)})
    assert (trial.ended, len(trial.groups), trial.tokens) == (ended, selected, 10 * selected)


def test_the_group_that_would_not_fit_is_not_selected():
    trial = run({"a": [*groups("a", 9, 10), group("a9", 6, 5)]})
    assert (trial.ended, trial.tokens) == ("full", 90)


@pytest.mark.parametrize(("count", "ended"), [(10, "empty"), (11, "full")])
def test_rollouts_above_half_a_row_fill_the_rows_before_the_tokens(count, ended):
    trial = run({"a": groups("a", count, 6)})
    assert (trial.ended, len(trial.groups)) == (ended, 10)


@pytest.mark.parametrize(("mean", "ended", "selected"), [(14.9, "short", 3), (15.0, "short", 4), (20.0, "empty", 4)])
def test_an_env_with_a_budget_is_short_when_its_deficit_exceeds_its_mean_group(mean, ended, selected):
    trial = run({"a": groups("a", 4, 10), "b": []}, budgeted=["a", "b"], means={"a": 10.0, "b": mean})
    assert (trial.ended, len(trial.groups)) == (ended, selected)


def test_a_step_does_not_wait_for_an_env_without_a_budget():
    trial = run({"a": groups("a", 20, 10), "b": []}, budgeted=["a"])
    assert (trial.ended, len(trial.groups), trial.exhausted) == ("full", 10, ["b"])


@pytest.mark.parametrize(("fill", "balanced"), [(0.8, 8), (0.9, 0)])
def test_a_balanced_step_at_close_fill_is_noticed(fill, balanced):
    ready = {"a": groups("a", 4, 10), "b": groups("b", 4, 10)}
    assert run(ready, budgeted=["a", "b"], close_fill=fill).balanced == balanced


def test_a_step_is_not_balanced_while_an_env_is_owed_more_than_a_group():
    ready = {"a": groups("a", 9, 10), "b": []}
    trial = run(ready, budgeted=["a"], deficits={"b": 0.0}, close_fill=0.5, means={"a": 1.0, "b": 1.0})
    assert trial.balanced == 9
    trial = run(ready, budgeted=["a", "b"], close_fill=0.2, means={"a": 10.0, "b": 10.0})
    assert (trial.ended, trial.balanced) == ("short", 2)


def planner_of(steps_of):
    calls = []

    def planner(some):
        calls.append(len(some))
        rows = tuple(((),) for _ in range(steps_of(len(some))))
        return Plan(rows=rows, world_size=1, row_tokens=10)

    return planner, calls


@pytest.mark.parametrize(
    ("largest", "fit", "calls"),
    [
        (8, 8, [8]),
        (7, 7, [8, 7]),
        (6, 6, [8, 7, 6]),
        (3, 3, [8, 7, 6, 4, 1, 2, 3]),
        (1, 1, [8, 7, 6, 4, 1, 2]),
        (0, 1, [8, 7, 6, 4, 1, 1]),
    ],
)
def test_one_call_settles_the_step_and_groups_are_given_back_in_steps_that_double(largest, fit, calls):
    planner, made = planner_of(lambda n: 4 if n <= largest else 5)
    count, plan = longest_fit(groups("a", 8, 5), planner, 4)
    assert (count, made) == (fit, calls)
    assert plan.micro_steps == (4 if largest else 5)


@pytest.mark.parametrize(
    ("row", "count", "more"),
    [(10, 4, False), (10, 5, True), (11, 5, True), (12, 5, False), (12, 6, False), (12, 7, True)],
)
def test_rows_that_no_packing_can_save_close_a_step(row, count, more):
    # Two rollouts of 4 fit a row of 10: 5 groups of two need more than 4 rows although they hold only 40 tokens.
    assert needs_more_rows(groups("a", count, 4, 4), row, 4) is more
