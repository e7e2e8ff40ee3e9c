"""What makes very many objects is not interrupted by the collector, and the collector is then as it was."""

import gc

import pytest

from rlbuffer.process.garbage_collection import without_garbage_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_meanwhile_and_then_is_as_it_was(was_on):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with without_garbage_collection(stays=True):
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_what_somebody_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with without_garbage_collection(stays=True):
            pass
        # Some of it may be gone, because nothing refers to it any more.
        assert gc.get_freeze_count() > 0.9 * frozen
    finally:
        gc.unfreeze()


def test_it_stays_on_when_another_thread_turns_it_on_between_the_look_and_the_turning_off(monkeypatch):
    is_on = gc.isenabled
    assert is_on()
    other = without_garbage_collection()
    other.__enter__()

    def looked_before_the_other_ended() -> bool:
        monkeypatch.undo()
        was_on = is_on()
        other.__exit__(None, None, None)
        return was_on

    monkeypatch.setattr(gc, "isenabled", looked_before_the_other_ended)
    with without_garbage_collection():
        assert is_on()
    assert is_on()
