"""A rollout of several sequences as a tree with names, the beginning that they share marked: printed, browsed, on pages
and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trees
from browsing import Person, browse
from rich.console import Console
from store_runs import Run
from test_html import check_harmless

import rlbuffer
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer_cli import look
from rlbuffer_cli.table import Printed
from rlbuffer_cli.tables import MEMBERS, member_rows
from rlbuffer_cli.web.pages import sources_of
from rlbuffer_cli.web.routes import route
from rlbuffer_cli.whole_run import WholeRun

EVIL = "\x1b[2J</p><script>x</script>\u202e[bold]"
PROMPT, FIRST = [1, 5, 9], [7, 8, 2, 4]


def sequence(name: str, *turns: tuple[str, list[int], float]) -> TokenSequence:
    made = [
        {"role": role, "tokens": ids} | ({"logprobs": [logprob] * len(ids)} if logprob else {})
        for role, ids, logprob in turns
    ]
    return replace(TokenSequence.from_turns(made, policy_version=0), name=name)


def tree() -> Rollout:
    """Two that go on from the same answer, and one whose context was compacted."""
    begun = ("user", PROMPT, 0.0), ("assistant", FIRST, -0.5)
    return Rollout.from_sequences(
        [
            sequence("main", *begun, ("tool", [3], 0.0), ("assistant", [6, 6], -0.25)),
            sequence(EVIL, *begun, ("tool", [4, 4], 0.0), ("assistant", [2, 9, 3], -1.0)),
            sequence("compacted", ("user", [11, 12], 0.0), ("assistant", [13], -0.75)),
        ],
        reward=0.5,
    )


@pytest.fixture(autouse=True)
def fill(run: Run) -> None:
    """A group with a tree in a committed step."""
    plain = Rollout.from_completion(prompt_ids=PROMPT, token_ids=[4], logprobs=[-0.5], reward=1.0, policy_version=0)
    group = Group("a.0", env="a", prompt_id="p", planned_size=2, rollouts=(tree(), plain))
    run.push(group)
    run.step("b.0", world_size=1)


def alike(a: TokenSequence, b: TokenSequence) -> int:
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))


Inspect = Callable[..., str]


@pytest.fixture
def inspect(call: Callable[..., tuple[int, str, str]]) -> Inspect:
    """What a look prints."""

    def look(*words: str) -> str:
        code, out, said = call("inspect", *words)
        assert code == 0, said
        return out

    return look


def test_what_a_sequence_shares_is_the_longest_beginning_and_what_others_train_of_it(
    run: Run, buffer: rlbuffer.Buffer
) -> None:
    (pushed,) = trees.groups(4, 1, 12)
    run.push(pushed)
    detail = buffer.group(pushed.group_id)
    views = {view.rollout_id: view for view in detail.tree()}
    shared = 0
    for rollout in pushed.rollouts:
        for number, its in enumerate(rollout.sequences if rollout.further else ()):
            view = views[f"{rollout.rollout_id}.{number}"]
            most = max([alike(its, other) for other in rollout.sequences[:number]], default=0)
            assert (view.shared.tokens if view.shared else 0) == most
            if view.shared is not None:
                # What a model said in it, and what is not trained here, an earlier one trains.
                said = np.zeros(len(its.tokens), bool)
                for turn in its.turns:
                    said[turn.start : turn.end] = turn.role == "assistant"
                assert view.shared.trained == int((said & ~its.loss_mask)[:most].sum())
                shared += view.shared.trained
    assert shared > 0
    assert sum(v.length for v in views.values() if v.sequence is not None) == sum(
        r.length for r in pushed.rollouts if r.further
    )


@pytest.mark.parametrize("width", [80, 140])
def test_a_group_has_a_line_for_the_rollout_and_under_it_one_for_each_sequence(
    buffer: rlbuffer.Buffer, width: int
) -> None:
    rows = member_rows(buffer.group("a.0"), lambda member: "said")
    out = io.StringIO()
    Console(file=out, width=width, theme=look.themed("printed"), markup=False).print(Printed(MEMBERS, rows))
    head, *lines = out.getvalue().splitlines()
    assert max(map(len, [head, *lines])) <= width
    words = [line.split() for line in lines]
    assert words[0][:2] == ["a.0/1", "1.000"], "the best comes first"
    assert words[1][:2] == ["a.0/0", "0.500"]
    assert [line[:2] for line in words[2:5]] == [["├─", "0.0"], ["├─", "0.1"], ["└─", "0.2"]]
    at = {name: head.index(name) + len(name) for name in ("tokens", "trained")}
    numbers = [[int(line[:end].split()[-1]) for end in at.values()] for line in lines[:5]]
    assert numbers == [[4, 1], [25, 10], [10, 6], [12, 3], [3, 1]]
    assert "main" in lines[2]
    assert "compacted" in lines[4]
    assert "\x1b" not in out.getvalue()
    assert "· 7 tok" in lines[3] or width == 80


def test_json_nests_sequences_and_counts_no_token_twice(inspect: Inspect) -> None:
    group: dict[str, Any] = json.loads(inspect("a.0", "--json"))
    whole, plain = group["members"]
    assert (whole["length"], whole["loss_tokens"], "tokens" in whole) == (25, 10, False)
    assert [one["length"] for one in whole["sequences"]] == [10, 12, 3]
    assert [one["name"] for one in whole["sequences"]] == ["main", EVIL, "compacted"]
    assert [(one["shared_with"], one["shared_tokens"], one["shared_trained"]) for one in whole["sequences"]] == [
        (None, 0, 0),
        ("a.0/0.0", 7, 4),
        (None, 0, 0),
    ]
    assert (plain["sequences"], plain["tokens"], plain["shared_with"]) == ([], [*PROMPT, 4], None)
    one = json.loads(inspect("a.0/0.1", "--json"))
    assert one == whole["sequences"][1]
    assert json.loads(inspect("a.0/0", "--json")) == whole


def test_a_printed_rollout_is_its_tree_and_a_sequence_says_what_it_shares(
    inspect: Inspect,
) -> None:
    whole = inspect("a.0/0")
    assert "25 tokens · 3 sequences" in whole
    assert "└─ 0.2" in whole
    one = inspect("a.0/0.1")
    assert "7 tokens shared with 0.0, 4 trained before" in one
    assert "\x1b" not in whole + one
    assert "\u202e" not in whole + one


def test_rollouts_are_compared_by_their_first_sequences(inspect: Inspect) -> None:
    assert "they part at token 3" in inspect("a.0/0", "a.0/1")
    assert "they part at token 7" in inspect("a.0/0", "a.0/0.1")
    assert json.loads(inspect("a.0/1", "a.0/0", "--json"))["part_at_token"] == 3


def test_the_browser_opens_each_sequence_of_the_tree(buffer: rlbuffer.Buffer) -> None:
    async def tour(person: Person) -> None:
        await person.sees("├─ 0.1", "└─ 0.2", "a.0/1")
        await person.press("j", "enter")
        await person.sees("rollout a.0/0 (1 of 2 of its group)", "SEQUENCES", "compacted", "1 trained")
        await person.press("n", "n")
        await person.sees("rollout a.0/0.1 (sequence 1", "══ 7 tokens shared with 0.0, 4 trained", "its own from here")
        await person.press("n", "n")
        await person.sees("rollout a.0/1 (2 of 2 of its group)")
        await person.press("escape", "s", "s")
        await person.until(lambda shown: "by reward" not in shown and "└─ 0.2" in shown, "the sorted tree")
        rows = [line.split() for line in person.lines()]
        order = [row[0] if row[0].startswith("a.0/") else row[1] for row in rows if row and row[0] in ORDER]
        assert order in (["a.0/0", "0.0", "0.1", "0.2", "a.0/1"], ["a.0/1", "a.0/0", "0.0", "0.1", "0.2"])

    browse(buffer, tour, size=(140, 40), identifier="a.0")


ORDER = {"a.0/0", "a.0/1", "├─", "└─"}


def test_pages_mark_what_is_shared_and_a_name_does_nothing_there(buffer: rlbuffer.Buffer, inspect: Inspect) -> None:
    seen = WholeRun(buffer)
    sources = sources_of(seen)

    def page(name: str, **query: str) -> str:
        pieces = route(seen, sources, name, query)
        assert pieces is not None
        return "".join(pieces)

    group = page("group", id="a.0")
    assert "rollout?id=a.0&amp;rollout=a.0%2F0.1" in group
    one = page("rollout", id="a.0", rollout="a.0/0.1")
    assert "7 tokens shared with 0.0, 4 trained before" in one
    given, _, own = one.partition("its own from here")
    assert given.count("given") > one.count(".given {") > 0
    assert 'class="given"' not in own
    whole = page("rollout", id="a.0", rollout="a.0/0")
    assert [whole.count(f"<h2>a.0/0.{n}</h2>") for n in range(3)] == [1, 1, 1]
    export = inspect("a.0", "--html", "-")
    assert "7 tokens shared with 0.0, 4 trained before" in check_harmless(export).text
    for html in (group, one, whole):
        assert "<script" not in html
        assert "\x1b" not in html


def test_a_step_counts_and_places_sequences(inspect: Inspect) -> None:
    printed = inspect("step:1")
    assert "4 rollouts, 6 sequences" in printed
    step = json.loads(inspect("step:1", "--json"))
    names = [name for rank in step["ranks"] for row in rank["rows"] for name in row]
    assert {"a.0/0.0", "a.0/0.1", "a.0/0.2", "a.0/1", "b.0/0", "b.0/1"} == set(names)
    assert len(names) == step["sequences"] == 6
    assert sum(rank["tokens"] for rank in step["ranks"]) == step["tokens"]
