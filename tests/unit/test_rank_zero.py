"""What a rank hears of rank 0, with a store that answers the same each time."""

from __future__ import annotations

import pytest

from rlbuffer.client.rank_0 import RankZeroWatch
from rlbuffer.errors import BatchTimeout
from rlbuffer.store.hand import NOTHING, RankZero


class Silent:
    """Rank 0 has registered, and says nothing more."""

    def rank_0(self) -> RankZero:
        return RankZero(attempt=1, world_size=2, at=0, seen_ms=5, hand=NOTHING)


@pytest.mark.parametrize("refusal", ["", "its disk is full"])
def test_rank_0_is_silent_by_itself_or_because_the_server_takes_nothing(refusal: str) -> None:
    watch = RankZeroWatch(Silent(), 2)  # type: ignore[arg-type]
    with pytest.raises(BatchTimeout) as caught:
        watch.has(4, "digest", silence_seconds=0.05, check=lambda: refusal)
    assert ("rank 0" in str(caught.value), "its disk is full" in str(caught.value)) == (not refusal, bool(refusal))
