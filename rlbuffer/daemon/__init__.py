"""The batcher daemon: the process that leads a run.

`loop` acquires the lease and starts over after every loss; `leadership` is what one leader does from its takeover on;
`held` is what it holds of the pool; `envs` watches the envs, `memory` the server's memory, `asked` the operators;
`revisions` knows which settings count; `telling` says what happens.
Every decision is made by the pure :class:`rlbuffer.batcher.batcher.Batcher`; this room only carries it out.
"""

from rlbuffer.daemon.loop import LEASE_SECONDS, Daemon

__all__ = ["LEASE_SECONDS", "Daemon"]
