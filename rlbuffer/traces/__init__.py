"""Traces of other frameworks as groups: what an agent, an environment or another trainer recorded is a rollout.

`read` recognises the format from the data and says it; `formats` is the list, one file a producer; `attempt` is what
each of them makes of a trace, `values` how it reads a field and names it in an error, `calls` how model calls become
sequences. Nothing of a producer is imported. Open first: `reading`, then `formats`.
"""

from rlbuffer.traces.reading import LeftOut, Traces, is_trace, read

__all__ = ["LeftOut", "Traces", "is_trace", "read"]
