"""`rlbuffer run`: every process of a run on this machine, restarted when it dies; and the checks before any starts.

The only room that knows all kinds of processes.
Open first: `supervisor`.
"""
