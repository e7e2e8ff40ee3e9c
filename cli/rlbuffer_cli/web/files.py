"""Pages of groups as files: `rlbuffer inspect --html FILE`, and the key `e` of the browser."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.trainer_values import KeptValues
from rlbuffer.client.views import GroupDetail
from rlbuffer_cli.facts import member_of
from rlbuffer_cli.web.pages import Sources, export

STDOUT = "-"


def sources_of(buffer: Buffer) -> Sources:
    """Everything that pages of this run know besides the groups: its tokenizer, and what its trainer keeps here."""
    return Sources(texts=buffer.texts, kept=KeptValues(buffer.settings.output_dir).of)


def write_page(buffer: Buffer, details: Iterable[GroupDetail], file: str, *, title: str) -> None:
    """Writes the page to `file`, ``-`` for stdout, a group at a time.

    Raises:
        OSError: the file cannot be written.
    """
    write_pieces(export(details, title=title, sources=sources_of(buffer), now=buffer.store.now()), file)


def write_pieces(pieces: Iterable[str], file: str) -> None:
    """Writes a page in pieces to `file`, ``-`` for stdout. Raises OSError."""
    if file == STDOUT:
        sys.stdout.writelines(pieces)
        return
    with Path(file).expanduser().open("w", encoding="utf-8") as out:
        out.writelines(pieces)


def one_of(detail: GroupDetail, identifier: str) -> GroupDetail:
    """The group, with one rollout alone where `identifier` (GROUP/INDEX) names it."""
    if "/" not in identifier:
        return detail
    return replace(detail, members=(member_of(detail, identifier),))


def file_name(identifier: str) -> str:
    """The name of a file for an id, which may hold anything: ``rlbuffer-math.7-3.html``."""
    return f"rlbuffer-{re.sub(r'[^A-Za-z0-9_.-]+', '-', identifier)[:120]}.html"
