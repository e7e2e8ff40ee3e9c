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
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "dataclass_type"), "must be a table"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "path_type": "must be a path, as text",
    "string_type": "must be text",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}
"""Kind of pydantic's complaints -> what to say in the words of TOML, with what pydantic knows of it."""
SHOWN_CHARACTERS = 120
"""Of a value; what is longer is cut."""


def refusal(
    error: ValidationError,
    *,
    located: Callable[[str], str] = lambda name: "",
    section: str = "",
    fields: Sequence[str] = (),
    meant: Callable[[str], str] | None = None,
) -> ConfigError:
    """All of pydantic's complaints, as one error with a line each. For the arguments see :func:`told`."""
    complaints = told(error, located=located, section=section, fields=fields, meant=meant)
    return together({text: ".".join(path) for text, path in complaints.items()})


def told(
    error: ValidationError,
    *,
    located: Callable[[str], str] = lambda name: "",
    section: str = "",
    fields: Sequence[str] = (),
    meant: Callable[[str], str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """All of pydantic's complaints: a line of text -> the parts of the setting's name.

    Args:
        error: of a record of settings.
        located: what stands before the text: where a setting was given.
        section: stands before the settings' names.
        fields: the record's, for arguments by position.
        meant: the sentence that follows a name that is no setting; None: the nearest of the fields.
    """
    lines: dict[str, tuple[str, ...]] = {}
    meant = meant or (lambda name: did_you_mean(name.rpartition(".")[2], fields))
    for complaint in _complaints(error):
        first, *rest = complaint["loc"] or ("",)
        path = (section, fields[first] if isinstance(first, int) and fields else str(first), *map(str, rest))
        path = tuple(part for part in path if part not in ("", "[key]"))
        name = ".".join(path)
        is_unknown = complaint["type"] in _UNKNOWN
        text = f"{name} is not a setting.{meant(name)}" if is_unknown else _sentence(complaint, name)
        lines.setdefault(f"{located(name)}{text}", path)
    return lines


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
    words = _IN_WORDS.get(kind)
    values = {k: f"{v:g}" if isinstance(v, float) else v for k, v in complaint.get("ctx", {}).items()}
    message = words.format(**values) if words else complaint["msg"].removeprefix("Value error, ")
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 3]}..."
    what = f"{name} = {shown}" if complaint["loc"][-1:] != ("[key]",) else f"{name}: the name {shown}"
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
