"""Names to things: ``package.module:attribute``, and what an option that does not exist may have meant."""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}: cannot be imported: {error}{_placed(error)}", setting="env") from error
    except (Exception, SystemExit) as error:  # it is the user's code
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what}: cannot be imported: {raised}{_placed(error)}", setting="env") from error
    if not callable(value):
        raise ConfigError(f"{what}: {attribute} is not callable", setting="env")
    called: Callable[..., Any] = value
    return called


def _placed(error: BaseException) -> str:
    from rlbuffer.worker.failures import place_of

    place = place_of(error, None, "")
    return f" ({place})" if place else ""
