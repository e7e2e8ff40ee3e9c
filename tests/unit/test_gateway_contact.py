"""When a gateway may take silence of agents for their end: once the server has been there for long enough."""

from __future__ import annotations

import pytest

from rlbuffer.gateway.sweeping import Contact


def looks(contact: Contact, since: float, seconds: int, *, losses: int = 0) -> list[bool]:
    """A look each second."""
    return [contact.noted(since + i, losses) for i in range(seconds + 1)]


@pytest.mark.parametrize(("idle", "grace"), [(3.0, 3), (60.0, 60), (840.0, 60)])
def test_a_process_that_has_just_started_waits_for_the_idle_limit_and_a_minute_at_most(idle: float, grace: int) -> None:
    assert looks(Contact(idle), 1000.0, 70).index(True) == grace


@pytest.mark.parametrize(
    "trouble", ["an error", "a lost connection", "a gap", "a clock set forward", "a clock set back"]
)
def test_whatever_holds_agents_up_gives_them_time_again(trouble: str) -> None:
    contact = Contact(5.0)
    assert looks(contact, 1000.0, 20)[-1]
    at, losses = 1021.0, 0
    if trouble == "an error":
        contact.lost()
    elif trouble == "a lost connection":
        losses = 1
    else:
        at += {"a gap": 20.0, "a clock set forward": 9999.0, "a clock set back": -500.0}[trouble]
    assert looks(contact, at, 9, losses=losses).index(True) == 5
