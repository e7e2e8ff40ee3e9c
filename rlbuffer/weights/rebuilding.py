"""Weights of a version made of an older one that is here, and the deltas since.

The older version is followed by name from list to list. Nothing depends on it: where a list or a delta is missing,
damaged or larger than the weights themselves, the whole file is downloaded.

Imports httpx, numpy and zstandard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx

from rlbuffer.errors import WeightsError
from rlbuffer.process.files import flush
from rlbuffer.process.stages import Stages
from rlbuffer.weights.delta import apply_delta
from rlbuffer.weights.download import fetch_file, fetch_list
from rlbuffer.weights.layout import DELTA_FILE, WEIGHTS_FILE, ListedFile

Step = tuple[str, ListedFile]
"""Name of a version's directory, and the delta in it."""


def rebuild(
    client: httpx.Client,
    place: str,
    files: tuple[ListedFile, ...],
    folder: Path,
    *,
    name: str,
    cache: Path,
    stopped: Callable[[], bool],
    took: Stages,
) -> bool:
    """Makes the weights of version `name` in `folder`, from what is in `cache` and the deltas at `place`.

    Its own delta lies there then, too, for whoever downloads from here.

    Args:
        place: URL over versions.
        files: the version's list there.
        took: is told the seconds of ``fetch`` and ``apply``, and the bytes of each ``delta``.

    Returns:
        False where no older version is here, or the deltas are no less to download than the weights.

    Raises:
        WeightsError: a delta is damaged, or makes other weights than the list says.
        OSError: the filesystem refused.
    """
    whole = next((file for file in files if file.name == WEIGHTS_FILE), None)
    if whole is None:  # an adapter's
        return False
    with took.measure("fetch"):
        base, steps = _steps(client, place, files, name=name, cache=cache, most_bytes=whole.size)
    if base is None:
        return False
    scratch = folder.with_name(f"{folder.name}-deltas")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        made, checksum = base / WEIGHTS_FILE, ""
        for number, (version, delta) in enumerate(steps):
            into = scratch / str(number)
            into.mkdir(parents=True)
            with took.measure("fetch"):
                fetch_file(client, f"{place}/{version}", delta, into, stopped=stopped)
            took.count("delta", delta.size)
            with took.measure("apply"):
                checksum = apply_delta(made, into / DELTA_FILE, into / WEIGHTS_FILE)
            if number:
                made.unlink()
            made = into / WEIGHTS_FILE
        if checksum != whole.sha256:
            raise WeightsError(f"{DELTA_FILE} makes weights with sha256 {checksum}, the list says {whole.sha256}")
        made.with_name(DELTA_FILE).rename(folder / DELTA_FILE)
        made.rename(folder / WEIGHTS_FILE)
        flush(folder / WEIGHTS_FILE)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _steps(
    client: httpx.Client, place: str, files: tuple[ListedFile, ...], *, name: str, cache: Path, most_bytes: int
) -> tuple[Path | None, list[Step]]:
    """The older version that is here, and the deltas from it on, the oldest first; None where there is no such way."""
    steps: list[Step] = []
    while delta := next((file for file in files if file.name == DELTA_FILE and file.base), None):
        steps.insert(0, (name, delta))
        if sum(step.size for _, step in steps) >= most_bytes:
            break
        base = cache / delta.base
        if (base / WEIGHTS_FILE).is_file():
            return base, steps
        name = delta.base
        try:
            files = fetch_list(client, f"{place}/{name}", name=name)
        except WeightsError:  # this place does not have it, or not any more
            break
    return None, []
