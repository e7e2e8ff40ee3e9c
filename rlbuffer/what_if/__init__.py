"""What other settings of the batcher would have done to a recorded run.

`recorded` reads an archive and says what it cannot answer; `again` makes each recorded decision once more and compares
the digests; `world` runs workers, leader and trainer on a virtual clock; `outcome` is what either comes to. The batcher
is the real one. Nothing here asks a server or a clock. Open first: `recorded`, then `again`, then `world`.
"""

from rlbuffer.what_if.again import Repeated, repeat
from rlbuffer.what_if.estimate import Estimate, estimate
from rlbuffer.what_if.outcome import Outcome
from rlbuffer.what_if.recorded import Recorded, read

__all__ = ["Estimate", "Outcome", "Recorded", "Repeated", "estimate", "read", "repeat"]
