"""The batcher daemon: the process that leads a run. Decisions are made by :mod:`rlbuffer.batcher`, and carried out
here.

`loop` acquires the lease and starts over after every loss; `leadership` is what one leader does from its takeover on;
`pending` is what it knows of the pool; `watches` look after the rest in every turn, `memory_watch` after the server's
memory; `revisions` knows which settings count; `reporter` says what happens.
Open first: `loop`, then `leadership`.
"""

from rlbuffer.daemon.loop import LEASE_SECONDS, Daemon

__all__ = ["LEASE_SECONDS", "Daemon"]
