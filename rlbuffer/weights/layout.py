"""The layout of policy versions in a folder, and its checks: names, the list of files, what is complete.

    <directory>/v00000012-9f86d081884c/model.safetensors    the weights
                                       config.json          the Hugging Face config
                                       tokenizer.json ...   what else makes it a model: see `companions`
                                       model.delta          the weights as a change of an older version's
                                       files.json           size and sha256 of the others: what a download is checked by

A LoRA adapter's version has ``adapter_model.safetensors``, ``adapter_config.json`` and ``base.json`` in place of the
first two; its base model lies beside the versions as ``base-9f86d081884c``, and stays.

The list is a file like the others, so that any web server over the folder can hand versions to other hosts.

Imports neither torch nor a web server.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlbuffer.errors import WeightsError
from rlbuffer.process.files import flush, sha256_of
from rlbuffer.records.policy_version import PolicyVersion

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
LIST_FILE = "files.json"
DELTA_FILE = "model.delta"
"""Only where it is much smaller than the weights, and only for who downloads them: :mod:`rlbuffer.weights.delta`."""
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base.json"
"""File of a LoRA adapter's version, in PEFT's layout, with location, size and checksum of the model that it is for."""
MAX_LIST_BYTES = 1 << 20
"""A longer list of files is refused unread."""
MAX_FILES = 4096

VERSION = re.compile(r"v(\d{8,20})-([0-9a-f]{12})\Z")
"""Name of a version's directory: version and the first digits of the weights' sha256."""
SERVED_NAME = re.compile(r"(?:v\d{8,20}|base)-([0-9a-f]{12})\Z")
"""Name of a directory that may be handed to other hosts: a version's, or that of the model that adapters are for."""
FILE = re.compile(r"(?:additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
"""Names that a version's files may have: no path but in that one folder, nothing hidden."""
TEMPORARY = ".tmp-"
"""Begins the name of what is being written or removed."""
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """One file of a version."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Hex."""
    base: str = ""
    """Of a delta: name of the directory of the older version that it is a change of."""


def listed(directory: Path, digests: Mapping[str, str]) -> list[ListedFile]:
    """The files in `directory`, with the list itself left out.

    Args:
        digests: name -> sha256 of files that were hashed already.

    Raises:
        OSError: a file cannot be read.
    """
    return [
        ListedFile(name=name, size=path.stat().st_size, sha256=digests.get(name) or sha256_of(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and (name := path.relative_to(directory).as_posix()) != LIST_FILE
    ]


def write_list(directory: Path, files: Iterable[ListedFile]) -> None:
    """Writes ``files.json``, and flushes it.

    Raises:
        OSError: the filesystem refused.
    """
    path = directory / LIST_FILE
    entries = {
        file.name: {"size": file.size, "sha256": file.sha256} | ({"from": file.base} if file.base else {})
        for file in files
    }
    path.write_text(json.dumps({"files": entries}, indent=2, sort_keys=True) + "\n", "utf-8")
    flush(path)


def parse_list(text: str | bytes, *, name: str) -> tuple[ListedFile, ...]:
    """The files that a version's list names; `name` is that of the version's directory.

    Raises:
        WeightsError: it is no such list, names a file outside, or one without weights of this version.
    """
    try:
        entries = json.loads(text)["files"]
        files = tuple(
            ListedFile(
                name=str(file), size=int(entry["size"]), sha256=str(entry["sha256"]), base=str(entry.get("from", ""))
            )
            for file, entry in entries.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{LIST_FILE} of {name} is no list of files ({type(error).__name__})") from error
    for file in files:
        if not FILE.match(file.name) or file.name == LIST_FILE or file.size < 0 or not _SHA256.match(file.sha256):
            raise WeightsError(f"{LIST_FILE} of {name} has an entry that cannot be: {file.name!r}")
        if file.base and not _is_older(file.base, name):
            raise WeightsError(f"{LIST_FILE} of {name} has a delta to {file.base!r}, which is no older version")
    weights = weights_among(files)
    match = SERVED_NAME.match(name)
    if len(files) > MAX_FILES or weights is None or match is None or not weights.sha256.startswith(match[1]):
        raise WeightsError(f"{LIST_FILE} of {name} is of other weights")
    return files


def weights_among(files: Iterable[ListedFile]) -> ListedFile | None:
    """The one that a version is named and announced by; None when there is none."""
    return next((file for file in files if file.name in (WEIGHTS_FILE, ADAPTER_FILE)), None)


def _is_older(base: str, name: str) -> bool:
    older, newer = VERSION.match(base), VERSION.match(name)
    return older is not None and newer is not None and int(older[1]) < int(newer[1])


def versions(directory: Path) -> dict[int, list[Path]]:
    """The complete versions under `directory`: version -> directories (several when a step was trained again).

    A link is none: what it leads to is nothing of this folder's.
    """
    directories: dict[int, list[Path]] = {}
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            match = VERSION.match(path.name)
            if match and path.is_dir() and not path.is_symlink():
                directories.setdefault(int(match[1]), []).append(path)
    return dict(sorted(directories.items()))


def is_adapter(directory: Path) -> bool:
    """A version's directory holds a LoRA adapter, not a whole model."""
    return (directory / ADAPTER_CONFIG_FILE).is_file()


def base_of(directory: Path) -> PolicyVersion:
    """The base model that an adapter is for: place, size and checksum; its version number means nothing.

    Raises:
        WeightsError: ``base.json`` is missing or does not say it.
    """
    path = directory / BASE_FILE
    try:
        base = json.loads(path.read_text("utf-8"))
        return PolicyVersion(
            version=0, location=str(base["location"]), size=int(base["size"]), checksum=str(base["checksum"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} does not say which model the adapter is for: {error!r}") from error


def check(directory: Path, policy: PolicyVersion) -> None:
    """Compares size and sha256 of the weights in `directory` with the announcement.

    Raises:
        WeightsError: not there; another size; another checksum.
    """
    weights = directory / (ADAPTER_FILE if is_adapter(directory) else WEIGHTS_FILE)
    try:
        size = weights.stat().st_size
        if size != policy.size:
            raise WeightsError(f"version {policy.version}: {weights} has {size} bytes, announced were {policy.size}")
        checksum = sha256_of(weights)
    except OSError as error:
        raise WeightsError(
            f"version {policy.version}: {weights} cannot be read ({error.strerror}); "
            "is the run's directory shared with this host? If not, set weights.url at the trainer"
        ) from error
    if checksum != policy.checksum:
        raise WeightsError(
            f"version {policy.version}: {weights} has sha256 {checksum}, announced was {policy.checksum}"
        )


def remove(directory: Path) -> None:
    """Removes a version's directory; nobody sees half of one, and who has a file open goes on reading it."""
    gone = directory.with_name(f"{TEMPORARY}gone-{uuid.uuid4().hex}")
    try:
        directory.rename(gone)
    except FileNotFoundError:
        return  # another process was quicker
    shutil.rmtree(gone, ignore_errors=True)
