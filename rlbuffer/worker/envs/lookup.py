"""Names to things: ``package.module:attribute``, and what an option that does not exist may have meant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from rlbuffer.errors import ConfigError


def target(name: str, *, what: str) -> Callable[..., Any]:
    """The callable that ``package.module:attribute`` names.

    Args:
        what: begins the message, such as ``env my.module:make``.

    Raises:
        ConfigError: it cannot be imported, or called.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}: cannot be imported: {error}{_placed(error)}", setting="env") from error
    except (Exception, SystemExit) as error:  # it is the user's code
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what}: cannot be imported: {raised}{_placed(error)}", setting="env") from error
    if not callable(found):
        raise ConfigError(f"{what}: {attribute} is not callable", setting="env")
    called: Callable[..., Any] = found
    return called


def _placed(error: BaseException) -> str:
    from rlbuffer.worker.failures import place_of

    place = place_of(error, None, "")
    return f" ({place})" if place else ""


def no_such_option(what: str, given: Iterable[str], known: Iterable[str]) -> str:
    """A sentence about the first of `given` that is not `known`, with what was probably meant; "" when all are."""
    names = list(known)
    for option in given:
        if option not in names:
            close = difflib.get_close_matches(option, names, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Its options are {', '.join(names)}." if names else ""
            return f"{what}: {option} is not an option.{hint}"
    return ""
