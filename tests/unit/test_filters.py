"""The filter language, field by field, and what it says to a typing mistake."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlbuffer.client.filters import SEARCHED_CHARACTERS, parse
from rlbuffer.errors import FilterError


def group(**changes: Any) -> SimpleNamespace:
    values = {
        "group_id": "math.7f3a",
        "env": "math",
        "state": "dropped",
        "reason": "stale",
        "worker": "inf-3",
        "age": 2,
        "reward": 0.25,
        "tokens": 8000,
        "prompt_id": "p-7",
        "step": 40,
        "waited_seconds": 90.0,
    }
    return SimpleNamespace(**(values | changes))


def rollout(**changes: Any) -> SimpleNamespace:
    values = {
        "finish_reason": "stop",
        "is_truncated": False,
        "text": "<think>No.\n</think> The answer is 42",
        "reward": 0.5,
        "length": 900,
        "loss_tokens": 800,
        "min_version": 3,
        "advantage": None,
        "logprob_mean": -0.5,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("env:math", True),
        ("env:mat", False),
        ("env:code,math", True),
        ("env!=math", False),
        ("ENV:math", True),
        ("state:dropped reason:small", False),
        ("id:math.7f", True),
        ("id:7f3a", False),
        ("id!=math.7f", False),
        ("id==math.7f3a", True),
        ("id=math.7f", False),
        ("id=math.7,math.7f3a", True),
        ("prompt=p-", False),
        ("prompt:q,p", True),
        ("prompt:-7", False),
        ("prompt!=p", False),
        ("age>=2", True),
        ("age>2", False),
        ("age<=2", True),
        ("age<2", False),
        ("age=2", True),
        ("age!=2", False),
        ("reward<0.1", False),
        ("reward<.3", True),
        ("reward>-1e-3", True),
        ("tokens>=8k", True),
        ("tokens<1M", True),
        ("env:math age>=2 reward<0.1", False),
        ("prompt:p-7 step:40 waited>60", True),
        ("step>40", False),
        ("waited>2k", False),
    ],
)
def test_a_filter_matches_what_it_says(text: str, matches: bool) -> None:
    assert parse(text).matches(group()) is matches


@pytest.mark.parametrize(
    ("text", "prompt", "matches"),
    [
        ('prompt:"a b"', "a b c", True),
        ('prompt="a b"', "a b c", False),
        ('prompt="a b"', "a b", True),
        ('prompt!="a b" env:math', "a b", False),
        ('prompt="a,b" env:math', "a,b", True),
        ('prompt="a,b"', "a", False),
        ('prompt=x,"a, b",y', "a, b", True),
        ('prompt=x,"a, b",y', "y", True),
        (r'prompt="say \"hi\" "', 'say "hi" ', True),
        (r'prompt="C:\d \\"', "C:\\d \\", True),
        ('prompt="a env:code b"', "a env:code b", True),
        ('prompt=a"b', 'a"b', True),
    ],
)
def test_within_quotes_blanks_and_commas_belong_to_the_value(text: str, prompt: str, matches: bool) -> None:
    assert parse(text).matches(group(prompt_id=prompt)) is matches


@pytest.mark.parametrize("text", ["reward<1", "reward>=0", "reward!=0"])
def test_a_missing_number_satisfies_nothing(text: str) -> None:
    assert parse(text).matches(group(reward=None)) is False


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("stop:length,abort", False),
        ("stop!=length", True),
        ("truncated:no", True),
        ("truncated:yes", False),
        ("text:answer", True),
        ("text:Answer", False),
        ("text:.*", False),
        ("text:/ANSWER  ?is/i", True),
        ("text:/</think>/", True),
        ("text:/<\\/think> The/", True),
        ("text:/^The/", False),
        ("text:/no.*the/is", True),
        ("text:/^</think>/m", True),
        ("text:/a b/ env:math", False),
        ('text:"answer is" env:math', True),
        ('text:"answer is 4 2"', False),
        ('text:"/42/"', False),
        ("text:/42/ env:code", False),
        ("text!=/4\\d/", False),
        ("rollout.reward>=0.5 rollout.tokens<1k rollout.trained:800 rollout.version<=3", True),
        ("rollout.reward<0.5", False),
        ("rollout.logprob<-0.4", True),
        ("rollout.advantage>0", False),
        ("rollout.advantage!=0", False),
    ],
)
def test_terms_about_a_rollout_match_what_they_say(text: str, matches: bool) -> None:
    assert parse(text).matches(group(), [rollout()]) is matches


def test_terms_about_a_rollout_must_hold_for_one_and_the_same() -> None:
    cut, best = rollout(finish_reason="length", reward=0.0), rollout(reward=1.0)
    chosen = parse("env:math stop:length rollout.reward>0")
    assert not chosen.matches(group(), [cut, best])
    assert chosen.matches(group(), [cut, best, rollout(finish_reason="length", reward=0.1)])
    assert chosen.matches_group(group())
    assert not chosen.matches(group()), "without rollouts nothing of them can hold"
    assert [parse("stop:length").matches_rollout(r) for r in (cut, best)] == [True, False]


def test_a_rollout_without_text_matches_no_term_about_text() -> None:
    assert [parse(text).matches_rollout(rollout(text=None)) for text in ("text:a", "text!=a")] == [False, False]


def test_of_a_very_long_text_both_ends_are_searched() -> None:
    long = rollout(text="begin" + "x" * 1_000_000 + "end")
    assert [parse(f"text:{word}").matches_rollout(long) for word in ("begin", "end")] == [True, True]
    assert SEARCHED_CHARACTERS == 65_536
    assert not parse("text:/begin.*end/").matches_rollout(long)
    # This takes a time that grows with the square of the length.
    assert not parse("text:/(x+x+)y/").matches_rollout(rollout(text="x" * 200 + "z" * 1_000_000))


def test_allows_tells_what_need_not_be_read() -> None:
    chosen = parse("state:forming,ready age>1")
    assert [s for s in ("forming", "ready", "packed", "dropped") if chosen.allows("state", s)] == ["forming", "ready"]
    assert parse("age>1").allows("state", "packed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stat:ready", "'stat' is not a field to filter by. Did you mean state?"),
        ("rollout.rewrd<1", "Did you mean rollout.reward?"),
        ("truncated:true", "'true' is not a truncated. One of: yes, no."),
        ("stop>length", "write stop:length"),
        ("text:/half", "write text:/REGEX/"),
        ("text:/a/q", "write text:/REGEX/"),
        ("text:/(/", "text:/(/ is no regular expression"),
        ("state:redy", "'redy' is not a state. Did you mean ready?"),
        ("age>=two", "got 'two'"),
        ("age>=", "'age>=' in the filter has no value"),
        ("env!=,", "'env!=,' in the filter has no value"),
        ('id=""', "'id=\"\"' in the filter has no value"),
        ('text:""', "'text:\"\"' in the filter has no value"),
        ('prompt:"a b', "its quote is not closed"),
        ('prompt:"a b"c', "something stands behind it"),
        ("env>math", "write env:math"),
        ("math", "expected FIELD:VALUE or FIELD>=NUMBER"),
    ],
)
def test_a_typing_mistake_is_explained(text: str, said: str) -> None:
    with pytest.raises(FilterError, match=re.escape(said)):
        parse(text)
