"""A docstring begins with the thing or with a verb, ends a sentence, and answers no question that nobody asked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlbuffer", "cli", "simulation")
FRONTED = frozenset({"What", "How", "Who", "Whose", "Whether", "Which", "Where", "When", "Why", "Of", "As"})
"""First words of a clause that has no subject yet: "How long closing waits", "Of maxmemory: ...", "As above"."""
PROGRAMS = ("rlbuffer", "vLLM", "verifiers", "torch", "redis-py", "splitmix64")
"""Names that are written small at the beginning of a sentence, too."""
BEGINNING = re.compile(
    rf"""[A-Z]
    | `                          # a setting, a name or a formula in quotes of code, or :role:`...`
    | :[a-z]+:`
    | --[a-z]                    # an option of the command line
    | (?:{"|".join(PROGRAMS)})\b
    | -?\d                       # "0 when no longer known."
    | ""                         # the empty text: '"" when every invariant held.'
    | \[[^\]]+\][ ]              # a shape: "[T] int32; ..."
    | \([\w ]+(?:,[ ][\w ]+)+\)  # a tuple: "(seed, version) of ..."
    | \w+(?:[ ]\w+){{0,3}}[ ]->  # a mapping: "group id -> steps that trained it"
    | \([^()]+\)[ ]->           # a function: "(ids [T], cu_seqlens [S + 1]) -> [T] logprobs"
    """,
    re.VERBOSE,
)
END = re.compile(r"""[.!?:]["')]*\Z""")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring: modules, classes, functions, and the strings below constants and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if not isinstance(before, ast.Assign | ast.AnnAssign) or not isinstance(after, ast.Expr):
                    continue
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    yield after.lineno, after.value.value


def fault(text: str) -> str:
    """The fault of a docstring, in words; "" for none."""
    first = " ".join(text.strip().split("\n\n")[0].split())
    if not BEGINNING.match(first):
        return "begins in lower case: write a sentence, or put a name or a formula into quotes of code"
    if not END.search(first):
        return "its first paragraph ends no sentence"
    word = re.match(r"\w+", first)
    if word and word[0] in FRONTED and not re.match(r"[^.!:]*\?", first):
        return f"begins with {word[0]!r}: begin with the thing or with a verb"
    return ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_docstring_begins_with_the_thing_or_a_verb_and_ends_a_sentence(folder: str) -> None:
    texts = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
    ]
    assert texts
    faults = [f"{place}: {fault(text)}: {text.strip().splitlines()[0]!r}" for place, text in texts if fault(text)]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    [
        "Seconds that closing waits for a beat.",
        "Is the run drained?",
        "What does it cost? No one knows.\n\nWhat follows is free.",
        "`max_age` in versions.",
        ":meth:`look` at what people are shown.",
        "vLLM samples with its own least temperature.",
        "0 when no longer known.",
        '"" when every invariant held.',
        "[T] int32; prompt then completion.",
        "[S + 1] int32; segment boundaries.",
        "(seed, version) of what was drawn.",
        "env -> groups of it that a step holds.",
        "Loads the settings (see `load`).",
        "Runs of the server:\n\n    one\n    two",
    ],
)
def test_docstrings_that_may_stand(text: str) -> None:
    assert not fault(text), fault(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("How long closing waits for a beat.", "begins with 'How'"),
        ("What came of a push.", "begins with 'What'"),
        ("Whether a payload was damaged.\n\nIs it?", "begins with 'Whether'"),
        ("Of maxmemory: from here on pushes may be refused.", "begins with 'Of'"),
        ("As above, for one entry.", "begins with 'As'"),
        ("and how much less.", "lower case"),
        ("-> the revision.", "lower case"),
        ("r_i - mean: no division.", "lower case"),
        ("the groups: env -> number.", "lower case"),
        ("SCRIPT LOAD", "ends no sentence"),
        ("Seeds that are looked at,", "ends no sentence"),
        ("Runs what is asked for. -> exit code\n\nTwice.", "ends no sentence"),
    ],
)
def test_docstrings_that_are_refused(text: str, words: str) -> None:
    assert words in fault(text)


def test_the_reader_sees_the_docstrings_of_modules_classes_functions_constants_and_fields() -> None:
    body = ['"""D."""', "f: int", '"""E."""', "async def g(self):", '    """F."""', '    "no docstring"']
    source = "\n".join(['"""A."""', "X = 1", '"""B."""', "class C:", *(f"    {line}" for line in body)])
    assert {text for _, text in docstrings(source)} == {"A.", "B.", "D.", "E.", "F."}
