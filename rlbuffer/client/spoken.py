"""Who said what in a conversation that a chat template wrote: turns without the template's own marks.

No template is known here. A turn begins at a mark that names a role (``<|User|>``, ``[INST]``), or that a role follows
(``<|im_start|>user``, ``<|start_header_id|>user<|end_header_id|>``, ``<start_of_turn>user``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

BARS = "|\uff5c"
"""The second one is as wide as a letter: DeepSeek writes it."""
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "model", "gpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "environment"), "tool"),
    **{name: name for name in ("system", "developer")},
}
"""What templates call those who speak."""
ROLES_OF_MARKS = {
    "inst": "user",
    "/inst": "assistant",
    "sys": "system",
    "/sys": "user",
    "system_prompt": "system",
    "available_tools": "tools",
    "tool_results": "tool",
    "tool_calls": "assistant",
}
"""Names of marks that say who speaks from there on, besides the roles themselves."""
_BRACKETS = "|".join(name.upper() for name in ROLES_OF_MARKS if name.isidentifier() and name != "sys")
WRITTEN_MARKS = re.compile(
    rf"<[{BARS}][^<>{BARS}\s]{{1,40}}[{BARS}]>|</?s>|<(?:bos|eos|pad)>|<(?:start|end)_of_[a-z]+>|\[/?(?:{_BRACKETS})\]|<</?SYS>>"
)
"""Marks as templates write them, for a text whose tokenizer is not at hand."""
_ROLE_LINE = re.compile(r"[ \t]*([A-Za-z]+)[ \t]*(\n+|$)")


class Said(NamedTuple):
    """A turn by its words."""

    role: str
    """``user``, ``assistant``, ``system``, ``tool``, ...; "" where nothing says it."""
    text: str
    """Without marks of a template."""


class Spoken(NamedTuple):
    """A turn in a text. Places are those of characters."""

    role: str
    opens: int
    """The place of the mark that opens it."""
    start: int
    end: int
    text: str


def marks_in(text: str) -> list[tuple[int, int]]:
    """Where marks stand in a text, as templates write them: their first character and the one behind them."""
    return [found.span() for found in WRITTEN_MARKS.finditer(text)]


def spoken(text: str, marks: Sequence[tuple[int, int]]) -> list[Spoken]:
    """The turns of a text with marks at these places, in their order; turns in which nothing is said are left out.

    Example:
        >>> talk = "<|im_start|>user\\n3 + 4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>"
        >>> [(turn.role, turn.text) for turn in spoken(talk, marks_in(talk))]
        [('user', '3 + 4?'), ('assistant', '7')]
    """
    out: list[Spoken] = []
    for role, opens, parts in _parts(text, marks):
        pieces = [(start, piece) for start, end in parts if (piece := text[start:end]).strip()]
        if not pieces:
            continue
        first, last = pieces[0], pieces[-1]
        start = first[0] + len(first[1]) - len(first[1].lstrip())
        end = last[0] + len(last[1].rstrip())
        words = reduce(_joined, (piece for _, piece in pieces)).strip()
        out.append(Spoken(role, opens, start, end, words))
    return out


def _joined(before: str, after: str) -> str:
    """Two pieces with a mark between them; words do not run into each other."""
    return f"{before} {after}" if before[-1:].isalnum() and after[:1].isalnum() else before + after


def _parts(text: str, marks: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """Of each turn its role, the place where it opens, and the ranges of text between its marks."""
    role, opens, parts = "", 0, list[tuple[int, int]]()
    ends = [start for start, _ in marks[1:]] + [len(text)]
    parts.append((0, marks[0][0] if marks else len(text)))
    for (start, end), until in zip(marks, ends, strict=bool(marks)):
        named, begins = _role_of_mark(text[start:end]), end
        if not named:
            named, begins = _role_behind(text, end, until)
        if named:
            yield role, opens, parts
            role, opens, parts = named, start, []
        parts.append((begins, until))
    yield role, opens, parts


def _role_of_mark(mark: str) -> str:
    name = mark.strip(f"<>[]{BARS}").lower()
    return ROLES_OF_MARKS.get(name) or ROLES.get(name, "")


def _role_behind(text: str, start: int, end: int) -> tuple[str, int]:
    """The role that stands alone on the line behind a mark, and where the line ends; "" where there is none."""
    found = _ROLE_LINE.match(text[start : min(end, start + 40)])
    role = ROLES.get(found[1].lower(), "") if found else ""
    return (role, start + found.end()) if role and found else ("", start)


def question_among(turns: Sequence[Said]) -> Said | None:
    """The last turn of a user; else the last one that is not the assistant's."""
    asked = [turn for turn in turns if turn.role == "user"] or [turn for turn in turns if turn.role != "assistant"]
    return asked[-1] if asked else None


def in_line(turns: Sequence[Said]) -> str:
    """The turns for a line that may be cut: the last question first, then the others in their order.

    Example:
        >>> in_line([Said("system", "Be short."), Said("user", "3 + 4?")])
        '3 + 4? · system: Be short.'
    """
    asked = question_among(turns)
    others = [f"{turn.role}: {turn.text}" if turn.role else turn.text for turn in turns if turn is not asked]
    return " · ".join([*([asked.text] if asked else []), *others])
