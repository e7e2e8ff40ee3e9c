"""Reads torch's checkpoint files without running what they hold.

torch writes its index, and what is no tensor, as pickled objects: loading those makes whatever they name. Here the
index may name the classes that every index is made of, and all else is plain values
(``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import pickle
from enum import EnumMeta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from rlbuffer.errors import CheckpointError

INDEX_NAMES = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Module -> what an index may name of it."""


def _member(of: object, name: object) -> Any:
    """A member of an enum: Debian 12's Python 3.11.2 writes one as a call of `getattr`, which would reach anything."""
    if not isinstance(of, EnumMeta) or not isinstance(name, str):
        raise pickle.UnpicklingError(f"it asks for {name!r} of something that is no enum")
    return of[name]


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is nothing of a checkpoint's")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """Reads a folder of :func:`~rlbuffer.trainer.checkpoints.checkpoint.save`. Raises CheckpointError for its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                index = _Index(file).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError("it holds something else")
        except Exception as error:  # a damaged pickle raises whatever its bytes lead to
            raise CheckpointError(f"{path} is no index of a checkpoint and is not loaded: {error}") from error
        return index


class PlainValues(DefaultLoadPlanner):
    """Takes what is no tensor as plain values."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Puts a value to its place in the state."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} is no plain value and is not loaded: {str(error).splitlines()[0]}"
            ) from error
        set_element(self.original_state_dict, self.mappings[name], loaded)
