"""A refusal of pydantic's in the words of a person who reads their file: ``PLACE  NAME = VALUE: why``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean

_T = TypeVar("_T")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_IN_WORDS = {
    "tuple_type": "must be a list",
    "path_type": "must be a path, as text",
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "dataclass_type"), "must be a table"),
}
"""Kind of pydantic's complaints -> what to say in the words of TOML."""


def refusal(
    error: ValidationError,
    *,
    located: Callable[[str], str] = lambda name: "",
    section: str = "",
    fields: Sequence[str] = (),
    meant: Callable[[str], str] | None = None,
) -> ConfigError:
    """All of pydantic's complaints, a line each.

    Args:
        error: of a record of settings.
        located: what stands before the text: where a setting was given.
        section: stands before the settings' names.
        fields: the record's, for arguments by position.
        meant: the sentence that follows a name that is no setting; None: the nearest of the fields.
    """
    lines: dict[str, str] = {}
    meant = meant or (lambda name: did_you_mean(name.rpartition(".")[2], fields))
    for complaint in _complaints(error):
        first, *rest = complaint["loc"] or ("",)
        path = (fields[first] if isinstance(first, int) and fields else str(first), *map(str, rest))
        name = ".".join(part for part in (section, *path) if part).removesuffix(".[key]")
        is_unknown = complaint["type"] in _UNKNOWN
        text = f"{name} is not a setting.{meant(name)}" if is_unknown else _sentence(complaint, name)
        lines.setdefault(f"{located(name)}{text}", name)
    return together(lines)


def _complaints(error: ValidationError) -> Iterator[Mapping[str, Any]]:
    """All complaints; those about a record that a validator has made stand where it stands."""
    for complaint in error.errors(include_url=False):
        inner = complaint.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            yield from ({**below, "loc": (*complaint["loc"], *below["loc"])} for below in _complaints(inner))
        else:
            yield complaint


def together(lines: Mapping[str, str]) -> ConfigError:
    """One error of several texts, each with its setting."""
    texts = list(lines)
    if len(texts) > 1:
        listed = "\n".join(f"  {text}".replace("\n", "\n  ") for text in texts)
        return ConfigError(f"{len(texts)} mistakes in the settings:\n{listed}", setting=next(iter(lines.values())))
    return ConfigError(texts[0], setting=lines[texts[0]])


def _sentence(complaint: Mapping[str, Any], name: str) -> str:
    kind, value = complaint["type"], complaint["input"]
    if kind in ("missing", "missing_argument"):
        return f"{name} is required"
    message = _IN_WORDS.get(kind) or complaint["msg"].removeprefix("Value error, ")
    what = f"{name} = {value!r}" if complaint["loc"][-1:] != ("[key]",) else f"{name}: the name {value!r}"
    return f"{what}: {message[:1].lower()}{message[1:]}"


def refusing_as_config_error(cls: type[_T]) -> type[_T]:
    """A caller that makes the record by hand gets the ConfigError that a file would give, and not pydantic's error."""
    check = cls.__init__

    @functools.wraps(check)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise refusal(error, section="batcher", fields=[f.name for f in dataclasses.fields(self)]) from None

    cls.__init__ = init  # type: ignore[method-assign]
    return cls
