"""The base of every table of settings, and the types of values that several tables have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo, field_validator

from rlbuffer.config.batcher import no_truth_as_number

LARGEST_SEED = 2**63 - 1
"""The largest that torch takes, with room for the numbers of replicas."""
Names = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""Name that the user gives a worker, a scorer or an evaluation: a part of the names of processes, files and metrics."""
OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty path is none: Python would take it for the current folder."""


def _given(value: Any) -> Any:
    if value == "":
        raise ValueError("must name a folder: write . for the current one")
    return value


GivenPath = Annotated[Path, BeforeValidator(_given)]
"""A path that is not empty."""


class Table(BaseModel):
    """A table of ``rlbuffer.toml``. It refuses names that it does not have, infinite numbers, and true for 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        return no_truth_as_number(value, cls.model_fields[info.field_name or ""].annotation)


def _gpu(value: Any) -> int | str:
    """A GPU's number, or its UUID."""
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and _GPU.fullmatch(value):
        return value
    raise ValueError("must be the number of a GPU, from 0 on, or its UUID")


_GPU = re.compile(r"[A-Za-z0-9./:-]+")
Gpu = Annotated[int | str, PlainValidator(_gpu)]
