"""The collector of cycles, where very many objects are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection(*, stays: bool = False) -> Iterator[None]:
    """Turns collection off meanwhile, in every thread: it would look again and again at thousands of objects that are
    just being made. Also a decorator. With several threads in it, collection is on again when the first one leaves.

    Args:
        stays: what is made now is kept, such as a pool that a leader takes over. It then counts as old, so that the
            next collections of what is young do not look at it either.
    """
    was_on = gc.isenabled()
    if was_on:  # where it was off, another thread may just have turned it on again: that must stay
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            if stays and not gc.get_freeze_count():  # what somebody else froze stays frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
