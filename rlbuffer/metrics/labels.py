"""Labels out of names that anybody may send: few, and harmless.

Every value of a label is a series that Prometheus keeps: what foreign workers call their envs and rewards must not make
more of them than a person would look at.
"""

from __future__ import annotations

from rlbuffer.state.text import printable

OTHER_NAMES = "_other"
"""Label of all names beyond the first ones. No env is called so by accident."""
MOST_ENVS = 64
MOST_REWARDS = 16
"""Named rewards of an env; those of all envs beyond the first ones count as one env's."""
MOST_FAILURES = 32
"""Kinds of failures."""
LONGEST = 64
"""Characters of a label."""


class Labels:
    """The first `most` names as they came, everything later as :data:`OTHER_NAMES`.

    Example:
        >>> labels = Labels(2)
        >>> [labels.of(name) for name in ("math", "code", "chess", "math")]
        ['math', 'code', '_other', 'math']
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of a name."""
        label = self._known.get(name)
        if label is None:
            if len(self._known) >= self._most:
                return OTHER_NAMES
            label = self._known[name] = printable(name)[:LONGEST]
        return label
