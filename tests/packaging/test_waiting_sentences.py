"""Every sentence about waiting has an entry in docs/guide/it_waits.md, and every entry a sentence."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rlbuffer.daemon import memory_rules
from rlbuffer.narration import waiting

ROOT = Path(__file__).parents[2]
NO_SENTENCES = {"progress", "counted", "to_trainer", "not_normal", "is_last_word"}
"""Functions of the module that make a part of one."""
ENTRY = re.compile(r"^### (.+?) \.\.\.\n<!-- waiting: (\w+) -->\n(.+?)(?=\n### |\Z)", re.MULTILINE | re.DOTALL)
EXAMPLE = waiting.EnvNeed(env="math", missing=3, ready=0, forming=1, oldest_seconds=2.0, is_silent=False)
ARGUMENTS = {
    "ended": (5,),
    "interrupted": (5,),
    "failed": (5, 1, "run.log"),
    "for_step": (7,),
    "for_dead": ("math", 9.0),
    "to_learn": (7, 2, 10.0),
    "for_scorer": ("math", "ref_logprobs", 12, 0),
    "for_no_lesson": ((155, 160, 20), 0.0, 0.041, 0.012),
    "for_damaged": (8, 8, "8 of env math by math-0"),
    "all_paused": (["math"],),
    "for_hand": (7,),
    "for_word": (7,),
    "for_making": (7, 6.0),
    "for_trainer": (7, 6, 1),
    "absent_trainer": (7, 6),
    "silent_trainer": (7, 6, 20.0),
    "draining": (),
    "for_failures": ("math", {"KeyError": 3}, "KeyError: 'x' (envs.py:3 in score)", ["math-0"]),
    "for_busy": ("math", "math-0", "score() has run for 12 s (envs.py:3 in score)"),
    "for_silent": ("math", "math-0", "score() (envs.py:3 in score)"),
    "for_worker": ("math", "math-0", "no such file"),
    "for_share": (EXAMPLE, 6),
    "for_archive": ("/data: No space left on device",),
}
NAMED = {
    "full": {"used": 1, "limit": 1, "steps": 1},
    "for_file": {"failed": 2},
    "for_version": {"step": 7, "needed": 6, "published": 5, "max_age": 1},
    "for_groups": {"step": 7, "done": 0.4, "what": "4 of 10 groups ready", "need": None, "published": 6},
}


def sentences() -> dict[str, object]:
    """name -> constant or function, of all that waiting.py says, and of a full server."""
    own = {name: value for name, value in vars(waiting).items() if not name.startswith("_")}
    texts = {name: value for name, value in own.items() if isinstance(value, str) and name.isupper()}
    made = {n: f for n, f in own.items() if inspect.isfunction(f) and f.__module__ == waiting.__name__}
    functions = {name: function for name, function in made.items() if name not in NO_SENTENCES}
    return texts | functions | {"full": memory_rules.full}


def entries() -> dict[str, tuple[str, str]]:
    """name -> the sentence's beginning and what to do."""
    text = (ROOT / "docs" / "guide" / "it_waits.md").read_text(encoding="utf-8")
    return {name: (beginning, advice) for beginning, name, advice in ENTRY.findall(text)}


def test_the_page_it_waits_what_now_has_an_entry_for_every_sentence_and_no_other() -> None:
    assert sorted(entries()) == sorted(sentences())
    assert all(len(advice.strip()) > 20 for _, advice in entries().values())


@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() | NAMED.keys() | {n for n in sentences() if n.isupper()}))
def test_an_entry_is_headed_by_the_beginning_of_its_sentence(name: str) -> None:
    value = sentences()[name]
    said = value if isinstance(value, str) else value(*ARGUMENTS.get(name, ()), **NAMED.get(name, {}))  # type: ignore[operator]
    assert str(said).startswith(entries()[name][0])


def test_nobody_else_makes_up_what_the_batcher_waits_for() -> None:
    """Every writer of a sentence takes it from waiting.py: no literal is handed to `set_waiting` or to the leader."""
    calls = re.compile(r"(?:set_waiting\([^\n]*,|\b_say\()\s*f?[\"'][A-Z]")
    found = [
        f"{path.relative_to(ROOT)}: {match.group(0)}"
        for folder in ("rlbuffer", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for match in calls.finditer(path.read_text(encoding="utf-8"))
        if path.name != "lines.py"
    ]
    assert found == []
