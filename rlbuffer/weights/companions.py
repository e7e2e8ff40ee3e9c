"""The small files that make weights a usable model: tokenizer, chat template, generation config, processors, code.

They lie in the directory that a model was loaded from, and go with every version of it: engines and the library then
open a version as they open the model. Imports neither torch nor transformers.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from rlbuffer.process.files import flush
from rlbuffer.weights.layout import FILE, versions

_OF_TOKENIZERS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "vocab*.bpe",
    "merges*.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_OTHERS = ("generation_config*.json", "*processor_config.json", "*.py")


def companions(*places: str | Path) -> dict[str, Path]:
    """Name in a version -> file, of all that goes with the weights of a model in these directories.

    Of several the later one's file counts, and a later one's tokenizer replaces all of an earlier one's. A place that
    is "" or no directory has none.
    """
    found: dict[str, Path] = {}
    for place in places:
        directory = Path(place).expanduser()
        if not place or not directory.is_dir():
            continue
        paths = [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*")]
        there = {path.relative_to(directory).as_posix(): path for path in sorted(paths) if path.is_file()}
        if "tokenizer_config.json" in there:
            found = {name: path for name, path in found.items() if not _is_among(name, _OF_TOKENIZERS)}
        patterns = (*_OF_TOKENIZERS, *_OTHERS)
        found |= {name: path for name, path in there.items() if FILE.match(name) and _is_among(name, patterns)}
    return found


def put_beside(temporary: Path, files: Mapping[str, Path], *, among: Path) -> None:
    """Puts files into a version that is being written, flushed to the disk.

    A file that is the same in the newest version, or the base of adapters, of the folder `among` is linked: a tokenizer
    has up to 30 MB, and is written once. It is never linked to the model's own directory, where somebody may edit it.

    Raises:
        OSError: one cannot be read or written.
    """
    earlier = [path for paths in versions(among).values() for path in paths][-1:] + sorted(among.glob("base-*"))
    for name, source in files.items():
        target = temporary / name
        target.parent.mkdir(exist_ok=True)
        if not any(_linked(directory / name, target, source) for directory in earlier):
            shutil.copyfile(source, target)
            flush(target)
    for folder in {(temporary / name).parent for name in files} - {temporary}:
        flush(folder)


def _linked(existing: Path, target: Path, source: Path) -> bool:
    """`target` is a link to an existing file with the content of `source`, where the filesystem knows links."""
    try:
        if not filecmp.cmp(existing, source, shallow=False):
            return False
        os.link(existing, target)
    except OSError:
        return False
    return True


def _is_among(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
