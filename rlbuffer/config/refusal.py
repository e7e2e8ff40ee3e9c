"""A refusal of pydantic's in the words of a person who reads their file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import nearest

_T = TypeVar("_T")

MEANING = {"tuple_type": "must be a list", "dict_type": "must be a table", "mapping_type": "must be a table"}
"""Kind of pydantic's complaints -> what to say in the words of TOML."""


def refusing_as_config_error(cls: type[_T]) -> type[_T]:
    """A caller that makes the record by hand gets the ConfigError that a file would give, and not pydantic's error."""
    check = cls.__init__

    @functools.wraps(check)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise refusal(error, section="batcher", names=[f.name for f in dataclasses.fields(self)]) from None

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def refusal(error: ValidationError, *, section: str = "", names: Sequence[str] = ()) -> ConfigError:
    """The first of pydantic's complaints as one line; the rest usually follow from it.

    `section` stands before the setting's name; `names` are the record's fields, for arguments by position.
    """
    first = error.errors(include_url=False)[0]
    path = first["loc"]
    if path and isinstance(path[0], int):  # an argument by position
        path = (*names[path[0] : path[0] + 1], *path[1:])
    setting = ".".join([section] * bool(section) + [str(part) for part in path])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = nearest(str(path[-1]), names) if len(path) == 1 else ""
        hint = f" Did you mean {section}.{near}?" if near else ""
        return ConfigError(f"{setting} is not a setting.{hint}", setting=setting)
    return ConfigError(sentence(first, setting), setting=setting)


def sentence(complaint: Mapping[str, Any], setting: str) -> str:
    """One complaint about `setting`, in the words of TOML."""
    if complaint["type"] in ("missing", "missing_argument"):
        return f"{setting} is required"
    if setting.endswith(".[key]"):
        return f"{complaint['loc'][0]}: a name has 1 to 64 of A-Z a-z 0-9 _ . -, got {complaint['input']!r}"
    message = MEANING.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")
    return f"{setting} = {complaint['input']!r}: {message[:1].lower()}{message[1:]}"
