"""The commands that README and docs tell people to type exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from rlbuffer_cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"),
]
CALL = re.compile(r"(?:^|`|\$ |bin/)rlbuffer ([a-z-]+)((?: [^\n`#]*)?)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_on_a_page_exists(page: str) -> None:
    unknown = []
    for name, rest in CALL.findall((ROOT / page).read_text(encoding="utf-8")):
        if name not in COMMANDS:
            unknown.append(name)
            continue
        found = importlib.import_module(f"rlbuffer_cli.commands.{name.replace('-', '_')}").command
        words = rest.split()
        if isinstance(found, click.Group):
            names = [word for word in words if word in found.commands]
            if not names:
                unknown.append(f"{name} {rest}")
                continue
            found = found.commands[names[0]]
        known = {"--help", *(option for parameter in found.params for option in parameter.opts)}
        options = [option for word in words if word.startswith("--") for option in word.split("=")[0].split("|")]
        unknown += [f"{name} {option}" for option in options if option.strip(".,;:)") not in known]
    assert unknown == []


FENCE = re.compile(r"^( *)```\w*.*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^(?:\$ )?(?:\S*bin/)?rlbuffer (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_in_a_block_of_a_page_can_be_parsed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are there and of their kind, its choices exist. Those of tests/e2e/test_pages.py are run, too."""
    monkeypatch.chdir(tmp_path)
    wrong = []
    for _, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        for line in TYPED.findall(block):
            words = shlex.split(re.split(r" \|\|? | && | > | & |&$", line)[0], comments=True)
            for file in (word for word in words if re.search(r"\.(toml|jsonl|gz|parquet|dump)$", word)):
                Path(file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                Path(file.lstrip("/")).touch()
            try:
                parse(words)
            except click.UsageError as error:
                wrong.append(f"{line}: {error.format_message()}")
    assert wrong == []


def parse(words: list[str]) -> None:
    """Parses the arguments of a command as `rlbuffer` does, and does not call it."""
    command: click.Command = importlib.import_module(f"rlbuffer_cli.commands.{words[0].replace('-', '_')}").command
    ctx = None
    for at, name in enumerate(words, 1):
        ctx = command.make_context(name, words[at:], parent=ctx)
        if not isinstance(command, click.Group):
            return
        found = command.get_command(ctx, words[at])
        assert found is not None, f"{name} has no command {words[at]}"
        command = found


def test_every_operation_has_its_page() -> None:
    text = (ROOT / "docs" / "guide" / "operate" / "README.md").read_text(encoding="utf-8")
    operations = set(COMMANDS) - {"demo", "run", "worker", "train", "push"}
    shown = set(re.findall(r"`rlbuffer ([a-z-]+)", text))
    assert sorted(operations - shown) == []


FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|lua))`")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_code_that_a_page_names_exists(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "rlbuffer", ROOT / "tests", ROOT / "docs", (ROOT / page).parent)
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
