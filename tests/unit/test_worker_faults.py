"""The pauses before a server that is at fault is asked again."""

from __future__ import annotations

from rlbuffer.errors import SamplerBusy
from rlbuffer.worker.faults import FIRST_PAUSE_SECONDS, Patience


def test_a_request_that_fails_during_the_pause_of_another_waits_too_where_a_third_has_worked_meanwhile() -> None:
    patience = Patience()
    for error in (SamplerBusy("429", seconds=20.0), SamplerBusy("503", seconds=0.0), SamplerBusy("503", seconds=0.0)):
        assert patience.pause(error) >= FIRST_PAUSE_SECONDS
        patience.works()
