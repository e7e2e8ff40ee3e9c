"""A home of its own for each fault run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked import Parent
    from homes import Home


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    from homes import a_home

    with a_home(parent) as place:
        yield place
