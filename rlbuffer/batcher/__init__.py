"""The batcher's decisions, pure: what the next step trains on, what is dropped, what workers may sample.

`pool` drops what is over the age limit (`age` has the arithmetic), `group` makes groups whole, `budget`,
`ordering` and `adapters` say whose turn it is, `closing` and `spillover` end a step, `admission` bounds what workers
may sample.
No server, no clock, no random numbers: `now` is an argument, so a decision can be replayed.
A rule of selection enters here, one file a rule.
Open first: `batcher`, then `selection`.
"""

from rlbuffer.batcher.advantages import advantage
from rlbuffer.batcher.batcher import Batcher

__all__ = ["Batcher", "advantage"]
