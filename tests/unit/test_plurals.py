"""One thing is one thing, in whatever is printed of it."""

from __future__ import annotations

import pytest

from rlbuffer.narration import waiting
from rlbuffer.narration.numbers import plural


@pytest.mark.parametrize(("count", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1000, "1,000 ranks")])
def test_a_noun_has_an_s_but_for_one(count: int, words: str) -> None:
    assert plural(count, "rank") == words


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert [plural(n, "push", "pushes") for n in (1, 2)] == ["1 push", "2 pushes"]


def test_sentences_of_one_step_and_one_failure() -> None:
    assert waiting.ended(1) == "The run has ended: the trainer has made its 1 step."
    assert "It has failed 1 time so far" in waiting.for_file(failed=1)
