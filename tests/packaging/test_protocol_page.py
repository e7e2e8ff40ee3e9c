"""The protocol page and the glossary have everything that is on the server: keys, scripts, fields, terms."""

from __future__ import annotations

import re
from pathlib import Path

from rlbuffer.store.keys import HEARTBEATS, Keys

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "rlbuffer" / "store" / "scripts").glob("*.lua"))
PAGE = (ROOT / "docs" / "explain" / "protocol.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
TERMS = {
    *("ticket", "push", "entry", "part", "pool", "lease", "claim", "epoch", "incarnation", "sequence", "revision"),
    *("tombstone", "garbage", "void", "pin", "span", "pull", "update", "forming", "ready", "packed", "trained"),
    *("policy version", "step", "row", "micro-batch", "advantage", "age", "attempt", "line", "ledger", "allowance"),
}
"""Terms that the code uses and nobody can guess."""


def test_every_key_of_a_run_has_a_row_in_the_table() -> None:
    table = PAGE[PAGE.index("## Keys") : PAGE.index("### Fields of `meta`")]
    keys = Keys("r")
    names = {getattr(keys, name) for name in Keys.__slots__} - {keys.run, keys.tag, keys.payload_prefix}
    names |= {keys.heartbeats(kind) for kind in HEARTBEATS}
    patterns = {"producer:", "tickets:", "evaluating:", "scoring:", "visits:"}
    short = {name.removeprefix("{rlb:r}:") for name in names}
    assert len(short) > 20
    assert sorted(name for name in short if not re.search(rf"[`:]{name}`", table)) == []
    assert sorted(name for name in patterns if f"{{rlb:R}}:{name}" not in table) == []
    assert "`rlb:R:g:<group_id>:" in table


def test_every_script_is_a_move_with_words_of_its_own() -> None:
    moves = PAGE[PAGE.index("## Moves") :]
    assert len(SCRIPTS) == 18
    assert [name for name in SCRIPTS if not re.search(rf"\b{name.upper()}\b", moves)] == []
    rows = re.findall(r"^\| ([A-Z, ]+) \| ", moves, re.MULTILINE)
    assert sorted({*", ".join(rows).split(", ")} - {"INGEST", "PULL", "DUMP", "RESTORE"}) == [
        name.upper() for name in SCRIPTS
    ]


def test_every_field_of_meta_is_in_its_table() -> None:
    table = PAGE[PAGE.index("### Fields of `meta`") : PAGE.index("## Moves")]
    source = (ROOT / "rlbuffer" / "store" / "moves" / "run.py").read_text(encoding="utf-8")
    parse = source[source.index("def parse_meta") :]
    fields = set(re.findall(r'b"(\w+)"', parse.split("\ndef ")[0]))
    assert len(fields) > 15
    assert sorted(field for field in fields if f"`{field}`" not in table) == []


def test_the_glossary_has_the_terms_of_the_code_in_their_order() -> None:
    terms = re.findall(r"^- \*\*([^*]+)\*\*: ", GLOSSARY, re.MULTILINE)
    assert sorted(TERMS - set(terms)) == []
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) == len(set(terms))
