"""miles without SGLang: the modules of its rollout loop import the engine's package, and ask nothing of it here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ENGINES = ("sglang", "sglang_router")


class _Made(ModuleType):
    """A module that has every name, as an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ENGINES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Made(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


if find_spec("sglang") is None:
    sys.meta_path.append(_Finder())
base_types = import_module("miles.rollout.base_types")
fully_async = import_module("miles.rollout.fully_async_rollout")
fully_async.GenerateState = lambda args: Namespace(sampling_params={})  # type: ignore[attr-defined]
