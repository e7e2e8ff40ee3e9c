"""A run's place: what the tickets of an env have counted, and what is said where a worker begins with other prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_role import stands_in
from worker_stage import Counting, FakeSampler, Stage, eventually, without_place

from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ServerUnsuitable
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.worker.envs import Env, Prompt, Skip, make_env
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.place import MOST_KEPT, as_text, changes
from rlbuffer.worker.samplers.transformers import Batched

GIVEN = 2
"""Tickets of the first life."""
OWN = {"name": "math", "vocab_size": 13, "eos_token_ids": [12], "max_new_tokens": 4}


def lines(count: int, *, first: int = 0) -> list[str]:
    """Lines of a data set, each with a prompt under two names."""
    return [
        json.dumps({"prompt": [1, n % 9], "question": [2, n % 9], "answer": "3", "id": f"p{n}"})
        for n in range(first, first + count)
    ]


def jsonl(path: Path, **changed: Any) -> Env:
    return make_env("jsonl", **{**OWN, "path": str(path), **changed})


def life(stage: Stage, env: Env, name: str = "w-0") -> list[str]:
    """What a worker with this env says of troubles, from its start until it samples."""
    begun, stop = len(stage.told("version")), threading.Event()
    troubles = len(stage.told("trouble"))
    settings = WorkerSettings(env="vcopy", group_size=2, groups_in_flight=GIVEN)
    sampler: Any = Batched(FakeSampler())  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_worker, stage.buffer, name, settings, stop=stop, env=env, sampler=sampler)
        try:
            eventually(lambda: running.done() or len(stage.told("version")) > begun)
            eventually(lambda: running.done() or len(stage.groups()) >= GIVEN)
        finally:
            stop.set()
        running.result()
    return [without_place(line.text) for line in stage.told("trouble")[troubles:]]


@pytest.fixture
def begun(stage: Stage, tmp_path: Path) -> Stage:
    """A run of which two tickets of a file of 48 prompts are given."""
    (tmp_path / "a.jsonl").write_text("\n".join(lines(48)))
    stage.announce(0)
    stage.allow(GIVEN, "math")
    assert life(stage, jsonl(tmp_path / "a.jsonl")) == []
    return stage


def rewritten(change: Callable[[list[str]], list[str]], **options: Any) -> Callable[[Path], Env]:
    def env(folder: Path) -> Env:
        (folder / "a.jsonl").write_text("\n".join(change(lines(48))))
        return jsonl(folder / "a.jsonl", **options)

    return env


def moved(folder: Path) -> Env:
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    return jsonl(folder / "b.jsonl")


def answered(given: list[str]) -> list[str]:
    """The lines with another answer and a note each, and their fields in another order."""
    return [json.dumps({"note": "checked", "answer": "4", **json.loads(line)} | {"answer": "4"}) for line in given]


def renamed(given: list[str]) -> list[str]:
    """The lines with their prompts under another name."""
    return [line.replace('"question"', '"other"').replace('"prompt"', '"question"') for line in given]


def same(given: list[str]) -> list[str]:
    return given


DIGEST = "digest of its prompts"
REWARDS = {"exact": {"kind": "exact", "weight": 3.0}}
KINDS: Mapping[str, tuple[Callable[[Path], Env], list[str]]] = {
    "other prompts, as many": (rewritten(lambda _: lines(48, first=100)), [DIGEST]),
    "other prompts, more": (rewritten(lambda _: lines(60, first=100)), [DIGEST, "prompts 48 -> 60"]),
    "lines behind": (
        rewritten(lambda given: given + lines(2, first=48)),
        [DIGEST, "prompts 48 -> 50"],
    ),
    "lines before": (
        rewritten(lambda given: lines(2, first=48) + given),
        [DIGEST, "prompts 48 -> 50"],
    ),
    "lines gone": (rewritten(lambda given: given[1:]), [DIGEST, "prompts 48 -> 47"]),
    "one line another": (rewritten(lambda given: [*given[:-1], *lines(1, first=77)]), [DIGEST]),
    "in another order": (rewritten(lambda given: given[::-1]), [DIGEST]),
    "another field": (rewritten(same, fields={"prompt": "question"}), [DIGEST]),
    "another seed": (rewritten(same, seed=1), ["seed 0 -> 1"]),
    "no shuffling": (rewritten(same, shuffle=False), ["shuffle True -> False", "seed 0 -> none"]),
    "another kind of env": (lambda _: make_env("vcopy", name="math"), ["env 'jsonl' -> 'vcopy'"]),
    "an env of one's own": (lambda _: Own(), ["env 'jsonl' -> 'of your own'"]),
    "nothing": (rewritten(same), []),
    "the file has another name": (moved, []),
    "answers were corrected": (rewritten(answered), []),
    "a field was renamed": (rewritten(renamed, fields={"prompt": "question"}), []),
    "one list, on many lines": (rewritten(lambda given: [json.dumps([*map(json.loads, given)], indent=1)]), []),
    "blank lines, Windows' ends": (rewritten(lambda given: [f"{line}\r\n" for line in given]), []),
    "more passes": (rewritten(same, passes=3), []),
    "other rewards": (rewritten(same, rewards=REWARDS), []),
    "longer answers": (rewritten(same, max_new_tokens=9), []),
}


class Own(Counting):
    """An env of somebody's own, without an identity."""

    name = "math"

    def __init__(self, first: int = 0, *, skips: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first, self.skips = first, skips

    def prompt(self, number: int) -> Prompt:
        if number in self.skips:
            raise Skip("of no use")
        number = self.first + number % 9
        return Prompt(prompt_id=f"own-{number}", tokens=np.array([number % 9], np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_begins_with_other_prompts_than_the_tickets_have_counted_says_so(
    kind: str, begun: Stage, tmp_path: Path
) -> None:
    env_of, expected = KINDS[kind]
    said = life(begun, env_of(tmp_path))
    if not expected:
        assert said == []
        return
    [sentence] = said
    assert sentence.startswith("math has other prompts than before, says w-0: ")
    parts = [f"go on with number {GIVEN}: what comes before it now is passed over", "begin a new run", *expected]
    assert [part for part in parts if part not in sentence] == []


def test_a_difference_is_said_by_the_heartbeat_for_as_long_as_the_worker_lives(begun: Stage, tmp_path: Path) -> None:
    assert len(life(begun, jsonl(tmp_path / "a.jsonl", seed=1))) == 1
    [problem] = [Problem.of(one) for one in begun.heartbeat()["problems"]]
    assert problem == Problem(kind=Trouble.OTHER_PROMPTS, count=GIVEN, detail="seed 0 -> 1")
    [shown] = read_run_state(begun.store).problems
    assert "math has other prompts than before, says w-0: seed 0 -> 1. " in str(shown)


def test_a_difference_is_said_once_and_again_by_whoever_differs_from_the_last(begun: Stage, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert len(life(begun, jsonl(path, seed=1))) == 1
    assert life(begun, jsonl(path, seed=1)) == []
    assert ["seed 1 -> 0" in sentence for sentence in life(begun, jsonl(path), "w-1")] == [True]


def test_another_epoch_of_the_run_takes_nothing_of_it_back(begun: Stage, tmp_path: Path) -> None:
    begun.store.rewind(0, force=True)
    assert ["seed 0 -> 1" in sentence for sentence in life(begun, jsonl(tmp_path / "a.jsonl", seed=1))] == [True]


@pytest.mark.parametrize(
    ("env", "is_said"),
    [
        (Own(), False),
        (Own(first=1), True),
        (Own(skips=(1,)), True),
        (make_env("vcopy", name="math"), True),
    ],
    ids=["the same", "others", "one less", "another kind"],
)
def test_the_first_prompts_of_an_env_without_an_identity_are_compared(env: Env, is_said: bool, stage: Stage) -> None:
    stage.announce(0)
    stage.allow(GIVEN, "math")
    assert life(stage, Own()) == []
    said = life(stage, env)
    assert ["digest of its first 4 prompts" in sentence for sentence in said] == [True] * is_said


def test_an_env_whose_first_prompts_cannot_be_had_is_not_compared(stage: Stage) -> None:
    class Broken(Own):
        def prompt(self, number: int) -> Prompt:
            if number == 3:
                raise OSError("away")
            return super().prompt(number)

    stage.announce(0)
    stage.allow(GIVEN, "math")
    assert life(stage, Broken()) == []
    assert life(stage, Own()) == []
    assert life(stage, Broken(first=5)) == []


def test_an_env_of_ones_own_says_itself_what_decides(stage: Stage) -> None:
    def env(**identity: Any) -> Env:
        own: Any = Own()
        own.identity = identity
        return own  # type: ignore[no-any-return]

    stage.announce(0)
    stage.allow(GIVEN, "math")
    assert life(stage, env(repository="one", at=(1, 2))) == []
    assert life(stage, env(at=[1, 2], repository="one")) == []
    [sentence] = life(stage, env(repository="two", at=(1, 2)))
    assert "repository 'one' -> 'two'. " in sentence


def test_an_identity_that_cannot_be_had_costs_no_sampling(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Own):
        @property
        def identity(self) -> Mapping[str, Any]:
            return {"of": 1 // 0}

    stage.announce(0)
    stage.allow(GIVEN, "math")
    assert life(stage, Broken()) == []
    assert len(stage.groups()) == GIVEN
    assert "the prompts of math are not compared, its identity fails: ZeroDivisionError: " in caplog.text


def test_of_workers_that_begin_at_once_with_different_prompts_all_but_one_hear_of_it(stage: Stage) -> None:
    barrier = threading.Barrier(8)

    def begin(prompts: str) -> str:
        barrier.wait()
        return str(stage.store.prompts_before("math", prompts)[0])

    with ThreadPoolExecutor(8) as pool:
        heard = list(pool.map(begin, "abcdefgh"))
    assert len({*heard}) == 1
    assert sum(before == now for before, now in zip(heard, "abcdefgh", strict=True)) == 1


def test_where_no_ticket_was_given_nothing_is_passed_over(stage: Stage, tmp_path: Path) -> None:
    """Two hosts with different copies of a file."""
    (tmp_path / "a.jsonl").write_text("\n".join(lines(48)))
    stage.store.prompts_before("math", as_text(jsonl(tmp_path / "a.jsonl", seed=1).identity))  # type: ignore[attr-defined]
    stage.announce(0)
    stage.allow(GIVEN, "math")
    [sentence] = life(stage, jsonl(tmp_path / "a.jsonl"))
    assert "seed 1 -> 0. Tickets count prompts, and have not begun, so nothing is passed over. " in sentence


def test_a_server_that_lets_a_worker_note_nothing_costs_no_sampling(stage: Stage, tmp_path: Path) -> None:
    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            if name == "prompts_before":
                raise ServerUnsuitable("NOPERM")
            return getattr(stage.store, name)

    stands_in(Forbidden(), stage.buffer)
    stage.announce(0)
    stage.allow(GIVEN, "math")
    (tmp_path / "a.jsonl").write_text("\n".join(lines(48)))
    assert life(stage, jsonl(tmp_path / "a.jsonl")) == []
    assert len(stage.groups()) == GIVEN


@pytest.mark.parametrize(
    "kept", ["", "no JSON", "[1]", "7", "[" * 100_000, '{"a": ' * 50_000, '{"x": "' + "y" * MOST_KEPT + '"}']
)
def test_what_somebody_else_has_put_there_is_no_identity(kept: str) -> None:
    assert changes(kept, as_text({"seed": 1})) == "seed none -> 1"


def test_only_so_many_differences_are_named_each_on_one_short_line() -> None:
    before = as_text({f"part {n}": "x" * 1000 for n in range(500)})
    assert len(changes(before, as_text({}))) < 1500
    assert "\n" not in changes(before, as_text({"a\nb": "c\nd"}))


def test_an_identity_that_is_too_long_is_kept_as_a_digest() -> None:
    one, other = (as_text({"tasks": ["x" * 100] * 1000, "seed": seed}) for seed in (0, 1))
    assert max(len(one), len(other)) < 200
    assert changes(one, one) == ""
    assert changes(one, other).startswith("digest '")
