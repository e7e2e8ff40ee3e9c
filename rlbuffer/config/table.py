"""The base of every table of settings, and the types of values that several tables have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from rlbuffer.config.addresses import parse_listen, wrong_url
from rlbuffer.config.fractions import read_budget, read_flat
from rlbuffer.process.variables import bare
from rlbuffer.records.checks import MAX_COUNT

LARGEST_SEED = 2**63 - 1
"""The largest that torch takes, with room for the numbers of replicas."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
"""A function of the user's own: ``package.module:name``."""
SIZE = re.compile(r"([0-9]+)(|b|k|kb|m|mb|g|gb)")
"""A number of bytes, and its unit."""


class NoTruth:
    """Python counts true and false as 1 and 0; no setting that asks for a number takes them."""

    @field_validator("*", mode="before")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        fields = cls.__pydantic_fields__  # type: ignore[attr-defined]
        if "bool" not in str(fields[info.field_name or ""].annotation):
            for inner in value if isinstance(value, list | tuple) else (value,):
                if isinstance(inner, bool):
                    raise ValueError("must not be true or false")
        return value


class Table(NoTruth, BaseModel):
    """A table of ``rlbuffer.toml``. It refuses names that it does not have, and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _named(value: Any) -> Any:
    if value == "":
        raise ValueError("must name a folder: write . for the current one")
    return value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _none_for_empty(value: Any) -> Any:
    return bare(value) or None if isinstance(value, str) else value


def _name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) is None:
        raise ValueError("must be 1 to 64 of the characters A-Z, a-z, 0-9, _, . and -")
    return value


def _gpu(value: Any) -> Any:
    is_number = isinstance(value, int) and value >= 0
    if not is_number and not (isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9./:-]+", value)):
        raise ValueError("must be the number of a GPU, from 0 on, or its UUID")
    return value


def _listen(value: str) -> str:
    if value:
        parse_listen(value)
    return value


def _url(value: str) -> str:
    if value and (wrong := wrong_url(value)):
        raise ValueError(wrong)
    return value


def _size(value: str) -> str:
    if SIZE.fullmatch(value.lower()) is None:
        raise ValueError("is no size: write a number and b, kb, mb or gb, like 2gb")
    return value


# The run's record, and what is computed from it, hold no larger numbers.
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Age = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=MAX_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[str, AfterValidator(_name)]
"""Name of an env, or that the user gives a worker, a scorer or an evaluation: a part of the names of processes, files
and metrics."""
OptionalPath = Annotated[Path | None, BeforeValidator(_none_for_empty)]
"""An empty path is none: Python would take it for the current folder."""
OptionalText = Annotated[str | None, BeforeValidator(_none_for_empty)]
"""Text without blanks and line's ends around it."""
PathText = Annotated[str, BeforeValidator(_as_text)]
"""A path as text; "" where there is none."""
GivenPath = Annotated[Path, BeforeValidator(_named)]
"""A path that is not empty."""
Gpu = Annotated[int | str, BeforeValidator(_gpu)]
"""A GPU's number, or its UUID."""
Listen = Annotated[str, AfterValidator(_listen)]
"""HOST:PORT to listen at; empty: nowhere."""
Url = Annotated[str, AfterValidator(_url)]
"""Address of a server that other hosts reach; empty: none."""
Size = Annotated[str, AfterValidator(_size)]
"""Bytes, as Redis writes them."""
Flat = Annotated[str | float, BeforeValidator(read_flat)]
Budget = Annotated[float | tuple[tuple[int, float], ...], BeforeValidator(read_budget)]
