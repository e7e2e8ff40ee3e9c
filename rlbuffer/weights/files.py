"""Policy versions on the filesystem: a directory per version, complete or absent, and verified before use.

:mod:`rlbuffer.weights.layout` says what lies where. A version is written under a temporary name, flushed to the disk
and renamed, so that a reader never sees half of one. The name carries the first digits of the file's sha256: a trainer
that trains a step again after a crash publishes beside the announced files, never over them. The layout is that of a
Hugging Face model directory: engines load it as it is.

Imports torch and safetensors: import this module lazily.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlbuffer.config.addresses import is_url
from rlbuffer.errors import WeightsError
from rlbuffer.process.files import flush, readable_as_others, rename_for_good, sha256_of
from rlbuffer.process.stages import Stages
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.companions import put_beside
from rlbuffer.weights.fit import require_adapter
from rlbuffer.weights.layout import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    BASE_FILE,
    CONFIG_FILE,
    DELTA_FILE,
    TEMPORARY,
    WEIGHTS_FILE,
    check,
    listed,
    remove,
    versions,
    write_list,
)
from rlbuffer.weights.model import unaliased

ABANDONED_SECONDS = 3600.0
"""A temporary directory untouched for this long belongs to a publisher that died."""


NO_FILES: Mapping[str, Path] = MappingProxyType({})


def publish(
    directory: Path,
    version: int,
    *,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    keep: int,
    beside: Mapping[str, Path] = NO_FILES,
    with_delta: bool = False,
    took: Stages | None = None,
) -> PolicyVersion:
    """Writes a policy version and removes old ones.

    The `keep` newest versions up to this one stay. Versions newer than this one stay too: a trainer that went back to
    a checkpoint must not pull away what samplers are serving. Publishing the same bytes again changes nothing.

    Args:
        state: name -> tensor, on any device; tied weights are written once.
        config: the Hugging Face config, JSON types.
        beside: what else makes it a model, as :func:`rlbuffer.weights.companions.companions` finds it.
        with_delta: the change since the newest older version is written, too, for who downloads versions.
        took: is told what the stages took: ``write``, ``hash``, ``delta`` and ``flush``.

    Raises:
        ValueError: `version` is negative or `keep` below 1.
        WeightsError: the filesystem refused.
    """
    if version < 0 or keep < 1:
        raise ValueError(f"version = {version} must not be negative and keep = {keep} must be at least 1")
    return _write(
        directory,
        version,
        state,
        {CONFIG_FILE: config},
        weights_file=WEIGHTS_FILE,
        beside=beside,
        since=_newest_before(directory, version) if with_delta else None,
        then=lambda: _prune(directory, version, keep),
        took=took,
    )


def publish_base(
    directory: Path,
    *,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    beside: Mapping[str, Path] = NO_FILES,
) -> PolicyVersion:
    """Writes the model that adapters are trained for, as ``base-<digits of its sha256>``. Nothing ever removes it.

    Writing the same weights again changes nothing. The number of the version means nothing.

    Raises:
        WeightsError: the filesystem refused.
    """
    return _write(directory, None, state, {CONFIG_FILE: config}, weights_file=WEIGHTS_FILE, beside=beside)


def publish_adapter(
    directory: Path,
    version: int,
    *,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    base: PolicyVersion,
    keep: int,
    beside: Mapping[str, Path] = NO_FILES,
    took: Stages | None = None,
) -> PolicyVersion:
    """Writes one version of a LoRA adapter in PEFT's layout, beside it where its base model is; removes old ones.

    ``base.json`` has the base model's location, size and checksum, as an announcement would. `took` as in
    :func:`publish`.

    Raises:
        WeightsError: the tensors are no LoRA adapter of this config, or not finite; the filesystem refused.
    """
    require_adapter(state, int(config["r"]))
    where = {name: getattr(base, name) for name in ("location", "size", "checksum")}
    return _write(
        directory,
        version,
        state,
        {ADAPTER_CONFIG_FILE: config, BASE_FILE: where},
        weights_file=ADAPTER_FILE,
        beside=beside,
        then=lambda: _prune(directory, version, keep),
        took=took,
    )


def _write(
    directory: Path,
    version: int | None,
    state: Mapping[str, torch.Tensor],
    documents: Mapping[str, Mapping[str, Any]],
    *,
    weights_file: str,
    beside: Mapping[str, Path],
    since: Path | None = None,
    then: Callable[[], None] = lambda: None,
    took: Stages | None = None,
) -> PolicyVersion:
    """Writes tensors and JSON documents under a temporary name, flushes them and renames the directory.

    `version` None: the base of adapters. `since`: the version that a delta is made to.
    """
    took = took or Stages()
    prefix = "base" if version is None else f"v{version:08d}"
    temporary = directory / f"{TEMPORARY}{prefix}-{uuid.uuid4().hex}"
    try:
        _sweep(directory)  # before: what a publisher that died has left may be the room that this one needs
        temporary.mkdir(parents=True)
        weights = temporary / weights_file
        with took.measure("write"):
            tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in unaliased(state).items()}
            save_file(tensors, weights, metadata={"format": "pt"})
            readable_as_others(weights)
            for name, values in documents.items():
                (temporary / name).write_text(json.dumps(dict(values), indent=2, sort_keys=True) + "\n", "utf-8")
            put_beside(temporary, beside, among=directory)
        with took.measure("hash"):
            size, checksum = weights.stat().st_size, sha256_of(weights)
        written = [weights, *(temporary / name for name in documents)]
        with took.measure("delta"):
            if since is not None and _write_delta(since, temporary):
                written.append(temporary / DELTA_FILE)
        with took.measure("flush"):
            files = listed(temporary, {weights_file: checksum})
            if since is not None:
                files = [replace(file, base=since.name) if file.name == DELTA_FILE else file for file in files]
            write_list(temporary, files)
            for path in (*written, temporary):
                flush(path)
            final = directory / f"{prefix}-{checksum[:12]}"
            if final.is_dir():
                shutil.rmtree(temporary)
            else:
                rename_for_good(temporary, final)
        then()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        what = "the adapters' base model" if version is None else f"version {version}"
        raise WeightsError(f"{what} cannot be written to {directory}: {error}") from error
    return PolicyVersion(version=version or 0, location=str(final.absolute()), size=size, checksum=checksum)


def open_weights(policy: PolicyVersion) -> Path:
    """The directory of an announced version, after comparing size and sha256 with the announcement.

    A version that was announced under a URL is downloaded first, into the default cache.

    Raises:
        WeightsError: announced without weights; not there; another size; another checksum.
    """
    if not policy.location:
        raise WeightsError(
            f"version {policy.version} was announced without weights: a trainer of your own publishes them, the first "
            f"ones before its first step (`buffer.policy.publish(model, {policy.version})`)"
        )
    if is_url(policy.location):
        from rlbuffer.weights.places import default_cache

        policy = default_cache().localized(policy)
    directory = Path(policy.location)
    check(directory, policy)
    return directory


def load_state(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a version's directory, on the CPU.

    Raises:
        WeightsError: the file is missing or is no complete safetensors file.
    """
    try:
        state: dict[str, torch.Tensor] = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{directory / WEIGHTS_FILE} cannot be loaded: {error}") from error
    return state


def read_config(directory: Path) -> dict[str, Any]:
    """The Hugging Face config of a version's directory.

    Raises:
        WeightsError: the file is missing or not a JSON object.
    """
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return config


def _newest_before(directory: Path, version: int) -> Path | None:
    older = [path for number, paths in versions(directory).items() if number < version for path in paths]
    return older[-1] if older else None


def _write_delta(since: Path, directory: Path) -> bool:
    try:
        from rlbuffer.weights.delta import write_delta
    except ImportError:  # zstandard: readers load the whole file then
        return False
    return write_delta(since / WEIGHTS_FILE, directory / WEIGHTS_FILE, directory / DELTA_FILE)


def _prune(directory: Path, version: int, keep: int) -> None:
    paths_of = versions(directory)
    for old in [v for v in paths_of if v <= version][:-keep]:
        for path in paths_of[old]:
            remove(path)


def _sweep(directory: Path) -> None:
    for path in directory.glob(f"{TEMPORARY}*"):
        if path.stat().st_mtime < time.time() - ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
